"""The slices of ZeRO-1 on worlds larger than a machine has. MindSpore's own simulation of a world (MS_SIMULATION_LEVEL)
refuses a CPU, so the workers are asked one after the other what each would hold."""

import numpy as np
import pytest

from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config

WORLDS = [8, 64, 512]


@pytest.fixture
def worker_of(mindspore, monkeypatch):
    """The shards of worker ``rank`` of ``world``, and the groups it formed."""
    from mindspeed_mm_dit.training.mindspore import flat_optimizer

    def worker_of(rank, world, size):
        groups = {}
        monkeypatch.setattr(flat_optimizer.runtime, "world_size", lambda: world)
        monkeypatch.setattr(flat_optimizer.runtime, "rank", lambda: rank)
        monkeypatch.setattr(flat_optimizer.communication, "create_group", groups.__setitem__)
        return flat_optimizer.ShardGroups.create(Fsdp2Config(sharding_size=size)), groups

    return worker_of


@pytest.mark.parametrize("world", WORLDS)
def test_the_slices_of_all_workers_make_the_state_once(worker_of, world):
    from mindspeed_mm_dit.training.mindspore.flat_optimizer import FlatLayout

    layout = FlatLayout(("a", "b"), ((7, 33), (5,)), world)
    vector = layout.from_arrays({"a": np.arange(231.0).reshape(7, 33), "b": np.arange(231.0, 236.0)})
    slices = [worker_of(rank, world, "auto")[0].local_slice(vector) for rank in range(world)]
    np.testing.assert_array_equal(np.concatenate(slices), vector)
    assert {len(part) for part in slices} == {layout.length // world}


@pytest.mark.parametrize("world", WORLDS)
def test_one_copy_for_each_node_shards_within_the_node(worker_of, world):
    for rank in {0, 7, world // 2, world - 1}:
        shards, groups = worker_of(rank, world, 8)
        if world == 8:
            assert (shards.count, shards.number, groups) == (8, rank, {})
            continue
        assert sorted(member for group in groups.values() for member in group) == list(range(world))
        assert groups[shards.group].index(rank) == shards.number and len(groups[shards.group]) == shards.count == 8
