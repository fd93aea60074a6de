"""What each rank hands to PyTorch's distributed checkpoint."""

from __future__ import annotations

import torch

from mindspeed_mm_dit.checkpoint.torch_dcp import _part_of_this_rank


def flat(tree, prefix=""):
    for key, value in tree.items():
        yield from flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]


def test_each_whole_tensor_is_written_by_one_rank_and_all_of_them_by_all_ranks():
    state = {tree: {str(i): torch.full((2,), float(i)) for i in range(5)} for tree in ("model", "ema")}
    state["facts"] = {"note": "on every rank"}
    parts = [dict(flat(_part_of_this_rank(state, rank, 3))) for rank in range(3)]
    assert all(part.pop("facts.note") == "on every rank" for part in parts)
    names = [name for part in parts for name in part]
    assert sorted(names) == sorted(name for name, value in flat(state) if isinstance(value, torch.Tensor))
    assert {len(part) for part in parts} == {3, 4}
