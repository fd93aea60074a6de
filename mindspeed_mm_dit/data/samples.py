"""From sample indices to batches of arrays: pixels or latents, the conditions, and every random draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.condition import Conditions
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.data.cache import Cache, CachedVisualReader
from mindspeed_mm_dit.data.conditions import CollatorInputs, ConditionCollator, kind_of
from mindspeed_mm_dit.data.order import Order, Stream, normals, order_of
from mindspeed_mm_dit.data.sources import Rows, VisualReader, source_of

Batch = dict[str, np.ndarray]
Draw = Callable[[int, np.ndarray, tuple[int, ...]], Batch]
"""(seed, sample indices (B,), shape of a latent) -> the objective's draws for them, by name."""


@dataclass(frozen=True)
class SampleReader:
    """The samples of a run, by sample index; safe to call from several threads."""

    visuals: VisualReader
    """Reads images or videos, or their latents."""
    collators: Sequence[ConditionCollator]
    """Makes the arrays of each condition."""
    order: Order
    """Maps sample indices to rows."""
    seed: int
    """Seed of every draw."""
    draw: Draw
    """The objective's draws."""
    latent_shape: Callable[[Batch], tuple[int, ...]]
    """Arrays that were read -> (C, ...) of a sample's latents, the shape given to ``draw``."""
    posterior_noise: bool = False
    """Whether latents are drawn from their posterior, so that a sample needs noise for it."""

    def batch(self, sample_indices: np.ndarray) -> Batch:
        """Return the batch of ``sample_indices`` (B,) int64.

        It has pixels (B, C, ...), or from a cache latent_mean and, for a sampled posterior, latent_std (B, C, ...)
        float32, unscaled; the arrays of each condition; the objective's draws; and, for a sampled posterior,
        posterior_noise (B, C, ...) float32.
        """
        read = self.visuals.read(self.order.images(sample_indices), self.visuals.views_at(self.seed, sample_indices))
        batch = dict(read.arrays)
        for collator in self.collators:
            batch |= collator.arrays(read.rows, sample_indices)
        shape = self.latent_shape(read.arrays)
        batch |= self.draw(self.seed, sample_indices, shape)
        if self.posterior_noise:
            batch["posterior_noise"] = normals(self.seed, Stream.POSTERIOR, sample_indices, shape)
        return batch

    def words(self, sample_indices: np.ndarray) -> list[list[tuple[str, bool]]]:
        """Return each condition of ``sample_indices`` (B,) in words, and whether it is dropped."""
        rows = self.order.images(sample_indices)
        return [collator.words(rows, sample_indices) for collator in self.collators]


@dataclass(frozen=True)
class OpenedDataset:
    """The rows of a data.json, checked against model.json, with their tokenizers and cache."""

    model: ModelConfig
    param: Any
    """Section ``dataset_param``."""
    rows: Rows
    tokenizers: Sequence[Any] = ()
    """One per text encoder; empty if a cache is read."""
    cache: Cache | None = None

    def samples(self, rows: Rows, seed: int, shuffle: bool, draw: Draw, held_out: bool = False) -> SampleReader:
        """Return the samples of a run on ``rows``, a subset of ``self.rows``; ``draw``: the objective's draws.

        held_out: whether they are for validation, which leaves no row out.
        """
        order, sampled = self.order(rows, seed, shuffle, held_out), self.model.ae.samples_posterior
        return SampleReader(
            self.visuals(rows), self.collators(rows, seed), order, seed, draw, self._latent_shape, sampled
        )

    def order(self, rows: Rows, seed: int, shuffle: bool, held_out: bool = False) -> Order:
        """Return the order of ``rows``."""
        return order_of(rows, self.param, seed, shuffle, held_out)

    def _latent_shape(self, read: Batch) -> tuple[int, ...]:
        """Return (C, ...) of a sample's latents, from the arrays read for a micro-batch."""
        if "latent_mean" in read:
            return read["latent_mean"].shape[1:]
        return self.model.ae.latent_shape(read["pixels"].shape[2:])

    def example_captions(self) -> list[str]:
        """Return the first caption of each row, without repeats; the empty caption if a cache has no text."""
        if self.cache is not None and not self.cache.knows_captions:
            return [""]
        return list(dict.fromkeys(captions[0] for captions in self.rows.captions))

    def visuals(self, rows: Rows) -> VisualReader:
        """Return the reader of the images or videos of ``rows``, or of their latents."""
        file_reader = source_of(self.param).visuals(rows, self.param, self.model.ae.channels)
        if self.cache is None:
            return file_reader
        others = (*self.model.feature_shapes, *self.model.predictor.conditions.cached_names(self.param.extra_images))
        return CachedVisualReader(self.cache, rows, file_reader, self.model.ae.samples_posterior, others)

    def collators(self, rows: Rows, seed: int) -> list[ConditionCollator]:
        """Return the collator of each of the predictor's conditions."""
        conditions: Conditions = self.model.predictor.conditions
        dropout_keys, dropout = conditions.dropout_keys(), self.param.caption_dropout_prob
        return [
            kind_of(condition).collator(
                condition,
                CollatorInputs(rows, seed, dropout_keys[condition.dropout_key], dropout, self.tokenizers, self.cache),
            )
            for condition in conditions
        ]
