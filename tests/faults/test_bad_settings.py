"""A wrong setting is named, with code 2, before anything is built or written; no huge number is counted to."""

import dataclasses
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from mindspeed_mm_dit.checkpoint import mindspore_ckpt, torch_dcp
from mindspeed_mm_dit.configs.data import DataloaderParam
from mindspeed_mm_dit.configs.diffusion import GaussianDiffusionConfig
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config, load_fsdp2_config
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.configs.model import AE_CONFIGS, TEXT_ENCODER_CONFIGS, load_model_config
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.hosts.preflight import preflight
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.planning import MemoryLimit, check_model_fits
from mindspeed_mm_dit.training.flags import full_parser, parse
from mindspeed_mm_dit.training.resume import find_resume_point
from tests.autoencoder_kl_fixtures import SD_VAE, write_folder
from tests.conftest import ROOT

EXTREMES = [-1, 0, 1, 2**63, 10**12, 10**30, 10**4000, 1.5, -0.5, 1e308, math.nan, math.inf, True, None, "", "é" * 5000,
            "\0", "\ud800", [], [[]], {"a": 1}]  # fmt: skip

TINY = {"input_size": 8, "num_classes": 10, "in_channels": 1, "hidden_size": 32, "num_layers": 2, "num_heads": 2,
        "learn_sigma": False}  # fmt: skip

SECTIONS = {
    DiTConfig: {**TINY, "model_id": "dit"},
    GaussianDiffusionConfig: {},
    **{kind: {} if name == "pixel" else {"from_pretrained": "vae"} for name, kind in AE_CONFIGS.items()},
    **{kind: {"from_pretrained": "text_encoder"} for kind in TEXT_ENCODER_CONFIGS.values()},
    DatasetParam: {"data_folder": "images", "image_size": 8},
    DataloaderParam: {},
    Fsdp2Config: {},
}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda cls: cls.__name__)
def test_every_field_takes_an_extreme_value_or_refuses_it_by_name(section):
    """Fields that are not checked against the machine here are checked against it when the model is."""
    for field in dataclasses.fields(section):
        for value in EXTREMES:
            try:
                built = from_mapping(section, {**SECTIONS[section], field.name: value}, "file.json: section")
                if isinstance(built, DiTConfig):
                    model = dataclasses.make_dataclass("Model", ["predictor"])(built)
                    check_model_fits(model, MemoryLimit("this machine", 2**34))
            except ConfigError as error:
                assert field.name in str(error) and len(str(error)) < 1000, (field.name, value)


NUMBERS = ["-1", "0", "1e30", "nan", "inf", "-inf", "1.5", "1" + "0" * 30, "1" + "0" * 5000, "", " ", "x", "é", "0x10"]


