"""Whole runs in the unmodified native engine, compared with the standalone host."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.weights import read_weights
from tests.contract.native_hosted import NativeAndStandalone, needs_engine
from tests.training.launch import Outcome

pytestmark = [needs_engine, pytest.mark.ranks]

STEPS = 20
CLOSE = {"abs": 2e-6, "rel": 0}  # float32 sums in another order; everything random comes with the batch


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, digits_folder: Path) -> NativeAndStandalone:
    return NativeAndStandalone(tmp_path_factory.mktemp("native"), digits_folder)


@pytest.fixture(scope="module")
def standalone(runs: NativeAndStandalone) -> Outcome:
    return good(runs.train("standalone", STEPS, "--save standalone --save-interval 10", fsdp2=False))


def good(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome.output[-4000:]
    return outcome


def check_same(there: Outcome, here: Outcome, steps: range = range(1, STEPS + 1)) -> None:
    assert list(there.losses) == list(steps), there.output[-4000:]
    assert there.losses == pytest.approx({step: here.losses[step] for step in steps}, **CLOSE)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_upstreams_trainer_prints_the_losses_of_the_standalone_host(
    runs: NativeAndStandalone, standalone: Outcome, ranks: int
) -> None:
    path = runs.yaml(f"ranks{ranks}", STEPS, ranks=ranks, fsdp2=ranks > 1)
    there = good(runs.engine(path, ranks))
    assert ("DDP mode is enabled" in there.output) == (ranks == 1)
    check_same(there, standalone)


# --- checkpoints ---------------------------------------------------------------------------------------------------

HALF, LATER = 10, range(11, 14)
"""The step that is saved, and those that a resumed run takes."""


@pytest.fixture(scope="module")
def halfway(runs: NativeAndStandalone) -> Path:
    """What the engine saved on two ranks."""
    good(runs.engine(runs.yaml("halfway", HALF, "--save halfway", ranks=2), 2))
    return runs.folder / "halfway"


@pytest.fixture(scope="module")
def averages(runs: NativeAndStandalone, standalone: Outcome) -> dict[str, np.ndarray]:
    """The moving average of a standalone run that goes on from its own checkpoint."""
    good(runs.train("standalone", LATER[-1], f"--load {runs.copy('standalone', HALF)} --save going_on", fsdp2=False))
    return read_weights(runs.folder / f"going_on/iter_{LATER[-1]:07d}")


def check_averages(found: Path, averages: dict[str, np.ndarray]) -> None:
    for name, value in read_weights(found / f"iter_{LATER[-1]:07d}").items():
        # AdamW divides gradients by their size: where that is small, rounding turns up in the weights.
        np.testing.assert_allclose(value, averages[name], rtol=0, atol=1e-4, err_msg=name)


def test_another_number_of_ranks_goes_on_as_if_uninterrupted(
    runs: NativeAndStandalone, standalone: Outcome, halfway: Path, averages: dict[str, np.ndarray]
) -> None:
    path = runs.yaml("alone", LATER[-1], "--load halfway --save alone", fsdp2=False)
    there = good(runs.engine(path))
    assert "resumed from halfway/iter_0000010: iteration 10, 80 samples consumed" in there.output
    check_same(there, standalone, LATER)
    check_averages(runs.folder / "alone", averages)


def test_the_standalone_host_goes_on_with_what_the_engine_saved(
    runs: NativeAndStandalone, standalone: Outcome, halfway: Path, averages: dict[str, np.ndarray]
) -> None:
    check_same(good(runs.train("standalone", LATER[-1], "--load halfway --save back", fsdp2=False)), standalone, LATER)
    check_averages(runs.folder / "back", averages)


def test_the_engine_goes_on_with_what_the_standalone_host_saved(
    runs: NativeAndStandalone, standalone: Outcome, averages: dict[str, np.ndarray]
) -> None:
    load = runs.copy("standalone", HALF)
    path = runs.yaml("taken_over", LATER[-1], f"--load {load} --save taken_over", ranks=2)
    check_same(good(runs.engine(path, 2)), standalone, LATER)
    check_averages(runs.folder / "taken_over", averages)


def test_a_checkpoint_says_what_it_is_of(halfway: Path) -> None:
    facts = json.loads((halfway / "iter_0000010/run.json").read_text())
    assert (facts["iteration"], facts["consumed_samples"], facts["global_batch_size"]) == (10, 80, 8)
    assert facts["model"]["predictor"]["hidden_size"] == 32 and facts["host"] == "MindSpeed-MM, native engine"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"training__lr_warmup_ration": 0.1}, "training.lr_warmup_ration = 0.1: unknown key"),
        ({"parallel__fsdp_plan__apply_modules": ["blocs.{*}"]}, "blocs.{*}: matches no module"),
        ({"parallel__fsdp_plan__param_dtype": "bf16"}, "makes weights, moments and average of this type"),
        ({"data__dataset_param__mm_data": None}, "data.dataset_param.mm_data: is required and missing"),
        ({"training__load": "nowhere"}, "holds no checkpoint"),
    ],
)
def test_a_mistake_is_named_before_a_model_is_built(
    runs: NativeAndStandalone, keys: dict[str, object], message: str
) -> None:
    outcome = runs.engine(runs.yaml("mistaken", 2, fsdp2=False, **keys))
    assert message in outcome.output and "Building custom model" not in outcome.output.partition(message)[2]
    assert "iteration  " not in outcome.output and outcome.code != 0


def test_one_word_trains_validates_and_draws_what_the_standalone_host_does(tmp_path: Path, digits_folder: Path) -> None:
    runs = NativeAndStandalone(tmp_path, digits_folder)
    data = json.loads((tmp_path / "data.json").read_text())
    data["dataset_param"]["valid_fraction"] = 0.1
    (tmp_path / "data.json").write_text(json.dumps(data))
    flags = "--bf16 --eval-interval 2 --eval-iters 1"
    drawn = "--save run/ck --load run/ck --tensorboard-dir run/tb --report --report-steps 2"
    there = good(runs.train("mindspeed-mm-native", 4, f"{flags} {drawn}", fsdp2=False))
    here = good(runs.train("standalone", 4, flags, fsdp2=False))
    assert there.losses == pytest.approx(here.losses, **CLOSE)
    assert validation_losses(there) == pytest.approx(validation_losses(here), **CLOSE)
    assert (tmp_path / "run/loss.png").is_file() and (tmp_path / "run/samples.png").is_file()


def validation_losses(outcome: Outcome) -> list[float]:
    found = [float(x) for x in re.findall(r"(?:validation loss:|loss value:) (\S+) \|", outcome.output)]
    assert len(found) == 2, outcome.output[-4000:]
    return found


def test_precision_recomputation_and_building_without_memory_change_no_number(
    tmp_path: Path, digits_folder: Path
) -> None:
    sharding = {"param_dtype": "bf16", "reduce_dtype": "fp32", "cast_forward_inputs": False}
    runs = NativeAndStandalone(tmp_path, digits_folder, **sharding, recompute_modules=["predictor.blocks.{*}"])
    path = runs.yaml("bf16", 4, "--bf16")
    assert "init_model_with_meta_device: true" in path.read_text() and "recompute: true" in path.read_text()
    assert good(runs.engine(path)).losses == pytest.approx(good(runs.train("standalone", 4, "--bf16")).losses, **CLOSE)


def test_an_id_that_another_plugin_holds_is_named(runs: NativeAndStandalone) -> None:
    script = runs.folder / "taken.py"
    script.write_text(
        "import runpy, sys\n"
        "from mindspeed_mm.fsdp.utils.register import model_register\n"
        "model_register.register('mindspeed_mm_dit')(dict)\n"
        "del sys.argv[0]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    outcome = runs.engine(runs.yaml("taken", 2, fsdp2=False), script=script)
    assert outcome.code != 0 and "model.model_id = mindspeed_mm_dit: is taken by builtins.dict" in outcome.output
