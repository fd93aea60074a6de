"""Adapts weights of a DiT with other classes, input size, patches, channels or variance to a DiT (--init-from).

Layers from or to patches are resized in float64. A patch is enlarged by bilinear interpolation, x' = B x, and shrunk
by the pseudo-inverse of enlarging. The layer from patches to tokens is resized so that an enlarged patch has the same
token as the original, w' = (B^T)^+ w (PI-resize of FlexiViT, Beyer et al. 2023); the layer from tokens to patches so
that it outputs the resized patch, W' = B W. Enlarging and shrinking back gives the same weights, for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from einops import rearrange

from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.models.weight_adapters import (
    AdaptedTensor,
    Shapes,
    SourceTensor,
    WeightConverter,
    count_of,
    shape_of,
)


class DiTAdapter(WeightConverter):
    """Adapter of a DiT: infers it from shapes, and takes weights of other DiTs of the same width."""

    def adaptable(self, here: Any) -> tuple[str, ...]:
        of_images = ("num_classes", "class_dropout_prob", "input_size", "patch_size", "in_channels", "learn_sigma")
        return (*of_images, "text_dim", "text_length", "pooled_dim", "pooled_encoder", "latent_size")

    def adapt_weight(self, here: Any, name: str, source: SourceTensor) -> AdaptedTensor | None:
        """Return the initial ``name``, adapted from a DiT of other classes, size, patches, channels or variance."""
        rule = RULES.get(name)
        if rule is None:
            return super().adapt_weight(here, name, source)
        assert isinstance(source.there, DiTConfig)
        return rule(here, source.there, source) if source.there.hidden_size == here.hidden_size else None

    def is_optional(self, name: str) -> bool:
        """Return whether ``name`` belongs to a condition or teacher, in which DiTs may differ."""
        others = ("y_embedder.", "text_embedder.", "pooled_embedder.", "projectors.")
        return name.startswith(others) or ".cross_attn." in name

    def of_shapes(self, shapes: Shapes) -> DiTConfig | None:
        """Return the architecture that ``shapes`` imply; settings that do not change shapes get a value that fits.

        Those are the number of heads without QK-norm, ``rope``, and the block before which in-context tokens join.
        Raises CheckpointError for a DiT without a tensor that decides the sizes.
        """
        if not any(name.startswith(("x_embedder.proj.", "x_embedder.proj1.")) for name in shapes):
            return None
        is_narrow = "x_embedder.proj1.weight" in shapes
        first, C, P, _ = shape_of(shapes, f"x_embedder.{'proj1' if is_narrow else 'proj'}.weight", 4)
        tokens, D = shape_of(shapes, "pos_embed", 3)[1:]
        widths = {name: shapes.get(f"{name}_embedder.linear_1.weight", (0, None))[1] for name in ("text", "pooled")}
        table = "y_embedder.embedding_table.weight"
        rows = 0 if any(widths.values()) and table not in shapes else shape_of(shapes, table, 2)[0]
        outputs = shape_of(shapes, "final_layer.linear.weight", 2)[0]
        swiglu, qk_norm = "blocks.0.mlp.w12.weight" in shapes, "blocks.0.attn.q_norm.weight" in shapes
        hidden = shape_of(shapes, f"blocks.0.mlp.{'w12' if swiglu else 'fc1'}.weight", 2)[0] // (2 if swiglu else 1)
        return DiTConfig(
            input_size=P * math.isqrt(tokens),
            num_classes=max(0, rows - 1),
            in_channels=C,
            patch_size=P,
            hidden_size=D,
            num_layers=count_of(shapes, "blocks"),
            mlp_ratio=_mlp_ratio(hidden, D, swiglu),
            num_heads=D // max(1, shape_of(shapes, "blocks.0.attn.q_norm.weight", 1)[0]) if qk_norm else 1,
            learn_sigma=outputs == 2 * C * P * P,
            qk_norm=qk_norm,
            rms_norm="blocks.0.norm1.weight" in shapes,
            swiglu=swiglu,
            wo_shift=shapes.get("blocks.0.adaLN_modulation.1.weight") == (4 * D, D),
            bottleneck_dim=first if is_narrow else None,
            in_context_len=shape_of(shapes, "in_context_posemb", 3)[1] if "in_context_posemb" in shapes else 0,
            h_embedder="h_embedder.mlp.0.weight" in shapes,
            text_dim=widths["text"],
            pooled_dim=widths["pooled"],
            **_projectors_of(shapes),
        )


def _projectors_of(shapes: Shapes) -> dict[str, Any]:
    """Return the sizes of the projectors; shapes do not show which block's tokens they read."""
    widths = tuple(shape_of(shapes, f"projectors.{n}.4.weight", 2)[0] for n in range(count_of(shapes, "projectors")))
    hidden = shape_of(shapes, "projectors.0.0.weight", 2)[0] if widths else 0
    return {"z_dims": widths, "projector_dim": hidden, "encoder_depth": 1} if widths else {}


