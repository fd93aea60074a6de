"""The tasks of the processes of ``mm-dit prove`` and ``compare``, and the nested results that they leave in files."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.data.order import micro_batches
from mindspeed_mm_dit.errors import UserError


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path: the keys and indices that lead to it, joined by dots."""
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        yield at, value
        return
    for key, inside in items:
        yield from leaves(inside, f"{at}.{key}" if at else str(key))


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same structure with every leaf changed."""
    if isinstance(value, Mapping):
        mapping = copy.copy(value)
        for key, inside in value.items():
            mapping[key] = mapped(inside, change)  # type: ignore[index]
        return mapping
    if isinstance(value, (list, tuple)):
        changed = [mapped(inside, change) for inside in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return change(value)


Arrays = Mapping[str, np.ndarray]
_ALIKE = ("gradient/", "model/", "ema/", "start/")


@dataclass(frozen=True)
class Task:
    """A request for the first steps of a run in one layout; passed to the process as JSON."""

    flags: tuple[str, ...]
    """Flags of pretrain_dit.py."""
    output: str
    """Prefix of the names of its files."""
    steps: int = 1
    is_truth: bool = False
    """Whether it is computed in float64."""
    on_host: bool = False
    """Whether it is computed on the host's CPU, whatever accelerators there are."""
    rounding: float = 0.0
    """Relative size of the perturbation of every number of a float64 reference."""
    optimizer_rounding: float = 0.0
    """The same for the optimizer's weights and for constants, which are float32 in every precision."""
    draw: int = 0
    """Seed of the perturbation."""
    watched: bool = False
    """Whether the modules are watched."""
    inputs: str = ""
    """An .npz of samples for the network, instead of data; then no step is done."""
    drawn: bool = True
    """Whether zero-initialised weights are replaced by random ones."""

    def value(self, flag: str) -> str:
        """Return the value after ``flag``."""
        return self.flags[self.flags.index(flag) + 1]

    def write(self, arrays: Arrays, rank: int) -> None:
        """Write the results of a rank; only rank 0 writes the arrays that are the same on all ranks."""
        written = {n: a for n, a in arrays.items() if rank == 0 or not n.startswith(_ALIKE)}
        np.savez(f"{self.output}.rank{rank}.npz", **written)  # type: ignore[arg-type]

    def refuse(self, error: UserError) -> None:
        """Write the reason why there are no results."""
        Path(f"{self.output}.refused").write_text(error.formatted, encoding="utf-8")


def sample_indices_of(
    args: RunConfig, steps: int, rank: int, ranks: int, dealt: Callable[..., Iterator[np.ndarray]] = micro_batches
) -> np.ndarray:
    """Return the sample indices of a rank, (steps, samples); ``ranks``: the number of data-parallel ranks.

    dealt: how a step's samples are dealt to micro-batches (``DataSet.micro_batches``).
    """
    rounds = args.global_batch_size // (args.micro_batch_size * ranks)
    batches = dealt(0, args.micro_batch_size, rank, ranks, rounds)
    return np.concatenate([next(batches) for _ in range(steps * rounds)]).reshape(steps, -1)


def write_tasks(path: Path, tasks: Sequence[Task]) -> None:
    """Write the tasks of a process."""
    path.write_text(json.dumps([asdict(task) for task in tasks]), encoding="utf-8")


def read_tasks(path: str | Path) -> list[Task]:
    """Return the tasks that ``write_tasks`` wrote."""
    tasks = json.loads(Path(path).read_text(encoding="utf-8"))
    return [Task(**{**each, "flags": tuple(each["flags"])}) for each in tasks]


@dataclass(frozen=True)
class StepResult:
    """The results of steps in one layout, from all its ranks."""

    arrays: Arrays
    """``grad_norm`` and ``seconds``, (steps,); ``gradient/PARAMETER``, ``model/PARAMETER`` and ``ema/PARAMETER`` of the
    first step; for a float64 reference ``start/PARAMETER``, the weights before it. ``facts``: versions and device as
    JSON."""
    losses: Sequence[np.ndarray]
    """Losses of each step, (samples,), in the order of the run."""
    watched: Arrays
    """Inputs and outputs of the modules, by sample, in the order in which they were computed."""

    @property
    def quantities(self) -> Arrays:
        """Losses, norms and gradients by their names in the table."""
        steps = range(1, len(self.losses) + 1)
        return {
            **{f"loss/{n}": self.losses[n - 1] for n in steps},
            **{f"gradient norm/{n}": self.arrays["grad_norm"][n - 1 : n] for n in steps},
            **{name: array for name, array in self.arrays.items() if name.startswith("gradient/")},
        }

    @property
    def facts(self) -> dict[str, str]:
        """Versions and device."""
        facts: dict[str, str] = json.loads(str(self.arrays["facts"]))
        return facts

    @property
    def start(self) -> Arrays:
        """The weights before the first step; only a float64 reference has them."""
        return {name[6:]: array for name, array in self.arrays.items() if name.startswith("start/")}

    @classmethod
    def read(cls, task: Task) -> StepResult | str:
        """Return the results that the processes wrote, or the reason why they have none."""
        refused = Path(f"{task.output}.refused")
        if refused.is_file():
            return refused.read_text(encoding="utf-8")
        files = sorted(Path(task.output).parent.glob(f"{Path(task.output).name}.rank*.npz"))
        if not files:
            return ""
        ranks = [dict(np.load(file, allow_pickle=False)) for file in files]
        by_step = ([(rank["positions"][n], rank["losses"][n]) for rank in ranks] for n in range(task.steps))
        losses = [_by_sample_index(parts) for parts in by_step]
        first = [rank["positions"][0] for rank in ranks]
        names = [name for name in ranks[0] if name.startswith("watched/")]
        watched = {name[8:]: _joined(first, [rank[name] for rank in ranks], name) for name in names}
        return cls(ranks[0], losses, watched)


def _by_sample_index(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return values in the order of sample indices; if several ranks computed one, take the first rank's."""
    sample_indices, values = (np.concatenate(each) for each in zip(*parts))
    return values[np.unique(sample_indices, return_index=True)[1]]


def _joined(sample_indices: Sequence[np.ndarray], values: Sequence[np.ndarray], name: str) -> np.ndarray:
    """Join the ranks' parts of one tensor: different samples, or token shards of the same samples.

    A rank averages gradients over its local samples only; they are rescaled to the mean over the whole batch.
    """
    if any(len(indices) != len(value) for indices, value in zip(sample_indices, values)):
        return values[0]  # not by sample
    groups: dict[int, list[np.ndarray]] = {}
    for indices, value in zip(sample_indices, values):
        groups.setdefault(int(indices[0]), []).append(value)
    shared = {first: each[0] if _same(each) else np.concatenate(each, 1) for first, each in groups.items()}
    scale = 1 / len(groups) if name.startswith(("watched/given", "watched/back")) else 1.0
    firsts = {int(indices[0]): indices for indices in sample_indices}
    return _by_sample_index([(firsts[first], value * scale) for first, value in shared.items()])


def _same(parts: Sequence[np.ndarray]) -> bool:
    return all(part.shape == parts[0].shape and np.allclose(part, parts[0], rtol=1e-2) for part in parts[1:])
