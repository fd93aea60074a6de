"""import mindspeed_mm_dit as dit: what it draws and trains is what mm-dit draws and trains."""

import copy
import dataclasses
import doctest
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import mindspeed_mm_dit as dit
from mindspeed_mm_dit import api
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.data.order import SampleOrder
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, UserError
from mindspeed_mm_dit.models.data import open_data
from mindspeed_mm_dit.objectives.registry import objective_of
from tests.clips_fixtures import clip_configs, write_clips
from tests.conftest import FRAMEWORK, ROOT
from tests.training.launch import Configs

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(FRAMEWORK != "pytorch", reason="draws and trains on PyTorch")
DRAW = "--classes 3,7 --num-per-class 2 --sampler ddim --steps 3 --cfg-scale 2 --seed 5"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, digits_folder):
    folder = tmp_path_factory.mktemp("run")
    configs = Configs.create(folder, digits_folder, hidden_size=32, num_layers=1, num_heads=2)
    assert configs.run(f"--train-iters 2 --micro-batch-size 8 --lr 1e-2 --save {folder}/checkpoints").code == 0
    return folder


def drawn(pipe):
    return pipe.sample(classes=["3", 7], num=2, sampler="ddim", steps=3, guidance=2.0, seed=5)


def test_import_brings_neither_a_framework_nor_numpy_and_its_examples_run():
    code = "import sys, mindspeed_mm_dit as dit; dit.load; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"
    result = doctest.testmod(api)
    assert result.attempted >= 5 and result.failed == 0


def test_it_draws_the_bytes_of_mm_dit_sample(trained, tmp_path):
    assert main(["sample", "--checkpoint", str(trained), *DRAW.split(), "--output", f"{tmp_path}/s.npz"]) == 0
    pipe = dit.load(trained)
    samples = drawn(pipe)
    named = pipe.sample(["3", 7], num=2, sampler="ddim", steps=3, cfg_scale=2.0, seed=5)
    assert named.arrays.tobytes() == samples.arrays.tobytes() and len(repr(pipe).splitlines()) == 3
    with np.load(tmp_path / "s.npz") as file:
        assert samples.arrays.tobytes() == file["arr_0"].tobytes()
        assert samples.labels.tolist() == file["arr_1"].tolist() == [3, 3, 7, 7]
    assert (samples[0].size, len(samples), len(samples[1:3]), len([*samples])) == ((8, 8), 4, 2, 4)
    assert repr(samples).startswith(f"<{len(samples)} samples of ")
    assert samples.save(tmp_path / "s.png") and samples._repr_png_()[1:4] == b"PNG"


def test_it_is_guided_by_a_weaker_model_at_any_size_as_mm_dit_sample_is(trained, digits_folder, tmp_path):
    folder = tmp_path / "weaker"
    configs = Configs.create(tmp_path, digits_folder, hidden_size=16, num_layers=1, num_heads=2)
    assert configs.run(f"--train-iters 1 --micro-batch-size 8 --lr 1e-2 --save {folder}").code == 0
    flags = ["--guidance-checkpoint", str(folder), "--size", "8x16", "--cfg-rescale", "sample", "--weights", "model"]
    assert main(["sample", "--checkpoint", str(trained), *DRAW.split(), *flags, "--output", f"{tmp_path}/s.npz"]) == 0
    asked = {"num": 2, "sampler": "ddim", "steps": 3, "guidance": 2.0, "seed": 5, "size": (8, 16), "rescale": "sample"}
    pipe, other = dit.load(trained, weights="model"), dit.load(folder, weights="model")
    samples = pipe.sample(["3", 7], **asked, weaker=other)
    with np.load(tmp_path / "s.npz") as file:
        assert samples.arrays.tobytes() == file["arr_0"].tobytes()
    assert samples.arrays.tobytes() != pipe.sample(["3", 7], **asked).arrays.tobytes()


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors", "w.ckpt", "folder"])
def test_every_format_draws_the_same_samples(trained, tmp_path, name):
    to = ["--to", "diffusers"] if name == "folder" else []
    assert main(["convert", f"{trained}/checkpoints", f"{tmp_path}/{name}", *to]) == 0
    tells_its_model = name in ("w.safetensors", "folder")
    there = drawn(dit.load(tmp_path / name, model=None if tells_its_model else trained / "model.json"))
    assert there.arrays.tobytes() == drawn(dit.load(trained)).arrays.tobytes()


