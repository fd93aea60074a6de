"""Sequence parallelism (DeepSpeed-Ulysses, Jacobs et al. 2023): ranks share the tokens of a sample.

Each rank of a group holds a part of the tokens. For attention the ranks exchange tokens for heads, so that each has all
tokens of some heads, and then exchange them back. All ranks of a group compute the same loss, of whole samples.

Gradients are averaged over all ranks. Layers that work on a part of the tokens get a part of their gradient on each
rank: ``gather`` multiplies it by the number of ranks that share, so that the average is the sum. ``split`` divides it
again for the layers before it, which work on whole samples and get their whole gradient on each rank.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

TOKENS, HEADS = 2, 1
"""Axes of queries, keys and values (B, heads, N, d)."""
_mesh: DeviceMesh | None = None


def set_context_parallel_group(group: dist.ProcessGroup | None, device_type: str) -> None:
    """Let the ranks of ``group`` share their samples' tokens from now on; None: ranks do not share samples."""
    global _mesh
    _mesh = None if group is None else DeviceMesh.from_group(group, device_type)


def context_parallel_size() -> int:
    """Return how many ranks share a sample."""
    return 1 if _mesh is None else _mesh.size()


def split_tokens(x: Tensor) -> Tensor:
    """Whole samples (B, N, D), equal on every rank of the group -> this rank's part of the tokens (B, N / ranks, D)."""
    if _mesh is None:
        return x
    if x.requires_grad:
        ranks = _mesh.size()
        x = x.view_as(x)
        x.register_hook(lambda gradient: gradient / ranks)
    return _resharded(x, _mesh, None, 1)


def gather_tokens(x: Tensor) -> Tensor:
    """This rank's part of the tokens (B, N / ranks, D) -> whole samples (B, N, D)."""
    if _mesh is None:
        return x
    x = _resharded(x, _mesh, 1, None)
    if x.requires_grad:
        ranks = _mesh.size()
        x.register_hook(lambda gradient: gradient * ranks)
    return x


def tokens_to_heads(x: Tensor) -> Tensor:
    """Some tokens of every head (B, heads, N / ranks, d) -> every token of some heads (B, heads / ranks, N, d)."""
    return x if _mesh is None else _resharded(x, _mesh, TOKENS, HEADS)


def heads_to_tokens(x: Tensor) -> Tensor:
    """Every token of some heads (B, heads / ranks, N, d) -> some tokens of every head (B, heads, N / ranks, d)."""
    return x if _mesh is None else _resharded(x, _mesh, HEADS, TOKENS)


def _resharded(x: Tensor, mesh: DeviceMesh, from_axis: int | None, to_axis: int | None) -> Tensor:
    """Reshard a tensor from axis ``from_axis`` to axis ``to_axis``; return this rank's part.

    None: every rank has it whole. Gradients go the reverse way.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    before, after = (Replicate() if axis is None else Shard(axis) for axis in (from_axis, to_axis))
    whole = DTensor.from_local(x.contiguous(), mesh, [before], run_check=False)
    return whole.redistribute(placements=[after]).to_local(grad_placements=[after])
