"""A trace holds the steps that were asked for, of the ranks that were asked for, and costs no run."""

import json
from types import SimpleNamespace

import pytest
import torch

from mindspeed_mm_dit.training.callbacks import profile
from tests.conftest import run_config


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
