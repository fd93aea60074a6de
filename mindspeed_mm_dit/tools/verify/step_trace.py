"""Record the first steps of any training loop, for ``mm-dit compare A.trace B.trace``.

Recorded are inputs, outputs and gradients of every module, the gradients that the optimizer gets, and the changes that
it makes to the weights. Of large tensors a fixed random choice of entries is recorded. Before the optimizer steps, the
step is repeated with every number perturbed at random by its rounding, which measures the rounding noise of this
machine. In later steps, weights are also perturbed by the drift that the optimizer may have made of earlier rounding.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, error_text
from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, DataError
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file
from mindspeed_mm_dit.tools.verify.module_recorder import ModuleRecorder, functions_for, perturbed_weights
from mindspeed_mm_dit.tools.verify.prove import ROUNDINGS
from mindspeed_mm_dit.tools.verify.table import noise_of

FORM = "mm-dit witness 1"
"""Version of the file format; the name is older than the term step trace."""
MAX_ENTRIES = 4096
"""Number of entries that are recorded of a larger tensor."""
MAX_JSON_BYTES = 2**26
_PARAMETER_KINDS = ("gradient", "moved", "step", "start/step", "average", "start/average")
"""Kinds of arrays that each parameter has, all of the same shape."""
PART_BYTES = 2**26
"""Bytes after which a new file is started."""
RECORD_AGAIN = "Record it again with dit.record_trace(...) as w, and w.step() after each step of the optimizer."


@dataclass(frozen=True)
class Facts:
    """The facts about a step in its .json."""

    unit: float
    """The largest relative error of one rounding: 2**-53 of float64, 2**-4 of float8."""
    shapes: dict[str, tuple[int, ...]]
    """The whole shape of each parameter."""
    settings: dict[str, str]
    model: str
    micro_batches: int

    def __post_init__(self) -> None:
        if not 0 <= self.unit < 0.5:
            raise ConfigError(f"unit = {self.unit} must be at least 0 and less than 0.5.")
        if min((size for shape in self.shapes.values() for size in shape), default=0) < 0:
            raise ConfigError("shapes must not be negative.")


@dataclass(frozen=True)
class Content:
    """The .json of a step."""

    form: Literal["mm-dit witness 1"]
    files: dict[str, int]
    names: tuple[str, ...]
    noise: dict[str, float]
    facts: Facts

    def __post_init__(self) -> None:
        if negative := [name for name, value in self.noise.items() if value < 0]:
            raise ConfigError(f"noise.{negative[0]} = {self.noise[negative[0]]} must not be negative.")
        if not any(name.startswith("gradient/") for name in self.names):
            raise ConfigError("names lists no gradient.")


@dataclass(frozen=True)
class Recorded:
    """What one rank recorded of a step."""

    arrays: Mapping[str, np.ndarray]
    noise: Mapping[str, float]
    """How far rounding moved each quantity on that machine."""
    facts: Facts

    def below(self, start: str) -> dict[str, np.ndarray]:
        """Return the arrays whose names begin with ``start``, without it."""
        return {name[len(start) :]: array for name, array in self.arrays.items() if name.startswith(start)}


def write(
    folder: Path, step: int, rank: int, arrays: Mapping[str, np.ndarray], noise: Any, facts: Mapping[str, Any]
) -> None:
    """Write the record of a step by one rank, in files of about PART_BYTES."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    files, part, size = dict[str, int](), dict[str, np.ndarray](), 0
    begin, names = f"step{step}-rank{rank}", list(arrays)
    for name in names:
        part[name] = np.ascontiguousarray(arrays[name])
        size += part[name].nbytes
        if size > PART_BYTES or name == names[-1]:
            file = folder / f"{begin}-{len(files)}.safetensors"
            save_file(part, file)
            files[file.name] = file.stat().st_size
            part, size = {}, 0
    finite = {name: value for name, value in noise.items() if math.isfinite(value)}
    content = {"form": FORM, "files": files, "names": names, "noise": finite, "facts": facts}
    (folder / f"{begin}.json").write_text(json.dumps(content), encoding="utf-8")


