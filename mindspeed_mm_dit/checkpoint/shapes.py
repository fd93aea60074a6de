"""Infer a network from the shapes of its tensors; name and shape of every tensor of an AutoencoderKL."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mindspeed_mm_dit.checkpoint.families import lacking
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.joint import JointConfig
from mindspeed_mm_dit.configs.limits import short_repr
from mindspeed_mm_dit.configs.model import PREDICTOR_CONFIGS, model_config_from_mapping
from mindspeed_mm_dit.configs.predictor import PredictorConfig, Shape, count_of, shape_of
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.configs.video_transformer import VideoTransformerConfig, WanConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.framework.contract import host_memory_bytes
from mindspeed_mm_dit.framework.meta.nn import meta_reference
from mindspeed_mm_dit.models.autoencoder_kl.files import KLArchitecture
from mindspeed_mm_dit.planning.memory import GIB, host_bytes

Shapes = dict[str, Shape]

_POSITION_BYTES = 24
"""Extra bytes per element while the positional embedding is computed: sines and cosines in float64."""


def check_claimed_sizes(config: DiTConfig | VideoTransformerConfig | JointConfig, what: str) -> None:
    """Raise CheckpointError if this machine cannot hold a network of the sizes that the file ``what`` claims."""
    need = host_bytes(config) + _POSITION_BYTES * config.num_tokens * config.hidden_size
    if need > host_memory_bytes():
        raise CheckpointError(
            what,
            f"describes a network that needs {need / GIB:,.1f} GiB to be made, and this machine has "
            f"{host_memory_bytes() / GIB:,.1f} GiB",
            "copy or download the file again, or use a larger machine",
        )


def named_kinds() -> dict[str, Any]:
    """Return the kinds of networks that have diffusers' names, by the name of their class there."""
    return {kind.diffusers_class: kind for kind in PREDICTOR_CONFIGS.values() if kind.diffusers_class}


def described_by(config: Mapping[str, Any], what: str) -> JointConfig | WanConfig | None:
    """Return the network with diffusers' names that ``config``, its config.json, describes; None if it is none.

    Raises CheckpointError, naming the key of ``what``, for settings that no network has or this machine cannot hold.
    """
    kind = named_kinds().get(str(config.get("_class_name")))
    if kind is None:
        return None
    network: JointConfig | WanConfig = from_diffusers(kind, config, what)
    check_claimed_sizes(network, what)
    return network


def from_diffusers(kind: Any, config: Mapping[str, Any], what: str) -> Any:
    """Return the settings of ``kind``, a class of ours, for those of diffusers in a config.json; raises as above."""
    try:
        return from_mapping(kind, kind.of_diffusers(config), what)
    except ConfigError as error:
        where = "" if error.what.startswith(what) else f"{what}: "
        raise CheckpointError(f"{where}{error.what}", error.reason, error.cure) from None
    except (LookupError, TypeError, ArithmeticError) as error:
        reason = f"does not have the sizes of a {kind.diffusers_class}: {short_repr(str(error))}"
        raise CheckpointError(what, reason, "copy or download the folder again") from None


def check_family(names: Collection[str], what: str, kind: str | None = None) -> None:
    """Raise CheckpointError if a file lacks the tensor that identifies its family, ``kind`` if that is known."""
    missing = lacking(names)
    if missing and kind in (None, missing[0]):
        reason = f"holds a network of kind {missing[0]!r} without its tensor {missing[1]}"
        raise CheckpointError(what, reason, "copy or download it again")


def predictor_of(
    shapes: Mapping[str, Shape], facts: Mapping[str, Any], config: Mapping[str, Any] | None = None
) -> PredictorConfig:
    """Return the architecture of the predictor whose tensors have ``shapes``.

    facts: content of run.json, used if the shapes do not determine the network; may be empty.
    config: diffusers' config.json, if known.

    Raises:
        CheckpointError: the network is unknown, or a tensor that decides its sizes is missing.
    """
    if (described := described_by(config or {}, "SOURCE: config.json")) is not None:
        return described
    if "model" not in facts:
        check_family(shapes, "SOURCE")
    for kind in PREDICTOR_CONFIGS.values():
        if (inferred := kind.of_shapes(shapes)) is not None:
            return inferred
    if "model" in facts:
        predictor: PredictorConfig = model_config_from_mapping(facts["model"], "model.json").predictor
        return predictor
    names = ", ".join(list(shapes)[:5])
    raise CheckpointError(
        "SOURCE",
        f"holds neither a known predictor nor an AutoencoderKL; its tensors are: {names}, ...",
        "give the model.json that it was trained with (--model)",
    )


def vae_shapes(config: KLArchitecture) -> Shapes:
    """Return the shapes of an AutoencoderKL by diffusers' names."""
    network = meta_reference("mindspeed_mm_dit.models.autoencoder_kl.network:AutoencoderKLNetwork")(config)
    return {name: parameter.shape for name, parameter in network.named_parameters()}


def vae_config(shapes: Mapping[str, tuple[int, ...]], norm_num_groups: int = 32) -> KLArchitecture:
    """Infer the architecture from ``shapes``, in which the number of norm groups does not show."""
    levels = count_of(shapes, "encoder.down_blocks")
    widths = [shape_of(shapes, f"encoder.down_blocks.{i}.resnets.0.conv1.weight", 4)[0] for i in range(levels)]
    return KLArchitecture(
        in_channels=shape_of(shapes, "encoder.conv_in.weight", 4)[1],
        out_channels=shape_of(shapes, "decoder.conv_out.weight", 4)[0],
        down_block_types=("DownEncoderBlock2D",) * levels, up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=tuple(widths), layers_per_block=count_of(shapes, "encoder.down_blocks.0.resnets"),
        latent_channels=shape_of(shapes, "decoder.conv_in.weight", 4)[1], norm_num_groups=norm_num_groups,
        use_quant_conv="quant_conv.weight" in shapes, use_post_quant_conv="post_quant_conv.weight" in shapes,
        mid_block_add_attention="encoder.mid_block.attentions.0.to_q.weight" in shapes,
    )  # fmt: skip
