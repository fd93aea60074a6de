"""Clips, tokenizer and latents of a text-to-video run, checked against each other before any weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from mindspeed_mm_dit.configs.autoencoder import AutoencoderConfig
from mindspeed_mm_dit.configs.clips import ClipsParam, check_patches
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig
from mindspeed_mm_dit.data.captions import Tokenizer, caption_problems
from mindspeed_mm_dit.data.clips import ClipIndex, open_clips, provide_clips
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.registry import open_tokenizer


@dataclass(frozen=True)
class ClipData:
    """What a run learns from, found to fit together."""

    index: ClipIndex
    """The clips, their captions readable by the tokenizer."""
    tokenizer: Tokenizer
    """That of the text encoder."""
    latent_shape: tuple[int, ...]
    """(C, f, h, w) of the latents of a clip."""


def open_clip_data(
    param: ClipsParam,
    ae: AutoencoderConfig,
    text_encoder: TextEncoderConfig,
    patch: tuple[int, int, int] = (1, 1, 1),
) -> ClipData:
    """Open the clips of data.json for the autoencoder, text encoder and patch (pf, ph, pw) of model.json.

    Raises:
        ConfigError: frames or size do not fit autoencoder or patch, model.json contradicts the autoencoder's
            config.json, or tokenizer and encoder do not belong together.
        DataError: naming every clip and caption that cannot be used, by file and line.
    """
    provide_clips(param)
    latent_shape = ae.latent_shape((param.num_frames, *param.size))
    check_patches(param, latent_shape, patch)
    ae.check_files()
    tokenizer = open_tokenizer(text_encoder)
    return ClipData(open_clips(param, partial(caption_problems, tokenizer)), tokenizer, latent_shape)


def check_clips(param: ClipsParam, model: ModelConfig) -> None:
    """Raise ConfigError unless the clips of data.json make latents of the size that model.json speaks of."""
    latent_shape = model.ae.latent_shape((param.num_frames, *param.size))
    check_patches(param, latent_shape, model.predictor.patch_size)
    if latent_shape != model.latent_shape:
        raise ConfigError(
            f"predictor.latent_size = {list(model.latent_shape[1:])}",
            f"clips of {param.num_frames} frames of {param.max_height} x {param.max_width} make latents of "
            f"{list(latent_shape[1:])}",
            f"write {list(latent_shape[1:])} (no weight depends on it), or change data.json",
        )


def check_text_width(model: ModelConfig) -> None:
    """Raise ConfigError unless the states of the text encoder, by its config.json, have the predictor's text_dim."""
    width = model.text_encoders[0].states_width()
    if width != model.predictor.condition.width:
        raise ConfigError(
            f"predictor.text_dim = {model.predictor.condition.width}",
            f"the text encoder's states have width {width}",
            f"write {width}",
        )