def read(folder: str | Path) -> dict[tuple[int, int], Recorded]:
    """Return the records by step, from 1, and rank; raises DataError for a folder that is not a whole step trace."""
    name = re.compile(r"step([1-9][0-9]*)-rank(0|[1-9][0-9]*)(-[0-9]+\.safetensors|\.json)")
    named = {path: name.fullmatch(path.name) for path in Path(folder).glob("step*")}
    files = {path: (int(match[1]), int(match[2])) for path, match in named.items() if match}
    paths = {key: path for path, key in files.items() if path.suffix == ".json"}
    if incomplete := set(files.values()) - paths.keys():
        step, rank = min(incomplete)
        raise DataError(
            f"{folder} is incomplete: rank {rank} has not finished step {step}, which has no .json. {RECORD_AGAIN}"
        )
    if not paths:
        raise DataError(f"{folder} is not a step trace. {RECORD_AGAIN}")
    steps, ranks = map(max, zip(*paths))
    if len(paths) < steps * (ranks + 1):
        every = ((step, rank) for step in itertools.count(1) for rank in range(ranks + 1))
        step, rank = next(key for key in every if key not in paths)
        raise DataError(f"{folder} has no step {step} of rank {rank}. {RECORD_AGAIN}")
    shapes: dict[int, dict[str, tuple[int, ...]]] = {rank: {} for rank in range(ranks + 1)}
    return {key: _read(path, shapes[key[1]]) for key, path in sorted(paths.items())}


