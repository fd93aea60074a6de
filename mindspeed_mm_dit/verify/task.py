"""What a process of ``mm-dit prove`` or ``compare`` is asked to compute, and what it leaves in files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.data.order import micro_batches
from mindspeed_mm_dit.errors import UserError

Arrays = Mapping[str, np.ndarray]
_ALIKE = ("gradient/", "model/", "ema/", "start/")


@dataclass(frozen=True)
class Task:
    """The first steps of a run in one layout; it travels as JSON."""

    flags: tuple[str, ...]
    """Of pretrain_dit.py."""
    output: str
    """Beginning of the names of its files."""
    steps: int = 1
    is_truth: bool = False
    """Whether it is computed in float64."""
    rounding: float = 0.0
    """By how much of themselves the numbers of a truth are moved."""
    kept: float = 0.0
    """The same of the weights that the optimizer is given."""
    draw: int = 0
    """Decides how they are moved."""
    watched: bool = False
    """Whether the modules are watched."""
    inputs: str = ""
    """An .npz of samples that the network is given instead of data; it takes no step then."""
    drawn: bool = True
    """Whether weights that begin as zero are drawn too."""

    def value(self, flag: str) -> str:
        """Return what follows ``flag``."""
        return self.flags[self.flags.index(flag) + 1]

    def write(self, found: Arrays, rank: int) -> None:
        """Leave what a rank has found; what all ranks have alike rank 0 leaves."""
        own = {n: a for n, a in found.items() if rank == 0 or not n.startswith(_ALIKE)}
        np.savez(f"{self.output}.rank{rank}.npz", **own)  # type: ignore[arg-type]

    def refuse(self, error: UserError) -> None:
        """Leave why there is nothing to be found here."""
        Path(f"{self.output}.refused").write_text(str(error), encoding="utf-8")


def sample_indices_of(
    args: RunConfig, steps: int, rank: int, ranks: int, dealt: Callable[..., Iterator[np.ndarray]] = micro_batches
) -> np.ndarray:
    """Return which samples of a run are a rank's, (steps, samples); ``ranks``: how many have samples of their own.

    dealt: how a step's micro-batches are (``DataSet.micro_batches``).
    """
    rounds = args.global_batch_size // (args.micro_batch_size * ranks)
    own = dealt(0, args.micro_batch_size, rank, ranks, rounds)
    return np.concatenate([next(own) for _ in range(steps * rounds)]).reshape(steps, -1)


def write_tasks(path: Path, tasks: Sequence[Task]) -> None:
    """Write the tasks of a process."""
    path.write_text(json.dumps([asdict(task) for task in tasks]), encoding="utf-8")


def read_tasks(path: str | Path) -> list[Task]:
    """Return what ``write_tasks`` has written."""
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    return [Task(**{**each, "flags": tuple(each["flags"])}) for each in found]


@dataclass(frozen=True)
class Taken:
    """Steps that were taken in one layout, by all its ranks."""

    arrays: Arrays
    """``grad_norm`` and ``seconds``, (steps,); of the first step ``gradient/PARAMETER``, ``model/PARAMETER`` and
    ``ema/PARAMETER``; of a truth ``start/PARAMETER``, the weights before it. ``facts``: versions, device, as JSON."""
    losses: Sequence[np.ndarray]
    """Of each step, (samples,), in the order of the run."""
    watched: Arrays
    """What the modules were given and gave, by sample, in the order in which it was computed."""

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
        found: dict[str, str] = json.loads(str(self.arrays["facts"]))
        return found

    @property
    def start(self) -> Arrays:
        """The weights before the first step, of a truth."""
        return {name[6:]: array for name, array in self.arrays.items() if name.startswith("start/")}

    @classmethod
    def read(cls, task: Task) -> Taken | str:
        """Return what the processes have left, or the reason that they gave."""
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
    """Return values by sample; of those that several ranks have computed, the first rank's."""
    sample_indices, values = (np.concatenate(each) for each in zip(*parts))
    return values[np.unique(sample_indices, return_index=True)[1]]


def _joined(sample_indices: Sequence[np.ndarray], values: Sequence[np.ndarray], name: str) -> np.ndarray:
    """Join what the ranks have of one tensor: samples, or of one sample's tokens each its part.

    The gradient of a sample's loss weighs the less the fewer samples a rank has: it is told as of the whole batch.
    """
    if any(len(own) != len(value) for own, value in zip(sample_indices, values)):
        return values[0]  # of no sample
    groups: dict[int, list[np.ndarray]] = {}
    for own, value in zip(sample_indices, values):
        groups.setdefault(int(own[0]), []).append(value)
    shared = {first: each[0] if _same(each) else np.concatenate(each, 1) for first, each in groups.items()}
    share = 1 / len(groups) if name.startswith(("watched/given", "watched/back")) else 1.0
    firsts = {int(own[0]): own for own in sample_indices}
    return _by_sample_index([(firsts[first], value * share) for first, value in shared.items()])


def _same(parts: Sequence[np.ndarray]) -> bool:
    return all(part.shape == parts[0].shape and np.allclose(part, parts[0], rtol=1e-2) for part in parts[1:])
