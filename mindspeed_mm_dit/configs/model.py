"""model.json: which predictor, diffusion and autoencoder a run is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mindspeed_mm_dit.configs.autoencoder_files import with_latent_facts
from mindspeed_mm_dit.configs.flow_matching import FlowMatchingConfig
from mindspeed_mm_dit.configs.gaussian_diffusion import GaussianDiffusionConfig
from mindspeed_mm_dit.configs.limits import LARGEST, check_path, shown
from mindspeed_mm_dit.configs.presets import PRESETS
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.configs.wan_flow import WanFlowConfig
from mindspeed_mm_dit.errors import ConfigError, nearest


@dataclass(frozen=True)
class DiTConfig:
    """Section ``predictor`` with ``model_id`` "dit"."""

    input_size: int
    """Height and width of the (square) latents, in latent pixels."""
    num_classes: int
    """Number of classes; label ``num_classes`` itself is the null class of guidance."""
    in_channels: int = 4
    """Channels of the latents."""
    patch_size: int = 2
    """Height and width of a patch, in latent pixels."""
    hidden_size: int = 1152
    """Width D of a token."""
    num_layers: int = 28
    """Number of transformer blocks."""
    num_heads: int = 16
    """Attention heads; must divide ``hidden_size``."""
    mlp_ratio: float = 4.0
    """Width of the MLP's hidden layer over ``hidden_size``."""
    class_dropout_prob: float = 0.1
    """Probability that a training label becomes the null class; 0 leaves the null class out."""
    learn_sigma: bool = True
    """Predict the variance too: twice the output channels."""
    model_id: str = "dit"
    """Key in PREDICTOR_MODEL_MAPPINGS."""

    def __post_init__(self) -> None:
        _require_positive(self, "predictor", "input_size", "num_classes", "in_channels", "patch_size", "hidden_size",
                          "num_layers", "num_heads")  # fmt: skip
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"predictor.num_heads = {self.num_heads}",
                f"does not divide hidden_size: {self.hidden_size} % {self.num_heads} = "
                f"{self.hidden_size % self.num_heads}",
                f"use one of {_divisors(self.hidden_size)}",
            )
        if self.hidden_size % 4:
            raise ConfigError(
                f"predictor.hidden_size = {self.hidden_size}", "2-D sin-cos positions need a multiple of 4"
            )
        if self.input_size % self.patch_size:
            raise ConfigError(
                f"predictor.patch_size = {self.patch_size}",
                f"does not divide input_size: {self.input_size} % {self.patch_size} = "
                f"{self.input_size % self.patch_size}",
                f"use one of {_divisors(self.input_size)}, or another input_size",
            )
        if not 1 <= self.hidden_size * self.mlp_ratio <= LARGEST:
            raise ConfigError(
                f"predictor.mlp_ratio = {self.mlp_ratio}",
                f"leaves the MLP's hidden layer without a width: hidden_size({self.hidden_size}) * mlp_ratio must be "
                "at least 1, and no more than a tensor can have",
                "the published DiT has 4.0",
            )
        if not 0.0 <= self.class_dropout_prob < 1.0:
            raise ConfigError(f"predictor.class_dropout_prob = {self.class_dropout_prob}", "must lie in [0, 1)")

    @property
    def out_channels(self) -> int:
        """Channels of the network's output."""
        return self.in_channels * 2 if self.learn_sigma else self.in_channels

    @property
    def num_tokens(self) -> int:
        """Sequence length N."""
        return (self.input_size // self.patch_size) ** 2

    @property
    def num_embeddings(self) -> int:
        """Rows of the label table: the classes and, if labels are ever dropped, the null class."""
        return self.num_classes + (1 if self.class_dropout_prob > 0 else 0)

    @property
    def null_label(self) -> int:
        """The label of the null class."""
        return self.num_classes


@dataclass(frozen=True)
class PixelConfig:
    """Section ``ae`` with ``model_id`` "pixel": no autoencoder, the images are the latents."""

    channels: int = 3
    """Channels of an image: 1 (grey) or 3 (RGB)."""
    model_id: str = "pixel"
    """Key in AE_MODEL_MAPPINGS."""

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise ConfigError(f"ae.channels = {self.channels}", "images are grey (1) or RGB (3)")

    downsample_factor = 1
    samples_posterior = False

    @property
    def latent_channels(self) -> int:
        """Channels of a latent."""
        return self.channels


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

    def __post_init__(self) -> None:
        check_path("ae.from_pretrained", self.from_pretrained)
        _require_positive(self, "ae", "latent_channels", "downsample_factor")
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


PREDICTOR_CONFIGS: dict[str, type] = {"dit": DiTConfig}
DIFFUSION_CONFIGS: dict[str, type] = {
    "gaussian_diffusion": GaussianDiffusionConfig,
    "flow_matching": FlowMatchingConfig,
    "wan_flow_match_scheduler": WanFlowConfig,
}
AE_CONFIGS: dict[str, type] = {"pixel": PixelConfig, "autoencoder_kl": AutoencoderKLConfig}


@dataclass(frozen=True)
class ModelConfig:
    """All of model.json."""

    ae: Any
    """An instance of one of AE_CONFIGS."""
    diffusion: Any
    """An instance of one of DIFFUSION_CONFIGS."""
    predictor: Any
    """An instance of one of PREDICTOR_CONFIGS."""
    note: str = ""
    """Free text: what the configuration is, what it costs."""

    def __post_init__(self) -> None:
        if self.predictor.in_channels != self.ae.latent_channels:
            raise ConfigError(
                f"predictor.in_channels = {self.predictor.in_channels}",
                f"the autoencoder '{self.ae.model_id}' makes latents of {self.ae.latent_channels} channels",
                f"set predictor.in_channels to {self.ae.latent_channels}",
            )
        self.diffusion.check_output(self.predictor.in_channels, self.predictor.out_channels)

    @property
    def image_size(self) -> int:
        """Height and width of the images, in pixels."""
        return int(self.predictor.input_size * self.ae.downsample_factor)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """(C, H, W) of a latent."""
        return (self.predictor.in_channels, self.predictor.input_size, self.predictor.input_size)


def load_model_config(path: str | Path) -> ModelConfig:
    """Read the model.json that --model names; raises ConfigError naming the file, the key and the cure."""
    return model_config_from_mapping(read_json(path, "--model"), str(path))


def model_config_from_mapping(content: Mapping[str, Any], where: str) -> ModelConfig:
    """Build a :class:`ModelConfig` from the parsed JSON of ``where``."""
    content = spelled_out(content, where)
    sections = {
        name: _section(content, name, kinds, where)
        for name, kinds in (("ae", AE_CONFIGS), ("diffusion", DIFFUSION_CONFIGS), ("predictor", PREDICTOR_CONFIGS))
    }
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


def _require_positive(config: Any, section: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value < 1 or isinstance(value, bool):
            raise ConfigError(f"{section}.{name} = {value}", "must be a positive whole number")


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, min(number, 64) + 1) if number % d == 0)