def _read(path: Path, shapes: dict[str, tuple[int, ...]]) -> Recorded:
    """Read a step; ``shapes`` of the arrays of each parameter are the same in all steps."""
    try:
        if check_file(path) > MAX_JSON_BYTES:
            raise UnusableFile(f"has more than {MAX_JSON_BYTES:,} bytes")
        content = from_mapping(Content, json.loads(path.read_text(encoding="utf-8")), path.name)
        arrays: dict[str, np.ndarray] = {}
        for file, size in content.files.items():
            if not re.fullmatch(rf"{path.stem}-[0-9]+\.safetensors", file) or check_file(path.with_name(file)) != size:
                raise UnusableFile(f"lists {file} with {size} bytes, which is another file")
            arrays |= read_safetensors_file(path.with_name(file), set(content.names).intersection, MAX_ENTRIES)[0]
        if missing := [name for name in content.names if name not in arrays]:
            raise UnusableFile(f"lists {missing[0]}, which its files lack")
        for name, array in arrays.items():
            kind, _, parameter = name.rpartition("/")
            if kind in _PARAMETER_KINDS and shapes.setdefault(parameter, array.shape) != array.shape:
                raise UnusableFile(f"has {name} of shape {array.shape}, not {shapes[parameter]} as before")
    except (OSError, ValueError, RecursionError, UnusableFile, ConfigError, CheckpointError) as error:
        raise DataError(
            f"{path.parent} is cut short or damaged ({path.name}: {error_text(error)}). {RECORD_AGAIN}"
        ) from None
    return Recorded({name: arrays[name] for name in content.names}, content.noise, content.facts)


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
        self._watch: ModuleRecorder | None = None
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
            raise ConfigError(
                "w.step() was never called within the block, so no step is recorded. Call it after each step of the "
                "optimizer."
            )

    def step(self, loss: Any = None) -> None:
        """End a step: call it after the optimizer's. Calls after the last recorded step do nothing.

        loss: the number that was differentiated; if it has several entries, their mean is recorded.

        Raises:
            ConfigError: the model was not called, or the optimizer took no step.
        """
        if not self._hooks:
            return
        if not self._calls or not any(name.startswith("gradient/") for name in self._arrays):
            problem = "the optimizer took no step after backward()" if self._calls else "the model was not called"
            raise ConfigError(
                f"Before w.step(), {problem}. Give dit.record_trace the module and the optimizer that the loop calls, "
                "without a closure, and not compiled to a graph on MindSpore."
            )
        after, arrays, name = self._weights(), self._arrays, f"loss/{self._step}"
        arrays |= {f"start/{key}": value for key, value in self._start.items()}
        arrays |= {key: value.astype(np.float64) - self._start[key] for key, value in after.items()}
        arrays |= {f"moved/{key}": value for key, value in self._moved.items()}
        if loss is not None:
            arrays[name] = np.atleast_1d(self._backend.to_numpy(self._backend.tensor(loss)).astype(np.float64).mean())
            self._noise[name] = self._noise.pop("loss") / max(abs(float(arrays[name][0])), 1e-30)
        shapes = {name: list(p.shape) for name, p in self._backend.parameters(self._model).items()}
        facts = {
            **{"unit": self._unit, "shapes": shapes, "settings": self._backend.settings()},
            **{"model": type(self._model).__name__, "micro_batches": len(self._calls)},
        }
        write(self._path, self._step, self._backend.rank(), arrays, self._noise, facts)
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
        return {
            f"{kind}/{name}": self._to_array(p)
            for kind, tree in trees.items()
            if tree is not None
            for name, p in self._backend.parameters(tree).items()
        }

    def _to_array(self, x: Any) -> np.ndarray:
        """Return a tensor, or the chosen entries of a large one."""
        count = self._backend.num_entries(x)
        return self._backend.to_numpy(self._backend.select_entries(x, chosen(count)) if count > MAX_ENTRIES else x)

    def _record(self, x: Any) -> np.ndarray:
        self._unit = max(self._unit, self._backend.unit_roundoff(x))
        return self._to_array(x)

    def _called(self, call: Any) -> None:
        """Record a call of the model by the loop."""
        if self._watch is None:
            self._watch = ModuleRecorder(self._model, convert=self._record)
            self._output_watch = ModuleRecorder(
                self._model, lambda name: not name, self._backend.detached_copy, of_scalars=True
            )
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
        self._arrays = {
            **values,
            **{f"gradient/{name}": self._to_array(g) for name, g in gradients.items()},
            f"gradient norm/{self._step}": self._backend.norm(gradients.values()),
        }
        calls, self._calls = self._calls, []  # (repeated calls do not count as calls of the loop)
        value, base, outputs = self._repeat(calls, sent)
        scales = {
            name: _norm_ratio(self._arrays[name], array)
            for name, array in base.items()
            if name.startswith("gradient") and name in self._arrays
        }
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
        backend, watch, value = self._backend, ModuleRecorder(self._model, convert=self._to_array), 0.0
        outputs, gradients = list[Any](), dict[str, np.ndarray]()
        with backend.restored(self._model, whole=False), self._moving(draw):
            for n in sorted(sent):
                watch.next()
                back, earlier = tuple(sent[n].values()), before[len(outputs)] if before else ()

                def loss(tensors: Any, back: Any = back, earlier: Any = earlier) -> Any:
                    if earlier:
                        back = [
                            b + (backend.detached_copy(x) - y) * backend.norm_ratio(b, y)
                            for b, x, y in zip(back, tensors, earlier)
                        ]
                    return sum((x * b).sum() for x, b in zip(tensors, back))

                results, _, step_gradients = backend.gradients(
                    self._model, partial(self._used, calls[n], sent[n]), loss, self._to_array
                )
                outputs.append(tuple(map(backend.detached_copy, results)))
                value += sum(float(backend.to_numpy((x * b).sum())) for x, b in zip(outputs[-1], back))
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
            perturbed_weights(self._model, lambda name: size + self._drift.get(name, 0.0), draw),
            self._backend.RoundingNoise(self._model, size, draw),
        ):
            yield

    def _used(self, call: Any, sent: Mapping[str, Any]) -> tuple[Any, ...]:
        """Repeat a call; return the outputs to which a gradient was sent back."""
        tensors = {
            self._backend.output_suffix(n): x for n, (_, x) in enumerate(self._backend.tensors(call(self._model)))
        }
        return tuple(tensors[mark] for mark in sent)


def _norm_ratio(recorded: np.ndarray, repeated: np.ndarray) -> float:
    """Return the factor by which the loop scaled a gradient after backward, as clipping and loss scaling do."""
    return float(np.linalg.norm(recorded) / (np.linalg.norm(repeated) or 1.0))


@cache
def chosen(count: int) -> np.ndarray:
    """Return the indices of the recorded entries of a tensor of ``count``: the same on every machine."""
    return np.random.Generator(np.random.Philox(count)).integers(0, count, MAX_ENTRIES)
