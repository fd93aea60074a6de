"""Device, ranks and the transport of tensors between them, on CPU (gloo), CUDA (nccl) and NPU (hccl)."""

from __future__ import annotations

import gc
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from mindspeed_mm_dit.configs.fsdp2 import ComputeMode
from mindspeed_mm_dit.configs.source import MAX_GRAPHS
from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.framework.contract import host_memory_bytes
from mindspeed_mm_dit.framework.exits import exits_on_sigint
from mindspeed_mm_dit.framework.pytorch import sequence
from mindspeed_mm_dit.framework.pytorch.low_bit import pack_weights as pack_weights
from mindspeed_mm_dit.framework.pytorch.low_bit import packed_weights
from mindspeed_mm_dit.framework.pytorch.low_bit import without_weights as without_weights
from mindspeed_mm_dit.framework.pytorch.optim import is_sharded
from mindspeed_mm_dit.terminal import progress

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
CAN_SAMPLE_IN_BF16 = True
"""Whether ``autocast`` and ``cast_matmul_weights_to_bf16`` are supported."""
BF16_MODES: tuple[ComputeMode, ...] = ("autocast", "fsdp2")
"""Modes in which a training step may compute in bfloat16."""
HAS_CONTEXT_PARALLEL = True
"""Whether several ranks can share the tokens of a sample (``sequence``)."""
HAS_LOW_BIT_WEIGHTS = True
"""Whether frozen linear layers can keep their weights in few bits (``pack_weights``)."""
_sequence_ranks = 1
_num_microbatches = 1
_cpu_only = False
_flags_group: dist.ProcessGroup | None = None


def device_type() -> str:
    """Return "cuda", "npu" or "cpu": the best device of this machine, unless the process stays on the host."""
    if _cpu_only:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)  # exists once torch_npu is imported
    return "npu" if npu is not None and npu.is_available() else "cpu"


def use_cpu_only() -> None:
    """Let this process compute on the CPU, even if there are accelerators."""
    global _cpu_only
    _cpu_only = True


def meta_device_context() -> torch.device:
    """Return a context in which tensors have shapes and no values."""
    return torch.device("meta")


def device() -> torch.device:
    """Return the device of this process: accelerator LOCAL_RANK, the CPU, or meta in :func:`meta_device_context`."""
    if torch.get_default_device().type == "meta":
        return torch.device("meta")
    kind = device_type()
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))


def check_backend(backend: str | None) -> str:
    """Return the backend to use; raises PlatformError if ``backend`` cannot work on this machine."""
    kind = device_type()
    if backend is None:
        return _BACKENDS[kind]
    backend_device = {"gloo": "cpu", "nccl": "cuda", "hccl": "npu"}[backend]
    if backend != "gloo" and backend_device != kind:
        raise PlatformError(
            f"--distributed-backend = {backend} needs a {backend_device.upper()} device, but this PyTorch "
            f"({torch.__version__}) sees none. Leave the flag out, or use gloo on a CPU."
        )
    return backend


def initialize(backend: str | None, micro_batch_size: int, global_batch_size: int, sequence_ranks: int = 1) -> None:
    """Join the process group that torchrun describes (without torchrun, a group of one) and choose the device.

    sequence_ranks: number of consecutive ranks that share the tokens of their samples.
    """
    backend = check_backend(backend)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    # A group of one needs no port for others to find it, so it opens none.
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if os.environ["WORLD_SIZE"] == "1" else {}
    if device_type() != "cpu":
        _choose_accelerator(int(os.environ["LOCAL_RANK"]))
    with exits_on_sigint():
        if not dist.is_initialized():
            # Asynchronous checkpoints and flags need a CPU backend, whatever the device.
            backends = backend if backend == "gloo" else f"cpu:gloo,{device_type()}:{backend}"
            dist.init_process_group(backends, **alone)
        divide_among_ranks(micro_batch_size, global_batch_size, sequence_ranks)


def divide_among_ranks(micro_batch_size: int, global_batch_size: int, sequence_ranks: int = 1) -> None:
    """Divide the samples among ranks that have joined; arguments as in :func:`initialize`."""
    global _flags_group, _num_microbatches, _sequence_ranks
    _flags_group = host_process_group()
    sequence_group = dist.new_subgroups(sequence_ranks)[0] if sequence_ranks > 1 else None
    _sequence_ranks = sequence_ranks
    _num_microbatches = global_batch_size // (micro_batch_size * data_parallel_size())
    sequence.set_context_parallel_group(sequence_group, device_type())


