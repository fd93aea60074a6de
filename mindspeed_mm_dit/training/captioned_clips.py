"""A run on clips with captions: from their files, or from the features that mm-dit cache-latents made of them."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.clips import ClipsConfig, ClipsParam
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig
from mindspeed_mm_dit.data.clip_samples import NO_CAPTION, ClipDraws, ClipReader, ClipSamples
from mindspeed_mm_dit.data.dataset import Draw
from mindspeed_mm_dit.data.features import FeatureCache, FeatureSamples, feature_identity
from mindspeed_mm_dit.data.loader import BatchSource
from mindspeed_mm_dit.data.order import SampleOrder, split
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.models.clip_data import ClipData, check_clips, check_text_width, open_clip_data
from mindspeed_mm_dit.training.mm_args import MultiModalArguments
from mindspeed_mm_dit.training.replay import Sample

CAPTIONS_SHOWN = 8
"""Captions that a report draws."""


class CaptionedClips:
    """The clips of data.json, split by the seed alone (a ``data_sets.DataSet``)."""

    noun = "clip"

    def __init__(self, mm: MultiModalArguments, seed: int) -> None:
        assert isinstance(mm.data, ClipsConfig)
        model, self._param = mm.model, mm.data.dataset_param
        _check_model(model)
        check_clips(self._param, model)
        self._mm, self._seed = mm, seed
        self._opened: ClipData | FeatureCache
        if self._param.features is None:
            self._opened = _clips(self._param, model.ae, model.text_encoders[0], model.predictor.patch_size)
            check_text_width(model)  # (the built-in encoder is there now)
            self._digest, self._offered = self._opened.index.digest, self._opened.index.offered
        else:
            self._opened = _open_features(self._param, model)
            self._digest, self._offered = self._opened.index.identity.clips, self._opened.offered
        self._train, self._valid = split(len(self._offered), self._param.valid_fraction, seed)
        self.num_train, self.num_valid = len(self._train), len(self._valid)

    def check(self, global_batch_size: int) -> None:
        """Raise DataError for a batch of more clips than there are."""
        if self.num_train < global_batch_size:
            raise DataError(
                f"dataset_param.json_path = {self._param.json_path}",
                f"{self.num_train} clips to train on, fewer than --global-batch-size {global_batch_size}",
                "use a smaller batch or more clips",
            )

    def samples(self, draw: Draw, held_out: bool = False) -> BatchSource:
        """Return the samples to train on, or those held out, by position."""
        drawn = self._drawn(draw, self._valid if held_out else self._train)
        if isinstance(self._opened, FeatureCache):
            return FeatureSamples(self._opened, drawn)
        reader = ClipReader(self._opened.index, self._param, self._mm.model.ae.channels)
        return ClipSamples(reader, drawn, self._opened.tokenizer)

    def _drawn(self, draw: Draw, clips: np.ndarray) -> ClipDraws:
        model = self._mm.model
        return ClipDraws(
            clips=clips,
            offered=self._offered,
            order=SampleOrder(len(clips), self._seed, self._mm.data.dataloader_param.shuffle),
            seed=self._seed,
            caption_dropout_prob=self._param.caption_dropout_prob,
            draw=draw,
            latent_shape=model.latent_shape,
            posterior_noise=model.ae.samples_posterior,
        )

    def facts(self) -> dict[str, Any]:
        """Return what every checkpoint keeps of the clips, as fields of MultiModalArguments."""
        return {"pictures": self._digest}

    def example_captions(self) -> tuple[str, ...]:
        """Return the first captions that differ; of features the empty one, for captions are not kept as words."""
        if isinstance(self._opened, FeatureCache):
            return ("",)
        captions = (clip.entry.captions[0] for clip in self._opened.index.clips)
        return tuple(dict.fromkeys(captions))[:CAPTIONS_SHOWN]

    def named(self, positions: np.ndarray) -> list[Sample]:
        """Return which clips stand at ``positions`` (B,), with their captions; of features the numbers of both."""
        drawn = self._drawn(lambda *_: {}, self._train)
        clips, captions = drawn.clips_at(positions).tolist(), drawn.captions(positions).tolist()
        return [
            Sample(position, *self._words(clip, max(caption, 0)), caption == NO_CAPTION)
            for position, clip, caption in zip(positions.tolist(), clips, captions)
        ]

    def _words(self, clip: int, caption: int) -> tuple[str, str]:
        if isinstance(self._opened, FeatureCache):
            return f"clip {clip}", f"caption {caption}"
        entry = self._opened.index.clips[clip].entry
        return entry.path, entry.captions[caption]

    def say(self) -> None:
        """Print what the run learns from, and what is left out of it."""
        p, several = self._param, int((self._offered > 1).sum())
        source = f"the features in {p.features}" if p.features else p.json_path
        held_out = f", {self.num_valid:,} held out" if self.num_valid else ""
        captions = f"; {several:,} have several captions" if several else ""
        print(
            f"{self.num_train:,} clips to train on{held_out}, {p.num_frames} frames of {p.max_height} x {p.max_width}, "
            f"from {source}{captions}",
            flush=True,
        )
        if isinstance(self._opened, FeatureCache):
            return
        for note in self._opened.index.notes:
            print(note, file=sys.stderr)
        for problem in self._opened.index.problems:
            print(f"warning: skipped: {problem}", file=sys.stderr)


@lru_cache(maxsize=1)
def _clips(param: ClipsParam, ae: Any, text_encoder: TextEncoderConfig, patch: tuple[int, int, int]) -> ClipData:
    """Open the clips once a process: checking every one takes a while."""
    return open_clip_data(param, ae, text_encoder, patch)


def _check_model(model: ModelConfig) -> None:
    if not model.reads_texts:
        raise ConfigError(
            f"data.json: dataset_param.dataset_type = {ClipsParam.dataset_type!r}",
            f"predictor {model.predictor.model_id!r} does not learn clips by their captions",
            "use custom_dit or wan, or a data.json of images",
        )


def _open_features(param: ClipsParam, model: ModelConfig) -> FeatureCache:
    """Return the cache that data.json names; raises ConfigError unless model.json and data.json would make it again."""
    assert param.features is not None
    cache = FeatureCache(param.features)
    wanted = feature_identity(cache.index.identity.clips, param, model.ae, model.text_encoders[0])
    cache.check(wanted)
    for shape, width in cache.shapes:
        if shape != model.latent_shape or width != model.predictor.condition.width:
            raise ConfigError(
                f"dataset_param.features = {param.features}",
                f"holds latents of {shape} and states of width {width}; the predictor takes {model.latent_shape} and "
                f"{model.predictor.condition.width}",
                "correct predictor.latent_size, in_channels or text_dim",
            )
    return cache
