"""Name and shape of every tensor of a DiT and of an AutoencoderKL, and the architecture that shapes tell."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mindspeed_mm_dit.configs.model import DiTConfig
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.host_memory import host_memory_bytes
from mindspeed_mm_dit.models.autoencoder_kl_files import KLArchitecture
from mindspeed_mm_dit.planning.fit import GIB, host_bytes

Shapes = dict[str, tuple[int, ...]]

_CODE_WIDTH = 256  # of the sinusoidal timestep code
_POSITION_BYTES = 24
"""What one element of the position code takes beside its weight while it is made: sines and cosines in float64."""


def dit_shapes(config: DiTConfig) -> Shapes:
    """Return the shapes of a DiT by the published names."""
    D, C, P = config.hidden_size, config.in_channels, config.patch_size
    hidden = int(D * config.mlp_ratio)
    shapes: Shapes = {"pos_embed": (1, config.num_tokens, D), **_layer("x_embedder.proj", D, C, P, P)}
    shapes |= _layer("t_embedder.mlp.0", D, _CODE_WIDTH) | _layer("t_embedder.mlp.2", D, D)
    shapes["y_embedder.embedding_table.weight"] = (config.num_embeddings, D)
    for block in (f"blocks.{i}" for i in range(config.num_layers)):
        shapes |= _layer(f"{block}.attn.qkv", 3 * D, D) | _layer(f"{block}.attn.proj", D, D)
        shapes |= _layer(f"{block}.mlp.fc1", hidden, D) | _layer(f"{block}.mlp.fc2", D, hidden)
        shapes |= _layer(f"{block}.adaLN_modulation.1", 6 * D, D)
    shapes |= _layer("final_layer.linear", P * P * config.out_channels, D)
    return shapes | _layer("final_layer.adaLN_modulation.1", 2 * D, D)


def check_claimed_sizes(config: DiTConfig, what: str) -> None:
    """Raise CheckpointError where this machine could not hold a DiT of the sizes that the file ``what`` claims."""
    need = host_bytes(config) + _POSITION_BYTES * config.num_tokens * config.hidden_size
    if need > host_memory_bytes():
        raise CheckpointError(
            what, f"describes a network that needs {need / GIB:,.1f} GiB to be made, and this machine has "
            f"{host_memory_bytes() / GIB:,.1f} GiB", "copy or download the file again, or use a larger machine",
        )  # fmt: skip


def dit_config(shapes: Mapping[str, tuple[int, ...]], num_heads: int = 1) -> DiTConfig:
    """Return the architecture that ``shapes`` tell; the number of heads shows in none of them."""
    D, C, P, _ = _of(shapes, "x_embedder.proj.weight", 4)
    (_, tokens, _), (rows, _) = _of(shapes, "pos_embed", 3), _of(shapes, "y_embedder.embedding_table.weight", 2)
    outputs, hidden = _of(shapes, "final_layer.linear.weight", 2)[0], _of(shapes, "blocks.0.mlp.fc1.weight", 2)[0]
    return DiTConfig(
        input_size=P * math.isqrt(tokens), num_classes=rows - 1, in_channels=C, patch_size=P, hidden_size=D,
        num_layers=count_of(shapes, "blocks"), num_heads=num_heads, mlp_ratio=hidden / D,
        learn_sigma=outputs == 2 * C * P * P,
    )  # fmt: skip


def vae_shapes(config: KLArchitecture) -> Shapes:
    """Return the shapes of an AutoencoderKL by diffusers' names."""
    widths, Z = config.block_out_channels, config.latent_channels
    last = widths[-1]
    shapes = _layer("encoder.conv_in", widths[0], config.in_channels, 3, 3)
    for side, levels, count, resize in (
        ("encoder.down_blocks", widths, config.layers_per_block, "downsamplers"),
        ("decoder.up_blocks", widths[::-1], config.layers_per_block + 1, "upsamplers"),
    ):
        before = levels[0]
        for i, width in enumerate(levels):
            for j in range(count):
                shapes |= _resnet(f"{side}.{i}.resnets.{j}", before if j == 0 else width, width)
            if i < len(levels) - 1:
                shapes |= _layer(f"{side}.{i}.{resize}.0.conv", width, width, 3, 3)
            before = width
    for side in ("encoder", "decoder"):
        shapes |= _middle(f"{side}.mid_block", last, config.mid_block_add_attention)
    shapes |= _norm("encoder.conv_norm_out", last) | _layer("encoder.conv_out", 2 * Z, last, 3, 3)
    shapes |= _layer("decoder.conv_in", last, Z, 3, 3) | _norm("decoder.conv_norm_out", widths[0])
    shapes |= _layer("decoder.conv_out", config.out_channels, widths[0], 3, 3)
    shapes |= _layer("quant_conv", 2 * Z, 2 * Z, 1, 1) if config.use_quant_conv else {}
    return shapes | (_layer("post_quant_conv", Z, Z, 1, 1) if config.use_post_quant_conv else {})


