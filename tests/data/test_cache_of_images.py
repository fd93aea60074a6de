"""A cache of images: the losses of encoding online, interruptions survived, and refused where it does not fit."""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file

from mindspeed_mm_dit.cli import cache_latents
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.data import DataConfig, DataloaderParam, load_data_config
from mindspeed_mm_dit.configs.images import CROP
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.data.cache import Cache
from mindspeed_mm_dit.data.cache_index import check_sources
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.autoencoder import NoAutoencoder
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.data import open_data
from tests.conftest import ROOT
from tests.data.test_sharded import write_parquets, write_tars
from tests.data_fixtures import open_rows, open_samples, split_rows

NUM_IMAGES = 11
OLD_CROP = "halve by box, scale bicubically, cut the centre"  # without EXIF orientation and 16 bits


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A tiny VAE, eleven images of two classes, model.json and data.json."""
    from diffusers import AutoencoderKL

    folder = tmp_path_factory.mktemp("latents")
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    for name, seed in (("vae", 0), ("other_vae", 1)):
        torch.manual_seed(seed)
        AutoencoderKL(**blocks, block_out_channels=(8, 8), norm_num_groups=4).save_pretrained(folder / name)
    draw = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        path = folder / "images" / ("even", "odd")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (20, 24, 3), np.uint8)).save(path)
    (folder / "model.json").write_text(json.dumps(model_json(folder, "vae")))
    (folder / "data.json").write_text(json.dumps(data_json(folder)))
    return folder


def model_json(folder, vae, **ae):
    return {
        "ae": {"model_id": "autoencoder_kl", "from_pretrained": str(folder / vae), "downsample_factor": 2, **ae},
        "diffusion": {"model_id": "gaussian_diffusion"},
        "predictor": {
            "model_id": "dit", "input_size": 8, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_classes": 2,
        },
    }  # fmt: skip


def data_json(folder, **param):
    return {"dataset_param": {"data_folder": str(folder / "images"), "image_size": 16, "random_flip": True, **param}}


def cache(home, output, model="model.json", data="data.json", **flags):
    flags = {"model": home / model, "data": home / data, "output": output, "shard-images": 4, "batch-size": 3, **flags}
    return main(["cache-latents", *(f"--{name}={value}" for name, value in flags.items())])


def load(home, latents, model="model.json"):
    param = dataclasses.replace(load_data_config(home / "data.json").dataset_param, latents=latents and str(latents))
    return load_model_config(home / model), DataConfig(param, DataloaderParam())


def samples(home, latents, model="model.json"):
    model, data = load(home, latents, model)
    train, _ = split_rows(open_rows(data.dataset_param, 2), 0.2, seed=3)
    return open_samples(model, data, 3, train)


def open_cache(folder):
    return Cache(folder, "dataset_param.latents")


def shard_path(folder, shard):
    return folder / f"rows-{shard:05d}.safetensors"


@pytest.fixture(scope="module")
def made(home):
    assert cache(home, home / "made") == 0
    return home / "made"


def test_a_cache_is_made_in_float32_unless_tensorfloat32_is_asked_for(home, tmp_path):
    argv = ["cache-latents", "--model", str(home / "model.json"), "--data", str(home / "data.json"), "--output"]
    try:
        assert main([*argv, str(tmp_path / "rounded"), "--tf32"]) == 0
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
    finally:
        assert main([*argv, str(tmp_path / "whole")]) == 0
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("objective", ["gaussian_diffusion", "flow_matching"])
def test_losses_equal_those_of_encoding_online(home, made, objective):
    torch.manual_seed(0)
    name = f"{objective}.json"
    (home / name).write_text(json.dumps(model_json(home, "vae") | {"diffusion": {"model_id": objective}}))
    model = DiTModel(load_model_config(home / name))
    for p in model.predictor.parameters():
        p.data += 0.02 * torch.randn_like(p)
    without_vae = DiTModel(load_model_config(home / name), NoAutoencoder(model.ae.config))
    without_vae.load_state_dict(model.state_dict())
    online, cached = samples(home, None, name), samples(home, made, name)
    for start in (0, 40):
        sample_indices = np.arange(start, start + 16)
        there, here = online.batch(sample_indices), cached.batch(sample_indices)
        assert "pixels" not in here
        for key in ("labels", "posterior_noise", *model.diffusion.draw_names):
            np.testing.assert_array_equal(there[key], here[key])
        # a convolution's rounding depends on the images beside it in the batch; nothing else differs
        with torch.no_grad():
            losses = (own(**runtime.to_device(batch)) for own, batch in ((without_vae, here), (model, there)))
            np.testing.assert_allclose(*losses, rtol=1e-5)


def test_half_precision_on_disk_changes_latents_by_its_rounding(home, made, tmp_path):
    assert cache(home, tmp_path, dtype="fp16") == 0
    rows, flipped = np.arange(NUM_IMAGES), np.zeros(NUM_IMAGES, bool)
    half, full = (open_cache(folder).read_latents(rows, flipped) for folder in (tmp_path, made))
    for name, b in full.items():
        assert half[name].dtype == np.float32
        np.testing.assert_allclose(half[name], b, rtol=2**-11, atol=1e-6)  # half of float16's last bit
    half, full = (sum(p.stat().st_size for p in folder.glob("*.safe*")) for folder in (tmp_path, made))
    assert half < 0.6 * full


def test_several_ranks_make_the_same_cache(home, made, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        assert not (tmp_path / "index.json").exists()
        monkeypatch.setenv("RANK", rank)
        assert cache(home, tmp_path) == 0
    assert (made / "index.json").read_text() == (tmp_path / "index.json").read_text()
    for mirrored in (False, True):
        arguments = np.arange(NUM_IMAGES), np.full(NUM_IMAGES, mirrored)
        there, here = (open_cache(folder).read_latents(*arguments) for folder in (made, tmp_path))
        for name in ("mean", "std"):
            np.testing.assert_array_equal(there[name], here[name])


def test_an_interrupted_run_goes_on_where_it_stopped(home, made, tmp_path, capsys):
    (copy_of(made, tmp_path) / "index.json").unlink()
    shard_path(tmp_path, 1).unlink()
    kept = shard_path(tmp_path, 0).stat().st_mtime_ns
    pytest.raises(DataError, open_cache, tmp_path).match("no finished cache")
    assert cache(home, tmp_path) == 0 and "4 of 11 images encoded" in capsys.readouterr().out
    assert shard_path(tmp_path, 0).stat().st_mtime_ns == kept and open_cache(tmp_path).index.num_rows == NUM_IMAGES
    (tmp_path / "index.json").write_text(json.dumps({"identity": {"image_size": 16}, "num_images": 3}))
    pytest.raises(DataError, open_cache, tmp_path).match(r"version 0\.1")


def test_cache_of_another_autoencoder_or_crop_is_refused(home, made, tmp_path, capsys):
    (home / "other.json").write_text(json.dumps(model_json(home, "other_vae")))
    (home / "bf16.json").write_text(json.dumps(model_json(home, "vae", dtype="bf16")))
    for name, words in (("other.json", "another autoencoder"), ("bf16.json", "'fp32', but this run has 'bf16'")):
        model, data = load(home, made, name)
        pytest.raises(ConfigError, open_data, model, data.dataset_param).match(words)
        assert cache(home, made, model=name) == 2 and words in capsys.readouterr().err  # nor may it be filled up
    index = json.loads((copy_of(made, tmp_path) / "index.json").read_text())
    model, data = load(home, tmp_path)
    for before, value in ((CROP, OLD_CROP), ("16 x 16", "32 x 32")):
        made_by = {**index["made_by"], "pixels": index["made_by"]["pixels"].replace(before, value)}
        (tmp_path / "index.json").write_text(json.dumps({**index, "made_by": made_by}))
        pytest.raises(ConfigError, open_data, model, data.dataset_param).match("another size or crop")


def test_cache_has_the_digest_of_its_images_and_fits_them_alone(home, made, monkeypatch):
    model, data = load(home, made)
    extra = home / "images" / "even" / "extra.png"
    extra.write_bytes((home / "images" / "even" / "0.png").read_bytes())
    try:
        pytest.raises(DataError, open_rows, data.dataset_param, 2).match("was made of 11 images")
    finally:
        extra.unlink()
    elsewhere = dataclasses.replace(data.dataset_param, data_folder=str(home / "gone"))
    index = open_rows(elsewhere, 2)
    assert len(index) == NUM_IMAGES and index.classes == ("even", "odd")
    online = dataclasses.replace(data.dataset_param, latents=None)
    index = open_rows(data.dataset_param, 2)
    assert index.digest == open_rows(online, 2).digest != ""
    larger = dataclasses.replace(model, predictor=dataclasses.replace(model.predictor, input_size=16))
    pytest.raises(ConfigError, open_data, larger, data.dataset_param).match("8 x 8, but the predictor takes 16 x 16")
    monkeypatch.setattr(Cache, "latent_shapes", {(4, 8, 8), (4, 9, 9)})
    pytest.raises(ConfigError, open_data, model, data.dataset_param).match(r"\(4, 9, 9\).*\(4, 8, 8\)")


WRITERS = {"image_folder": None, "webdataset": write_tars, "parquet": write_parquets}


@pytest.mark.parametrize("kind", WRITERS)
def test_cache_of_changed_files_is_refused(home, tmp_path, kind, monkeypatch):
    """A file that is touched or copied has the same bytes; files that are gone are not needed."""
    folder = tmp_path / "images"
    if WRITERS[kind]:
        WRITERS[kind](folder)
    else:
        shutil.copytree(home / "images", folder)
    file, other = sorted(file for file in folder.rglob("*") if file.is_file())[:2]
    (tmp_path / "data.json").write_text(json.dumps(data_json(tmp_path, dataset_type=kind)))

    def fill():
        return cache(home, tmp_path / "made", data=tmp_path / "data.json")

    assert fill() == 0
    model, param = load_model_config(home / "model.json"), load_data_config(tmp_path / "data.json").dataset_param
    param = dataclasses.replace(param, latents=str(tmp_path / "made"))
    notes = open_data(model, param).rows.notes
    added = shutil.copy(other, other.with_stem("train-new"))
    pytest.raises(DataError, open_data, model, param).match(r"1 in all.*train-new|holds 12")
    added.unlink()
    os.utime(file, ns=(1, 1))
    assert open_data(model, param).rows.notes == notes
    monkeypatch.setattr("mindspeed_mm_dit.data.cache_index.READ_BYTES", 0)
    assert len(open_data(model, param).rows.notes) == len(notes) + 1
    assert fill() == 0 and open_data(model, param).rows.notes == notes
    content, times = bytearray(file.read_bytes()), file.stat().st_mtime_ns
    file.write_bytes(content[:-1] + b"x")
    os.utime(file, ns=(times, times))
    open_data(model, param)  # of many files, one with the same size and time is not read
    monkeypatch.setattr("mindspeed_mm_dit.data.cache_index.READ_BYTES", 2**28)
    pytest.raises(DataError, open_data, model, param).match("1 in all")
    shutil.copy(other, file)
    pytest.raises(DataError, open_data, model, param).match(f"1 in all.*{file.relative_to(folder)}")
    assert fill() == 2
    (tmp_path / "made/sources.jsonl").rename(tmp_path / "sources.jsonl")  # as of an earlier version
    assert len(open_data(model, param).rows.notes) == len(notes) + 1
    (tmp_path / "sources.jsonl").rename(tmp_path / "made/sources.jsonl")
    folder.rename(tmp_path / "moved")
    open_data(model, param)


def test_damaged_record_of_source_files_is_refused(tmp_path):
    for content in (b"{}", b"[1]", b"[1, 2, 3, 4]", b'["a", "b", 0, ""]', b"\xff", b"[" * 10**5):
        (tmp_path / "sources.jsonl").write_bytes(content)
        with pytest.raises(DataError, match=r"sources\.jsonl cannot be read"):
            check_sources(tmp_path, "dataset_param.latents", str(tmp_path))


def test_a_run_on_the_mean_of_the_posterior_reads_the_mean_alone(home, made):
    (home / "mean.json").write_text(json.dumps(model_json(home, "vae", sample_posterior=False)))
    model, data = load(home, made, "mean.json")
    rows = np.array([9, 2, 5])
    batch = open_samples(model, data, 3).visuals.read(rows, rows > 4)
    mean, std = open_cache(made).read_latents(rows, rows > 4).values()
    assert list(batch.arrays) == ["latent_mean"] and batch.rows.tolist() == rows.tolist()
    np.testing.assert_array_equal(batch.arrays["latent_mean"], mean)
    assert std.shape == mean.shape == (3, 4, 8, 8) and not np.array_equal(mean, std)


def copy_of(made, folder):
    """A copy of a cache that may be damaged."""
    for path in made.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def with_tensors(change):
    """Return what writes a shard with these changes to its two tensors."""
    mean = std = np.zeros((4, 2, 4, 8, 8), np.float32)
    return lambda path: save_file(change({"mean": mean, "std": std}), path)


def each(change):
    return with_tensors(lambda tensors: {name: change(value) for name, value in tensors.items()})


@pytest.mark.parametrize(("damage", "message"), [
    pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-1]), "is not a shard of a cache", id="cut"),
    pytest.param(lambda path: path.write_bytes(b""), "is not a shard of a cache", id="empty"),
    pytest.param(lambda path: path.unlink(), "does not exist", id="gone"),
    pytest.param(lambda path: (path.unlink(), path.mkdir()), "is a folder", id="folder"),
    pytest.param(with_tensors(lambda both: {"mean": both["mean"]}), "not mean and std", id="no std"),
    pytest.param(each(lambda value: value[:3]), "(4, 2,", id="few"),
    pytest.param(each(lambda value: value[..., 0, 0]), "C, ...)", id="flat"),
    pytest.param(each(np.float64), "tensors of F64", id="float64"),
])  # fmt: skip
def test_damaged_shard_is_refused_before_it_is_mapped(home, made, tmp_path, damage, message):
    damage(shard_path(copy_of(made, tmp_path), 1))
    model, data = load(home, tmp_path)
    with pytest.raises(DataError, match=r"rows-00001\.safetensors") as caught:  # before a device is touched, that is
        open_data(model, data.dataset_param)
    assert message in str(caught.value) and "mm-dit cache-latents" in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("mean", np.nan), ("mean", np.inf), ("std", -np.inf)])
def test_latents_that_are_not_finite_reach_no_step(home, made, tmp_path, name, value):
    path = shard_path(copy_of(made, tmp_path), 1)
    tensors = load_file(path)
    tensors[name][2, 0, 3, 7, 7] = value  # row 6 of the cache, as it is
    save_file(tensors, path)
    model, data = load(home, tmp_path)
    reader = open_samples(model, data).visuals
    reader.read(np.array([5, 6, 7]), np.array([False, True, False]))  # the mirrored one is good
    pytest.raises(DataError, reader.read, np.array([5, 6, 7]), np.zeros(3, bool)).match(r"00001.*row 6, odd/1\.png")
    (tmp_path / "rows.jsonl").unlink()
    pytest.raises(DataError, open_rows, data.dataset_param, 2).match(r"rows\.jsonl does not exist")


def test_undecodable_image_is_found_before_the_first_is_encoded(home, tmp_path, monkeypatch, capsys):
    """However many there are: a run of hours must not end at the last one."""
    monkeypatch.setattr("mindspeed_mm_dit.data.images.DECODE_CHECK_LIMIT", 3)
    images = shutil.copytree(home / "images", tmp_path / "images")
    (images / "odd/9.png").write_bytes((images / "odd/9.png").read_bytes()[:200])
    for skip, code in ((False, 2), (True, 0)):
        (tmp_path / "data.json").write_text(json.dumps(data_json(tmp_path, skip_bad_images=skip)))
        assert cache(home, tmp_path / "made", data=tmp_path / "data.json") == code
        said = capsys.readouterr().err
        assert "odd/9.png cannot be decoded" in said and "encoding" not in said
        assert len(list((tmp_path / "made").glob("*"))) == (0 if code else 6)  # three shards and three lists
    _, data = load(home, tmp_path / "made")
    index = open_rows(dataclasses.replace(data.dataset_param, data_folder=str(images)), 2)
    assert len(index) == NUM_IMAGES - 1 and index.skipped == 1


def test_command_refuses_what_cannot_be_cached(home, tmp_path, monkeypatch, capsys):
    """Pixels, a folder that would become a class, latents that are not finite, and a full disk: nothing is left."""

    def full(tensors, path, metadata):
        path.write_bytes(b"some")
        raise OSError(28, "No space left on device")

    weights = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    shutil.copytree(home / "vae", tmp_path / "vae")
    tensors = load_file(weights)
    tensors["quant_conv.bias"][0] = np.nan
    save_file(tensors, weights)
    (home / "nan.json").write_text(json.dumps(model_json(tmp_path, "vae")))
    (home / "pixel.json").write_text((ROOT / "examples/dit/model.json").read_text())
    for model, output, words in (
        ("pixel.json", "made", "trains on the images themselves"),
        ("model.json", home / "images/latents", "lies among the images"),
        ("nan.json", "made", "even/0.png"),
        ("model.json", "made", "No space left on device"),
    ):
        if "space" in words:
            monkeypatch.setattr("mindspeed_mm_dit.models.fill_cache.save_file", full)
        assert cache(home, tmp_path / output, model=model) == 2
        assert words in capsys.readouterr().err
        assert not list((tmp_path / output).glob("*")) and not (home / "images/latents").exists()


def test_vectors_of_another_source_are_kept(home, tmp_path, monkeypatch):
    vectors, opened = np.random.default_rng(0).standard_normal((NUM_IMAGES, 5)), cache_latents._open

    def with_vectors(*given):
        found = opened(*given)
        items = {**found.rows.items, "vector": vectors}
        return dataclasses.replace(found, rows=dataclasses.replace(found.rows, items=items))

    monkeypatch.setattr(cache_latents, "_open", with_vectors)
    assert cache(home, tmp_path / "made") == 0
    found = open_cache(tmp_path / "made").rows(str(home / "images")).items
    np.testing.assert_array_equal(found["vector"], vectors.astype(np.float32))
    assert found["label"].tolist() == [number // 6 for number in range(NUM_IMAGES)]
