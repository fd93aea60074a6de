"""Recommend the sharding of a run, and write it as an fsdp2.yaml with a reason for each line."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from mindspeed_mm_dit.configs.fsdp2 import AUTOCAST, SHARDED_BF16
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.planning import (
    RESERVE,
    Placement,
    gathered_elements,
    host_bytes,
    memory,
    recompute_flop,
    train_flop,
)

GIB = 2**30
BUSY_TOKENS = 4096
"""Tokens of a micro-batch that keep a device busy; more save little time."""


@dataclass(frozen=True)
class Request:
    """A request for a plan."""

    run: Placement
    """The run; the number of ranks that share its weights is to be chosen."""
    device_bytes: float
    """Memory of one device."""
    images_per_rank: int
    """Images of the global batch on each rank."""
    micro_batch_size: int | None = None
    """Micro-batch to plan for; None: the largest that fits and divides ``images_per_rank``."""
    node_size: int = 8
    """Number of devices of a node, joined by the fast link."""
    online_vae: bool = True
    """Whether images are encoded in the step."""
    machine_bytes: float = 0
    """Host memory for weights that the devices cannot hold (fsdp2.yaml: offload_to_cpu)."""

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.run.world_size

    @property
    def global_batch_size(self) -> int:
        """Images of a step over all ranks."""
        return self.images_per_rank * (self.world_size // self.run.sequence_ranks)


@dataclass(frozen=True)
class Recommendation:
    """A placement, its micro-batch size, and the reasons."""

    placement: Placement
    micro_batch_size: int
    reasons: dict[str, str]
    """Reason for each key of fsdp2.yaml."""


def recommend(model: ModelConfig, request: Request) -> Recommendation:
    """Choose the cheapest placement whose micro-batch keeps a device busy: least sharding first, recompute last.

    Raises ConfigError if the requested micro-batch, or a single image, does not fit.
    """
    busy = min(request.images_per_rank, -(-BUSY_TOKENS // model.predictor.num_tokens))
    placements = candidates(request)
    for enough in (request.micro_batch_size or busy, request.micro_batch_size or 1):
        for placement in placements:
            largest = fitting(model, placement, request)
            micro = request.micro_batch_size or _divisor_up_to(request.images_per_rank, largest)
            if enough <= micro <= largest:
                return _recommendation(model, placement, micro, request)
    if offloaded := _offloaded(model, request):
        return offloaded
    micro_batch_size = request.micro_batch_size or 1
    needs = [memory(model, placement, request.online_vae).total(micro_batch_size) for placement in placements]
    need = min(needs)
    best = placements[needs.index(need)]
    sharded = f" and sharding over {best.shard_ranks} ranks" if best.shard_ranks > 1 else ""
    raise ConfigError(
        f"--device-memory-gib = {request.device_bytes / GIB:g} is too little: {micro_batch_size} image(s) of a "
        f"micro-batch need {need / GIB:.1f} GiB with recompute{sharded}, and {fitting(model, best, request)} fit. Use "
        "more or larger devices, or smaller images; mm-dit plan also tries --micro-batch-size and --offload-to-cpu."
    )


def _offloaded(model: ModelConfig, request: Request) -> Recommendation | None:
    """Return a placement with weights offloaded to host memory; None if it does not fit either."""
    precision = SHARDED_BF16 if request.run.precision == AUTOCAST else request.run.precision
    run = dataclasses.replace(request.run, offloaded=True, precision=precision)
    if request.run.offloaded or not request.machine_bytes:
        return None
    try:
        recommendation = recommend(model, dataclasses.replace(request, run=run))
    except ConfigError:
        return None
    in_machine = memory(model, recommendation.placement, request.online_vae).host_bytes_offloaded
    need = request.world_size * max(in_machine, host_bytes(model.predictor))  # (each rank first builds all of it)
    return recommendation if need <= request.machine_bytes * (1 - RESERVE) else None


def fitting(model: ModelConfig, placement: Placement, request: Request) -> int:
    """Return the largest micro-batch of ``placement``."""
    return memory(model, placement, request.online_vae).largest_micro_batch(request.device_bytes)


def candidates(request: Request) -> list[Placement]:
    """Return the placements to try, cheapest first: least sharding within one node, one copy per node across nodes.

    An offloaded placement has one copy over all ranks.
    """
    W, node = request.world_size, request.node_size
    sizes = (1, W) if node >= W else (node, W) if W % node == 0 else (W,)
    plain = [
        dataclasses.replace(request.run, shard_ranks=size, reshard_after_forward=reshard)
        for size in dict.fromkeys(sizes[-1:] if request.run.offloaded else sizes)
        for reshard in (False, True)
    ]
    again = [dataclasses.replace(placement, recompute=True) for placement in plain if placement.reshard_after_forward]
    return again if request.run.offloaded_blocks else plain + again  # (blocks that wait are recomputed)


def fsdp2_yaml(model: ModelConfig, recommendation: Recommendation, header: str) -> str:
    """Return the text of fsdp2.yaml, with the reason for each key as a comment."""
    placement = recommendation.placement
    prefetch = placement.prefetch if placement.shard_ranks > 1 else 0
    parameters = parameters_of(model)
    blocks = [f"predictor.{prefix}.{{*}}" for prefix in parameters.block_prefixes]
    names = list(parameters)
    after = names[names.index(next(name for name in reversed(names) if parameters.block_of(name))) + 1 :]
    last = dict.fromkeys(f"predictor.{name.partition('.')[0]}" for name in after if "." in name)
    values: dict[str, object] = {
        "sharding_size": "auto" if 1 < placement.shard_ranks == placement.world_size else placement.shard_ranks,
        "sub_modules_to_wrap": [*blocks, *last],
        "reshard_after_forward": placement.reshard_after_forward,
        "param_dtype": placement.precision.compute,
        "reduce_dtype": "fp32",
        "cast_forward_inputs": False,
        "recompute_modules": blocks if placement.recompute else [],
        "use_reentrant": False,
        "num_to_forward_prefetch": prefetch,
        "num_to_backward_prefetch": prefetch,
        **({"offload_to_cpu": True} if placement.offloaded else {}),
    }
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    for key, value in values.items():
        lines.append(f"# {recommendation.reasons[key]}")
        if isinstance(value, list) and value:
            lines += [f"{key}:", *(f"  - {item}" for item in value)]
        else:
            lines.append(f"{key}: {str(value).lower() if isinstance(value, bool) else value}")
    return "\n".join(lines) + "\n"


def _recommendation(model: ModelConfig, placement: Placement, micro: int, request: Request) -> Recommendation:
    plan = memory(model, placement, request.online_vae)
    limit = request.device_bytes / GIB
    whole = memory(model, dataclasses.replace(placement, shard_ranks=1, offloaded=False), request.online_vae)
    state = (whole.weights + whole.gradients + whole.optimizer + whole.ema) / GIB
    per_rank = (plan.weights + plan.gradients + plan.optimizer + plan.ema) / GIB
    without = fitting(model, dataclasses.replace(placement, recompute=False), request)
    sharding = (
        "blocks come from the machine's memory as they are needed"
        if placement.offloaded
        else f"{state:.1f} GiB of weights, gradients, optimizer state and EMA fit beside the batch: nothing is gathered"
        if placement.shard_ranks == 1
        else f"{state:.1f} GiB of weights, gradients, optimizer state and EMA become {per_rank:.1f} GiB on each rank"
        + ("; only gradients of one shard cross between nodes" if placement.shard_ranks < placement.world_size else "")
    )
    recompute = (
        f"{without} images fit if activations are kept, {micro} if they are recomputed, for a third more arithmetic"
        if placement.recompute
        else f"activations of {micro} images fit: {micro * plan.activations_per_sample / GIB:.1f} of {limit:.4g} GiB"
    )
    reshard = (
        "to save memory, gathered weights are freed after forward and gathered again in backward"
        if placement.reshard_after_forward
        else f"there is room for the gathered {placement.precision.compute} weights between forward and backward: one "
        "gather less"
    )
    travel = (
        "nothing is gathered, so nothing is prefetched"
        if placement.shard_ranks == 1
        else "the next block's weights are gathered while this one computes"
    )
    return Recommendation(
        placement,
        micro,
        {
            "sharding_size": sharding,
            "sub_modules_to_wrap": "one block is gathered at a time; the embedders stay with the root",
            "reshard_after_forward": reshard,
            "param_dtype": "half the traffic, twice the arithmetic rate or more; the weights themselves stay float32"
            if placement.precision.compute == "bf16"
            else "the precision of the weights",
            "reduce_dtype": "sums of many small gradients lose their low bits in bf16",
            "cast_forward_inputs": "latents and noise stay float32; the embedders cast their own inputs",
            "recompute_modules": recompute,
            "use_reentrant": "PyTorch's recommended form of recompute; it also works with torch.compile",
            "num_to_forward_prefetch": travel,
            "num_to_backward_prefetch": "the same in backward",
            "offload_to_cpu": f"{plan.host_bytes_offloaded / GIB:.1f} GiB a rank are in the machine's memory",
        },
    )


def _divisor_up_to(number: int, limit: int) -> int:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return max((d for low in small for d in (low, number // low) if d <= limit), default=0)


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
    weight = 2 if placement.precision.mode == "fsdp2" else 4
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
