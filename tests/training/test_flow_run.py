"""Flow matching as its user meets it: samplers, guidance, and what does not fit."""

import numpy as np
import pytest

from mindspeed_mm_dit.cli.main import main
from tests.training.launch import Configs

pytestmark = pytest.mark.ranks

FLOW = {"timestep_sampling": "logit_normal", "shift": 2.0, "path": "gvp"}


def flow_configs(folder, digits, **diffusion) -> Configs:
    configs = Configs.create(folder, digits, hidden_size=32, num_layers=2, num_heads=2)
    return configs.change("model.json", diffusion={"model_id": "flow_matching", **diffusion})


@pytest.fixture(scope="module")
def flow(tmp_path_factory, few_digits):
    return flow_configs(tmp_path_factory.mktemp("flow"), few_digits, **FLOW)


@pytest.fixture(scope="module")
def trained(flow):
    assert flow.run(f"--train-iters 3 --micro-batch-size 8 --lr 1e-2 --save {flow.folder}/checkpoints").code == 0
    return flow.folder / "checkpoints"


def sample(checkpoint, output, *flags: str) -> int:
    common = ("--checkpoint", str(checkpoint), "--classes", "0,3", "--num-per-class", "2", "--cfg-scale", "2")
    return main(["sample", *common, "--steps", "4", "--output", str(output), *flags])


@pytest.mark.parametrize(
    "flags",
    [
        ("--sampler", "euler"),
        ("--sampler", "heun", "--cfg-interval", "0.2,0.8"),
        ("--sampler", "dopri5", "--rtol", "1e-2", "--cfg-interval", "0.3,0.7"),
        ("--sampler", "sde-euler"),
        ("--sampler", "sde-heun", "--form", "linear", "--last-step", "Tweedie"),
        ("--sampler", "sde-euler", "--last-step", "None", "--norm", "0.5"),
    ],
    ids=" ".join,
)
def test_the_batch_size_does_not_change_the_images(trained, tmp_path, flags):
    for name, size in (("a", "4"), ("b", "3")):
        assert sample(trained, tmp_path / f"{name}.npz", *flags, "--batch-size", size) == 0
    a, b = (np.load(tmp_path / f"{name}.npz")["arr_0"].astype(int) for name in "ab")
    assert a.std() > 0 and abs(a - b).max() <= 1  # rounding of float32 sums


def test_a_sampler_that_does_not_fit_is_named_before_weights_are_read(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mindspeed_mm_dit.sampling.load.read_weights", None)
    for flags, named in (
        ("--sampler ddim", "is for gaussian_diffusion"),
        ("--sampler eulr", "Did you mean 'euler'"),
        ("--sampler euler --clip 1", "--clip = 1.0"),
        ("--form sigm", "--form = 'sigm'"),
        ("--norm 1e30", "--norm = 1e+30"),
        ("--steps 999999999999", "--steps = 999999999999"),
        ("--last-step mean", "--last-step = 'mean' must be 'Mean', 'Tweedie', 'Euler' or None"),
        ("--steps 1", "leaves no step before the last one"),
    ):
        assert sample(trained, tmp_path / "o.npz", *flags.split()) == 2
        assert named in capsys.readouterr().err


def test_what_is_infinite_at_an_end_of_the_straight_path_is_named(tmp_path, few_digits, capsys):
    """SBDM needs data in x at t = 0; at t = 1 a velocity's score is 0 / 0, which Euler's steps do not ask for."""
    flow = flow_configs(tmp_path, few_digits)
    assert flow.run(f"--train-iters 1 --micro-batch-size 2 --lr 1e-3 --save {tmp_path}/saved").code == 0
    assert sample(tmp_path / "saved", tmp_path / "o.npz", "--form", "SBDM") == 2
    assert "--form = SBDM" in capsys.readouterr().err
    without = ("--last-step", "None", "--steps", "2", "--sampler")
    assert sample(tmp_path / "saved", tmp_path / "o.npz", *without, "sde-heun") == 2
    assert "--last-step = None" in capsys.readouterr().err
    assert sample(tmp_path / "saved", tmp_path / "o.npz", *without, "sde-euler") == 0


def test_a_weaker_checkpoint_guides_and_one_that_does_not_fit_is_named(flow, trained, tmp_path, few_digits, capsys):
    """The same images by the command as by its own weights twice, where the weaker model is the model itself."""
    plain, guided = tmp_path / "plain.npz", tmp_path / "guided.npz"
    by = ("--sampler", "euler", "--guidance-checkpoint")
    assert sample(trained, plain, "--sampler", "euler", "--cfg-scale", "1") == 0
    assert sample(trained, guided, *by, str(trained)) == 0
    difference = np.load(plain)["arr_0"].astype(int) - np.load(guided)["arr_0"]
    assert np.abs(difference).max() <= 1  # (w a + (1 - w) a is a but for rounding)
    assert sample(trained, guided, *by, str(trained), "--weights", "model") == 0
    other = flow_configs(tmp_path / "other", few_digits, prediction_type="noise")
    assert other.run(f"--train-iters 1 --global-batch-size 4 --lr 1e-3 --save {tmp_path}/noise").code == 0
    assert sample(trained, guided, *by, f"{tmp_path}/noise") == 2
    assert "is of a model with another objective" in capsys.readouterr().err
    assert sample(trained, guided, *by, f"{tmp_path}/nowhere") == 2
    assert "--guidance-checkpoint" in capsys.readouterr().err