def test_every_flag_with_a_number_takes_an_extreme_value_or_refuses_it_by_name():
    parser = full_parser()
    needed = ["--mm-model", "m", "--mm-data", "d", "--train-iters", "1", "--lr", "1"]
    typed = [action.option_strings[0] for action in parser._actions if action.type is not None]
    assert {"--seed", "--lr", "--num-workers", "--keep-last", "--ema-decay"} <= set(typed)
    for flag in typed:
        for value in NUMBERS:
            try:
                parser.parse_strictly([*needed, f"{flag}={value}"])
            except ConfigError as error:
                assert flag in str(error) and len(str(error)) < 1000, (flag, value)


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Run all that comes before the device, on two images, with changes to the files and ``flags``."""
    monkeypatch.chdir(tmp_path)
    for label in ("0", "1"):
        (tmp_path / "images" / label).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "images" / label / "a.png")

    def check(flags="", model=None, data=None, fsdp2=None):
        content = json.loads((ROOT / "examples/dit/model.json").read_text())
        content["predictor"] = {**TINY, "model_id": "dit", "num_classes": 2}
        for section, changes in (model or {}).items():
            content[section] = changes if "model_id" in changes else {**content[section], **changes}
        (tmp_path / "model.json").write_text(json.dumps(content))
        sections = {"dataset_param": {"data_folder": "images", "image_size": 8}, "dataloader_param": {}}
        for section, changes in (data or {}).items():
            sections[section].update(changes)
        (tmp_path / "data.json").write_text(json.dumps(sections))
        argv = "--mm-model model.json --mm-data data.json --train-iters 2 --lr 1e-3 --micro-batch-size 1 --save saved"
        if fsdp2 is not None:
            (tmp_path / "f.yaml").write_text(yaml.safe_dump(fsdp2))
            argv += " --use-torch-fsdp2 --fsdp2-config-path f.yaml"
        args = preflight(parse([*argv.split(), *flags.split()]))
        return find_resume_point(args, torch_dcp), args

    return check


PREDICTOR, LOADER, DATASET, DIFFUSION = "predictor", "dataloader_param", "dataset_param", "diffusion"

BAD = {
    "depth": (dict(model={PREDICTOR: {"num_layers": 10**8}}), "predictor.num_layers = 100000000", "1,000"),
    "timesteps": (dict(model={DIFFUSION: {"num_train_timesteps": 10**9}}), "num_train_timesteps", "1,000,000"),
    "workers": (dict(flags="--num-workers 1000000000"), "--num-workers", "1024"),
    "seed": (dict(flags=f"--seed {2**70}"), "--seed", "2**63"),
    "samples": (dict(flags=f"--train-iters {2**62}"), f"--train-iters = {2**62}", "samples"),
    "micro-batch": (dict(flags="--micro-batch-size 1000000000"), "2 training images", "smaller batch"),
    "rate": (dict(flags="--lr 1e308"), "--lr", "float32"),
    "guidance": (dict(flags="--report --report-cfg-scale 1e30"), "--report-cfg-scale = 1e+30", "1,000"),
    "fp16": (dict(fsdp2={"param_dtype": "fp16"}), "param_dtype = 'fp16'", "bf16"),
    "reshard": (dict(fsdp2={"reshard_after_forward": 2}), "reshard_after_forward = 2", "1 ranks"),
    "load": (dict(flags="--load " + "a" * 300), "--load", "too long"),
    "model device": (dict(flags="--mm-model /dev/zero"), "--mm-model = /dev/zero", "regular file"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_setting_is_named_with_its_value_and_cure_and_nothing_is_written(check, tmp_path, name):
    changes, *fragments = BAD[name]
    with pytest.raises(UserError) as caught:
        check(**changes)
    assert [fragment for fragment in fragments if fragment not in str(caught.value)] == [], str(caught.value)
    assert not any((tmp_path / "saved").glob("*"))


def test_the_same_files_without_a_mistake_pass_and_a_fitting_load_is_found(check, places):
    for load in ("good", "host"):  # whichever host wrote it
        assert check(f"--load {load}")[0].iteration == 7
    assert check("--load weights --no-load-optim")[0].iteration == 7
    assert check("--load nowhere")[0] is None and check("--load saved")[0] is None
    start, args = check()
    assert start is None and str(args.mm.precision) == "float32"
    assert str(check("--bf16")[1].mm.precision).startswith("bfloat16 under autocast")
    sharded = check(fsdp2={"param_dtype": "bf16", "reduce_dtype": "fp32"})[1].mm.precision
    assert str(sharded).startswith("bfloat16 by fsdp2.yaml")


TEXTS = {
    "deep JSON": "[" * 100_000,
    "deep YAML": "- " * 100_000 + "x",
    "long number": '{"ae": ' + "9" * 5000 + "}",
    "aliases of aliases": "a: &a [1, 1]\nb: &b [*a, *a, *a]\nc: &c [*b, *b, *b]\nd: [*c, *c, *c]\n",
    "merged mappings": "a: &a {x: 1}\nb: &b {<<: [*a, *a]}\nc: {<<: [*b, *b]}\n",
    "code": "a: !!python/object/apply:os.system ['true']",
    "hexadecimal": "sharding_size: 0x" + "f" * 9000,
    "much": " " * (2 << 20),
}


def test_a_file_that_is_no_config_is_named_in_time(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
        for read in (load_model_config, load_fsdp2_config):
            with pytest.raises(ConfigError) as caught:
                read(tmp_path / name)
            assert f"{tmp_path}/{name}" in str(caught.value) and len(str(caught.value)) < 2000


def state_of(config):
    """Return what a checkpoint of ``config`` holds, zeros all of it, by our names."""
    state = {}
    for name, shape in parameters_of(config).shapes().items():
        state |= {f"{tree}.{name}": np.zeros(shape, np.float32) for tree in ("model", "ema")}
        state[f"optimizer.state.{name}.exp_avg"] = np.zeros(shape, np.float32)
    return state


OURS = DiTConfig(**{**TINY, "num_classes": 2})


@pytest.fixture
def places(tmp_path):
    """What a user may name by mistake, under the working directory of ``check``."""
    ours = state_of(OURS)
    host = {name.replace("ema.", "model.ema.", 1): array for name, array in ours.items() if "optimizer" not in name}
    for folder, state in {
        "good": ours, "wider": state_of(dataclasses.replace(OURS, hidden_size=64)),
        "weights": {name: array for name, array in ours.items() if name.startswith("model.")},
        "host": {**host, "optimizer.state.0.exp_avg": np.zeros(1, np.float32)},
    }.items():  # fmt: skip
        path = tmp_path / folder / "iter_0000007"
        path.mkdir(parents=True)
        torch_dcp.write({name: torch.from_numpy(array) for name, array in state.items()}, path)
    (tmp_path / "mindspore" / "iter_0000007").mkdir(parents=True)
    mindspore_ckpt.write(tmp_path / "mindspore" / "iter_0000007", state_of(OURS))
    (tmp_path / "diffusers").mkdir()
    (tmp_path / "diffusers" / "config.json").write_text("{}")
    (tmp_path / "weights.pt").write_bytes(b"PK")
    return tmp_path


def test_a_wrong_load_is_named_before_the_model_is_built(check, places, monkeypatch):
    for load, message in (
        ("weights.pt", "weights.pt"),
        ("good/iter_0000007", "one checkpoint"),
        ("wider", "x_embedder.proj.weight is (64, 1, 2, 2)"),
        ("weights", "optimizer's state"),
        ("mindspore", "mm-dit convert"),
        ("diffusers", "no checkpoint of a run"),
    ):
        monkeypatch.setattr("mindspeed_mm_dit.models.composite.DiTModel", None)
        with pytest.raises(UserError) as caught:
            check(f"--load {load}")
        assert message in str(caught.value) and "--load" in str(caught.value)


@pytest.fixture
def with_vae(check, tmp_path):
    """Return ``check`` for a model on latents of an autoencoder of factor 8, whose ae section is given."""
    write_folder(tmp_path / "vae", {**SD_VAE, "scaling_factor": 0.18215}, {"decoder.conv_in.weight": (1, 1)})

    def with_vae(data=None, **ae):
        section = {"model_id": "autoencoder_kl", "from_pretrained": "vae", **ae}
        return check(model={PREDICTOR: {"in_channels": 4}, "ae": section}, data={DATASET: data or {}})

    return with_vae


def test_an_autoencoder_is_looked_at_before_the_model_is_built(with_vae, tmp_path):
    args, weights = with_vae({"image_size": 64})[1], tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    assert args.mm.model_json["ae"]["downsample_factor"] == 8  # and so do the checkpoints of the run remember it
    with pytest.raises(ConfigError, match="image_size to 64"):
        with_vae({"image_size": 32})
    weights.write_bytes(b"")
    with pytest.raises(UserError, match=r"vae/diffusion_pytorch_model\.safetensors"):
        with_vae({"image_size": 64})
    weights.unlink()
    with pytest.raises(UserError, match=r"ae\.from_pretrained = vae"):
        with_vae({"image_size": 64})


@pytest.mark.parametrize(("redirect", "code"), [("> /dev/full", 2), ("| true", 0)])
def test_an_output_that_takes_nothing_is_no_traceback(tmp_path, redirect, code):
    command = f"{sys.executable} -m mindspeed_mm_dit.cli.main plan --model {ROOT}/examples/dit/model.json {redirect}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == code and "Traceback" not in done.stderr
