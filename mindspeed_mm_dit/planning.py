"""The cost of a run, from model.json in closed form: parameters, FLOP, bytes and time. Needs no device or framework."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_mm_dit.configs.fsdp2 import SHARDED_BF16, Fsdp2Config, Precision
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.predictor import ParameterSpec, ParameterSpecs, PredictorConfig, count
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework.low_bit import WIDENED_AT_ONCE, num_bytes
from mindspeed_mm_dit.models.meta import forward_pass, multiply_adds, parameters_of
from mindspeed_mm_dit.optimizers.contract import ConfiguredOptimizer
from mindspeed_mm_dit.optimizers.registry import ADAMW


def train_flop(predictor: PredictorConfig) -> int:
    """Return the FLOP of one sample in one training step: forward, and twice that in backward; 2 per multiply-add."""
    return 6 * multiply_adds(predictor)


def recompute_flop(predictor: PredictorConfig) -> int:
    """Return the FLOP that recomputing the blocks adds per sample and step; they do not count as useful in MFU."""
    return 2 * multiply_adds(predictor)


PEAKS: dict[str, dict[str, float]] = {
    # part of the device's name: dense TFLOP/s of the vendor's data sheet; fp32 with PyTorch's defaults (no TF32)
    "B200": {"bf16": 2250.0, "fp32": 75.0},
    "H200": {"bf16": 989.0, "fp32": 67.0},
    "H100 PCIe": {"bf16": 756.0, "fp32": 51.0},
    "H100": {"bf16": 989.0, "fp32": 67.0},
    "H800": {"bf16": 989.0, "fp32": 67.0},
    "A100": {"bf16": 312.0, "fp32": 19.5},
    "A800": {"bf16": 312.0, "fp32": 19.5},
    "L40S": {"bf16": 362.0, "fp32": 91.6},
    "4090": {"bf16": 165.2, "fp32": 82.6},
}
"""Ascend parts and CPUs are not listed, because parts of the same name differ too much: use --peak-tflops."""

CARDS = {"4090": 24, "L40S": 48, "H100": 80, "H200": 141, "B200": 192}
"""Memory in GiB of the devices whose peak a plan assumes if only the memory is known; ascending."""


def smallest_card(gib: float) -> str:
    """Return the smallest of CARDS with ``gib`` of memory, or the largest of all."""
    return next((name for name, memory in CARDS.items() if memory >= gib), list(CARDS)[-1])


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Return the peak TFLOP/s of a device in ``precision`` "bf16" or "fp32"; None if its name has no known part."""
    for part, peaks in PEAKS.items():
        if part in device_name:
            return peaks[precision]
    return None


def model_flop_utilization(
    images_per_second: float, flop_per_image: float, peak: float | None, devices: int = 1
) -> float | None:
    """Return the MFU: useful arithmetic / peak of all ``devices``, in [0, 1]; None if the peak is unknown."""
    return None if peak is None else images_per_second * flop_per_image / (peak * 1e12 * devices)


RESERVE = 0.08
"""Fraction of a device's memory kept free for the context, the buffers of collectives and fragmentation."""

_MATRIX_COPIES = 4
"""Tensors of the size of a parameter that an optimizer of whole matrices holds while it updates it."""