def vae_config(shapes: Mapping[str, tuple[int, ...]], norm_num_groups: int = 32) -> KLArchitecture:
    """Return the architecture that ``shapes`` tell; the number of groups shows in none of them."""
    levels = count_of(shapes, "encoder.down_blocks")
    widths = [_of(shapes, f"encoder.down_blocks.{i}.resnets.0.conv1.weight", 4)[0] for i in range(levels)]
    return KLArchitecture(
        in_channels=_of(shapes, "encoder.conv_in.weight", 4)[1],
        out_channels=_of(shapes, "decoder.conv_out.weight", 4)[0],
        down_block_types=("DownEncoderBlock2D",) * levels, up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=tuple(widths), layers_per_block=count_of(shapes, "encoder.down_blocks.0.resnets"),
        latent_channels=_of(shapes, "decoder.conv_in.weight", 4)[1], norm_num_groups=norm_num_groups,
        use_quant_conv="quant_conv.weight" in shapes, use_post_quant_conv="post_quant_conv.weight" in shapes,
        mid_block_add_attention="encoder.mid_block.attentions.0.to_q.weight" in shapes,
    )  # fmt: skip


def _middle(name: str, width: int, has_attention: bool) -> Shapes:
    shapes = _resnet(f"{name}.resnets.0", width, width) | _resnet(f"{name}.resnets.1", width, width)
    if has_attention:
        shapes |= _norm(f"{name}.attentions.0.group_norm", width)
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            shapes |= _layer(f"{name}.attentions.0.{part}", width, width)
    return shapes


def _resnet(name: str, before: int, width: int) -> Shapes:
    shapes = _norm(f"{name}.norm1", before) | _layer(f"{name}.conv1", width, before, 3, 3)
    shapes |= _norm(f"{name}.norm2", width) | _layer(f"{name}.conv2", width, width, 3, 3)
    return shapes | (_layer(f"{name}.conv_shortcut", width, before, 1, 1) if before != width else {})


def _layer(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _norm(name: str, width: int) -> Shapes:
    return _layer(name, width)


def _of(shapes: Mapping[str, tuple[int, ...]], name: str, ndim: int) -> tuple[int, ...]:
    if name not in shapes:
        raise CheckpointError("SOURCE", f"{name} is missing, without which the architecture is unknown")
    if len(shapes[name]) != ndim:
        raise CheckpointError("SOURCE", f"{name} is {tuple(shapes[name])}, expected {ndim} dimensions")
    return tuple(shapes[name])


def count_of(shapes: Mapping[str, tuple[int, ...]], stem: str) -> int:
    """Return how many ``stem.0``, ``stem.1``, ... there are, whatever the largest number is."""
    numbers = {name[len(stem) + 1 :].split(".")[0] for name in shapes if name.startswith(f"{stem}.")}
    return sum(number.isdecimal() for number in numbers)
