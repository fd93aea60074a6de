"""Validation in the host: the same batches every time, and the loss by noise level in addition to the mean."""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.objectives.contract import NOISE_LEVEL
from mindspeed_mm_dit.training.validation import QUARTERS, name_of, sums_by_quarter

Tensor = Any


def validation_forever(batches: Iterable[Any] | None, args: Namespace) -> Iterator[Any] | None:
    """Return an endless stream in which every validation starts with the same first batch."""
    if batches is None:
        return None
    each = args.eval_iters * (args.global_batch_size // args.micro_batch_size // args.data_parallel_size)
    return itertools.chain.from_iterable(itertools.islice(batches, each) for _ in itertools.count())


def held_out_step(forward_step: Callable[..., Any], batches: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
    """Run ``forward_step`` on the next held-out micro-batch, and report the loss by noise level too."""
    batch = next(batches)
    losses, loss_func = forward_step(iter([batch]), model)

    def reported(losses: Tensor) -> tuple[Tensor, dict[str, Any]]:
        loss, metrics = loss_func(losses)
        return loss, {**metrics, **_by_quarter(ops.numpy(losses), batch[NOISE_LEVEL])}

    return losses, reported


def _by_quarter(losses: np.ndarray, noise_levels: np.ndarray) -> dict[str, tuple[Tensor, Tensor]]:
    """Return sum and number of ``losses`` in each quarter of the noise level; Megatron adds these up, then divides."""
    sums = sums_by_quarter(losses, noise_levels).astype(np.float32)
    means = runtime.mean_over_ranks([ops.tensor(value) for value in sums.reshape(-1, 1)])
    return {name_of(quarter): (loss, count) for quarter, loss, count in zip(QUARTERS, means[:4], means[4:])}
