"""Frozen linear layers whose weights are stored in few bits, and widened inside each product only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mindspeed_mm_dit.framework.low_bit import (
    WIDENED_AT_ONCE,
    Arrays,
    LowBitWeight,
    StoredArray,
    as_stored,
    num_bytes,
    quantized,
)

_ABOUT = 1.125
"""Most bytes that a file may need for each byte of a format, for its own format to be kept."""
_DTYPES = {
    "int8": torch.int8,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def _take(table: Tensor, codes: Tensor) -> Tensor:
    return table.index_select(0, codes.reshape(-1).int()).reshape(*codes.shape, *table.shape[1:])


def _constant(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.as_tensor(array).to(like.device)


TORCH = Arrays(
    Tensor.float,
    lambda codes, dtype: codes.contiguous().view(_DTYPES[dtype]),
    _take,
    torch.cat,
    _constant,
)


class PackedWeight(nn.Module):
    """A weight (out, in) in few bits, in place of the parameter ``weight`` of a linear layer.

    It holds the bytes of each part. They are in no state dict: the weight does not train, and belongs to a base that a
    checkpoint names by its digest.
    """

    dtype = torch.float32
    """Of the weight that it stands for: with FSDP2, the one that parameters are cast to."""

    def __init__(self, shape: tuple[int, ...], requested: str) -> None:
        super().__init__()
        self.shape, self._requested, self.format = torch.Size(shape), requested, requested
        self._options: tuple[tuple[str, Any], ...] = ()
        self._parts: dict[str, tuple[torch.dtype, torch.Size]] = {}

    @torch.no_grad()
    def load(self, weight: np.ndarray | StoredArray, device: torch.device) -> None:
        """Store a weight: as its file does if that takes about as many bits as the format of this one, else quantised.

        (Q8_0, with 8.5 bits for each number, is not quantised a second time to int8 of 8.)
        """
        assert tuple(weight.shape) == tuple(self.shape), (weight.shape, self.shape)
        stored = as_stored(weight)
        if stored is None or stored.bytes_of_numbers > _ABOUT * num_bytes(self._requested, tuple(self.shape)):
            stored = quantized(np.asarray(weight, np.float32), self._requested)
        self.format, self._options, self._parts = stored.format, stored.options, {}
        for name, array in stored.parts.items():
            part = torch.tensor(np.asarray(array), device=device)
            self._parts[name] = (part.dtype, part.shape)
            self.register_buffer(name, part.reshape(-1).view(torch.uint8), persistent=False)

    def shard_with(self, dtype: torch.dtype | None) -> None:
        """Let FSDP2 shard and gather the bytes, unless they were taken, beside parameters cast to ``dtype``."""
        self.dtype = dtype or torch.float32
        for name in list(self._buffers):
            self.register_parameter(name, nn.Parameter(self._buffers.pop(name), requires_grad=False))

    def take_parts(self) -> dict[str, Tensor]:
        """Remove the bytes of each part, and return them; :meth:`place_parts` says where they are from then on."""
        return {name: self._buffers.pop(name) for name in list(self._buffers)}

    def place_parts(self, parts: Mapping[str, Tensor]) -> None:
        """Let the bytes of each part be ``parts``, which are neither moved nor sharded with the module."""
        self.__dict__.update(parts)

    def state_dict(self, *args: Any, destination: Any = None, **kwargs: Any) -> Any:
        """Return nothing."""
        return {} if destination is None else destination

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b, (..., out), of x (..., in), in the precision that a linear layer would have."""
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        stored = self.format, tuple(self.shape), self._options, tuple(self._parts)
        return _Product.apply(x.to(dtype), bias, *stored, *self._tensors())

    def widened(self) -> Tensor:
        """Return the weight, (out, in) float32."""
        return _widened((self.format, tuple(self.shape), self._options, tuple(self._parts)), self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, name).view(dtype).reshape(shape) for name, (dtype, shape) in self._parts.items()]


def _widened(stored: Any, parts: Iterable[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a weight (out, in) in ``dtype``, widened some rows at a time.

    stored: format, shape, options and names of the parts; plain values, which a compiled graph may hold.
    """
    name, (rows, columns), options, names = stored
    whole = LowBitWeight(name, (rows, columns), dict(zip(names, parts)), options)
    step = max(256, WIDENED_AT_ONCE // columns // 256 * 256)
    if step >= rows or whole.rows(0, step) is None:
        return whole.widened(TORCH).to(dtype)
    weight = torch.empty((rows, columns), dtype=dtype, device=whole.parts["codes"].device)
    for begin in range(0, rows, step):
        some = whole.rows(begin, min(rows, begin + step))
        assert some is not None, "blocks of each chunk are whole"
        weight[begin : begin + step] = some.widened(TORCH)
    return weight


class _Product(torch.autograd.Function):
    """x W^T + b with a frozen W in few bits, of which autograd keeps the bits alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *stored: Any) -> Tensor:
        ctx.save_for_backward(*stored[4:])
        ctx.save_for_forward(*stored[4:])
        ctx.stored = stored[:4]
        weight = _widened(stored[:4], stored[4:], x.dtype)
        return nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, bias: Tensor | None, *stored: None) -> Tensor:
        """Return the derivative along tangents of x and b."""
        assert x is not None, "the weights are frozen: only x has a tangent"
        change = nn.functional.linear(x, _widened(ctx.stored, ctx.saved_tensors, x.dtype))
        return change if bias is None else change + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (grad_output,) = gradients
        x_needs_grad, bias_needs_grad, *_ = ctx.needs_input_grad
        grad_x = grad_bias = None
        if x_needs_grad:
            grad_x = grad_output @ _widened(ctx.stored, ctx.saved_tensors, grad_output.dtype)
        if bias_needs_grad:
            grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(0)
        return (grad_x, grad_bias, *(None for _ in ctx.needs_input_grad[2:]))


_building_without_weights = False


@contextmanager
def without_weights() -> Iterator[None]:
    """Build the linear layers in this block without memory for their weights, which :func:`pack_weights` gives them."""
    global _building_without_weights
    _building_without_weights = True
    try:
        yield
    finally:
        _building_without_weights = False


def builds_without_weights() -> bool:
    """Return whether the caller is in :func:`without_weights`."""
    return _building_without_weights


def pack_weights(network: nn.Module, formats: Mapping[str, str]) -> None:
    """Let the linear layers of ``network`` hold the weights that ``formats`` names in few bits, and others in float32.

    formats: name of a weight, "blocks.0.attn.qkv.weight" -> its format. The values are loaded later.
    """
    for name, layer in list(network.named_modules()):
        if not isinstance(layer, nn.Linear):
            continue
        if (stored_as := formats.get(f"{name}.weight")) is not None:
            shape = tuple(layer.weight.shape)
            del layer.weight
            layer.weight = PackedWeight(shape, stored_as)  # type: ignore[assignment]
        elif layer.weight.is_meta:
            layer.weight = nn.Parameter(torch.zeros(layer.weight.shape))


def packed_weights(module: nn.Module) -> dict[str, PackedWeight]:
    """Return the packed weights of a module by their names."""
    return {name: part for name, part in module.named_modules() if isinstance(part, PackedWeight)}
