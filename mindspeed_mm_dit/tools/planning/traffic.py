"""Compute the bytes that a rank sends in one optimizer step, with ring collectives, and the time of a step."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.planning.arithmetic import recompute_flop, train_flop
from mindspeed_mm_dit.planning.memory import Placement, gathered_elements


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in one optimizer step."""

    within_shards: int
    """Sent among the ranks that share one copy: gathering weights, reducing gradients, and gathering what the optimizer
    needs unsharded."""
    between_replicas: int
    """Sent between copies, to average gradients."""

    @property
    def total(self) -> int:
        """All bytes."""
        return self.within_shards + self.between_replicas


def traffic(model: ModelConfig, placement: Placement, micro_batches: int = 1) -> Traffic:
    """Return the traffic of a step of ``micro_batches`` on each rank.

    A ring over n ranks sends (n - 1) / n of the tensor to gather or reduce-scatter it, twice that to all-reduce.
    Gradients are reduced in float32, sharded ones after every micro-batch. What an optimizer needs unsharded (Muon's
    matrices) is gathered in float32 once per step.
    """
    parameters, S = parameters_of(model), placement.shard_ranks
    replicas = placement.world_size // S
    weight = 2 if placement.precision.way == "fsdp2" else 4
    trained = parameters.num_elements(trained_only=True)
    gathers = 2 if placement.reshard_after_forward else 1
    ring = (S - 1) / S
    gathered = ring * weight * parameters.num_elements() * gathers
    stepped = ring * 4 * gathered_elements(parameters, placement.optimizer)
    reduced = ring * 4 * trained
    averaged = 2 * (replicas - 1) / replicas * 4 * trained / S
    rounds = micro_batches if S > 1 else 1
    return Traffic(round(micro_batches * (gathered + reduced) + stepped), round(averaged * rounds))


def host_traffic(model: ModelConfig, placement: Placement, micro_batches: int = 1) -> int:
    """Return the bytes between the machine's memory and one device in a step of ``micro_batches``, if offloaded.

    FSDP2 copies a rank's float32 shard to the device whenever it gathers a block, and each gradient back.
    """
    if not placement.offloaded:
        return 0
    parameters, S = parameters_of(model), placement.shard_ranks
    gathers = 2 if placement.reshard_after_forward else 1
    trained = parameters.num_elements(S, trained_only=True)
    return 4 * micro_batches * (gathers * parameters.num_elements(S) + trained)


@dataclass(frozen=True)
class Links:
    """How fast a rank can send."""

    between_nodes_gbps: float
    """To other nodes, in 1e9 bits per second."""
    within_node_gbps: float
    """To devices of the same node, in 1e9 bits per second."""
    node_size: int
    """Number of devices in a node."""

    def seconds(self, placement: Placement, sent: Traffic) -> float:
        """Return the time of ``sent``: a ring is as fast as its slowest link."""
        shards = self.within_node_gbps if placement.shard_ranks <= self.node_size else self.between_nodes_gbps
        replicas = self.within_node_gbps if placement.world_size <= self.node_size else self.between_nodes_gbps
        return 8e-9 * (sent.within_shards / shards + sent.between_replicas / replicas)


def step_time(model: ModelConfig, placement: Placement, images_per_rank: int, flop_per_second: float) -> float:
    """Return the seconds of arithmetic for ``images_per_rank`` images; ``flop_per_second`` is achieved, not peak."""
    flop = train_flop(model.predictor) + (recompute_flop(model.predictor) if placement.recompute else 0)
    return images_per_rank * flop / flop_per_second
