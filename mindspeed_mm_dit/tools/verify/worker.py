"""A process of ``mm-dit prove`` or ``compare``: compute the first steps of a run in one layout after another.

The launcher of a run starts it with a file of tasks, so launcher, checks, model and engine are the same as in a run. A
task inside MindSpeed-MM runs through pretrain_dit.py: PyTorch's hooks observe modules and optimizer, and the gradient
norm is read from what the host logs. A host cannot be started twice in one process, so such a process does one task.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])  # not the folder of this file

import numpy as np

from mindspeed_mm_dit.configs.arguments import ENTRY_SCRIPT
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.exits import end_with_launcher, exit_now, exit_on_sigint
from mindspeed_mm_dit.hosts.registry import host_by_name
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.tools.verify.module_recorder import ModuleRecorder
from mindspeed_mm_dit.tools.verify.processes import (
    Task,
    facts_as_array,
    measure,
    randomize_zeros,
    read_tasks,
    sample_indices_of,
)
from mindspeed_mm_dit.training.flags import parse, without_outputs
from mindspeed_mm_dit.training.loop import LearningRate


def main(argv: Sequence[str]) -> int:
    """Do the tasks in the file that ``argv`` ends with; return 0, or 2 if the ranks could not meet."""
    tasks = read_tasks(argv[-1])
    if tasks[0].host != "standalone":
        run_hosted(*tasks)
    exit_on_sigint()
    end_with_launcher(os.environ)
    activate(tasks[0].value("--ai-framework"))
    for task in tasks:
        try:
            compute_task(task)
        except UserError as error:
            task.refuse(error)
    from mindspeed_mm_dit.framework import runtime

    runtime.barrier()
    runtime.shutdown()
    return 0


def compute_task(task: Task) -> None:
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
    from mindspeed_mm_dit.tools.verify.recompute import begin, join, script
    from mindspeed_mm_dit.training.contract import train_valid_batches
    from mindspeed_mm_dit.training.resume import read_initial_weights

    step_record: Any = importlib.import_module(f"mindspeed_mm_dit.tools.verify.{active()}_steps")
    if task.on_host:
        step_record.stay_on_host()
    args = join(without_outputs(flags))
    if task.on_host:
        _check_inputs(args)
    first: Any = read_initial_weights(args, None)
    first = _without_zeros(first, args.seed) if task.randomise_zeros else first
    engine = begin(args, prepare=step_record.in_float64 if task.is_float64 else lambda model: model, first=first)
    roundings = (
        step_record.RoundingNoise(engine, task.rounding, task.optimizer_rounding, task.draw) if task.rounding else None
    )
    observer, losses = step_record.StepObserver(engine), list[Any]()
    watch = ModuleRecorder(engine.predictor, _watched(args)) if task.watched else None
    options = {"losses_of": step_record.losses_in_float64} if task.is_float64 else {}
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
    if task.is_float64 and not task.rounding:
        arrays |= {f"start/{name}": array for name, array in first.weights.items()}
    values = np.concatenate([step_record.whole(each) for each in losses]).reshape(task.steps, -1)
    rank, ranks, data = runtime.data_parallel_rank(), runtime.data_parallel_size(), args.mm.data_set
    sample_indices = sample_indices_of(args, task.steps, rank, ranks, data.micro_batches)
    arrays |= {"grad_norm": np.array(norms), "seconds": np.array(seconds), "losses": values}
    step_record.forget()
    return {**arrays, "positions": sample_indices[:, : values.shape[1]]}


def _check_inputs(args: RunConfig) -> None:
    """Raise ConfigError if each device would encode the inputs, whose rounding is not measured."""
    if args.mm.encodes and (args.mm.autoencoder or args.mm.model.text_encoders or args.mm.model.teachers):
        raise ConfigError(
            "The layout device needs inputs from a cache, because each device would encode them differently. Fill one "
            "with mm-dit cache-latents."
        )


def _without_zeros(first: Any, seed: int) -> Any:
    """Replace zero-initialised weights by random ones: every B of LoRA is one, and would hide other errors."""
    return first._replace(weights={name: randomize_zeros(name, value, seed) for name, value in first.weights.items()})


def _first(observer: Any, watch: ModuleRecorder | None, divided_by: int) -> dict[str, np.ndarray]:
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


def run_hosted(task: Task) -> None:
    """Run ``task``; the process ends by itself after its steps."""
    flags = parse(task.flags)
    activate("pytorch")
    at = task.flags.index("--init-from")
    _start_from(task.value("--init-from"))
    HostRecorder(task, flags)
    run_flags = ["--train-iters", str(task.steps + 1), "--log-interval", "1"]
    run_flags += host_by_name(flags.host).flags_needed(flags)
    sys.argv[:] = [str(ENTRY_SCRIPT), *task.flags[:at], *task.flags[at + 2 :], *run_flags]
    runpy.run_path(str(ENTRY_SCRIPT), run_name="__main__")


def _start_from(weights: str) -> None:
    """Start the run from these weights instead of random ones: the hosts of MindSpeed-MM have no --init-from."""
    from safetensors.numpy import load_file

    from mindspeed_mm_dit.models import composite
    from mindspeed_mm_dit.models import layers as init

    first = load_file(weights)
    modules: tuple[Any, ...] = (init, composite)
    for module in modules:
        module.initial_weights = lambda parameters, seed: {name: first[name] for name in parameters.shapes()}


class HostRecorder:
    """Records what a host's steps do, through PyTorch's hooks. All ranks take part, and rank 0 writes whole arrays."""

    def __init__(self, task: Task, flags: RunConfig) -> None:
        from mindspeed_mm_dit.tools.verify import pytorch_steps

        self._task, self._flags, self._step_record = task, flags, pytorch_steps
        self._model: Any = None
        self._watch: Any = None
        self._names: dict[Any, str] = {}
        self._losses: list[np.ndarray] = []
        self._norms: list[float] = []
        self._arrays: dict[str, np.ndarray] = {}
        pytorch_steps.hook_everything(self._before, self._after, self._step)

    def _before(self, module: Any, inputs: Any) -> None:
        """Observe the model before a micro-batch. The model is the module that has an EMA of its weights."""
        if not hasattr(module, "averages"):
            return
        if self._model is None:
            self._model = module
            self._names = {p: name for name, p in self._step_record.weights(module).items()}
            self._watch = ModuleRecorder(getattr(module, "predictor", module)) if self._task.watched else None
            self._record_grad_norms()
        if len(self._norms) == 1 and "grad_norm" not in self._arrays:
            self._arrays["grad_norm"] = np.array(self._norms)
            weights = self._step_record.weights(module)
            self._arrays |= {f"model/{name}": self._step_record.whole(p) for name, p in weights.items()}
            self._arrays |= {f"ema/{name}": self._step_record.whole(mean) for name, mean in module.averages().items()}
            watched, self._watch = self._watch.end() if self._watch else {}, None
            self._arrays |= {f"watched/{name}": array for name, array in watched.items()}
        if len(self._norms) == self._task.steps:
            self._write()
        if self._watch:
            self._watch.next()

    def _after(self, module: Any, inputs: Any, output: Any) -> None:
        from mindspeed_mm_dit.models.composite import DiTModel

        if isinstance(module, DiTModel):
            self._losses.append(self._step_record.whole(output))

    def _step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None and p in self._names:
                self._arrays.setdefault(f"gradient/{self._names[p]}", self._step_record.whole(p.grad))

    def _record_grad_norms(self) -> None:
        """Record the gradient norm of every step that the host logs."""
        module, _, name = host_by_name(self._flags.host).logs_steps.partition(":")
        *path, leaf = name.split(".")
        owner = reduce(getattr, path, sys.modules[module])
        log: Callable[..., Any] = getattr(owner, leaf)

        def recording(*args: Any, **kwargs: Any) -> Any:
            self._norms.append(float(inspect.signature(log).bind(*args, **kwargs).arguments["grad_norm"]))
            return log(*args, **kwargs)

        setattr(owner, leaf, recording)

    def _write(self) -> None:
        """Write what was recorded, and end the run: the step that starts now is one more than requested."""
        from mindspeed_mm_dit.framework import runtime

        sample_indices = sample_indices_of(self._flags, self._task.steps, runtime.rank(), runtime.world_size())
        losses = np.concatenate(self._losses).reshape(self._task.steps, -1)
        arrays = self._arrays | {"grad_norm": np.array(self._norms), "losses": losses, "positions": sample_indices}
        self._task.write({**arrays, "facts": facts_as_array()}, runtime.rank())
        runtime.barrier()
        exit_now(0)  # (there is no other way to stop a host between steps)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
