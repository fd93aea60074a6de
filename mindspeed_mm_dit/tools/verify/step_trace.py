"""Record the first steps of anybody's training loop, for ``mm-dit compare A.trace B.trace``.

Recorded are inputs, outputs and gradients of every module, the gradients that the optimizer gets, and what it does to
the weights. Of large tensors a fixed random choice of entries is kept. Before the optimizer steps, the same step is
repeated with every number moved at random by its rounding: so far is this machine from itself. In later steps, weights
are moved by as much as the optimizer may have turned the roundings of earlier ones into.
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
from mindspeed_mm_dit.tools.verify.witness_file import MOST_ENTRIES, write

MOST_REPEATS = 100
MOST_STEPS = 100
MAX_RELATIVE_DRIFT = 2.0
"""By so many times itself the change of an entry is off at most: rounding has turned its sign."""

Sent = Mapping[int, Mapping[str, Any]]
"""Micro-batch -> what a loop has sent back to each output that its loss has used."""


class TraceRecorder:
    """Records the first steps within a ``with`` block; see ``dit.record_trace``."""

    def __init__(
        self, model: Any, optimizer: Any, place: str, average: Any = None, repeats: int = 3, steps: int = 2
    ) -> None:
        check_between("repeats", repeats, 1, MOST_REPEATS)
        check_between("steps", steps, 1, MOST_STEPS)
        self._room, self._model, self._optimizer, self._average = functions_for(model), model, optimizer, average
        self._place, self._repeats, self._steps, self._unit = Path(place), repeats, steps, 0.0
        self._moved: dict[str, np.ndarray] = {}
        self._drift: dict[str, float] = {}
        self._watch: Watch | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> TraceRecorder:
        for ending in (".json", "-*.safetensors"):
            for earlier in self._place.glob(f"step*-rank{self._room.rank()}{ending}"):
                earlier.unlink()
        self._hooks = [
            self._room.before_call(self._model, self._called),
            self._room.before_step(self._optimizer, self._model, self._stepping),
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

        loss: the number that was differentiated; of several, the mean is recorded.

        Raises:
            ConfigError: no call of the model was seen, or the optimizer took no step.
        """
        if not self._hooks:
            return
        if not self._calls or not any(name.startswith("gradient/") for name in self._found):
            what = "the optimizer took no step after backward()" if self._calls else "the model was not called"
            raise ConfigError("w.step()", f"since the block began, {what}",
                              "give dit.trace the module and the optimizer that the loop calls, without a closure, "
                              "and not compiled to a graph on MindSpore")  # fmt: skip
        after, found, name = self._weights(), self._found, f"loss/{self._step}"
        found |= {f"start/{key}": value for key, value in self._start.items()}
        found |= {key: value.astype(np.float64) - self._start[key] for key, value in after.items()}
        found |= {f"moved/{key}": value for key, value in self._moved.items()}
        if loss is not None:
            found[name] = np.atleast_1d(self._room.host(self._room.tensor(loss)).astype(np.float64).mean())
            self._noise[name] = self._noise.pop("loss") / max(abs(float(found[name][0])), 1e-30)
        shapes = {name: list(p.shape) for name, p in self._room.parameters(self._model).items()}
        write(self._place, self._step, self._room.rank(), found, self._noise,
              {"unit": self._unit, "shapes": shapes, "settings": self._room.settings(),
               "model": type(self._model).__name__, "micro_batches": len(self._calls)})  # fmt: skip
        self._drifted(after)
        self._start = after
        self._next()
        if self._step > self._steps:
            self._end()

    def _next(self) -> None:
        """Begin the next step."""
        self._step, self._watch = self._step + 1, None
        self._calls: list[Any] = []
        self._found: dict[str, np.ndarray] = {}
        self._noise: dict[str, float] = {}

    def _end(self) -> None:
        for each in (*self._hooks, *((self._watch, self._ends) if self._watch else ())):
            each.remove()
        self._hooks = []

    def _drifted(self, after: Mapping[str, np.ndarray]) -> None:
        """Add up by how much of itself another right machine's weight may be off after this step.

        What is not finite adds nothing: the comparison names it.
        """
        for name in (each for each in self._moved if f"gradient/{each}" in self._found):
            gradient = np.abs(self._found[f"gradient/{name}"].astype(np.float64))
            share = np.minimum(self._moved[name] / np.maximum(gradient, 1e-300), MAX_RELATIVE_DRIFT)
            off, size = np.linalg.norm(share * self._found[f"step/{name}"]), np.linalg.norm(after[f"step/{name}"])
            more = math.sqrt(3) * float(off) / max(float(size), 1e-30)
            self._drift[name] = self._drift.get(name, 0.0) + (more if math.isfinite(more) else 0.0)

    def _weights(self) -> dict[str, np.ndarray]:
        trees = {"step": self._model, "average": self._average}
        return {f"{kind}/{name}": self._taken(p) for kind, tree in trees.items() if tree is not None
                for name, p in self._room.parameters(tree).items()}  # fmt: skip

    def _taken(self, x: Any) -> np.ndarray:
        """Return a tensor, or the chosen entries of a large one."""
        count = self._room.size(x)
        return self._room.host(self._room.picked(x, chosen(count)) if count > MOST_ENTRIES else x)

    def _seen(self, x: Any) -> np.ndarray:
        self._unit = max(self._unit, self._room.unit(x))
        return self._taken(x)

    def _called(self, call: Any) -> None:
        """Note a call of the model by the loop."""
        if self._watch is None:
            self._watch = Watch(self._model, taken=self._seen)
            self._ends = Watch(self._model, lambda name: not name, self._room.copied, of_scalars=True)
        self._calls.append(call)
        self._watch.next()
        self._ends.next()

    def _stepping(self, gradients: Mapping[str, Any]) -> None:
        """Record what the optimizer gets, and repeat the step with every number moved."""
        if self._watch is None or self._noise:
            return
        found = self._watch.end()
        sent = self._ends.parts("given/")
        self._ends.remove()
        self._found = {**found, **{f"gradient/{name}": self._taken(g) for name, g in gradients.items()},
                       f"gradient norm/{self._step}": self._room.norm(gradients.values())}  # fmt: skip
        calls, self._calls = self._calls, []  # (a repeated call is none of the loop)
        value, base, outputs = self._again(calls, sent)
        shares = {name: _share(self._found[name], array) for name, array in base.items()
                  if name.startswith("gradient") and name in self._found}  # fmt: skip
        base |= {name: base[name] * share for name, share in shares.items()}
        for draw in range(self._repeats):  # (the values of one repetition at a time are held)
            off, moved, _ = self._again(calls, sent, draw, outputs)
            moved |= {name: moved[name] * share for name, share in shares.items()}
            noise = noise_of([moved], {**base, **found}) | {"loss": abs(off - value)}
            self._noise = {name: max(far, self._noise.get(name, 0.0)) for name, far in noise.items()}
            for name in (key[9:] for key in base if key.startswith("gradient/")):
                far = np.abs(moved[f"gradient/{name}"] - base[f"gradient/{name}"])
                self._moved[name] = np.maximum(self._moved.get(name, 0.0), far)
        self._calls = calls

    def _again(
        self, calls: list[Any], sent: Sent, draw: int | None = None, before: Sequence[Any] = ()
    ) -> tuple[float, dict[str, Any], list[Any]]:
        """Take the calls again; return the change of the loss by the outputs, all quantities, and the outputs.

        A draw: with every number moved. What the loop sends back is moved too, by as much as the outputs have moved
        from those ``before``, for a loss compares them with something of their size.
        """
        room, watch, value = self._room, Watch(self._model, taken=self._taken), 0.0
        outputs, gradients = list[Any](), dict[str, np.ndarray]()
        with room.restored_afterwards(self._model, whole=False), self._moving(draw):
            for n in sorted(sent):
                watch.next()
                back, earlier = tuple(sent[n].values()), before[len(outputs)] if before else ()

                def loss(found: Any, back: Any = back, earlier: Any = earlier) -> Any:
                    if earlier:
                        back = [b + (room.copied(x) - y) * room.share(b, y) for b, x, y in zip(back, found, earlier)]
                    return sum((x * b).sum() for x, b in zip(found, back))

                found, _, own = room.gradients(self._model, partial(self._used, calls[n], sent[n]), loss, self._taken)
                outputs.append(tuple(map(room.copied, found)))
                value += sum(float(room.host((x * b).sum())) for x, b in zip(outputs[-1], back))
                gradients = {name: gradients.get(name, 0.0) + gradient for name, gradient in own.items()}
        found = watch.end() | {f"gradient/{name}": gradient for name, gradient in gradients.items()}
        norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in gradients.values()))
        return value, {**found, f"gradient norm/{self._step}": np.atleast_1d(norm)}, outputs

    @contextmanager
    def _moving(self, draw: int | None) -> Iterator[None]:
        """While entered, every number is moved by a few of its roundings, weights also by their drift; without a draw,
        none is."""
        if draw is None:
            yield
            return
        size = ROUNDINGS * self._unit
        with (
            moved_weights(self._model, lambda name: size + self._drift.get(name, 0.0), draw),
            self._room.Roundings(self._model, size, draw),
        ):
            yield

    def _used(self, call: Any, sent: Mapping[str, Any]) -> tuple[Any, ...]:
        """Call again; return the outputs that something was sent back to."""
        found = {self._room.mark(n): x for n, (_, x) in enumerate(self._room.tensors(call(self._model)))}
        return tuple(found[mark] for mark in sent)


def _share(found: np.ndarray, repeated: np.ndarray) -> float:
    """Return by what a loop has multiplied a gradient since it went back, as clipping and scales of a loss do."""
    return float(np.linalg.norm(found) / (np.linalg.norm(repeated) or 1.0))


@cache
def chosen(count: int) -> np.ndarray:
    """Return which entries are kept of a tensor of ``count``: the same on every machine."""
    return np.random.Generator(np.random.Philox(count)).integers(0, count, MOST_ENTRIES)
