"""Frozen weights of some blocks that wait in the machine's memory, and are copied to the device ahead of their turn.

A block's bytes lie together in one pinned tensor. The device has two buffers, which the blocks use in turn: while one
block computes from its buffer, the bytes of the next are copied into the other on a stream of their own, in forward
and, in reverse, while backward recomputes the blocks. The host waits for neither.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.framework.pytorch.low_bit import PackedWeight, packed_weights

_ALIGNED = 256
"""Bytes at whose multiples parts begin."""


class BlockOffload:
    """Copies the frozen weights of blocks to the device when they are needed.

    Args:
        blocks: the blocks that are offloaded, in the order of forward, each with its packed weights on the host. Their
            ``forward`` is replaced; backward must recompute them, so wrap them in recompute afterwards.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._device = runtime.device()
        self._stored = [_Stored(block, self._device) for block in blocks]
        size = max((len(stored.host) for stored in self._stored), default=0)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._resident: list[int | None] = [None, None]
        self._stream = torch.get_device_module(self._device).Stream() if self._device.type != "cpu" else None
        self._copied: list[Any] = [None, None]
        self._last = -1
        for number, block in enumerate(blocks):
            block.forward = functools.partial(self._forward, number, block.forward)

    def _forward(self, number: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        backward = self._last >= number > 0 or (number == 0 and self._last == 1)
        self._copy(number)
        if self._stream is not None:
            torch.get_device_module(self._device).current_stream().wait_event(self._copied[number % 2])
        self._stored[number].use_buffer(self._buffers[number % 2])
        following = number - 1 if backward else number + 1
        if 0 <= following < len(self._stored):
            self._copy(following)
        self._last = number
        return forward(*args, **kwargs)

    @torch.no_grad()
    def _copy(self, number: int) -> None:
        """Start copying a block's bytes into its buffer once what computes from that buffer is done."""
        which = number % 2
        if self._resident[which] == number:
            return
        self._resident[which] = number
        host, buffer = self._stored[number].host, self._buffers[which]
        if self._stream is None:
            buffer[: len(host)].copy_(host)
            return
        devices = torch.get_device_module(self._device)
        self._stream.wait_stream(devices.current_stream())
        with devices.stream(self._stream):
            buffer[: len(host)].copy_(host, non_blocking=True)
            self._copied[which] = self._stream.record_event()


class _Stored:
    """The bytes of a block in the machine's memory."""

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self._weights: list[tuple[PackedWeight, dict[str, tuple[int, int]]]] = []
        parts, end = [], 0
        for weight in packed_weights(block).values():
            places = {}
            for name, part in weight.take_parts().items():
                places[name] = (end, end + part.numel())
                parts.append((end, part.cpu()))
                end += -(-part.numel() // _ALIGNED) * _ALIGNED
            self._weights.append((weight, places))
        self.host = torch.empty(end, dtype=torch.uint8, pin_memory=device.type != "cpu")
        for begin, part in parts:
            self.host[begin : begin + part.numel()] = part

    def use_buffer(self, buffer: Tensor) -> None:
        """Let the weights of the block be those in ``buffer``."""
        for weight, places in self._weights:
            weight.place_parts({name: buffer[begin:end] for name, (begin, end) in places.items()})
