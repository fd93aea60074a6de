"""The batches of this rank: a stream to train on, and held-out batches that every validation repeats."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.fsdp2 import load_fsdp2_config
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.data.draws import VALIDATION_START
from mindspeed_mm_dit.data.loader import load_batches
from mindspeed_mm_dit.data.loader_process import load_batches_apart
from mindspeed_mm_dit.data.samples import Batch, SampleReader
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.objectives.registry import draw_of, validation_draw_of
from mindspeed_mm_dit.training.data_set import open_data_set
from mindspeed_mm_dit.training.signals import StopRequest


def next_batches(batches: Iterator[Any], stop: StopRequest) -> list[Any]:
    """Return this rank's micro-batches for one optimizer step.

    All are read before the step, so an error while reading leaves the weights unchanged. ``stop`` records the error.
    """
    count, micro_batches = runtime.num_microbatches(), []
    try:
        micro_batches = list(itertools.islice(batches, count))
        if len(micro_batches) < count:
            raise DataError("the batches of this run", "have come to an end")
    except Exception as error:  # (a reader may raise any kind)
        stop.note(error)
    return micro_batches


class WeighedByToken:
    """Samples whose losses are weighted by their tokens: each batch has ``loss_weights`` (B,), with mean 1 over a step.

    So the mean over a step's samples is a mean over its tokens, however ranks and micro-batches split the step.

    tokens: (N,), of each training sample; start: a sample index at which a step begins; size: samples per step.
    """

    def __init__(self, samples: SampleReader, tokens: np.ndarray, start: int, size: int) -> None:
        self._samples, self._tokens, self._start, self._size = samples, tokens, start, size
        self.order = samples.order

    def batch(self, sample_indices: np.ndarray) -> Batch:
        """Return the samples at ``sample_indices`` (B,) int64, all of one step."""
        first = sample_indices[0] - (sample_indices[0] - self._start) % self._size
        step = self._tokens[self.order.images(np.arange(first, first + self._size))]
        tokens = self._tokens[self.order.images(sample_indices)]
        return {**self._samples.batch(sample_indices), "loss_weights": (tokens / step.mean()).astype(np.float32)}


class BatchStream:
    """This rank's micro-batches from one sample index on; every ``iter`` starts there again."""

    def __init__(self, args: RunConfig, samples: SampleReader | WeighedByToken, start: int, num_workers: int) -> None:
        self._args, self._samples, self._start, self._num_workers = args, samples, start, num_workers

    def __iter__(self) -> Generator[Batch, None, None]:
        rank, ranks, size = runtime.data_rank(), runtime.data_world_size(), self._args.micro_batch_size
        rounds = self._args.global_batch_size // (size * ranks)
        sample_indices = self._samples.order.micro_batches(self._start, size, rank, ranks, rounds)
        # A step takes all its micro-batches at once, so that many are prefetched in the step before; no thread idles.
        prefetch = max(self._args.mm.data.dataloader_param.prefetch_batches, rounds, self._num_workers)
        apart = self._num_workers > 0 and runtime.device_type() != "cpu" and sys.platform == "linux"
        apart = apart and not _offloads(self._args)
        load = load_batches_apart if apart else load_batches
        return load(self._samples, sample_indices, self._num_workers, prefetch)


def _offloads(args: RunConfig) -> bool:
    """Return whether the state is in host memory: a forked process would copy every page that a step changes."""
    return args.use_torch_fsdp2 and load_fsdp2_config(args.fsdp2_config_path).offload_to_cpu


def train_valid_batches(args: RunConfig) -> tuple[Iterator[Batch], BatchStream | None]:
    """Return the training micro-batches, from ``args.consumed_train_samples`` on, and the held-out ones."""
    training, held_out = train_valid_streams(args)
    return iter(training), held_out


def train_valid_streams(args: RunConfig) -> tuple[BatchStream, BatchStream | None]:
    """Return both as streams that have not started."""
    data, diffusion = open_data_set(args.mm, args.seed), args.mm.model.diffusion
    plain = data.samples(draw_of(diffusion))
    samples: SampleReader | WeighedByToken = plain
    samples.order.check(args.micro_batch_size, args.consumed_train_samples)
    if args.loss_by == "token":
        samples = WeighedByToken(plain, data.tokens(), args.consumed_train_samples, args.global_batch_size)
    training = BatchStream(args, samples, args.consumed_train_samples, args.num_workers)
    if not data.num_valid:
        return training, None
    # Validation repeats its samples if there are few: a batch may be larger than the held-out part.
    held_out = data.samples(validation_draw_of(diffusion), held_out=True)
    return training, BatchStream(args, held_out, VALIDATION_START, 0)
