"""Positions of a run to batches of arrays: pixels or latents, labels and every random draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mindspeed_mm_dit.configs.condition import Condition
from mindspeed_mm_dit.configs.data import DataConfig
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.data import draws
from mindspeed_mm_dit.data.draws import Stream
from mindspeed_mm_dit.data.folder import ImageIndex
from mindspeed_mm_dit.data.images import ImageReader
from mindspeed_mm_dit.data.latents import LatentCache, LatentReader, check_latents
from mindspeed_mm_dit.data.order import SampleOrder
from mindspeed_mm_dit.data.reader import Reader
from mindspeed_mm_dit.errors import ConfigError, DataError

Batch = dict[str, np.ndarray]
Draw = Callable[[int, np.ndarray, tuple[int, ...]], Batch]
"""(seed, positions (B,), shape of a latent) -> what an objective draws for them, by name."""


@dataclass(frozen=True)
class DrawSettings:
    """What the draws of a batch look like; derived from model.json and data.json."""

    seed: int
    latent_shape: tuple[int, ...]
    condition: Condition
    flip_prob: float
    posterior_noise: bool

    @classmethod
    def create(cls, model: ModelConfig, data: DataConfig, seed: int) -> DrawSettings:
        """Collect them from the two configs."""
        return cls(
            seed=seed,
            latent_shape=model.latent_shape,
            condition=model.predictor.condition,
            flip_prob=0.5 if data.dataset_param.random_flip else 0.0,
            posterior_noise=model.ae.samples_posterior,
        )


class TrainingSamples:
    """The samples of a run, by position; safe to call from several threads."""

    def __init__(
        self, reader: Reader, labels: np.ndarray, order: SampleOrder, settings: DrawSettings, draw: Draw
    ) -> None:
        self.reader, self.labels, self.order, self.settings, self._draw = reader, labels, order, settings, draw

    def batch(self, positions: np.ndarray) -> Batch:
        """Return the samples at ``positions`` (B,) int64.

        pixels (B, channels, size, size) uint8, or with a latent cache latent_mean and, for a sampled posterior,
        latent_std (B, C, h, w) float32, unscaled; labels (B,) int64, some of them the null class; what the objective
        draws; and, for a sampled posterior, posterior_noise (B, C, h, w) float32.
        """
        s = self.settings
        images = self.order.images(positions)
        flipped = draws.coins(s.seed, Stream.FLIP, positions, s.flip_prob)
        dropped = draws.coins(s.seed, Stream.LABEL_DROP, positions, s.condition.dropout)
        read = self.reader.read(images, flipped)
        batch = {
            **read.arrays,
            **s.condition.dropped({"labels": self.labels[read.images]}, dropped),
            **self._draw(s.seed, positions, s.latent_shape),
        }
        if s.posterior_noise:
            batch["posterior_noise"] = draws.normals(s.seed, Stream.POSTERIOR, positions, s.latent_shape)
        return batch


def build_samples(
    model: ModelConfig, data: DataConfig, index: ImageIndex, seed: int, global_batch_size: int, draw: Draw
) -> TrainingSamples:
    """Check that model, data and batch fit each other, and return the samples of a run; ``draw``: the objective's."""
    check_fit(model, data, len(index), global_batch_size)
    order = SampleOrder(len(index), seed, data.dataloader_param.shuffle)
    settings = DrawSettings.create(model, data, seed)
    return TrainingSamples(open_reader(model, data, index), index.labels, order, settings, draw)


def open_reader(model: ModelConfig, data: DataConfig, index: ImageIndex) -> Reader:
    """Return where the images of ``index`` are read from: the latent cache data.json names, or their files."""
    param = data.dataset_param
    if param.latents is None:
        return ImageReader(index, param.image_size, model.ae.channels, param.skip_bad_images)
    assert index.rows is not None, "an index beside a cache knows its rows"
    return LatentReader(LatentCache(param.latents), index.paths, index.rows, with_std=model.ae.samples_posterior)


def check_fit(model: ModelConfig, data: DataConfig, num_images: int, global_batch_size: int) -> None:
    """Raise ConfigError or DataError where model.json, data.json and the batch size contradict each other."""
    check_sizes(model, data)
    check_latents(model, data)
    if num_images < global_batch_size:
        raise DataError(
            f"dataset_param.data_folder = {data.dataset_param.data_folder}",
            f"holds {num_images} training images, fewer than --global-batch-size {global_batch_size}",
            "use a smaller batch or more images",
        )


def check_sizes(model: ModelConfig, data: DataConfig) -> None:
    """Raise ConfigError where model.json and data.json speak of images of different sizes; no image is opened."""
    size, sides = data.dataset_param.image_size, model.latent_shape[1:]
    if len(sides) != 2 or sides[0] != sides[1]:
        raise ConfigError(
            f"predictor: latents of {' x '.join(map(str, sides))}",
            "data.json has images, which are cut square",
            "choose sizes that give a latent of two equal sides",
        )
    if size != model.image_size:
        raise ConfigError(
            f"data.json: dataset_param.image_size = {size}",
            f"the model wants input_size({sides[0]}) * autoencoder factor"
            f"({model.ae.downsample_factor}) = {model.image_size} pixels",
            f"set image_size to {model.image_size}, or change predictor.input_size",
        )
