"""The batches of a run on this rank: a stream to train on, and the same batches again for every validation."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from functools import lru_cache

from mindspeed_mm_dit.configs.data import DatasetParam
from mindspeed_mm_dit.data.dataset import Batch, TrainingSamples, build_samples, check_sizes
from mindspeed_mm_dit.data.draws import VALIDATION_POSITIONS
from mindspeed_mm_dit.data.folder import ImageIndex, open_index, split_index
from mindspeed_mm_dit.data.loader import load_batches
from mindspeed_mm_dit.data.order import micro_batches
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.objectives.registry import draw_of, validation_draw_of
from mindspeed_mm_dit.training.mm_args import MultiModalArguments


class BatchStream:
    """Micro-batches of this rank from one position of the run on; every ``iter`` starts there again."""

    def __init__(self, args: Namespace, samples: TrainingSamples, start: int, num_workers: int) -> None:
        self._args, self._samples, self._start, self._num_workers = args, samples, start, num_workers

    def __iter__(self) -> Iterator[Batch]:
        positions = micro_batches(self._start, self._args.micro_batch_size, runtime.rank(), runtime.world_size())
        # A step takes all its micro-batches at once: as many are made while the step before is computed.
        prefetch = max(self._args.mm.data.dataloader_param.prefetch_batches, runtime.num_microbatches())
        return load_batches(self._samples, positions, self._num_workers, prefetch)


def train_valid_batches(args: Namespace) -> tuple[Iterator[Batch], BatchStream | None]:
    """Return the micro-batches to train on, from ``args.consumed_train_samples`` on, and those held out."""
    train, valid = image_indices(args.mm, args.seed)
    diffusion = args.mm.model.diffusion
    samples = build_samples(args.mm.model, args.mm.data, train, args.seed, args.global_batch_size, draw_of(diffusion))
    training = iter(BatchStream(args, samples, args.consumed_train_samples, args.num_workers))
    if not len(valid):
        return training, None
    # Validation repeats its images if they are few: a batch may be larger than the held-out part.
    held_out = build_samples(args.mm.model, args.mm.data, valid, args.seed, 1, validation_draw_of(diffusion))
    return training, BatchStream(args, held_out, VALIDATION_POSITIONS, 0)


def image_indices(mm: MultiModalArguments, seed: int) -> tuple[ImageIndex, ImageIndex]:
    """Return the images to train on and those held out."""
    check_sizes(mm.model, mm.data)
    param = mm.data.dataset_param
    return split_index(_index(param, mm.model.predictor.num_classes), param.valid_fraction, seed)


@lru_cache(maxsize=1)
def _index(param: DatasetParam, num_classes: int) -> ImageIndex:
    """Open an index once a process: checking every image takes a while."""
    return open_index(param, num_classes)
