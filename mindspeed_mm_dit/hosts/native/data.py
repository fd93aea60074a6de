"""The batches of a run as the engine's data loader wants them; positions, draws and threads are every host's.

The engine casts floats to ``param_dtype`` on their way, so they travel as the integers of their bits.
"""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.hosts.native.run import current
from mindspeed_mm_dit.training.batches import BatchStream, train_valid_streams
from mindspeed_mm_dit.training.data_set import open_data_set

PREFIX = "bits_of_"
_FLOATS = {torch.int32: torch.float32, torch.int64: torch.float64}


def packed(batch: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return a batch as tensors; a float (...) of 32 or 64 bits becomes an integer, its name begins with PREFIX."""
    tensors = {}
    for name, array in batch.items():
        is_float = array.dtype.kind == "f"
        bits = array.view(f"int{8 * array.dtype.itemsize}") if is_float else array
        tensors[f"{PREFIX}{name}" if is_float else name] = torch.as_tensor(bits)
    return tensors


def unpacked(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch that :func:`packed` was given, wherever it is now."""
    return {
        name.removeprefix(PREFIX): value.view(_FLOATS[value.dtype]) if name.startswith(PREFIX) else value
        for name, value in batch.items()
    }


class Batches(IterableDataset):
    """``count`` micro-batches of ``size`` samples in all, or (None) as many as are asked for; ``iter`` begins again."""

    def __init__(self, stream: BatchStream, size: int, count: int | None) -> None:
        self._stream, self._size, self._count = stream, size, count

    def __len__(self) -> int:
        """Return how many samples there are: what an epoch is counted by (``training.train_epochs``)."""
        return self._size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield batches, floats as bits."""
        batches = iter(self._stream)
        if self._count is None:
            atexit.register(batches.close)  # (the engine keeps what is endless until Python has taken modules apart)
        return map(packed, itertools.islice(batches, self._count))


def datasets(dataset_param: Mapping[str, Any], **_: Any) -> tuple[Batches, Batches | None]:
    """Return what to train on and what to validate on (the engine's data builder); of ``data.val_dataset_param``, which
    the engine asks for after them, the latter comes first."""
    flags = replace(current().flags, consumed_train_samples=current().consumed_samples)
    data, (train, valid) = open_data_set(flags.mm, flags.seed), train_valid_streams(flags)
    training = Batches(train, data.num_train, None)
    if valid is None:
        return training, None
    rounds = flags.eval_iters * flags.global_batch_size // flags.micro_batch_size // runtime.data_world_size()
    held_out = Batches(valid, data.num_valid, rounds)
    return (held_out, None) if dataset_param.get("mm_data") == flags.mm_valid_data else (training, held_out)


class OneBatch:
    """The engine's collator for a data set that makes whole batches."""

    def __init__(self, **_: Any) -> None:
        """Take what the engine tells a collator; there is nothing to be set."""

    def __call__(self, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the only one."""
        (batch,) = batches
        return batch
