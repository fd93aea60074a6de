"""model.json: which predictor, diffusion, autoencoder and text encoder a run is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mindspeed_mm_dit.configs.autoencoder_files import with_latent_facts
from mindspeed_mm_dit.configs.autoencoder_kl_wan import WanVAEConfig
from mindspeed_mm_dit.configs.condition import TextStates
from mindspeed_mm_dit.configs.custom_dit import CustomDiTConfig
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.flow_matching import FlowMatchingConfig
from mindspeed_mm_dit.configs.gaussian_diffusion import GaussianDiffusionConfig
from mindspeed_mm_dit.configs.limits import check_path, require_positive, shown
from mindspeed_mm_dit.configs.plugins import load_plugins
from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.configs.presets import PRESETS
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig
from mindspeed_mm_dit.configs.wan import WanConfig
from mindspeed_mm_dit.configs.wan_flow import WanFlowConfig
from mindspeed_mm_dit.errors import ConfigError, nearest


@dataclass(frozen=True)
class PixelConfig:
    """Section ``ae`` with ``model_id`` "pixel": no autoencoder, the images, or the clips, are the latents."""

    channels: int = 3
    """Channels of an image or a frame: 1 (grey) or 3 (RGB)."""
    model_id: str = "pixel"
    """Key in AE_MODEL_MAPPINGS."""

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise ConfigError(f"ae.channels = {self.channels}", "images are grey (1) or RGB (3)")

    downsample_factor = 1
    samples_posterior = False
    encodes_kinds = ("images", "videos")

    @property
    def latent_channels(self) -> int:
        """Channels of a latent."""
        return self.channels

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return (C, F, H, W) of a clip, as it is."""
        return self.channels, frames, height, width

    def clip_size(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return (F, H, W) of the clip that latents of this size are."""
        return frames, height, width


@dataclass(frozen=True)
class AutoencoderKLConfig:
    """Section ``ae`` with ``model_id`` "autoencoder_kl": diffusers' AutoencoderKL, frozen."""

    from_pretrained: str
    """Local diffusers folder (config.json and weights), or one .safetensors/.bin/.pt/.ckpt file of it."""
    scaling_factor: float = 0.18215
    """Latents are multiplied by this before diffusion, to have about unit variance. Like the two sizes below it may be
    left out of model.json: the autoencoder's config.json then says it (:func:`with_latent_facts`)."""
    latent_channels: int = 4
    """Channels of a latent."""
    downsample_factor: int = 8
    """Height of an image over height of its latent."""
    sample_posterior: bool = True
    """Train on a draw from the posterior (as published) or, if false, on its mean."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the autoencoder runs."""
    model_id: str = "autoencoder_kl"
    """Key in AE_MODEL_MAPPINGS."""

    channels = 3
    encodes_kinds = ("images",)

    def __post_init__(self) -> None:
        check_path("ae.from_pretrained", self.from_pretrained)
        require_positive(self, "ae", "latent_channels", "downsample_factor")
        if not 1e-6 <= abs(self.scaling_factor) <= 1e6:
            raise ConfigError(
                f"ae.scaling_factor = {self.scaling_factor}",
                "must be a number other than 0, and neither tiny nor huge",
                "use the one in the autoencoder's config.json; Stable Diffusion's has 0.18215",
            )

    @property
    def samples_posterior(self) -> bool:
        """Whether a training sample carries posterior noise."""
        return self.sample_posterior


PREDICTOR_CONFIGS: dict[str, type[PredictorConfig]] = {
    "dit": DiTConfig,
    "custom_dit": CustomDiTConfig,
    "wan": WanConfig,
}
DIFFUSION_CONFIGS: dict[str, type] = {
    "gaussian_diffusion": GaussianDiffusionConfig,
    "flow_matching": FlowMatchingConfig,
    "wan_flow_match_scheduler": WanFlowConfig,
}
AE_CONFIGS: dict[str, type] = {
    "pixel": PixelConfig,
    "autoencoder_kl": AutoencoderKLConfig,
    "wan_video_vae": WanVAEConfig,
}


@dataclass(frozen=True)
class ModelConfig:
    """All of model.json."""

    ae: Any
    """An instance of one of AE_CONFIGS."""
    diffusion: Any
    """An instance of one of DIFFUSION_CONFIGS."""
    predictor: Any
    """An instance of one of PREDICTOR_CONFIGS."""
    text_encoder: TextEncoderConfig | None = None
    """What reads captions, for a predictor that is steered by texts."""
    note: str = ""
    """Free text: what the configuration is, what it costs."""

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.predictor.in_channels != self.ae.latent_channels:
            raise ConfigError(
                f"predictor.in_channels = {self.predictor.in_channels}",
                f"the autoencoder '{self.ae.model_id}' makes latents of {self.ae.latent_channels} channels",
                f"set predictor.in_channels to {self.ae.latent_channels}",
            )
        self.diffusion.check_output(self.predictor.in_channels, self.predictor.out_channels)

    def _check_kinds(self) -> None:
        """Raise ConfigError unless autoencoder and text encoder are of the kind that the predictor learns from."""
        kind = "images" if len(self.predictor.latent_shape) == 3 else "videos"
        if kind not in self.ae.encodes_kinds:
            fitting = [name for name, config in AE_CONFIGS.items() if kind in getattr(config, "encodes_kinds", ())]
            raise ConfigError(
                f"ae.model_id = {self.ae.model_id!r}",
                f"makes no latents of {kind}, which predictor {self.predictor.model_id!r} learns",
                f"use {' or '.join(fitting)}",
            )
        if self.reads_texts and self.text_encoder is None:
            raise ConfigError(
                "text_encoder", f"this section is missing: predictor {self.predictor.model_id!r} is steered by texts",
                'add {"model_id": "umt5", "from_pretrained": "folder"}',
            )  # fmt: skip
        if self.text_encoder is not None and not self.reads_texts:
            raise ConfigError(
                "text_encoder", f"predictor {self.predictor.model_id!r} is not steered by texts", "drop the section"
            )

    @property
    def reads_texts(self) -> bool:
        """Whether the predictor is steered by texts."""
        return isinstance(self.predictor.condition, TextStates)

    def require_labels(self, what: str, cure: str = "draw clips with mm-dit sample --prompt") -> None:
        """Raise ConfigError, of ``what``, for a model that is steered by texts and not by labels."""
        if self.reads_texts:
            raise ConfigError(
                what,
                f"predictor {self.predictor.model_id!r} is steered by texts: this command is for images with labels",
                cure,
            )

    @property
    def num_classes(self) -> int:
        """Classes that steer the predictor, the null class not counted."""
        return int(self.predictor.condition.num_classes)

    @property
    def image_size(self) -> int:
        """Height and width of the images, in pixels."""
        return int(self.latent_shape[-1] * self.ae.downsample_factor)

    @property
    def sample_size(self) -> tuple[int, ...]:
        """(H, W) of an image, or (F, H, W) of a clip, in pixels."""
        if len(self.latent_shape) == 3:
            return (self.image_size, self.image_size)
        return tuple(self.ae.clip_size(*self.latent_shape[1:]))

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """(C, ...) of a latent, of any rank."""
        return tuple(self.predictor.latent_shape)


def load_model_config(path: str | Path) -> ModelConfig:
    """Read the model.json that --model names; raises ConfigError naming the file, the key and the cure."""
    return model_config_from_mapping(read_json(path, "--model"), str(path))


def model_config_from_mapping(content: Mapping[str, Any], where: str) -> ModelConfig:
    """Build a :class:`ModelConfig` from the parsed JSON of ``where``; plugins are loaded first."""
    load_plugins()
    content = spelled_out(content, where)
    sections = {
        name: _section(content, name, kinds, where)
        for name, kinds in (("ae", AE_CONFIGS), ("diffusion", DIFFUSION_CONFIGS), ("predictor", PREDICTOR_CONFIGS))
    }
    if content.get("text_encoder") is not None:
        sections["text_encoder"] = from_mapping(TextEncoderConfig, content["text_encoder"], f"{where}: text_encoder")
    return from_mapping(ModelConfig, {**content, **sections}, where)


def spelled_out(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the parsed model.json of ``where`` with all that it leaves to be looked up: preset and autoencoder.

    Raises ConfigError where a key contradicts what was looked up.
    """
    content, ae = _with_preset(content, where), content.get("ae")
    if isinstance(ae, dict) and ae.get("model_id") == AutoencoderKLConfig.model_id:
        content["ae"] = with_latent_facts(ae, f"{where}: ae")
    return content


def _section(content: Mapping[str, Any], name: str, kinds: Mapping[str, type], where: str) -> Any:
    if name not in content:
        raise ConfigError(f"{where}: {name}", "this section is required and missing")
    section = content[name]
    model_id = section.get("model_id") if isinstance(section, dict) else None
    if not isinstance(model_id, str) or model_id not in kinds:
        raise ConfigError(
            f"{where}: {name}.model_id = {shown(model_id)}",
            "unknown model_id",
            f"{nearest(str(model_id), kinds)}Known here: {', '.join(kinds)}",
        )
    return from_mapping(kinds[model_id], section, f"{where}: {name}")


def _with_preset(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Replace ``predictor.preset`` by the sizes it stands for; sizes given beside it must agree."""
    predictor = content.get("predictor")
    if not isinstance(predictor, dict) or "preset" not in predictor:
        return dict(content)
    given = dict(predictor)
    name = given.pop("preset")
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(
            f"{where}: predictor.preset = {shown(name)}",
            "unknown preset",
            f"{nearest(str(name), PRESETS)}Presets are: {', '.join(PRESETS)}",
        )
    for key, value in PRESETS[name].items():
        if given.setdefault(key, value) != value:
            raise ConfigError(
                f"{where}: predictor.{key} = {shown(given[key])}",
                f"preset {name} means {value}",
                f"drop either the preset or {key}",
            )
    return {**content, "predictor": given}
