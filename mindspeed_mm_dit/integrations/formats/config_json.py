"""diffusers' JSON files: the network, autoencoder or Wan pipeline that one describes, and those that describe ours."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.checkpoint.state import Shapes, State, shapes_of
from mindspeed_mm_dit.configs.autoencoder import config_file
from mindspeed_mm_dit.configs.dit import DIT, OPTIONS, DiTConfig
from mindspeed_mm_dit.configs.joint import JointConfig
from mindspeed_mm_dit.configs.limits import number, shorten_repr
from mindspeed_mm_dit.configs.model import AE_CONFIGS, PREDICTOR_CONFIGS, model_config_from_mapping
from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.configs.video_transformer import VideoTransformerConfig, WanConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.framework.contract import host_memory_bytes
from mindspeed_mm_dit.framework.meta.nn import meta_reference
from mindspeed_mm_dit.models.pretrained import KLArchitecture
from mindspeed_mm_dit.models.weight_adapters import count_of, shape_of, weight_converter_of
from mindspeed_mm_dit.planning import GIB, host_bytes

INDEX = "model_index.json"
"""What is in a pipeline's folder."""
DIT_CLASS, VAE_CLASS = "DiTTransformer2DModel", "AutoencoderKL"
DIT_CLASSES = (DIT_CLASS, "Transformer2DModel")  # (the latter in the published pipelines of 2022)
FIRST, SECOND = "transformer", "transformer_2"
"""Folders of the network in a pipeline, and of Wan 2.2's expert of low noise."""
FROM_TEXT, FROM_IMAGE = "WanPipeline", "WanImageToVideoPipeline"
_CLIP_SIZE = (81, 480, 832)
"""(F, H, W) of a clip that Wan's pipelines generate by default."""
_PUBLISHED_SHIFT = 5.0
"""Of a Wan folder without a scheduler."""
_FIXED = {
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "norm_type": "ada_norm_zero",
    "norm_elementwise_affine": False,
}
"""Keys of a DiT's config.json, with their only value in the published network."""
_POSITION_BYTES = 24
"""Extra bytes per element while the positional embedding is computed: sines and cosines in float64."""


def check_declared_sizes(config: DiTConfig | VideoTransformerConfig | JointConfig, what: str) -> None:
    """Raise CheckpointError if this machine cannot hold a network of the sizes that the file ``what`` claims."""
    need = host_bytes(config) + _POSITION_BYTES * config.num_tokens * config.hidden_size
    if need > host_memory_bytes():
        raise CheckpointError(
            f"{what} describes a network that needs {need / GIB:,.1f} GiB to be made, and this machine has "
            f"{host_memory_bytes() / GIB:,.1f} GiB. Copy or download the file again, or use a larger machine."
        )


# --- networks with diffusers' names -----------------------------------------------------------------------------------


def diffusers_predictors() -> dict[str, Any]:
    """Return the kinds of networks that have diffusers' names, by the name of their class there."""
    return {kind.diffusers_class: kind for kind in PREDICTOR_CONFIGS.values() if kind.diffusers_class}


def config_from_diffusers(config: Mapping[str, Any], what: str) -> JointConfig | WanConfig | None:
    """Return the network with diffusers' names that ``config``, its config.json, describes; None if it is none.

    Raises CheckpointError, naming the key of ``what``, for settings that no network has or this machine cannot hold.
    """
    kind = diffusers_predictors().get(str(config.get("_class_name")))
    if kind is None:
        return None
    network: JointConfig | WanConfig = from_diffusers(kind, config, what)
    check_declared_sizes(network, what)
    return network


def from_diffusers(kind: Any, config: Mapping[str, Any], what: str) -> Any:
    """Return the settings of ``kind``, a class of ours, for those of diffusers in a config.json; raises as above."""
    try:
        return from_mapping(kind, weight_converter_of(kind).of_diffusers(config), what)
    except ConfigError as error:
        where = "" if str(error).startswith(what) else f"{what}: "
        raise CheckpointError(f"{where}{error}") from None
    except (LookupError, TypeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{what} does not have the sizes of a {kind.diffusers_class}: {shorten_repr(str(error))}. Copy or download "
            "the folder again."
        ) from None


# --- DiT --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    """The whole numbers in a DiT's config.json, by diffusers' keys."""

    sample_size: int
    num_embeds_ada_norm: int
    in_channels: int
    patch_size: int
    num_attention_heads: int
    attention_head_dim: int
    num_layers: int