def test_the_loss_of_a_batch_is_that_of_the_trainer(trained):
    from mindspeed_mm_dit.framework.pytorch import runtime

    pipe = dit.create(trained / "model.json", seed=3)
    opened = open_data(pipe.config, load_data_config(trained / "data.json").dataset_param)
    objective = objective_of(pipe.config.diffusion)
    samples = opened.samples(opened.rows, 3, True, lambda *given: objective.draws(pipe.config.diffusion, *given))
    places = 2 * 32 + np.arange(32)
    batch = samples.batch(places)
    labels = opened.rows.labels[SampleOrder(len(opened.rows), 3, True).images(places)]
    assert (batch["labels"] != labels).any(), "some labels are dropped"
    there = pipe.model(**runtime.to_device(batch))
    assert torch.equal(pipe.loss(batch["pixels"], classes=labels, step=2, seed=3), there)
    loss = pipe.loss(np.zeros((2, 1, 8, 16), np.uint8), classes=torch.tensor([1, 2]))  # (patches go into any size)
    assert loss.shape == (2,) and bool(torch.isfinite(loss).all())


def test_a_network_is_an_ordinary_module_that_an_ordinary_optimizer_trains(trained):
    pipe = dit.create(trained / "model.json")
    optimizer = torch.optim.AdamW(pipe.predictor.parameters(), lr=1e-2)
    pixels, losses = np.tile(np.uint8([0, 255]), (32, 1, 8, 4)), []
    for step in range(30):
        loss = pipe.loss(pixels, classes=[step % 10] * 32, step=step).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert isinstance(pipe.predictor, torch.nn.Module) and losses[-1] < losses[0] / 2


def test_a_model_of_videos_draws_frames_for_prompts(tmp_path):
    pytest.importorskip("av")
    pytest.importorskip("transformers")
    pipe = dit.create(clip_configs(tmp_path, write_clips(tmp_path)).folder / "model.json")
    samples = pipe.sample(prompts=["a seven moves left", "a one moves up"], steps=2, guidance=2.0)
    assert samples.arrays.shape == (2, 9, 32, 32, 1) and samples.titles[1] == "a one moves up"
    assert len(samples[0]) == 9 and samples[0][0].size == (32, 32)
    assert samples.save(tmp_path / "seven.gif") == f"{tmp_path}/seven-0000.gif ... seven-0001.gif"
    loss = pipe.loss(np.zeros((2, 1, 9, 32, 32), np.uint8), prompts=["a seven moves left", "a one moves up"])
    assert loss.shape == (2,) and bool(torch.isfinite(loss).all())


@pytest.mark.parametrize(("asked", "message"), [
    ({"classes": ["eight"]}, "eight"),
    ({"classes": [10]}, r"0 \.\.\. 9"),
    ({"prompts": ["a cat"]}, "prompts"),
    ({"classes": [1], "steps": 0}, "^steps = 0"),
    ({"classes": [1], "sampler": "euler"}, "euler"),
    ({"classes": [1], "num": 0}, "num = 0"),
    ({"classes": [1], "size": 8}, "size = 8"),
    ({"classes": [1], "size": "88"}, "^size = '88'"),
    ({"classes": [1], "size": b"8x"}, "^size = b'8x'"),
    ({"classes": b"\x03"}, r"^classes = b'\\x03'"),
    ({"interval": b"\x00\x01"}, "^interval = "),
    ({"cfg_scale": -1}, r"^cfg_scale = -1\.0"),
    ({"classes": 1.5}, r"'1\.5'"),
    ({"classes": object()}, "classes = <object "),
    ({"classes": iter([])}, "classes"),
    ({"seed": 1.5}, r"^seed = 1\.5"),
    ({"seed": -1}, "^seed = -1"),
    ({"seed": True}, "^seed = True"),
    ({"steps": "4"}, "^steps = '4'"),
    ({"batch_size": np.float32(2)}, r"^batch_size = .*2\.0"),
    ({"num": 1.9}, r"num = 1\.9"),
    ({"num": 10**7}, "num = 10000000.* 1,000,000"),
    ({"path": 10**9}, "path = 1000000000.* 1,000,000"),
    ({"guidance": "2"}, "^guidance = '2'"),
    ({"guidance": float("nan")}, "^guidance = nan.* 1,000"),
    ({"channels": "x"}, "^channels = 'x'"),
    ({"interval": (0.2,)}, r"^interval = \(0\.2,\)"),
    ({"bf16": "no"}, "^bf16 = 'no'"),
    ({"options": ["eta"]}, r"options = \['eta'\]"),
    ({"sampler": 3}, "^sampler = 3"),
    ({"frames": 9}, "^frames = 9"),
    ({"rescale": "x"}, "^rescale = 'x'"),
    ({"weaker": "outputs/small"}, "weaker = 'outputs/small'"),
    ({"negative_prompt": "a cat"}, "negative_prompt = 'a cat'"),
])  # fmt: skip
def test_what_a_model_cannot_draw_is_named(trained, asked, message):
    with pytest.raises(ConfigError, match=message):
        dit.load(trained).sample(**asked)