def host_process_group() -> dist.ProcessGroup:
    """Return a group of all ranks over gloo.

    If the host program has bound its group to a device, PyTorch would look for a backend of that device here too.
    """
    whole: Any = dist.group.WORLD
    bound, whole.bound_device_id = whole.bound_device_id, None
    try:
        return dist.new_group(backend="gloo")
    finally:
        whole.bound_device_id = bound


def _choose_accelerator(number: int) -> None:
    count = torch.accelerator.device_count()
    if number >= count:
        raise PlatformError(
            f"LOCAL_RANK = {number} is too high for the {count} accelerator(s) of this machine. Start {count} "
            "process(es) (NPUS_PER_NODE)."
        )
    torch.accelerator.set_device_index(number)


def shutdown() -> None:
    """Leave the process group.

    The error of a failed save holds a group in a reference cycle. If it were collected only while Python exits, the
    group's threads would abort the process.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def num_microbatches() -> int:
    """Return the number of micro-batches per optimizer step on this rank."""
    return _num_microbatches


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def data_parallel_rank() -> int:
    """Return which samples of a batch are this rank's; ranks that share samples have the same."""
    return rank() // _sequence_ranks


def data_parallel_size() -> int:
    """Return the number of ranks, or of groups of ranks that share samples, with separate samples."""
    return world_size() // _sequence_ranks


def device_name() -> str:
    """Return a description of this process's device for the log."""
    kind = device_type()
    if kind == "cpu":
        return f"CPU ({platform.processor() or platform.machine()}, {torch.get_num_threads()} threads)"
    return str(getattr(torch, kind).get_device_name())


def device_memory_bytes() -> int | None:
    """Return the bytes of this process's device, of the machine on a CPU; None if there is no such device."""
    target = device()
    if target.type == "cpu":
        return host_memory_bytes()
    accelerator = torch.get_device_module(target)
    if (target.index or 0) >= accelerator.device_count():
        return None
    return int(accelerator.get_device_properties(target.index or 0).total_memory)


def to_device(batch: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Move a batch of arrays to the device; the copy overlaps with computation on accelerators."""
    target = device()
    tensors = {name: torch.as_tensor(array) for name, array in batch.items()}
    if target.type in ("cpu", "meta"):  # (on meta they were created there)
        return tensors
    return {name: x.pin_memory().to(target, non_blocking=True) for name, x in tensors.items()}


def mean_over_ranks(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Average scalar tensors over all ranks, without waiting for the device."""
    stacked = torch.stack([value.detach().float().reshape(()) for value in values])
    if world_size() > 1:
        dist.all_reduce(stacked)
        stacked /= world_size()
    return list(stacked.unbind())


def mean_over_ranks_on_cpu(values: np.ndarray) -> np.ndarray:
    """Average an array of the host over all ranks, in float32, without the device."""
    mean = torch.tensor(values, dtype=torch.float32)
    if world_size() > 1:
        dist.all_reduce(mean, group=_flags_group)
        mean /= world_size()
    return mean.numpy()


class PendingRead:
    """Scalars on their way to the host; reading them does not wait for work queued on the device later."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        target = device()  # (with offload_to_cpu the norm of the gradients is on the host)
        stacked = torch.stack([value.detach().float().reshape(()).to(target, non_blocking=True) for value in values])
        self._values, self._arrived = stacked, None
        if stacked.device.type != "cpu":
            self._values = torch.empty(stacked.shape, pin_memory=True).copy_(stacked, non_blocking=True)
            self._arrived = torch.get_device_module(stacked.device).Event()
            self._arrived.record()

    def is_ready(self) -> bool:
        """Return whether ``wait`` would return at once."""
        return self._arrived is None or bool(self._arrived.query())

    def wait(self) -> list[float]:
        """Return the values."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return list(self._values.tolist())


def read_later(values: list[torch.Tensor]) -> PendingRead:
    """Start copying scalars to the host; reading them later waits only for what was queued before."""
    return PendingRead(values)


def any_over_ranks(flag: bool) -> bool:
    """Return whether ``flag`` is true on any rank; on the CPU, without waiting for the device."""
    return each_any_over_ranks([flag])[0]


def each_any_over_ranks(flags: list[bool]) -> list[bool]:
    """Return for each of ``flags`` whether it is true on any rank, in one exchange on the CPU."""
    if world_size() == 1:
        return flags
    values = torch.tensor(flags, dtype=torch.uint8)
    dist.all_reduce(values, dist.ReduceOp.MAX, group=_flags_group)
    return [bool(value) for value in values.tolist()]


def barrier() -> None:
    """Wait until every rank is here."""
    if world_size() > 1:
        dist.barrier(group=_flags_group)


def load_arrays(module: torch.nn.Module, arrays: Mapping[str, np.ndarray]) -> None:
    """Write ``arrays`` into the parameters of ``module``, of which each rank may hold a part; all must exist."""
    parameters: dict[str, Any] = module.state_dict(keep_vars=True)  # (a checkpoint's names, without those of wrappers)
    packed = packed_weights(module)
    items: Any = arrays.items()
    if packed:
        items = progress("storing weights in few bits", items, total=len(arrays), unit="tensor", delay=2)
    with torch.no_grad():
        for name, array in items:
            if name in packed:
                packed[name].load(array, device())
                continue
            parameter, value = parameters[name], torch.as_tensor(np.asarray(array))
            assert parameter.shape == value.shape, (name, parameter.shape, value.shape)
            if is_sharded(parameter):
                value = _local_shard(value.to(device()), parameter)
                parameter = parameter.to_local()
            parameter.copy_(value)


def _local_shard(whole: torch.Tensor, sharded: Any) -> torch.Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None).to_local()


def shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every parameter of a module."""
    packed = packed_weights(module)
    others = {name: p for name, p in module.named_parameters() if name.rpartition(".")[0] not in packed}
    return {name: tuple(p.shape) for name, p in {**others, **packed}.items()}


def to_runtime_device(model: torch.nn.Module) -> torch.nn.Module:
    """Move a model to the device of this process."""
    return model.to(device())


def autocast(bf16: bool) -> torch.autocast:
    """Return a context in which, if ``bf16``, matrix products run in bfloat16."""
    return torch.autocast(device_type(), torch.bfloat16, enabled=bf16)


def cast_matmul_weights_to_bf16(module: torch.nn.Module) -> torch.nn.Module:
    """Keep the weights of linear and convolutional layers in bfloat16; ``autocast`` would cast them in every call.

    Results stay the same, to the bit.
    """
    for layer in module.modules():
        if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d)):
            layer.to(torch.bfloat16)
    return module


def free_memory() -> None:
    """Release the accelerator's unused memory to other processes."""
    gc.collect()
    if device_type() != "cpu":
        getattr(torch, device_type()).empty_cache()  # (torch.accelerator has it from 2.9 on)


class Profiler:
    """Records operators, and kernels of an NVIDIA GPU, from now on, as a chrome trace in the file ``path``.json."""

    def __init__(self, path: Path) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device_type() == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._file = path.with_name(f"{path.name}.json")
        self._profile = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profile.start()

    def stop(self) -> Path:
        """Write the trace, and return its file."""
        if device_type() != "cpu":
            torch.accelerator.synchronize()  # work that the steps have queued belongs to them
        self._profile.stop()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._file))
        if not self._file.is_file():  # (the exporter reports no error)
            raise OSError(f"{self._file} was not written")
        return self._file


def report_failure(error: BaseException) -> None:
    """Store ``error`` where torchrun looks for it, so that its summary names the reason."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        ErrorHandler().record_exception(error)


def prepare_frozen(module: torch.nn.Module, dtype: str = "fp32") -> torch.nn.Module:
    """Return ``module`` frozen on the device, in precision "fp32" or "bf16"."""
    return module.to(device(), {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]).eval().requires_grad_(False)


def jit_forward(module: torch.nn.Module) -> torch.nn.Module:
    """Return ``module`` as it is: its operators are fast without compilation."""
    return module


def compile_blocks(blocks: Iterable[torch.nn.Module], shapes: int = 1) -> None:
    """Compile the forward of each transformer block in place (--torch-compile); equal blocks share a compilation.

    shapes: the number of shapes that samples have. Up to MAX_GRAPHS shapes have a graph each, or one for those with as
    many tokens; more have one graph with dynamic sizes. Recompute and the hooks of FSDP2, which come later, stay
    outside of the compiled code.

    Raises:
        PlatformError: on a CPU without a C++ compiler, which is needed to build the code.
    """
    if device_type() == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        raise PlatformError(
            "--torch-compile needs a C++ compiler on a CPU, such as g++ or clang++. Install one, or drop the flag."
        )
    torch._dynamo.config.optimize_ddp = False  # it would split a block's graph where DDP's buckets end
    torch._dynamo.config.recompile_limit = max(8, 4 * MAX_GRAPHS)  # (validation and samples have other graphs)
    dynamic = None if shapes == 1 else shapes > MAX_GRAPHS
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=dynamic)


def allow_tf32(allowed: bool) -> None:
    """Let float32 products and convolutions round their inputs to TensorFloat-32 (--tf32; NVIDIA GPUs have it)."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def versions() -> dict[str, str]:
    """Return the versions that decide what this framework computes."""
    return {"torch": torch.__version__, "numpy": np.__version__}