def _mlp_ratio(hidden: int, width: int, swiglu: bool) -> float:
    """Return a ratio that gives an MLP of width ``hidden``; the published 4 if it does."""
    full = -(-hidden * 3 // 2) if swiglu else hidden
    if swiglu and 4 * width * 2 // 3 == hidden:
        return 4.0
    ratio = full / width
    return ratio if int(width * ratio) == full else math.nextafter(ratio, math.inf)


def resize_matrix(before: int, after: int) -> np.ndarray:
    """Return b (after, before) float64, which resizes a row of ``before`` pixels; b x b^T resizes a patch x."""
    if after < before:
        return np.linalg.pinv(resize_matrix(after, before))
    centres = np.clip((np.arange(after) + 0.5) * before / after - 0.5, 0, before - 1)  # half-pixel, edges repeated
    left = np.minimum(centres.astype(int), max(before - 2, 0))
    fraction = centres - left
    matrix = np.zeros((after, before))
    matrix[np.arange(after), left] += 1 - fraction
    matrix[np.arange(after), np.minimum(left + 1, before - 1)] += fraction
    return matrix


def resized_input(weight: np.ndarray, after: int) -> np.ndarray:
    """Resize the weights (..., P, P) of a layer from patches to tokens to patches of ``after`` pixels."""
    matrix = np.linalg.pinv(resize_matrix(weight.shape[-1], after).T)  # (after, P)
    return matrix @ weight.astype(np.float64) @ matrix.T


def resized_output(weight: np.ndarray, after: int) -> np.ndarray:
    """Resize the weights (P, P, ...) of a layer from tokens to patches to patches of ``after`` pixels."""
    matrix = resize_matrix(weight.shape[0], after)  # (after, P)
    return np.einsum("ip,jq,pq...->ij...", matrix, matrix, weight.astype(np.float64))


def _positions(here: DiTConfig, there: DiTConfig, source: SourceTensor) -> AdaptedTensor:
    if source.value.shape == source.shape:
        return AdaptedTensor(source.value)
    side = here.input_size // here.patch_size
    return AdaptedTensor(source.draw(), f"computed for {side}x{side} patches")


def _class_table(here: DiTConfig, there: DiTConfig, source: SourceTensor) -> AdaptedTensor:
    """Keep the rows of the classes that both networks have, and of the unconditional class."""
    if source.value.shape == source.shape and list(source.labels.items()) == [(i, i) for i in range(source.shape[0])]:
        return AdaptedTensor(source.value)
    table, value = source.draw(), np.asarray(source.value)
    for label, other in source.labels.items():
        table[label] = value[other]
    num_kept = sum(label < here.num_classes for label in source.labels)
    done = []
    if num_kept:
        done.append(f"{num_kept} of {here.num_classes} classes kept")
    if num_kept < here.num_classes:
        done.append(f"{here.num_classes - num_kept} of {here.num_classes} classes randomly initialised")
    if here.conditions.has_unconditional:
        state = "kept" if here.num_classes in source.labels else "randomly initialised"
        done.append(f"the unconditional class {state}")
    return AdaptedTensor(table, ", ".join(done))


def _patch_embedding(here: DiTConfig, there: DiTConfig, source: SourceTensor) -> AdaptedTensor:
    """Resample patches; from grey to colour, split each weight over three equal channels; from colour to grey, sum."""
    value = np.asarray(source.value)  # (D, C, P, P)
    channels = (there.in_channels, here.in_channels)
    if _are_foreign(*channels):
        return AdaptedTensor(source.draw(), _FOREIGN.format(*channels))
    if channels == (1, 3):
        value = np.repeat(value / 3, 3, axis=1)
    elif channels == (3, 1):
        value = value.sum(axis=1, keepdims=True)
    if there.patch_size != here.patch_size:
        value = resized_input(value, here.patch_size)
    return AdaptedTensor(value, _resampling(here, there))


def _last_layer(here: DiTConfig, there: DiTConfig, source: SourceTensor) -> AdaptedTensor:
    """Resample patches, copy grey to each colour or average colours to grey, and drop or add the variance."""
    channels = (there.in_channels, here.in_channels)
    if _are_foreign(*channels):
        return AdaptedTensor(source.draw(), _FOREIGN.format(*channels))
    P, parts = there.patch_size, 2 if there.learn_sigma else 1
    # The parts are the prediction and, if it is learned, the variance; the last axis is D, or 1 for the bias.
    value = np.asarray(source.value)
    value = rearrange(value, "(p q parts c) ... -> p q parts c (...)", p=P, q=P, parts=parts)
    done = [_resampling(here, there)]
    if there.learn_sigma and not here.learn_sigma:
        value, done = value[:, :, :1], [*done, "variance dropped"]
    if here.learn_sigma and not there.learn_sigma:
        value, done = np.concatenate([value, np.zeros_like(value)], 2), [*done, "variance added, with zeros"]
    if channels == (1, 3):
        value = np.repeat(value, 3, axis=3)
    elif channels == (3, 1):
        value = value.mean(axis=3, keepdims=True)
    if there.patch_size != here.patch_size:
        value = resized_output(value, here.patch_size)
    return AdaptedTensor(value.reshape(source.shape), ", ".join(filter(None, done)))


def _text_embedding(here: DiTConfig, there: DiTConfig, source: SourceTensor) -> AdaptedTensor:
    if source.value.shape == source.shape:
        return AdaptedTensor(source.value)
    return AdaptedTensor(source.draw(), f"randomly initialised for texts of width {source.shape[1]}")


_FOREIGN = "randomly initialised: weights for latents of {0} channels do not convert to {1} channels"


def _are_foreign(there: int, here: int) -> bool:
    """Return whether channels cannot be converted: only those of grey and colour images can."""
    return there != here and {there, here} != {1, 3}


def _resampling(here: DiTConfig, there: DiTConfig) -> str:
    done = []
    if there.in_channels != here.in_channels:
        done.append("from grey to colour" if there.in_channels == 1 else "from colour to grey")
    if there.patch_size != here.patch_size:
        done.append(f"resampled from patches of {there.patch_size} to {here.patch_size}")
    return ", ".join(done)


RULES: dict[str, Callable[[DiTConfig, DiTConfig, SourceTensor], AdaptedTensor]] = {
    "pos_embed": _positions,
    "x_embedder.proj.weight": _patch_embedding,
    "x_embedder.proj1.weight": _patch_embedding,
    "y_embedder.embedding_table.weight": _class_table,
    "text_embedder.linear_1.weight": _text_embedding,
    "pooled_embedder.linear_1.weight": _text_embedding,
    "final_layer.linear.weight": _last_layer,
    "final_layer.linear.bias": _last_layer,
}
"""How to adapt the tensors that are not simply copied."""
