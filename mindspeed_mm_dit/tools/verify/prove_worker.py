"""A process of ``mm-dit prove`` or ``compare``: compute the first steps of a run, one layout after another, and write
the results.

The launcher of a run starts it with a file of tasks, so launcher, checks, model and engine are the same as in a run.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])  # not the folder of this file

import numpy as np

from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.exits import end_with_launcher, exit_on_sigint
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.tools.verify.examples import facts_as_array, measure, nudged
from mindspeed_mm_dit.tools.verify.first_wrong_module import Watch
from mindspeed_mm_dit.tools.verify.task import Task, read_tasks, sample_indices_of
from mindspeed_mm_dit.training.flags import parse, quiet
from mindspeed_mm_dit.training.loop import LearningRate


def main(argv: Sequence[str]) -> int:
    """Do the tasks in the file that ``argv`` ends with; return 0, or 2 if the ranks could not meet."""
    exit_on_sigint()
    end_with_launcher(os.environ)
    tasks = read_tasks(argv[-1])
    activate(tasks[0].value("--ai-framework"))
    for task in tasks:
        try:
            take(task)
        except UserError as error:
            task.refuse(error)
    from mindspeed_mm_dit.framework import runtime

    runtime.barrier()
    runtime.shutdown()
    return 0


def take(task: Task) -> None:
    """Compute the steps of ``task``, and write the results."""
    from mindspeed_mm_dit.framework import runtime

    if task.inputs:
        model, weights = load_model_config(task.value("--mm-model")), Path(task.value("--init-from"))
        arrays = measure(model, weights, Path(task.inputs))
    else:
        arrays = _steps(task, parse(list(task.flags)))
    task.write({**arrays, "facts": facts_as_array()}, runtime.rank())


def _steps(task: Task, flags: RunConfig) -> dict[str, np.ndarray]:
    from mindspeed_mm_dit.framework import active, runtime
    from mindspeed_mm_dit.tools.verify.step_trace import begin, join, script
    from mindspeed_mm_dit.training.contract import train_valid_batches
    from mindspeed_mm_dit.training.resume import first_weights

    step_record: Any = importlib.import_module(f"mindspeed_mm_dit.tools.verify.{active()}.step_record")
    if task.on_host:
        step_record.stay_on_host()
    args = join(quiet(flags))
    if task.on_host:
        _check_inputs(args)
    first: Any = first_weights(args, None)
    first = _without_zeros(first, args.seed) if task.drawn else first
    engine = begin(args, prepare=step_record.in_float64 if task.is_truth else lambda model: model, first=first)
    roundings = (
        step_record.RoundingNoise(engine, task.rounding, task.optimizer_rounding, task.draw) if task.rounding else None
    )
    observer, losses = step_record.StepObserver(engine), list[Any]()
    watch = Watch(engine.predictor, _watched(args)) if task.watched else None
    options = {"losses_of": step_record.losses_in_float64} if task.is_truth else {}
    step = script(losses.append, watch.next if watch else lambda: None, **options)
    schedule = LearningRate.of(args)
    batches, _ = train_valid_batches(args)
    arrays, norms, seconds = dict[str, np.ndarray](), [], []
    for number in range(task.steps):
        if roundings:
            roundings.begin()
        began = time.perf_counter()
        norms.append(step_record.whole(engine.train_step(step, batches, schedule.at(number)).grad_norm))
        seconds.append(time.perf_counter() - began)
        if number == 0:
            arrays = _first(observer, watch, runtime.num_microbatches() if step_record.IS_DIVIDED_AFTER else 1)
    del batches  # ends its threads too
    if task.is_truth and not task.rounding:
        arrays |= {f"start/{name}": array for name, array in first.weights.items()}
    values = np.concatenate([step_record.whole(each) for each in losses]).reshape(task.steps, -1)
    rank, ranks, data = runtime.data_rank(), runtime.data_world_size(), args.mm.data_set
    sample_indices = sample_indices_of(args, task.steps, rank, ranks, data.micro_batches)
    arrays |= {"grad_norm": np.array(norms), "seconds": np.array(seconds), "losses": values}
    step_record.forget()
    return {**arrays, "positions": sample_indices[:, : values.shape[1]]}


def _check_inputs(args: RunConfig) -> None:
    """Raise ConfigError if each device would encode the inputs, whose rounding is not measured."""
    if args.mm.encodes and (args.mm.autoencoder or args.mm.model.text_encoders or args.mm.model.teachers):
        raise ConfigError("layout device", "with autoencoder or encoders, each device would compute different inputs",
                          "fill a cache first: mm-dit cache-latents")  # fmt: skip


def _without_zeros(first: Any, seed: int) -> Any:
    """Replace zero-initialised weights by random ones: every B of LoRA is one, and would hide other errors."""
    return first._replace(weights={name: nudged(name, value, seed) for name, value in first.weights.items()})


def _first(observer: Any, watch: Watch | None, divided_by: int) -> dict[str, np.ndarray]:
    arrays = {f"gradient/{name}": gradient for name, gradient in observer.gradients.items()}
    for tree in ("model", "ema"):
        arrays |= {f"{tree}/{name}": array for name, array in observer.tree(tree).items()}
    for name, array in (watch.end() if watch else {}).items():
        arrays[f"watched/{name}"] = array / divided_by if name.startswith(("given/", "back/")) else array
    return arrays


def _watched(args: RunConfig) -> Any:
    """Return a predicate of the names of modules to watch; the inside of compiled blocks is not watched."""
    block_prefixes = "|".join(map(re.escape, parameters_of(args.mm.model).block_prefixes))
    inside = re.compile(rf"(?:{block_prefixes})\.\d+\..+")
    return lambda name: not (args.torch_compile and inside.fullmatch(name))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
