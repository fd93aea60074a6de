"""The tables a model.json chooses from by ``model_id``, under MindSpeed-MM's names.

OBJECTIVES is what it calls DIFFUSION_MODEL_MAPPINGS.

An entry builds its object from the frozen dataclass of its section. To add a predictor: write its config class
(``configs/predictor.py``) and its module, then ``register(PREDICTOR_MODEL_MAPPINGS, PREDICTOR_CONFIGS, ...)``; an
objective with ``register_objective``; from another package by a plugin (``configs/plugins.py``). No framework is
imported before something is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_mm_dit.configs.autoencoder_kl_wan import WanVAEConfig
from mindspeed_mm_dit.configs.model import AE_CONFIGS, PREDICTOR_CONFIGS, AutoencoderKLConfig, ModelConfig
from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import own
from mindspeed_mm_dit.models.autoencoder import NoAutoencoder, PixelAutoencoder
from mindspeed_mm_dit.models.autoencoder_kl.files import find_weights
from mindspeed_mm_dit.models.text_encoder import TextEncoder, check_framework, load_text_encoder
from mindspeed_mm_dit.objectives.registry import OBJECTIVES, register_objective

Builder = Callable[[Any], Any]


def _dit(config: Any) -> Any:
    from mindspeed_mm_dit.models.dit import DiT

    return DiT(config)


def _custom_dit(config: Any) -> Any:
    from mindspeed_mm_dit.models.custom_dit import CustomDiT

    return CustomDiT(config)


def _wan(config: Any) -> Any:
    from mindspeed_mm_dit.models.wan import Wan

    return Wan(config)


def _autoencoder_kl(config: Any) -> Any:
    return own("mindspeed_mm_dit.models.autoencoder_kl").AutoencoderKL(config)


def _wan_video_vae(config: Any) -> Any:
    check_framework(config)
    from mindspeed_mm_dit.models.autoencoder_kl_wan import AutoencoderKLWan

    return AutoencoderKLWan(config)


PREDICTOR_MODEL_MAPPINGS: dict[str, Builder] = {"dit": _dit, "custom_dit": _custom_dit, "wan": _wan}
AE_MODEL_MAPPINGS: dict[str, Builder] = {
    "pixel": PixelAutoencoder,
    "autoencoder_kl": _autoencoder_kl,
    "wan_video_vae": _wan_video_vae,
}


def load_autoencoder(config: Any, encodes: bool = True) -> Any:
    """Load the autoencoder of section "ae"; of one that ``encodes`` nothing the weights stay on disk."""
    return AE_MODEL_MAPPINGS[config.model_id](config) if encodes else NoAutoencoder(config)


def load_encoders(config: ModelConfig, encodes: bool = True) -> tuple[Any, TextEncoder | None]:
    """Load the autoencoder and, where model.json has one, the text encoder; see :func:`load_autoencoder`."""
    autoencoder, section = load_autoencoder(config.ae, encodes), config.text_encoder if encodes else None
    return autoencoder, None if section is None else load_text_encoder(section)


def check_encoders(config: ModelConfig) -> None:
    """Raise PlatformError unless the active framework runs the encoders of ``config``; CheckpointError unless the
    weights of an AutoencoderKL are where it says. None is read.
    """
    if isinstance(config.ae, AutoencoderKLConfig):
        find_weights(config.ae)
    for section in (config.ae, config.text_encoder):
        if isinstance(section, (WanVAEConfig, TextEncoderConfig)):
            check_framework(section)


def register(
    mappings: dict[str, Builder], configs: dict[str, Any], model_id: str, config: type, build: Builder
) -> None:
    """Add ``model_id`` to a table and its config class to the matching table of configs.

    Raises ConfigError when another entry holds that name.
    """
    if mappings.get(model_id, build) is not build:
        raise ConfigError(f"model_id = {model_id!r}", "is registered already", "choose another name")
    mappings[model_id], configs[model_id] = build, config


__all__ = [
    "AE_CONFIGS",
    "AE_MODEL_MAPPINGS",
    "OBJECTIVES",
    "PREDICTOR_CONFIGS",
    "PREDICTOR_MODEL_MAPPINGS",
    "load_autoencoder",
    "load_encoders",
    "register",
    "register_objective",
]
