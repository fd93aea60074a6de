"""fsdp2.yaml on MindSpore: the optimizer's state is sharded over the workers (ZeRO-1; Rajbhandari et al. 2020).

Weights and gradients stay whole on every worker. Keys that this does not support raise an error that names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspore import Tensor, communication, ops

from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework.mindspore import runtime

_REASON = "MindSpore shards the optimizer's state only, the weights stay whole on every worker"


def check(config: Fsdp2Config) -> None:
    """Raise ConfigError for a key of fsdp2.yaml that this backend does not support."""
    unsupported: dict[str, bool] = {
        "offload_to_cpu": config.offload_to_cpu,
        "recompute_modules": bool(config.recompute_modules),
        "ignored_modules": bool(config.ignored),
        "num_to_forward_prefetch": bool(config.num_to_forward_prefetch),
        "num_to_backward_prefetch": bool(config.num_to_backward_prefetch),
        "reshard_after_forward": not isinstance(config.reshard_after_forward, bool),
        "reduce_dtype": config.reduce_dtype not in (None, "fp32"),
        "output_dtype": config.output_dtype not in (None, "fp32"),
    }
    for key, is_set in unsupported.items():
        if is_set:
            raise ConfigError(
                f"fsdp2.yaml: {key} = {getattr(config, key)!r}",
                f"--ai-framework mindspore cannot do this: {_REASON}",
                "leave the key out, or train with --ai-framework pytorch",
            )


@dataclass(frozen=True)
class Shards:
    """The slice of the flat state that this worker holds, and how slices are joined."""

    count: int
    """Workers that share one copy of the state."""
    number: int
    """This worker's slice."""
    group: str | None
    """Name of the communication group of those workers; None if it is the only one."""

    @classmethod
    def create(cls, config: Fsdp2Config | None) -> Shards:
        """Create the groups for ``sharding_size``; every worker must call this."""
        world = runtime.world_size()
        count = config.shard_ranks(world) if config else 1
        if count == 1:
            return cls(1, 0, None)
        if count == world:
            return cls(count, runtime.rank(), communication.GlobalComm.WORLD_COMM_GROUP)
        for start in range(0, world, count):
            communication.create_group(f"shards_{start}", list(range(start, start + count)))
        number = runtime.rank() % count
        return cls(count, number, f"shards_{runtime.rank() - number}")

    def local_slice(self, vector: Any) -> Any:
        """Return this worker's slice of a vector."""
        length = vector.shape[0] // self.count
        return vector[self.number * length : (self.number + 1) * length]

    def gathered(self, part: Tensor) -> Tensor:
        """Join the slices of all workers of the group."""
        if self.group is None:
            return part
        if self.group == communication.GlobalComm.WORLD_COMM_GROUP or runtime.device_type() != "cpu":
            return ops.AllGather(self.group)(part)
        # On a CPU only the group of all workers can gather: add up slices that are zero elsewhere.
        before, after = self.number * part.shape[0], (self.count - 1 - self.number) * part.shape[0]
        return ops.AllReduce(ops.ReduceOp.SUM, self.group)(ops.cat([ops.zeros(before), part, ops.zeros(after)], 0))
