"""What watches a run: grids of samples by its moving average and traces of its steps, and no number of it moves."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.sampling.conditions import SampleConditions
from mindspeed_mm_dit.sampling.generate import generate, with_defaults
from mindspeed_mm_dit.sampling.load import describe, load_model
from mindspeed_mm_dit.sampling.pictures import captioned, draw_grid
from mindspeed_mm_dit.sampling.request import ModelRequest, SampleRequest
from mindspeed_mm_dit.training.callbacks import profile
from mindspeed_mm_dit.training.callbacks.grids import check_grids
from tests.conftest import run_config

STEPS = "--train-iters 6 --global-batch-size 16 --lr 1e-2 --num-workers 0 --ema-decay 0.5 --eval-interval 2 "
GRIDS = "--save {0}/checkpoints --tensorboard-dir {0}/board --sample-interval 3"
SHARDED = "sub_modules_to_wrap:\n  - predictor.blocks.{{*}}\nsharding_size: auto\nreshard_after_forward: {}\n"


@pytest.fixture(scope="module")
def alone(validated, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    outcome = validated.done(STEPS + GRIDS.format(folder))
    return outcome, folder


def pixels(folder, iteration):
    return np.asarray(Image.open(folder / f"samples/iter_{iteration:07d}.png")).astype(int)


@pytest.mark.ranks
def test_the_grid_is_what_is_sampled_of_the_average_in_the_checkpoint(alone):
    _, folder = alone
    described = describe(ModelRequest(folder / "checkpoints"))
    model, config = load_model(described), described.config
    request = SampleRequest(sampler="ddim", steps=20, guidance=2.0, seed=1234, batch_size=16)
    labels = np.repeat(np.arange(10), 4)
    conditions = SampleConditions({"label": labels.tolist()})
    drawn = draw_grid(generate(model, config, conditions, with_defaults(request, config)), list(map(str, labels)))
    whole = captioned(drawn, "step 6: ddim, 20 steps, guidance 2, seed 1234, 8 x 8")
    np.testing.assert_array_equal(pixels(folder, 6), np.asarray(whole))
    assert sorted(path.name for path in (folder / "samples").iterdir()) == ["iter_0000003.png", "iter_0000006.png"]
    assert np.abs(pixels(folder, 3) - pixels(folder, 6)).max() > 0
    board = EventAccumulator(str(folder / "board"), size_guidance={"images": 0})
    board.Reload()
    assert [event.step for event in board.Images("samples")] == [3, 6]


@pytest.mark.ranks
def test_drawing_moves_no_printed_digit(validated, alone):
    without = validated.run(STEPS)
    assert alone[0].lines == without.lines and alone[0].validations == without.validations and len(without.lines) == 6


@pytest.mark.extended
@pytest.mark.ranks
@pytest.mark.parametrize("reshard", [None, "false"], ids=["replicated", "kept gathered"])
def test_two_ranks_draw_the_grid_of_one_and_print_what_they_print_without_it(validated, alone, tmp_path, reshard):
    flags = STEPS
    if reshard:
        (tmp_path / "fsdp2.yaml").write_text(SHARDED.format(reshard))
        flags += f"--use-torch-fsdp2 --fsdp2-config-path {tmp_path}/fsdp2.yaml "
    drawing, without = validated.run(flags + GRIDS.format(tmp_path), 2), validated.run(flags, 2)
    assert drawing.code == without.code == 0, drawing.output
    assert drawing.lines == without.lines and drawing.validations == without.validations
    for iteration in (3, 6):  # sums in another order move a rounding of a pixel, no more
        assert np.abs(pixels(tmp_path, iteration) - pixels(alone[1], iteration)).max() <= 1


def test_grids_that_could_not_be_kept_or_drawn_are_refused(tmp_path, model_json):
    def check(**places):
        mm = SimpleNamespace(model=model_config_from_mapping(model_json, "model.json"))
        check_grids(run_config(sample_interval=5, mm=mm, **places), 1)

    with pytest.raises(ConfigError, match=r"--sample-interval = 5 has nowhere to keep the images"):
        check()
    check(save=str(tmp_path))
    model_json["diffusion"]["num_train_timesteps"] = 15
    with pytest.raises(ConfigError, match=r"--sample-interval = 5.*20 steps of ddim.*15 timesteps"):
        check(save=str(tmp_path))


def after(iteration, args):
    return SimpleNamespace(args=args, progress=SimpleNamespace(iteration=iteration))


@pytest.fixture
def traced(tmp_path, monkeypatch, capsys):
    """Take steps 1 to 5, each a product of matrices of its own size; return the sizes in the trace, or None."""

    def traced(rank=0, first_iteration=0, **flags):
        monkeypatch.setattr(profile.runtime, "rank", lambda: rank)
        given = {"profile": True, "profile_step_start": 1, "profile_step_end": 3}
        args = run_config(**{"save": str(tmp_path / "save"), **given, **flags})
        run = after(first_iteration, args)
        profiling = profile.KIND.open(run)
        for iteration in range(first_iteration, 5) if profiling is not None else ():
            run.progress.iteration = iteration
            profiling.before_step(run)
            x = torch.ones(iteration + 1, iteration + 1)
            x @ x
            run.progress.iteration = iteration + 1
            profiling.after_step(run, None)
        if profiling is not None:
            profiling.at_end(run)
        said = capsys.readouterr().out
        last = args.profile_step_end
        file = tmp_path / f"profile/rank_{rank}_steps_{args.profile_step_start + 1}-{last}.json"
        if not file.exists():
            assert said == ""
            return None
        assert said == f"profile of rank {rank}: {file}\n"
        events = json.loads(file.read_text())["traceEvents"]
        shapes = [event["args"]["Input Dims"] for event in events if event.get("name") == "aten::mm"]
        file.unlink()
        return [shape[0][0] for shape in shapes]

    return traced


def test_the_trace_is_of_the_steps_after_the_start_up_to_the_end(traced):
    assert traced() == [2, 3]
    assert traced(profile_step_start=0, profile_step_end=1) == [1]
    assert traced(profile_step_start=3, profile_step_end=9) == [4, 5]  # the run ends before
    assert traced(first_iteration=2) == [3] and traced(first_iteration=3) is None  # resumed


def test_only_the_ranks_that_were_named_are_traced(traced):
    assert traced(rank=1) == [2, 3] and traced(rank=1, profile_ranks=[1]) == [2, 3]
    assert traced(rank=1, profile_ranks=[0]) is None and traced(profile=False) is None