@dataclass(frozen=True)
class Placement:
    """How a run is spread over devices."""

    world_size: int = 1
    """Number of ranks."""
    shard_ranks: int = 1
    """Number of ranks that share one copy of the weights (fsdp2.yaml: sharding_size)."""
    precision: Precision = SHARDED_BF16
    """Precision of forward and backward."""
    recompute: bool = False
    """Whether the blocks' activations are recomputed in backward."""
    prefetch: int = 1
    """Number of blocks whose weights are gathered ahead."""
    reshard_after_forward: bool = True
    """Whether gathered weights are freed between forward and backward."""
    sequence_ranks: int = 1
    """Number of ranks that share the tokens of a sample (--context-parallel-size)."""
    averages: int = 1
    """Number of EMAs of the weights: the plain one, and those of --power-ema-stds."""
    optimizer: ConfiguredOptimizer = ADAMW
    """The optimizer."""
    offloaded_blocks: int = 0
    """Number of blocks whose frozen weights in few bits wait in the machine's memory (--offload-blocks)."""
    offloaded: bool = False
    """Whether weights, gradients, optimizer state and EMA are in the machine's memory (fsdp2.yaml: offload_to_cpu)."""

    def with_sharding(self, fsdp2: Fsdp2Config | None) -> Placement:
        """Return this placement with the sharding of fsdp2.yaml; None: every rank holds all weights."""
        if fsdp2 is None:
            return self
        return replace(
            self,
            shard_ranks=fsdp2.shard_ranks(self.world_size),
            recompute=bool(fsdp2.recompute_modules),
            prefetch=fsdp2.num_to_forward_prefetch or 0,
            reshard_after_forward=bool(fsdp2.reshard_after_forward),
        )


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    gathered: int
    """Gathered, or cast, copies of weights and gradients that a block computes with."""
    vae: int
    """Weights of the autoencoder, and of teachers and an image encoder whose files exist."""
    activations_per_sample: int
    """Kept from forward to backward."""
    workspace_per_sample: int
    """Temporary: gradients of activations, one recomputed block, the autoencoder's layers."""
    host_bytes_offloaded: int = 0
    """What lies in the machine's memory instead of the first four, for each rank."""

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.weights + self.gradients + self.optimizer + self.ema + self.gathered + self.vae

    def total(self, micro_batch_size: int) -> int:
        """Return the bytes with ``micro_batch_size`` images."""
        return self.fixed + micro_batch_size * (self.activations_per_sample + self.workspace_per_sample)

    def largest_micro_batch(self, device_bytes: float) -> int:
        """Return how many images fit into a device of ``device_bytes``, minus RESERVE; 0 if none does."""
        free = device_bytes * (1 - RESERVE) - self.fixed
        return max(0, int(free // (self.activations_per_sample + self.workspace_per_sample)))


def memory(model: ModelConfig, placement: Placement, online_vae: bool = True) -> Memory:
    """Return the memory of a rank; ``online_vae``: images are encoded in the step, not read from a cache."""
    parameters, S = parameters_of(model), placement.shard_ranks
    trained, everything = parameters.num_elements(S, trained_only=True), parameters.num_elements(S)
    encoders: list[Any] = [model.ae, *model.teachers, *([model.image_encoder] if model.image_encoder else [])]
    activations, workspace = activation_bytes(model, placement)
    state = {
        "weights": 4 * everything + sum(_saved_bytes(p, S) for p in parameters.values() if p.stored_as),
        "gradients": 4 * trained,
        "ema": 4 * trained * placement.averages,
        "optimizer": optimizer_bytes(parameters, placement.optimizer, S),
    }
    waiting, buffers = _offloaded_bytes(parameters, placement.offloaded_blocks)
    state["weights"] += buffers - waiting
    on_device = dict.fromkeys(state, 0) if placement.offloaded else state
    return Memory(
        **on_device,
        host_bytes_offloaded=sum(state.values()) if placement.offloaded else waiting,
        gathered=max(_gathered_bytes(model, placement), _stepped_bytes(parameters, placement.optimizer)),
        vae=sum(encoder.weight_bytes() for encoder in encoders) if online_vae else 0,
        activations_per_sample=activations,
        workspace_per_sample=max(workspace, model.ae.workspace_bytes(model.sample_size) if online_vae else 0),
    )


def _saved_bytes(p: ParameterSpec, shards: int) -> int:
    """Return the difference that few bits make to the bytes of a weight on one of ``shards`` ranks: negative."""
    return -(-num_bytes(p.stored_as, p.shape) // shards) - 4 * count([p], shards)


def offloaded_blocks(count: int, blocks: Sequence[str]) -> list[str]:
    """Return which blocks wait in the machine's memory if ``count`` do: evenly spread, to leave time for copies."""
    total = len(blocks)
    return [block for n, block in enumerate(blocks) if (n + 1) * count // total > n * count // total]


def check_offloaded_blocks(count: int, base_dtype: str | None, parameters: ParameterSpecs) -> None:
    """Raise ConfigError unless ``count`` blocks, those of --offload-blocks, have frozen weights that can wait."""
    what, total = f"--offload-blocks = {count}", len(parameters.blocks)
    if count and not base_dtype:
        raise ConfigError(f"{what} moves frozen weights, and none are stored apart. Add --base-dtype.")
    if count > total:
        raise ConfigError(f"{what} is more than the {total} blocks of this model. Use fewer.")


def _offloaded_bytes(parameters: ParameterSpecs, blocks: int) -> tuple[int, int]:
    """Return the bytes that wait in the machine's memory, and those of the two buffers on the device."""
    by_block = parameters.by_block()
    waiting = [
        sum(num_bytes(p.stored_as, p.shape) for p in by_block[block] if p.stored_as)
        for block in offloaded_blocks(blocks, parameters.blocks)
    ]
    return sum(waiting), 2 * max(waiting, default=0)


def optimizer_bytes(parameters: ParameterSpecs, optimizer: ConfiguredOptimizer, shards: int = 1) -> int:
    """Return the bytes of optimizer state on the fullest of ``shards`` ranks, without its step counters."""

    def state_bytes(p: ParameterSpec) -> int:
        return -(-optimizer.size_of(p).num_bytes * count([p], shards) // count([p]))

    return sum(state_bytes(p) for p in parameters.values() if p.trained)


def optimizer_note(parameters: ParameterSpecs, optimizer: ConfiguredOptimizer) -> str:
    """Return how the size of the optimizer's state was estimated; empty if it is exact."""
    return max((optimizer.size_of(p).note for p in parameters.values() if p.trained), default="")


def gathered_elements(parameters: ParameterSpecs, optimizer: ConfiguredOptimizer) -> int:
    """Return the elements whose shards an optimizer step must gather, because it needs their whole change."""
    return count(p for p in parameters.values() if p.trained and optimizer.rule_of(p).update_matrices)


def _stepped_bytes(parameters: ParameterSpecs, optimizer: ConfiguredOptimizer) -> int:
    """Return the bytes for stepping the largest whole matrix: its change, the result, and intermediate products."""
    matrix_sizes = (count([p]) for p in parameters.values() if optimizer.rule_of(p).update_matrices)
    return 4 * _MATRIX_COPIES * max(matrix_sizes, default=0)


def activation_bytes(model: ModelConfig, placement: Placement) -> tuple[int, int]:
    """Return the bytes of one image on one rank: (kept from forward to backward, temporary).

    Temporary memory is that of the gradients of a large tensor and the next, and one recomputed block.
    """
    passed = forward_pass(model, placement.precision.mode, placement.sequence_ranks)
    by_loss = 4 * model.diffusion.saved_tensors * math.prod(model.latent_shape)  # always float32
    saved = passed.saved_bytes(placement.recompute) + by_loss // placement.sequence_ranks
    return saved, 2 * passed.widest_bytes + (passed.largest_block_bytes() if placement.recompute else 0)


def _gathered_bytes(model: ModelConfig, placement: Placement) -> int:
    whole = parameters_of(model)
    widened = max((_widened_bytes(p, placement) for p in whole.values() if p.stored_as), default=0)
    wide = {name: p for name, p in whole.items() if not p.stored_as}
    return widened + _copied_bytes(ParameterSpecs(wide, whole.blocks), placement)


def _widened_bytes(p: ParameterSpec, placement: Placement) -> int:
    """Return the bytes for widening a weight in few bits inside a product: all of it, and what a chunk takes."""
    return (2 if placement.precision.mode else 4) * count([p]) + 10 * min(count([p]), WIDENED_AT_ONCE)


def _copied_bytes(parameters: ParameterSpecs, placement: Placement) -> int:
    if placement.precision.mode == "autocast":
        return 2 * parameters.num_elements()  # a copy of each weight is kept until backward is over
    if placement.shard_ranks == 1 and placement.precision.mode is None and not placement.offloaded:
        return 0
    element = 2 if placement.precision.mode == "fsdp2" else 4
    largest = max(map(count, parameters.by_block().values()))
    if not placement.reshard_after_forward:
        return element * (parameters.num_elements() + largest)
    return element * largest * (2 + placement.prefetch)  # in use, gathered ahead, and the gradient being reduced


GIB = 2**30
BLOCK_BYTES = 36_000
"""Bytes that the objects of one transformer block take, without its weights, when it is built (measured on PyTorch
2.13)."""


@dataclass(frozen=True)
class MemoryLimit:
    """A memory that a model must fit into."""

    name: str
    """Its name in errors."""
    num_bytes: int
    """Its size."""
    num_processes: int = 1
    """Number of ranks that share it."""


def check_model_fits(model: ModelConfig, limit: MemoryLimit, base_dtype: str = "") -> None:
    """Raise ConfigError unless the unsharded weights of all ranks, in ``base_dtype`` or float32, fit into ``limit``."""
    number = num_bytes(base_dtype, (1, 2**20)) / 2**20 if base_dtype else 4.0
    need = int(limit.num_processes * host_bytes(model.predictor, number))
    _check(model.predictor, need, "the weights of {} parameters need {}", limit)


def check_state_fits(model: ModelConfig, placement: Placement, limit: MemoryLimit) -> None:
    """Raise ConfigError unless weights, gradients, optimizer state and EMA of all ranks fit into ``limit``.

    The plan is exact about these, so a run that is refused could not have worked.
    """
    need = limit.num_processes * state_bytes(memory(model, placement))
    _check(model.predictor, need, "weights, gradients, optimizer state and average of {} parameters need {}", limit)


def memory_warning(
    model: ModelConfig, placement: Placement, micro_batch_size: int, online_vae: bool, limit: MemoryLimit
) -> str | None:
    """Return a warning if the plan estimates that a step needs more than ``limit`` has, else None."""
    plan = memory(model, placement, online_vae)
    need = limit.num_processes * plan.total(micro_batch_size)
    if need <= limit.num_bytes:
        return None
    largest = plan.largest_micro_batch(limit.num_bytes / limit.num_processes)
    advice = f"a micro-batch of {largest} fits" if largest else "no micro-batch fits"
    return (
        f"warning: --micro-batch-size = {micro_batch_size}: a step may need {_gib(need)}, and {limit.name} has "
        f"{_gib(limit.num_bytes)}; by the plan {advice} (mm-dit plan)"
    )


def host_bytes(predictor: PredictorConfig, number: float = 4.0) -> int:
    """Return the bytes that a network takes when it is built: weights of ``number`` bytes, and what holds them."""
    parameters = parameters_of(predictor)
    return int(number * parameters.num_elements()) + BLOCK_BYTES * len(parameters.blocks)


def state_bytes(plan: Memory) -> int:
    """Return the bytes that persist from step to step."""
    return plan.weights + plan.gradients + plan.optimizer + plan.ema


def _check(predictor: PredictorConfig, need: int, sentence: str, limit: MemoryLimit) -> None:
    if need > limit.num_bytes:
        name = dominant_setting(predictor)
        shared = f", which {limit.num_processes} ranks share" if limit.num_processes > 1 else ""
        raise ConfigError(
            f"predictor.{name} = {getattr(predictor, name)} is too large: "
            f"{sentence.format(f'{parameters_of(predictor).num_elements():,}', _gib(need))}, and {limit.name} has "
            f"{_gib(limit.num_bytes)}{shared}. Use a smaller {name}, or more devices (mm-dit plan says how many)."
        )


def dominant_setting(predictor: PredictorConfig) -> str:
    """Return the setting that makes a network large: resetting it to its ordinary value saves the most memory."""
    config: Any = predictor
    ordinary = predictor.settings_of_size()
    needed = {name: host_bytes(dataclasses.replace(config, **values)) for name, values in ordinary.items()}
    return min(needed, key=lambda name: needed[name], default="model_id")


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f} GiB"
