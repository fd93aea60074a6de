"""The batches of a run in the form of the engine's data loader; order, random numbers and threads are as in every host.

The engine casts floats to ``param_dtype`` on their way, so they are passed as integers with the same bits.
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
from mindspeed_mm_dit.integrations.mindspeed_mm.native.run import current
from mindspeed_mm_dit.training.contract import BatchStream, train_valid_streams

PREFIX = "bits_of_"
_FLOATS = {torch.int32: torch.float32, torch.int64: torch.float64}


def pack_bits(batch: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return a batch as tensors; floats of 32 or 64 bits become integers of the same bits, with PREFIX in the name."""
    tensors = {}
    for name, array in batch.items():
        is_float = array.dtype.kind == "f"
        bits = array.view(f"int{8 * array.dtype.itemsize}") if is_float else array
        tensors[f"{PREFIX}{name}" if is_float else name] = torch.as_tensor(bits)
    return tensors


def unpack_bits(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Invert :func:`pack_bits`, on the device where the batch is now."""
    return {
        name.removeprefix(PREFIX): value.view(_FLOATS[value.dtype]) if name.startswith(PREFIX) else value
        for name, value in batch.items()
    }


class Batches(IterableDataset):
    """``count`` micro-batches (None: no end) of a data set of ``size`` samples; ``iter`` starts again."""

    def __init__(self, stream: BatchStream, size: int, count: int | None) -> None:
        self._stream, self._size, self._count = stream, size, count

    def __len__(self) -> int:
        """Return the number of samples, by which the engine counts epochs (``training.train_epochs``)."""
        return self._size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield batches, with floats as integers (:func:`pack_bits`)."""
        batches = iter(self._stream)
        if self._count is None:
            atexit.register(batches.close)  # (the engine keeps the endless stream until Python unloads modules)
        return map(pack_bits, itertools.islice(batches, self._count))


def datasets(dataset_param: Mapping[str, Any], **_: Any) -> tuple[Batches, Batches | None]:
    """Return the batches to train on and to validate on, as the engine's data builder.

    The engine then calls it for ``data.val_dataset_param``; for that the validation batches come first.
    """
    flags = replace(current().flags, consumed_train_samples=current().consumed_samples)
    data, (train, valid) = flags.mm.data_set, train_valid_streams(flags)
    training = Batches(train, data.num_train, None)
    if valid is None:
        return training, None
    num_microbatches = (
        flags.eval_iters * flags.global_batch_size // flags.micro_batch_size // runtime.data_parallel_size()
    )
    held_out = Batches(valid, data.num_valid, num_microbatches)
    return (held_out, None) if dataset_param.get("mm_data") == flags.mm_valid_data else (training, held_out)


class WholeBatchCollator:
    """A collator for the engine: the data set already makes whole batches."""

    def __init__(self, **_: Any) -> None:
        """Ignore the engine's settings of a collator."""

    def __call__(self, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the only batch."""
        (batch,) = batches
        return batch
