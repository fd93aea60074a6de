"""Record the first steps of any training loop, for ``mm-dit compare A.trace B.trace``.

Recorded are inputs, outputs and gradients of every module, the gradients that the optimizer gets, and the changes that
it makes to the weights. Of large tensors a fixed random choice of entries is recorded. Before the optimizer steps, the
step is repeated with every number perturbed at random by its rounding, which measures the rounding noise of this
machine. In later steps, weights are also perturbed by the drift that the optimizer may have made of earlier rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.tools.verify.first_wrong_module import Watch, functions_for, moved_weights
from mindspeed_mm_dit.tools.verify.prove import ROUNDINGS
from mindspeed_mm_dit.tools.verify.table import noise_of
from mindspeed_mm_dit.tools.verify.witness_file import MAX_ENTRIES, write

MAX_REPEATS = 100
MAX_STEPS = 100
MAX_RELATIVE_DRIFT = 2.0
"""Largest relative error of the change of an entry: rounding may flip its sign, which is an error of twice itself."""

OutputGradients = Mapping[int, Mapping[str, Any]]
"""Micro-batch -> the gradient that the loop sent back to each output that its loss used."""


class TraceRecorder:
    """Records the first steps within a ``with`` block; see ``dit.record_trace``."""

    def __init__(
        self, model: Any, optimizer: Any, path: str, average: Any = None, repeats: int = 3, steps: int = 2
    ) -> None:
        check_between("repeats", repeats, 1, MAX_REPEATS)
        check_between("steps", steps, 1, MAX_STEPS)
        self._backend, self._model, self._optimizer, self._average = functions_for(model), model, optimizer, average
        self._path, self._repeats, self._steps, self._unit = Path(path), repeats, steps, 0.0
        self._moved: dict[str, np.ndarray] = {}
        self._drift: dict[str, float] = {}
        self._watch: Watch | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> TraceRecorder:
        for ending in (".json", "-*.safetensors"):
            for earlier in self._path.glob(f"step*-rank{self._backend.rank()}{ending}"):
                earlier.unlink()
        self._hooks = [
            self._backend.before_call(self._model, self._called),
            self._backend.before_step(self._optimizer, self._model, self._stepping),
        ]
        self._step, self._start = 0, self._weights()
        self._next()
        return self

    def __exit__(self, kind: Any, *failure: Any) -> None:
        self._end()
        if kind is None and self._step == 1:
            raise ConfigError("w.step()", "was never called within the block: no step is recorded",
                              "call it after each step of the optimizer")  # fmt: skip

    def step(self, loss: Any = None) -> None:
        """End a step: call it after the optimizer's. Calls after the last recorded step do nothing.

        loss: the number that was differentiated; if it has several entries, their mean is recorded.

        Raises:
            ConfigError: the model was not called, or the optimizer took no step.
        """
        if not self._hooks:
            return
        if not self._calls or not any(name.startswith("gradient/") for name in self._arrays):
            what = "the optimizer took no step after backward()" if self._calls else "the model was not called"
            raise ConfigError("w.step()", f"since the block began, {what}",
                              "give dit.record_trace the module and the optimizer that the loop calls, without a "
                              "closure, and not compiled to a graph on MindSpore")  # fmt: skip
        after, arrays, name = self._weights(), self._arrays, f"loss/{self._step}"
        arrays |= {f"start/{key}": value for key, value in self._start.items()}
        arrays |= {key: value.astype(np.float64) - self._start[key] for key, value in after.items()}
        arrays |= {f"moved/{key}": value for key, value in self._moved.items()}
        if loss is not None:
            arrays[name] = np.atleast_1d(self._backend.host(self._backend.tensor(loss)).astype(np.float64).mean())
            self._noise[name] = self._noise.pop("loss") / max(abs(float(arrays[name][0])), 1e-30)
        shapes = {name: list(p.shape) for name, p in self._backend.parameters(self._model).items()}
        write(self._path, self._step, self._backend.rank(), arrays, self._noise,
              {"unit": self._unit, "shapes": shapes, "settings": self._backend.settings(),
               "model": type(self._model).__name__, "micro_batches": len(self._calls)})  # fmt: skip
        self._add_drift(after)
        self._start = after
        self._next()
        if self._step > self._steps:
            self._end()

    def _next(self) -> None:
        """Start the next step."""
        self._step, self._watch = self._step + 1, None
        self._calls: list[Any] = []
        self._arrays: dict[str, np.ndarray] = {}
        self._noise: dict[str, float] = {}

    def _end(self) -> None:
        for each in (*self._hooks, *((self._watch, self._output_watch) if self._watch else ())):
            each.remove()
        self._hooks = []

    def _add_drift(self, after: Mapping[str, np.ndarray]) -> None:
        """Accumulate the relative weight drift that rounding alone may cause.

        Values that are not finite add nothing: the comparison reports them.
        """
        for name in (each for each in self._moved if f"gradient/{each}" in self._arrays):
            gradient = np.abs(self._arrays[f"gradient/{name}"].astype(np.float64))
            relative = np.minimum(self._moved[name] / np.maximum(gradient, 1e-300), MAX_RELATIVE_DRIFT)
            drift, size = np.linalg.norm(relative * self._arrays[f"step/{name}"]), np.linalg.norm(after[f"step/{name}"])
            more = math.sqrt(3) * float(drift) / max(float(size), 1e-30)
            self._drift[name] = self._drift.get(name, 0.0) + (more if math.isfinite(more) else 0.0)

    def _weights(self) -> dict[str, np.ndarray]:
        trees = {"step": self._model, "average": self._average}
        return {f"{kind}/{name}": self._to_array(p) for kind, tree in trees.items() if tree is not None
                for name, p in self._backend.parameters(tree).items()}  # fmt: skip

    def _to_array(self, x: Any) -> np.ndarray:
        """Return a tensor, or the chosen entries of a large one."""
        count = self._backend.size(x)
        return self._backend.host(self._backend.picked(x, chosen(count)) if count > MAX_ENTRIES else x)

    def _record(self, x: Any) -> np.ndarray:
        self._unit = max(self._unit, self._backend.unit(x))
        return self._to_array(x)

    def _called(self, call: Any) -> None:
        """Record a call of the model by the loop."""
        if self._watch is None:
            self._watch = Watch(self._model, convert=self._record)
            self._output_watch = Watch(self._model, lambda name: not name, self._backend.copied, of_scalars=True)
        self._calls.append(call)
        self._watch.next()
        self._output_watch.next()

    def _stepping(self, gradients: Mapping[str, Any]) -> None:
        """Record the gradients that the optimizer gets, and repeat the step with every number perturbed."""
        if self._watch is None or self._noise:
            return
        values = self._watch.end()
        sent = self._output_watch.parts("given/")
        self._output_watch.remove()
        self._arrays = {**values, **{f"gradient/{name}": self._to_array(g) for name, g in gradients.items()},
                       f"gradient norm/{self._step}": self._backend.norm(gradients.values())}  # fmt: skip
        calls, self._calls = self._calls, []  # (repeated calls do not count as calls of the loop)
        value, base, outputs = self._repeat(calls, sent)
        scales = {name: _norm_ratio(self._arrays[name], array) for name, array in base.items()
                  if name.startswith("gradient") and name in self._arrays}  # fmt: skip
        base |= {name: base[name] * scale for name, scale in scales.items()}
        for draw in range(self._repeats):  # (one repetition at a time is in memory)
            moved_value, moved, _ = self._repeat(calls, sent, draw, outputs)
            moved |= {name: moved[name] * scale for name, scale in scales.items()}
            noise = noise_of([moved], {**base, **values}) | {"loss": abs(moved_value - value)}
            self._noise = {name: max(error, self._noise.get(name, 0.0)) for name, error in noise.items()}
            for name in (key[9:] for key in base if key.startswith("gradient/")):
                distance = np.abs(moved[f"gradient/{name}"] - base[f"gradient/{name}"])
                self._moved[name] = np.maximum(self._moved.get(name, 0.0), distance)
        self._calls = calls

    def _repeat(
        self, calls: list[Any], sent: OutputGradients, draw: int | None = None, before: Sequence[Any] = ()
    ) -> tuple[float, dict[str, Any], list[Any]]:
        """Repeat the calls; return the change of the loss by the outputs, all quantities, and the outputs.

        draw: seed of the perturbation of every number; None: nothing is perturbed. The gradients of the outputs are
        perturbed too, by as much as the outputs differ from those ``before``, because a loss compares outputs with
        targets of their size.
        """
        backend, watch, value = self._backend, Watch(self._model, convert=self._to_array), 0.0
        outputs, gradients = list[Any](), dict[str, np.ndarray]()
        with backend.restored_afterwards(self._model, whole=False), self._moving(draw):
            for n in sorted(sent):
                watch.next()
                back, earlier = tuple(sent[n].values()), before[len(outputs)] if before else ()

                def loss(tensors: Any, back: Any = back, earlier: Any = earlier) -> Any:
                    if earlier:
                        back = [
                            b + (backend.copied(x) - y) * backend.norm_ratio(b, y)
                            for b, x, y in zip(back, tensors, earlier)
                        ]
                    return sum((x * b).sum() for x, b in zip(tensors, back))

                results, _, step_gradients = backend.gradients(
                    self._model, partial(self._used, calls[n], sent[n]), loss, self._to_array
                )
                outputs.append(tuple(map(backend.copied, results)))
                value += sum(float(backend.host((x * b).sum())) for x, b in zip(outputs[-1], back))
                gradients = {name: gradients.get(name, 0.0) + gradient for name, gradient in step_gradients.items()}
        values = watch.end() | {f"gradient/{name}": gradient for name, gradient in gradients.items()}
        norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in gradients.values()))
        return value, {**values, f"gradient norm/{self._step}": np.atleast_1d(norm)}, outputs

    @contextmanager
    def _moving(self, draw: int | None) -> Iterator[None]:
        """While entered, every number is perturbed by a few roundings, and weights also by their drift.

        Without a draw, nothing is.
        """
        if draw is None:
            yield
            return
        size = ROUNDINGS * self._unit
        with (
            moved_weights(self._model, lambda name: size + self._drift.get(name, 0.0), draw),
            self._backend.RoundingNoise(self._model, size, draw),
        ):
            yield

    def _used(self, call: Any, sent: Mapping[str, Any]) -> tuple[Any, ...]:
        """Repeat a call; return the outputs to which a gradient was sent back."""
        tensors = {self._backend.mark(n): x for n, (_, x) in enumerate(self._backend.tensors(call(self._model)))}
        return tuple(tensors[mark] for mark in sent)


def _norm_ratio(recorded: np.ndarray, repeated: np.ndarray) -> float:
    """Return the factor by which the loop scaled a gradient after backward, as clipping and loss scaling do."""
    return float(np.linalg.norm(recorded) / (np.linalg.norm(repeated) or 1.0))


@cache
def chosen(count: int) -> np.ndarray:
    """Return the indices of the recorded entries of a tensor of ``count``: the same on every machine."""
    return np.random.Generator(np.random.Philox(count)).integers(0, count, MAX_ENTRIES)
