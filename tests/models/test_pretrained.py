"""Folders of pretrained weights in several files: all that the index lists are looked at before a device is used."""

import json

import numpy as np
import pytest

from mindspeed_mm_dit.configs.teacher import Dinov2Config
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.torch_file import write_torch_file
from mindspeed_mm_dit.integrations.formats.single_files import write_arrays
from mindspeed_mm_dit.models.pretrained import _parts
from mindspeed_mm_dit.models.registry import TEACHERS, TEXT_ENCODERS

FROM_FOLDERS = {
    name: kind for kinds in (TEXT_ENCODERS, TEACHERS) for name, kind in kinds.items()
    if "from_pretrained" in kind.config.__dataclass_fields__
}  # fmt: skip


def test_the_parts_that_an_index_lists_are_the_files_each_once(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "2.safetensors", "a": "1.safetensors", "c": "2.safetensors"}}))
    assert _parts(index, "text_encoder.from_pretrained") == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]


@pytest.mark.parametrize("content", [{}, {"weight_map": ["1.safetensors"]}, {"weight_map": {"a": 1}}])
def test_an_index_that_lists_no_files_is_named(tmp_path, content):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"text_encoder.from_pretrained = .*index.json: lists no weight files"):
        _parts(index, "text_encoder.from_pretrained")


@pytest.mark.parametrize("path", ["missing", "google/umt5-xxl", "file", "empty"])
@pytest.mark.parametrize("kind", FROM_FOLDERS)
def test_a_path_that_is_no_folder_of_a_model_is_named(kind, path, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    known = FROM_FOLDERS[kind]
    config = known.config(from_pretrained=path if "/" in path else str(tmp_path / path))
    opens = [known.open_tokenizer] if kind in TEXT_ENCODERS else []
    for check in (known.check_files, getattr(known.config, "states_width", known.check_files), *opens):
        with pytest.raises(CheckpointError, match=rf"from_pretrained = .*{path}") as error:
            check(config)
        assert error.value.cure


@pytest.mark.parametrize("kind", ["t5", "umt5"])
@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_two_different_tables_of_tokens_are_refused(kind, ending, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    check, config = TEXT_ENCODERS[kind].check_files, TEXT_ENCODERS[kind].config(str(tmp_path))

    def write(second):
        arrays = {"shared.weight": np.ones((4, 2), np.float32), "encoder.embed_tokens.weight": second}
        if ending == "bin":
            write_torch_file(tmp_path / "pytorch_model.bin", arrays)
        else:
            write_arrays(tmp_path / "model.safetensors", arrays, {})

    write(np.ones((4, 2), np.float32))
    check(config)
    write(np.eye(4, 2, dtype=np.float32))
    with pytest.raises(CheckpointError, match=r"shared\.weight and encoder\.embed_tokens\.weight"):
        check(config)


@pytest.mark.parametrize("patch", [14, 3, 10**6])
@pytest.mark.parametrize("value", [1.0, np.nan])
def test_a_teacher_of_other_patches_or_of_nan_is_refused(patch, value, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "dinov2", "hidden_size": 8, "patch_size": patch, "num_hidden_layers": 2})
    )
    arrays = {"embeddings.patch_embeddings.projection.weight": np.ones((8, 3, 14, 14), np.float32)}
    write_arrays(tmp_path / "model.safetensors", arrays | {"layernorm.weight": np.full(8, value, np.float32)}, {})
    config = Dinov2Config(from_pretrained=str(tmp_path))
    if patch == 14 and value == 1:
        TEACHERS["dinov2"].check_files(config)
        return
    with pytest.raises(CheckpointError, match=rf"patch_size = {patch}|layernorm\.weight"):
        TEACHERS["dinov2"].check_files(config)


def test_a_text_encoder_in_integers_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    write_arrays(tmp_path / "model.safetensors", {"a.weight": np.ones((2, 2), np.int8)}, {})
    with pytest.raises(CheckpointError, match=r"a\.weight is stored in 'I8'"):
        TEXT_ENCODERS["bert"].check_files(TEXT_ENCODERS["bert"].config(str(tmp_path)))
