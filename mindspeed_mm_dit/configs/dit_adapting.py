"""Adapts weights of a DiT with other classes, input size, patches, channels or variance to this one (--init-from)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from einops import rearrange

from mindspeed_mm_dit.configs.dit_settings import DiTSettings
from mindspeed_mm_dit.configs.predictor import AdaptedTensor, SourceTensor
from mindspeed_mm_dit.configs.resampling import resized_input, resized_output


def _positions(here: DiTSettings, there: DiTSettings, source: SourceTensor) -> AdaptedTensor:
    if source.value.shape == source.shape:
        return AdaptedTensor(source.value)
    side = here.input_size // here.patch_size
    return AdaptedTensor(source.draw(), f"computed for {side}x{side} patches")


def _class_table(here: DiTSettings, there: DiTSettings, source: SourceTensor) -> AdaptedTensor:
    """Keep the rows of the classes that both networks have, and of the unconditional class."""
    if source.value.shape == source.shape and list(source.labels.items()) == [(i, i) for i in range(source.shape[0])]:
        return AdaptedTensor(source.value)
    table = source.draw()
    for label, other in source.labels.items():
        table[label] = source.value[other]
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


def _patch_embedding(here: DiTSettings, there: DiTSettings, source: SourceTensor) -> AdaptedTensor:
    """Resample patches; from grey to colour, split each weight over three equal channels; from colour to grey, sum."""
    value = source.value  # (D, C, P, P)
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


def _last_layer(here: DiTSettings, there: DiTSettings, source: SourceTensor) -> AdaptedTensor:
    """Resample patches, copy grey to each colour or average colours to grey, and drop or add the variance."""
    channels = (there.in_channels, here.in_channels)
    if _are_foreign(*channels):
        return AdaptedTensor(source.draw(), _FOREIGN.format(*channels))
    P, parts = there.patch_size, 2 if there.learn_sigma else 1
    # The parts are the prediction and, if it is learned, the variance; the last axis is D, or 1 for the bias.
    value = rearrange(source.value, "(p q parts c) ... -> p q parts c (...)", p=P, q=P, parts=parts)
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


def _text_embedding(here: DiTSettings, there: DiTSettings, source: SourceTensor) -> AdaptedTensor:
    if source.value.shape == source.shape:
        return AdaptedTensor(source.value)
    return AdaptedTensor(source.draw(), f"randomly initialised for texts of width {source.shape[1]}")


_FOREIGN = "randomly initialised: weights for latents of {0} channels do not convert to {1} channels"


def _are_foreign(there: int, here: int) -> bool:
    """Return whether channels cannot be converted: only those of grey and colour images can."""
    return there != here and {there, here} != {1, 3}


def _resampling(here: DiTSettings, there: DiTSettings) -> str:
    done = []
    if there.in_channels != here.in_channels:
        done.append("from grey to colour" if there.in_channels == 1 else "from colour to grey")
    if there.patch_size != here.patch_size:
        done.append(f"resampled from patches of {there.patch_size} to {here.patch_size}")
    return ", ".join(done)


RULES: dict[str, Callable[[DiTSettings, DiTSettings, SourceTensor], AdaptedTensor]] = {
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
