import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

pytest.importorskip("av", reason="requirements/video.txt")
pytest.importorskip("transformers", reason="requirements/video.txt")

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.data.cache import Cache
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.models.data import open_data
from mindspeed_mm_dit.tools.evaluate import demo
from tests.conftest import GOLDEN

CLIPS = 5
FLOW = {"model_id": "wan_flow_match_scheduler"}
SMALL = {"model_id": "custom_dit", "num_layers": 1, "num_heads": 1, "head_dim": 8, "text_dim": 64, "ffn_dim": 8}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "moving_digits"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "NUM_CLIPS", CLIPS)
        demo.write_moving_digits(folder)
    path = folder / "annotation.json"
    entries = json.loads(path.read_text())
    entries[1]["cap"] = [entries[1]["cap"], "a moves"]
    path.write_text(json.dumps(entries))
    return folder


def write_configs(place, digits, data=None, ae=None, text=None):
    """Write model.json and data.json, with changes; return the flags that name them."""
    param = {"dataset_type": "clips", "data_folder": str(digits), "json_path": str(digits / "annotation.json"),
             "num_frames": 9, "max_height": 32, "max_width": 32, "caption_dropout_prob": 0.4}  # fmt: skip
    vae = {"model_id": "wan_video_vae", "from_pretrained": str(GOLDEN / "wan_vae_tiny"), "do_sample": True}
    encoder = {"model_id": "UMT5", "from_pretrained": str(digits / "text_encoder"), "max_length": 8, "dtype": "fp32"}
    param |= data or {}
    (place / "data.json").write_text(json.dumps({"dataset_param": param}))
    predictor = {**SMALL, "latent_size": [(param["num_frames"] - 1) // 4 + 1, 4, 4]}
    sections = {"ae": vae | (ae or {}), "text_encoder": encoder | (text or {}), "diffusion": FLOW}
    (place / "model.json").write_text(json.dumps({**sections, "predictor": predictor}))
    return ["--model", str(place / "model.json"), "--data", str(place / "data.json")]


def cached(place, digits, *flags, **changes):
    names = write_configs(place, digits, **changes)
    return main(["cache-latents", *names, "--output", str(place / "cache"), "--shard-images", "2", *flags])


def from_cache(place):
    """Return model and data of ``place`` opened with its cache; raises where it does not fit them."""
    model, param = load_model_config(place / "model.json"), load_data_config(place / "data.json").dataset_param
    return open_data(model, dataclasses.replace(param, features=str(place / "cache")))


@pytest.mark.parametrize("zero_padding", [False, True])
def test_a_run_learns_the_same_with_a_cache_and_without(framework, digits, tmp_path, zero_padding):
    from mindspeed_mm_dit.models.pytorch_encoders import AutoencoderKLWan
    from mindspeed_mm_dit.models.registry import load_text_encoder

    assert cached(tmp_path, digits, text={"zero_padding": zero_padding}) == 0
    sample_indices, numpy = np.arange(20), framework.ops.numpy
    model = load_model_config(tmp_path / "model.json")
    online, kept = open_data(model, load_data_config(tmp_path / "data.json").dataset_param), from_cache(tmp_path)
    assert kept.rows.captions == online.rows.captions and kept.rows.paths == online.rows.paths
    files, cache = (own.samples(own.rows, 1, True, lambda *_: {}) for own in (online, kept))
    without, with_cache = files.batch(sample_indices), cache.batch(sample_indices)
    images = framework.ops.tensor(without["pixels"].astype(np.float32)) / 127.5 - 1
    mean, std = AutoencoderKLWan(model.ae).moments(images)
    captions = ["" if dropped else caption for caption, dropped in files.words(sample_indices)[0]]
    states, mask, _ = load_text_encoder(model.text_encoder).encode(captions)
    assert with_cache["latent_mean"] == pytest.approx(numpy(mean), rel=1e-4, abs=1e-5)
    assert with_cache["latent_std"] == pytest.approx(numpy(std), rel=1e-4, abs=1e-6)
    assert with_cache["text"] == pytest.approx(numpy(states), abs=1e-5)
    assert np.array_equal(with_cache["text_mask"], numpy(mask)) and np.array_equal(without["caption_mask"], numpy(mask))
    assert np.array_equal(with_cache["posterior_noise"], without["posterior_noise"])
    assert {"", "a moves"} < set(captions)


def test_only_the_states_of_tokens_are_kept_where_padding_is_zero(framework, digits, tmp_path):
    cached(tmp_path, digits, text={"zero_padding": True}, ae={"do_sample": False})
    first = load_file(tmp_path / "cache/rows-00000.safetensors")
    assert first["captions"].tolist() == [1, 2] and first["text.tokens"].tolist() == [5, 5, 3]
    assert first["text.states"].shape == (13, 64) and first["mean"].shape == (2, 1, 16, 3, 4, 4) and "std" not in first
    assert load_file(tmp_path / "cache/null.safetensors")["text.tokens"].tolist() == [1]
    write_configs(tmp_path, digits, text={"zero_padding": True})
    pytest.raises(ConfigError, from_cache, tmp_path).match("only the mean of the posterior")


@pytest.fixture(scope="module")
def made(framework, digits, tmp_path_factory):
    """Configs and their cache, for tests that change the configs alone."""
    place = tmp_path_factory.mktemp("made")
    assert cached(place, digits) == 0
    return place


@pytest.mark.parametrize(("changes", "words"), [
    ({"data": {"num_frames": 5}}, "'9 of 32 x 32', but this run has '5 of 32 x 32'"),
    ({"data": {"crop": "mindspeed_mm"}}, "'crop exact', but this run has 'crop mindspeed_mm'"),
    ({"ae": {"dtype": "bf16"}}, "another autoencoder.*'fp32', but this run has 'bf16'"),
    ({"ae": {"enable_tiling": True}}, "another autoencoder.* tiling"),
    ({"text": {"dtype": "bf16"}}, "another text encoder.*'fp32', but this run has 'bf16'"),
    ({"text": {"max_length": 9}}, "'8 tokens', but this run has '9 tokens'"),
    ({"text": {"zero_padding": True}}, "padding of texts"),
])  # fmt: skip
def test_cache_made_otherwise_is_refused(made, digits, changes, words):
    write_configs(made, digits, **changes)
    pytest.raises(ConfigError, from_cache, made).match(words)


def test_cache_of_changed_clips_or_captions_is_refused(made, digits, tmp_path):
    copied = shutil.copytree(digits, tmp_path / "clips")
    annotation, video = copied / "annotation.json", sorted((copied / "videos").iterdir())[2]
    shutil.copytree(made / "cache", tmp_path / "cache")
    write_configs(tmp_path, copied)
    from_cache(tmp_path)
    entries = json.loads(annotation.read_text())
    entries[3]["cap"] = "another"
    annotation.write_text(json.dumps(entries))
    pytest.raises(DataError, from_cache, tmp_path).match(f"another caption.*{entries[3]['path']}")
    annotation.write_text((digits / "annotation.json").read_text())
    video.write_bytes(video.read_bytes() + b"\0")
    pytest.raises(DataError, from_cache, tmp_path).match(f"1 in all.*videos/{video.name}")
    video.unlink()
    from_cache(tmp_path)
    annotation.unlink()
    from_cache(tmp_path)


def test_cache_of_other_files_moving_starts_or_among_the_clips_is_refused(made, digits, tmp_path, capsys, framework):
    for file in (digits / "tokenizer").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes() + b"\n")
    changes = {"text": {"tokenizer": str(tmp_path)}}
    write_configs(made, digits, **changes)
    words = r"'tokenizer \w{12}', but this run has 'tokenizer \w{12}'"
    pytest.raises(ConfigError, from_cache, made).match(words)
    assert cached(made, digits, **changes) == 2  # nor may it be filled up
    assert re.search(words, capsys.readouterr().err)
    assert cached(tmp_path, digits, data={"clip_start": "random"}) == 2
    assert "dataset_param.clip_start = 'random' cannot be cached" in capsys.readouterr().err
    names = write_configs(tmp_path, digits)
    for place in (digits, digits / "cache"):
        assert main(["cache-latents", *names, "--output", str(place)]) == 2
        assert "lies among the clips" in capsys.readouterr().err


def test_not_finite_latents_and_missing_tokens_are_refused(made, tmp_path):
    shutil.copytree(made / "cache", tmp_path / "cache")
    path = tmp_path / "cache/rows-00001.safetensors"
    tensors = load_file(path)
    tensors["mean"][1, 0, 0, 0, 0, 0] = np.inf
    save_file(tensors, path)
    cache = Cache(tmp_path / "cache", "dataset_param.features")
    cache.read_latents(np.arange(3), np.zeros(3, int))
    pytest.raises(DataError, cache.read_latents, np.arange(5), np.zeros(5, int)).match(r"00001.*row 3, videos/0003")
    del tensors["text.tokens"]
    save_file(tensors, path)
    pytest.raises(DataError, Cache, tmp_path / "cache", "dataset_param.features").match(r"text\.tokens")
