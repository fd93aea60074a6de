"""The batches of a run as the engine's data loader wants them; positions, draws and threads are every host's."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from mindspeed_mm_dit.data.draws import VALIDATION_POSITIONS
from mindspeed_mm_dit.data.loader import BatchSource, load_batches
from mindspeed_mm_dit.data.order import micro_batches
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.hosts.native.bits import packed
from mindspeed_mm_dit.hosts.native.run import Run, current
from mindspeed_mm_dit.objectives.registry import draw_of, validation_draw_of
from mindspeed_mm_dit.training.data_set import open_data_set


class Batches(IterableDataset):
    """Micro-batches of this rank from position ``start`` of the run on; every ``iter`` starts there again."""

    def __init__(self, run: Run, samples: BatchSource, size: int, start: int, count: int | None) -> None:
        self._run, self._samples, self._size, self._start, self._count = run, samples, size, start, count

    def __len__(self) -> int:
        """Return how many samples there are: what an epoch is counted by (``training.train_epochs``)."""
        return self._size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield batches, floats as bits; ``count`` of them, or without end."""
        flags = self._run.flags
        ranks = runtime.data_world_size()
        positions = micro_batches(self._start, flags.micro_batch_size, runtime.data_rank(), ranks)
        if self._count is not None:
            positions = (own for own, _ in zip(positions, range(self._count)))
        rounds = flags.global_batch_size // flags.micro_batch_size // ranks
        prefetch = max(flags.mm.data.dataloader_param.prefetch_batches, rounds)
        batches = load_batches(self._samples, positions, flags.num_workers, prefetch)
        if self._count is None:
            atexit.register(batches.close)  # (the engine keeps what is endless until Python has taken modules apart)
        return map(packed, batches)


def datasets(dataset_param: Mapping[str, Any], **_: Any) -> tuple[Batches, Batches | None]:
    """Return what to train on and what to validate on (the engine's data builder); of ``data.val_dataset_param``, which
    the engine asks for after them, the latter comes first."""
    run = current()
    flags, mm = run.flags, run.flags.mm
    data = open_data_set(mm, flags.seed)
    training = Batches(run, data.samples(draw_of(mm.model.diffusion)), data.num_train, run.consumed_samples, None)
    if not data.num_valid:
        return training, None
    samples = data.samples(validation_draw_of(mm.model.diffusion), held_out=True)
    rounds = flags.eval_iters * flags.global_batch_size // flags.micro_batch_size // runtime.data_world_size()
    held_out = Batches(run, samples, data.num_valid, VALIDATION_POSITIONS, rounds)
    return (held_out, None) if dataset_param.get("mm_data") == flags.mm_valid_data else (training, held_out)


class OneBatch:
    """The engine's collator for a data set that makes whole batches."""

    def __init__(self, **_: Any) -> None:
        """Take what the engine tells a collator; there is nothing to be set."""

    def __call__(self, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the only one."""
        (batch,) = batches
        return batch
