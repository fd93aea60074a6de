"""Positions of a run to batches of arrays: pixels, labels and every random draw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_mm_dit.configs.data import DataConfig
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.data import draws
from mindspeed_mm_dit.data.draws import Stream
from mindspeed_mm_dit.data.folder import ImageIndex
from mindspeed_mm_dit.data.order import SampleOrder
from mindspeed_mm_dit.data.transforms import load_pixels
from mindspeed_mm_dit.errors import ConfigError, DataError

CACHE_BYTES = 256 * 2**20
"""Data sets whose pixels fit in this are decoded once and kept."""

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class DrawSettings:
    """What the draws of a batch look like; derived from model.json and data.json."""

    seed: int
    num_train_timesteps: int
    latent_shape: tuple[int, int, int]
    label_drop_prob: float
    null_label: int
    flip_prob: float
    posterior_noise: bool

    @classmethod
    def create(cls, model: ModelConfig, data: DataConfig, seed: int) -> DrawSettings:
        """Collect them from the two configs."""
        return cls(
            seed=seed,
            num_train_timesteps=model.diffusion.num_train_timesteps,
            latent_shape=model.latent_shape,
            label_drop_prob=model.predictor.class_dropout_prob,
            null_label=model.predictor.null_label,
            flip_prob=0.5 if data.dataset_param.random_flip else 0.0,
            posterior_noise=model.ae.samples_posterior,
        )


class TrainingSamples:
    """The samples of a run, by position; safe to call from several threads."""

    def __init__(self, index: ImageIndex, order: SampleOrder, size: int, channels: int, settings: DrawSettings) -> None:
        self.index, self.order, self.settings = index, order, settings
        self.size, self.channels = size, channels
        keep = len(index) * channels * size * size <= CACHE_BYTES
        self._decoded: dict[int, np.ndarray] | None = {} if keep else None

    def batch(self, positions: np.ndarray) -> Batch:
        """Return the samples at ``positions`` (B,) int64.

        pixels (B, channels, size, size) uint8; labels (B,) int64, some of them the null class;
        timesteps (B,) int64; noise and, for a sampled posterior, posterior_noise (B, C, h, w) float32.
        """
        s = self.settings
        images = self.order.images(positions)
        pixels = np.stack([self._pixels(image) for image in images.tolist()])
        flipped = draws.coins(s.seed, Stream.FLIP, positions, s.flip_prob)
        pixels[flipped] = pixels[flipped, :, :, ::-1]
        dropped = draws.coins(s.seed, Stream.LABEL_DROP, positions, s.label_drop_prob)
        batch = {
            "pixels": pixels,
            "labels": np.where(dropped, s.null_label, self.index.labels[images]),
            "timesteps": draws.timesteps(s.seed, positions, s.num_train_timesteps),
            "noise": draws.normals(s.seed, Stream.NOISE, positions, s.latent_shape),
        }
        if s.posterior_noise:
            batch["posterior_noise"] = draws.normals(s.seed, Stream.POSTERIOR, positions, s.latent_shape)
        return batch

    def _pixels(self, image: int) -> np.ndarray:
        if self._decoded is not None and image in self._decoded:
            return self._decoded[image]
        try:
            pixels = load_pixels(self.index.paths[image], self.size, self.channels)
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(
                self.index.paths[image],
                f"cannot be decoded: {error}",
                "repair or remove the file; training can be resumed from the last checkpoint",
            ) from None
        if self._decoded is not None:
            self._decoded[image] = pixels
        return pixels


def build_samples(
    model: ModelConfig, data: DataConfig, index: ImageIndex, seed: int, global_batch_size: int
) -> TrainingSamples:
    """Check that model, data and batch fit each other, and return the samples of a run."""
    check_fit(model, data, len(index), global_batch_size)
    order = SampleOrder(len(index), seed, data.dataloader_param.shuffle)
    settings = DrawSettings.create(model, data, seed)
    return TrainingSamples(index, order, data.dataset_param.image_size, model.ae.channels, settings)


def check_fit(model: ModelConfig, data: DataConfig, num_images: int, global_batch_size: int) -> None:
    """Raise ConfigError or DataError where model.json, data.json and the batch size contradict each other."""
    size = data.dataset_param.image_size
    if size != model.image_size:
        raise ConfigError(
            f"data.json: dataset_param.image_size = {size}",
            f"the model wants input_size({model.predictor.input_size}) * autoencoder factor"
            f"({model.ae.downsample_factor}) = {model.image_size} pixels",
            f"set image_size to {model.image_size}, or change predictor.input_size",
        )
    if num_images < global_batch_size:
        raise DataError(
            f"dataset_param.data_folder = {data.dataset_param.data_folder}",
            f"holds {num_images} training images, fewer than --global-batch-size {global_batch_size}",
            "use a smaller batch or more images",
        )