def read_dit_config(config: Mapping[str, Any], folder: Path) -> DiTConfig:
    """Return the DiT that the config.json of a folder describes; raises CheckpointError if it is none."""
    for key, expected in _FIXED.items():
        if config.get(key, expected) != expected:
            raise CheckpointError(f"{folder}/config.json: {key} = {config[key]!r}, but a DiT has {expected!r}.")
    names = [field.name for field in dataclasses.fields(_Sizes)]
    try:
        sizes = from_mapping(_Sizes, {name: config[name] for name in names if name in config}, f"{folder}/config.json")
        return DiTConfig(
            input_size=sizes.sample_size,
            num_classes=sizes.num_embeds_ada_norm,
            in_channels=sizes.in_channels,
            patch_size=sizes.patch_size,
            hidden_size=sizes.num_attention_heads * sizes.attention_head_dim,
            num_layers=sizes.num_layers,
            num_heads=sizes.num_attention_heads,
            learn_sigma=(config.get("out_channels") or sizes.in_channels) == 2 * sizes.in_channels,
        )
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def dit_json(network: DiTConfig) -> dict[str, Any]:
    """Return the config.json of a DiT; raises CheckpointError for a size that diffusers has no setting for."""
    if network.mlp_ratio != 4:
        raise CheckpointError(f"predictor.mlp_ratio = {network.mlp_ratio} must be 4, as in diffusers' DiT.")
    return {
        "_class_name": DIT_CLASS,
        **_FIXED,
        "norm_eps": 1e-6,
        "sample_size": network.input_size,
        "num_embeds_ada_norm": network.num_classes,
        "in_channels": network.in_channels,
        "out_channels": network.out_channels,
        "patch_size": network.patch_size,
        "num_layers": network.num_layers,
        "num_attention_heads": network.num_heads,
        "attention_head_dim": network.hidden_size // network.num_heads,
    }


def dit_with_heads(predictor: PredictorConfig, state: State) -> DiTConfig:
    """Return the DiT with its number of heads; raises ConfigError for a predictor that diffusers does not have."""
    if not isinstance(predictor, DiTConfig):
        raise ConfigError(
            f"predictor.model_id = {predictor.model_id!r} has no counterpart in diffusers here. Convert to "
            "safetensors, .pt or .ckpt."
        )
    check_options(predictor)
    if "model" in state.facts:  # (it has settings that show in no shape)
        check_options(model_config_from_mapping(state.facts["model"], "model.json").predictor)
    return replace(predictor, num_heads=_num_heads(predictor, state))


def check_options(network: DiTConfig) -> None:
    """Raise ConfigError, naming it, for an option of the network that diffusers' DiT does not have."""
    for name in OPTIONS:
        if value := getattr(network, name):
            raise ConfigError(
                f"predictor.{name} = {json.dumps(value)} is an option that diffusers' {DIT_CLASS} does not have. "
                "Convert to safetensors, .pt or .ckpt."
            )


def _num_heads(network: DiTConfig, state: State) -> int:
    """Return the number of heads, from config.json, model.json or the published model of these sizes."""
    if state.config:
        return int(state.config["num_attention_heads"])
    if "model" in state.facts:
        return int(model_config_from_mapping(state.facts["model"], "model.json").predictor.num_heads)
    for sizes in DIT.values():
        if (sizes["hidden_size"], sizes["num_layers"]) == (network.hidden_size, network.num_layers):
            return sizes["num_heads"]
    raise ConfigError(
        "--model is needed: the weights do not tell the number of attention heads. Give the model.json of their run."
    )


# --- AutoencoderKL ----------------------------------------------------------------------------------------------------


def vae_shapes(config: KLArchitecture) -> Shapes:
    """Return the shapes of an AutoencoderKL by diffusers' names."""
    network = meta_reference("mindspeed_mm_dit.models.autoencoder_kl:AutoencoderKLNetwork")(config)
    return {name: parameter.shape for name, parameter in network.named_parameters()}


def infer_vae_config(shapes: Mapping[str, tuple[int, ...]], norm_num_groups: int = 32) -> KLArchitecture:
    """Infer the architecture from ``shapes``, in which the number of norm groups does not show."""
    levels = count_of(shapes, "encoder.down_blocks")
    widths = [shape_of(shapes, f"encoder.down_blocks.{i}.resnets.0.conv1.weight", 4)[0] for i in range(levels)]
    return KLArchitecture(
        in_channels=shape_of(shapes, "encoder.conv_in.weight", 4)[1],
        out_channels=shape_of(shapes, "decoder.conv_out.weight", 4)[0],
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=tuple(widths),
        layers_per_block=count_of(shapes, "encoder.down_blocks.0.resnets"),
        latent_channels=shape_of(shapes, "decoder.conv_in.weight", 4)[1],
        norm_num_groups=norm_num_groups,
        use_quant_conv="quant_conv.weight" in shapes,
        use_post_quant_conv="post_quant_conv.weight" in shapes,
        mid_block_add_attention="encoder.mid_block.attentions.0.to_q.weight" in shapes,
    )


