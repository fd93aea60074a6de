"""Of a folder that another library reads nothing is run or fetched, and its files are looked at before; teachers."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.configs.autoencoder import AutoencoderKLConfig
from mindspeed_mm_dit.configs.files import check_names_no_code
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.configs.teacher import Dinov2Config
from mindspeed_mm_dit.configs.text_encoder import BertConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.framework.torch_file import write_torch_file
from mindspeed_mm_dit.integrations.formats.single_files import write_arrays
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.data import check_sizes
from mindspeed_mm_dit.models.pretrained import _parts
from mindspeed_mm_dit.models.registry import TEACHERS, TEXT_ENCODERS, register_teacher
from mindspeed_mm_dit.objectives.registry import training_draw
from tests.conftest import ROOT
from tests.external.teacher import BRIGHTNESS

READS = {"from_pretrained", "from_single_file"}


def calls():
    """All calls of the package that let another library read a folder: (place, name, arguments by name)."""
    for file in sorted((ROOT / "mindspeed_mm_dit").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS:
                given = {word.arg: word.value for word in node.keywords}
                yield f"{file.name}:{node.lineno}", node.func.attr, given


def test_every_call_of_a_library_stays_on_this_machine_and_runs_no_code_of_a_folder():
    found = [*calls()]
    assert len(found) >= 5
    for place, name, given in found:
        wanted = {"local_files_only": True} | ({"trust_remote_code": False} if name == "from_pretrained" else {})
        assert {key: ast.literal_eval(given[key]) for key in wanted if key in given} == wanted, place


def test_a_key_that_names_code_is_named(tmp_path):
    for file, content, key in (
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own.Words", None]}}, "auto_map"),
        ("config.json", {"_attn_implementation": "someone/attention"}, "_attn_implementation"),
        # CVE-2026-4372, of transformers 4.56 to 5.2, 4.57.1 of requirements/ among them:
        ("config.json", {"_attn_implementation_internal": "someone/code"}, "_attn_implementation_internal"),
        ("config.json", {"text_config": {"experts_implementation": "someone/code"}}, "experts_implementation"),
        ("config.json", {"_experts_implementation_internal": "someone/code"}, "_experts_implementation_internal"),
        ("config.json", {"kernel_config": {"kernel_mapping": {"RMSNorm": "someone/code:Norm"}}}, "kernel_config"),
        ("config.json", {"vision_config": {"attn_implementation": "flash_attention_2"}}, "attn_implementation"),
        ("config.json", {"parts": [{"quantization_config": {"quant_method": "mxfp4"}}]}, "quantization_config"),
        ("adapter_config.json", {"base_model_name_or_path": "someone/model"}, "base_model_name_or_path"),
        ("preprocessor_config.json", {"trust_remote_code": True}, "trust_remote_code"),
    ):
        folder = tmp_path / key
        folder.mkdir()
        (folder / file).write_text(json.dumps({"model_type": "bert", **content}))
        with pytest.raises(ConfigError, match=rf"^a\.folder = .*{file}.*{key} = .*names code"):
            check_names_no_code("a.folder", folder)


def test_a_folder_that_names_no_code_of_others_is_read(tmp_path):
    own = {"auto_map": {}, "_attn_implementation": "sdpa", "quantization_config": None, "_name_or_path": "a/b"}
    (tmp_path / "config.json").write_text(json.dumps(own))
    (tmp_path / "other.json").write_text(json.dumps({"auto_map": {"AutoModel": "own.Model"}}))
    (tmp_path / "data_config.json").write_text(json.dumps([{"name": "what MiniLM was trained on"}]))
    check_names_no_code("a.folder", tmp_path)


def text_encoder(folder):
    TEXT_ENCODERS["bert"].check_files(BertConfig(folder))


def tokenizer(folder):
    Path(folder, "config.json").write_text(json.dumps({"model_type": "bert", "max_position_embeddings": 512}))
    TEXT_ENCODERS["bert"].open_tokenizer(BertConfig(folder))


def teacher(folder):
    TEACHERS["dinov2"].check_files(Dinov2Config(from_pretrained=folder))


def autoencoder(folder):
    AutoencoderKLConfig(folder).check_files()


@pytest.mark.parametrize(
    ("check", "file"),
    [(text_encoder, "config.json"), (tokenizer, "tokenizer_config.json"), (teacher, "config.json"),
     (autoencoder, "config.json")],
)  # fmt: skip
def test_every_folder_of_a_model_is_looked_at_before_it_is_read(tmp_path, check, file):
    known = {"model_type": "dinov2", "hidden_size": 8, "_class_name": "AutoencoderKL"}
    for key, value in (("auto_map", {"AutoModel": "own.Model"}), ("_attn_implementation_internal", "someone/code")):
        (tmp_path / file).write_text(json.dumps({**known, key: value}))
        with pytest.raises(ConfigError, match=rf"{file}.*{key} = .*names code"):
            check(str(tmp_path))


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
    with pytest.raises(CheckpointError, match=r"text_encoder.from_pretrained = .*index.json.*lists no weight files"):
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
        with pytest.raises(CheckpointError, match=rf"from_pretrained = .*{path}"):
            check(config)


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


def test_folder_whose_config_says_no_width_or_integers_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    write_arrays(tmp_path / "model.safetensors", {"a.weight": np.ones((2, 2), np.int8)}, {})
    with pytest.raises(CheckpointError, match=r"a\.weight in 'I8'"):
        TEXT_ENCODERS["bert"].check_files(TEXT_ENCODERS["bert"].config(str(tmp_path)))
    for content, named in (
        ({"model_type": "vit", "hidden_size": 16}, "is not a dinov2"),
        ({"model_type": "dinov2", "hidden_size": "16"}, "has hidden_size = '16'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=rf"teacher.from_pretrained = {tmp_path}.*{named}"):
            Dinov2Config(from_pretrained=str(tmp_path)).width()


@pytest.fixture
def config():
    register_teacher("brightness", BRIGHTNESS)
    predictor = {"model_id": "dit", "input_size": 8, "in_channels": 1, "patch_size": 2, "hidden_size": 16,
                 "num_layers": 2, "num_heads": 2, "num_classes": 3, "learn_sigma": False}  # fmt: skip
    learned = {"z_dims": [1], "projector_dim": 8, "encoder_depth": 2}
    yield lambda weight: model_config_from_mapping(
        {"ae": {"model_id": "pixel", "channels": 1}, "diffusion": {"model_id": "flow_matching"},
         "teacher": {"model_id": "brightness", "weight": weight}, "predictor": predictor | learned}, "model.json",
    )  # fmt: skip
    del TEACHERS["brightness"]


def test_its_part_in_the_loss_has_its_weight_and_trains_the_network(config):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 1, 8, 8)).astype(np.uint8)
    losses, gradients = [], []
    for weight in (0.0, 0.5, 1.0):
        model = DiTModel(config(weight))
        for number, value in enumerate(model.predictor.parameters()):
            value.data = 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(number))
        draws = training_draw(config(weight).diffusion)(0, np.arange(3), (1, 8, 8))
        batch = {"pixels": pixels, "labels": np.arange(3), **draws}
        loss = model(**{name: torch.from_numpy(array) for name, array in batch.items()})
        loss.mean().backward()
        losses.append(loss.detach())
        gradients.append(model.predictor.blocks[0].attn.qkv.weight.grad)
    torch.testing.assert_close(losses[2] - losses[0], 2 * (losses[1] - losses[0]))
    assert (losses[2] != losses[0]).any() and not torch.equal(gradients[0], gradients[2])
    assert config(0.5).without_teachers().predictor.z_dims == ()


def test_images_of_several_shapes_are_refused_beside_a_teacher(config):
    param = DatasetParam("images", buckets=((8, 8), (8, 12)), bucket_group=1)
    with pytest.raises(ConfigError, match="buckets makes latents of several shapes"):
        check_sizes(config(0.5), param)
    check_sizes(config(0.5).without_teachers(), param)