def test_arguments_of_load_that_mean_nothing_are_named(trained, tmp_path):
    for name, value in (
        ("lora", 5), ("lora", None), ("lora", [5]), ("low_noise_lora", 5), ("weights", np.array([1, 2])), ("bf16", "x"),
        ("framework", 5), ("boundary", "x"), ("model", 5), ("checkpoint", 5), ("low_noise_checkpoint", []),
        ("weights", "EMA"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=rf"^{name} = "):
            dit.load(**{"checkpoint": trained, name: value})
    with pytest.raises(CheckpointError, match="nothing"):
        dit.load(tmp_path / "nothing")


@pytest.mark.cpu
@pytest.mark.parametrize("made", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_draws_the_same_and_shares_no_weight(made):
    pipe = dit.create("digits")
    other = made(pipe)
    asked = {"classes": [3], "steps": 2, "guidance": 2.0}
    assert other.sample(**asked).arrays.tobytes() == pipe.sample(**asked).arrays.tobytes()
    assert other.predictor is not pipe.predictor and other.config == pipe.config


def test_numbers_of_numpy_and_pytorch_and_paths_from_home_are_taken(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(trained))
    pipe, place = dit.load(Path("~/checkpoints"), model="~/model.json"), Path("~/drawn.png")
    plain = pipe.sample([3], num=2, steps=3, seed=5, guidance=2.0, sampler="ddim", size=(8, 16), options={"clip": 1.0})
    asked = {"num": torch.tensor(2), "steps": np.array(3), "seed": np.int64(5), "guidance": torch.tensor(2.0)}
    other = pipe.sample([3], **asked, sampler="ddim", size=np.array([8, 16]), options={"clip": np.float64(1.0)})
    assert other.arrays.tobytes() == plain.arrays.tobytes() and other.save(place) == f"{trained}/drawn.png"
    (trained / "drawn.png").unlink()


VALUES = [None, True, -1, 0, 1, 2, 1.5, 2**63, -(2**70), float("nan"), float("inf"), "", "4", "8x8", "ddim", "x" * 5000,
          b"4", [], {}, [1, 2], (0.2, 0.8), {"eta": 0.5}, {"eta": "x"}, {1: 2}, np.float64(1.5), np.int64(2),
          np.array(2), np.array([8, 8]), torch.tensor(2), torch.tensor(1.5), torch.tensor([1.0, 2.0]), object(),
          Path("x"), "\ud800"]  # fmt: skip
NAMES = ("classes", "prompts", "vectors", "num", "steps", "guidance", "sampler", "seed", "negative_prompt", "frames",
         "size", "channels", "interval", "rescale", "weaker", "batch_size", "bf16", "options", "path")  # fmt: skip


def test_whatever_is_asked_is_done_or_refused_as_a_mistake(tmp_path, monkeypatch, every):
    from hypothesis import strategies as st

    monkeypatch.chdir(tmp_path)
    pipe = dit.create("digits")
    pixels, values = np.zeros((2, 1, 8, 8), np.uint8), st.sampled_from(VALUES)

    @every(st.dictionaries(st.sampled_from(NAMES), values, min_size=1, max_size=3), values, values)
    def each(asked, step, seed):
        with suppress(UserError):
            samples = pipe.sample(**{"classes": [1], "steps": 1, "guidance": 1.0, **asked})
            assert len(samples) >= 1 and samples.arrays.dtype == np.uint8
        with suppress(UserError):
            assert pipe.loss(pixels, classes=asked.get("classes", [1, 2]), step=step, seed=seed).shape == (2,)
        for make in (lambda: dit.load(step, model=seed), lambda: dit.create(step, seed=seed),
                     lambda: dit.load("x", lora=step, weights=seed)):  # fmt: skip
            with suppress(UserError):
                make()


def test_a_single_class_or_prompt_stands_for_itself_and_a_size_may_be_written(trained):
    pipe, drawn = dit.load(trained), {"steps": 2, "sampler": "ddim"}
    listed = pipe.sample(classes=[3], size=(8, 16), **drawn)
    for asked in ("3", 3, np.int64(3), torch.tensor(3), torch.tensor([3])):
        assert pipe.sample(classes=asked, size="8x16", **drawn).arrays.tobytes() == listed.arrays.tobytes()
    assert listed.arrays.shape == (1, 8, 16, 1)


@pytest.mark.parametrize(("pixels", "asked", "message"), [
    (np.zeros((2, 1, 8, 8), np.float32), {"classes": [1, 2]}, "float32"),
    (np.zeros((2, 8, 8), np.uint8), {"classes": [1, 2]}, "uint8"),
    (np.zeros((0, 1, 8, 8), np.uint8), {"classes": []}, "uint8"),
    (np.zeros((2, 3, 8, 8), np.uint8), {"classes": [1, 2]}, r"\(2, 3, 8, 8\).* 1 channel"),
    (np.zeros((2, 1, 8, 9), np.uint8), {"classes": [1, 2]}, "patches"),
    (np.zeros((2, 1, 8, 8), np.uint8), {"classes": [1]}, "2 samples.* 1 of label"),
    (np.zeros((2, 1, 8, 8), np.uint8), {}, "classes"),
    (np.zeros((2, 1, 8, 8), np.uint8), {"classes": [1, 2], "step": -1}, "step = -1"),
    (np.zeros((2, 1, 8, 8), np.uint8), {"classes": [1, 2], "step": 1.5}, r"step = 1\.5"),
    (np.zeros((2, 1, 8, 8), np.uint8), {"classes": [1, 2], "seed": "1"}, "seed = '1'"),
])  # fmt: skip
def test_a_batch_that_a_model_cannot_learn_from_is_named(trained, pixels, asked, message):
    with pytest.raises(ConfigError, match=message):
        dit.create(trained / "model.json").loss(pixels, **asked)


def test_a_list_names_classes_before_their_numbers_and_an_array_holds_labels():
    pipe = dit.create("digits")
    description = dataclasses.replace(pipe.description, classes=("1", "0", "a, b"))
    pipe = dataclasses.replace(pipe, description=description)
    drawn = {"steps": 1, "sampler": "ddim"}
    for asked in (1, [1], ["1"], "0-1"):
        with pytest.raises(ConfigError, match=r"^classes.* label [01].* label [01]"):
            pipe.sample(classes=asked, **drawn)
    assert pipe.sample(classes=["a, b", '"1"', 5], **drawn).labels.tolist() == [2, 0, 5]
    assert pipe.sample(classes=np.array([1, 0]), **drawn).labels.tolist() == [1, 0]


def test_the_way_from_noise_ends_with_the_samples_and_begins_with_noise():
    pipe = dit.create("digits")
    asked = {"classes": [3, 4, 5], "steps": 4, "sampler": "ddim", "guidance": 2.0}
    samples, alone = pipe.sample(**asked, path=3, batch_size=2), pipe.sample(**asked, batch_size=2)
    assert samples.path.shape == (3, 3, 8, 8, 1) and alone.path is None
    assert samples.path[:, -1].tobytes() == samples.arrays.tobytes() == alone.arrays.tobytes()
    assert np.abs(samples.path[:, 0].astype(int) - samples.arrays).mean() > 1