def with_vae_config(state: State) -> tuple[State, list[str]]:
    """Return the autoencoder with a config.json, and a note on what was assumed for it.

    Raises ConfigError if the usual number of norm groups does not fit; the weights do not determine it.
    """
    if "_class_name" in state.config:
        return state, []
    guess = infer_vae_config(shapes_of(state.weights))
    if any(width % guess.norm_num_groups for width in guess.block_out_channels):
        raise ConfigError(
            f"--model is needed: the weights do not tell norm_num_groups, and the usual {guess.norm_num_groups} does "
            f"not divide the widths {', '.join(map(str, guess.block_out_channels))}. Give the autoencoder's "
            "config.json."
        )
    note = f"config.json: norm_num_groups = {guess.norm_num_groups} is assumed, as in Stable Diffusion's autoencoder"
    if "scaling_factor" not in state.config:
        note += "; scaling_factor is not known and left out"
    config = {"_class_name": VAE_CLASS, **dataclasses.asdict(guess), **state.config}
    return replace(state, config=config), [f"{note} (--model CONFIG_JSON sets both)"]


# --- Wan's pipelines: model_index.json, transformer/, in Wan 2.2 transformer_2/, vae/, text_encoder/, scheduler/ ----


def wan_model_of(path: Path) -> dict[str, Any] | None:
    """Return the model.json of a Wan pipeline, or of the folder of one expert in it; None if ``path`` is neither."""
    folder = path if (path / INDEX).is_file() else path.parent
    part = FIRST if folder == path else path.name
    if not (folder / INDEX).is_file() or not (folder / part / "config.json").is_file():
        return None
    index = read_json(folder / INDEX, "--checkpoint")
    if index.get("_class_name") not in (FROM_TEXT, FROM_IMAGE):
        return None
    ae = {"model_id": "wan_video_vae", "from_pretrained": str(folder / "vae")}
    images = folder / "image_encoder"
    return {
        "ae": ae,
        "text_encoder": {"from_pretrained": str(folder / "text_encoder"), "zero_padding": True},
        "diffusion": _wan_diffusion(folder, part, index),
        "predictor": _wan_predictor(folder / part, index, ae),
        **({"image_encoder": {"from_pretrained": str(images)}} if images.is_dir() else {}),
    }


def _wan_predictor(folder: Path, index: dict[str, Any], ae: dict[str, Any]) -> dict[str, Any]:
    content = read_json(folder / "config.json", "--checkpoint")
    settings = {name: value for name, value in content.items() if not name.startswith("_")}
    settings |= {
        "expand_timesteps": bool(index.get("expand_timesteps")),
        "last_frame": bool(settings.get("pos_embed_seq_len")),
    }
    where = f"{folder}/config.json"
    if config_file(ae["from_pretrained"]).is_file():
        kind = AE_CONFIGS[ae["model_id"]]
        autoencoder = from_mapping(kind, kind.spelled_out(ae, where), where)
        settings["latent_size"] = list(autoencoder.latent_shape(_CLIP_SIZE)[1:])
    return {"model_id": WanConfig.model_id, **settings}


def _wan_diffusion(folder: Path, part: str, index: dict[str, Any]) -> dict[str, Any]:
    """Return section "diffusion": the scheduler's shift, and the window of an expert."""
    file = folder / "scheduler" / "scheduler_config.json"
    scheduler = read_json(file, "--checkpoint") if file.is_file() else {"shift": _PUBLISHED_SHIFT}
    # (1.0: diffusers' default, which its files may leave out)
    shift = scheduler.get("flow_shift", scheduler.get("shift", 1.0))
    settings = {"model_id": "wan_flow_match_scheduler", "shift": shift, "sigma_min": 0.0, "extra_one_step": True}
    if (boundary := index.get("boundary_ratio")) is None or low_noise_folder(folder) is None:
        return settings
    level = number(f"{folder / INDEX}: boundary_ratio", boundary, 0.0, 1.0)
    return {**settings, "timestep_window": [level, 1.0] if part == FIRST else [0.0, level]}


def low_noise_folder(path: Path) -> Path | None:
    """Return the expert of low noise in a pipeline; None if ``path`` is none, or has one network."""
    second = path / SECOND
    return second if (path / INDEX).is_file() and (second / "config.json").is_file() else None
