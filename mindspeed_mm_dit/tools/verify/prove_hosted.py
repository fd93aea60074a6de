"""A process of ``mm-dit prove`` that computes the first steps of a run inside MindSpeed-MM, through pretrain_dit.py.

PyTorch's own hooks observe the modules and the optimizer; the gradient norm is read from what the host logs. A host
cannot be started twice in one process, so each process does one task.
"""

from __future__ import annotations

import inspect
import runpy
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])  # not the folder of this file

import numpy as np

from mindspeed_mm_dit.configs.embedded import ENTRY_SCRIPT
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.exits import leave
from mindspeed_mm_dit.hosts.registry import named
from mindspeed_mm_dit.tools.verify.task import Task, read_tasks
from mindspeed_mm_dit.training.flags import parse


def main(task: Task) -> None:
    """Run ``task``; the process ends by itself after its steps."""
    flags = parse(task.flags)
    activate("pytorch")
    at = task.flags.index("--init-from")
    _start_from(task.value("--init-from"))
    TraceRecorder(task, flags)
    run_flags = ["--train-iters", str(task.steps + 1), "--log-interval", "1"]
    run_flags += named(flags.host).flags_needed(flags)
    sys.argv[:] = [str(ENTRY_SCRIPT), *task.flags[:at], *task.flags[at + 2 :], *run_flags]
    runpy.run_path(str(ENTRY_SCRIPT), run_name="__main__")


def _start_from(weights: str) -> None:
    """Start the run from these weights instead of random ones: the hosts of MindSpeed-MM have no --init-from."""
    from safetensors.numpy import load_file

    from mindspeed_mm_dit.models import composite, layers

    first = load_file(weights)
    modules: tuple[Any, ...] = (layers, composite)
    for module in modules:
        module.initial_weights = lambda parameters, seed: {name: first[name] for name in parameters.shapes()}


class TraceRecorder:
    """Records what a host's steps do, through PyTorch's hooks. All ranks take part, and rank 0 writes whole arrays."""

    def __init__(self, task: Task, flags: RunConfig) -> None:
        from mindspeed_mm_dit.tools.verify.pytorch import step_record

        self._task, self._flags, self._step_record = task, flags, step_record
        self._model: Any = None
        self._watch: Any = None
        self._names: dict[Any, str] = {}
        self._losses: list[np.ndarray] = []
        self._norms: list[float] = []
        self._arrays: dict[str, np.ndarray] = {}
        step_record.hook_everything(self._before, self._after, self._step)

    def _before(self, module: Any, inputs: Any) -> None:
        """Observe the model before a micro-batch. The model is the module that has an EMA of its weights."""
        from mindspeed_mm_dit.tools.verify.first_wrong_module import Watch

        if not hasattr(module, "averages"):
            return
        if self._model is None:
            self._model = module
            self._names = {p: name for name, p in self._step_record.weights(module).items()}
            self._watch = Watch(getattr(module, "predictor", module)) if self._task.watched else None
            self._record_grad_norms()
        if len(self._norms) == 1 and "grad_norm" not in self._arrays:
            self._arrays["grad_norm"] = np.array(self._norms)
            self._arrays |= {
                f"model/{name}": self._step_record.whole(p) for name, p in self._step_record.weights(module).items()
            }
            self._arrays |= {f"ema/{name}": self._step_record.whole(mean) for name, mean in module.averages().items()}
            self._arrays |= {f"watched/{name}": array for name, array in self._watched().items()}
        if len(self._norms) == self._task.steps:
            self._write()
        if self._watch:
            self._watch.next()

    def _watched(self) -> dict[str, np.ndarray]:
        watch, self._watch = self._watch, None
        if watch is None:
            return {}
        return dict(watch.end())

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
        module, _, name = named(self._flags.host).logs_steps.partition(":")
        *path, leaf = name.split(".")
        owner = reduce(getattr, path, sys.modules[module])
        setattr(owner, leaf, self._recording(getattr(owner, leaf)))

    def _recording(self, log: Callable[..., Any]) -> Callable[..., Any]:
        def recording(*args: Any, **kwargs: Any) -> Any:
            self._norms.append(float(inspect.signature(log).bind(*args, **kwargs).arguments["grad_norm"]))
            return log(*args, **kwargs)

        return recording

    def _write(self) -> None:
        """Write what was recorded, and end the run: the step that starts now is one more than requested."""
        from mindspeed_mm_dit.framework import runtime
        from mindspeed_mm_dit.tools.verify.examples import facts_as_array
        from mindspeed_mm_dit.tools.verify.task import sample_indices_of

        sample_indices = sample_indices_of(self._flags, self._task.steps, runtime.rank(), runtime.world_size())
        losses = np.concatenate(self._losses).reshape(self._task.steps, -1)
        arrays = self._arrays | {"grad_norm": np.array(self._norms), "losses": losses, "positions": sample_indices}
        self._task.write({**arrays, "facts": facts_as_array()}, runtime.rank())
        runtime.barrier()
        leave(0)  # (there is no other way to stop a host between steps)


if __name__ == "__main__":
    main(*read_tasks(sys.argv[-1]))
