"""Device, ranks and the transport of tensors between them, on CPU and Ascend, under msrun or alone."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, communication, ops

from mindspeed_mm_dit.configs.fsdp2 import ComputeMode
from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.framework.contract import host_memory_bytes

_DEVICES = {"gloo": "cpu", "nccl": "cuda", "hccl": "npu"}
_NAMES = {"CPU": "cpu", "GPU": "cuda", "Ascend": "npu"}

ON_CPU = mindspore.get_context("device_target") == "CPU"
"""Whether this process computes on a CPU; a constant, so that ms.jit compiles only the branch that is taken."""

if ON_CPU:  # else its threads spin between operators: 25 times the CPU time if operators are small
    mindspore.runtime.launch_blocking()


CAN_SAMPLE_IN_BF16 = False
"""Whether ``autocast`` and ``cast_matmul_weights_to_bf16`` are supported."""
BF16_MODES: tuple[ComputeMode, ...] = ()
"""Modes in which a training step may compute in bfloat16: none yet."""
HAS_CONTEXT_PARALLEL = False
"""Whether several ranks can share the tokens of a sample: not yet."""
HAS_LOW_BIT_WEIGHTS = False
"""Whether frozen linear layers can keep their weights in few bits: not yet."""


class _Job:
    """The group that this process has joined, and its micro-batches per step."""

    joined = False
    num_microbatches = 1


def device_type() -> str:
    """Return "npu" or "cpu": the device MindSpore has chosen."""
    return _NAMES[mindspore.get_context("device_target")]


def check_backend(backend: str | None) -> str:
    kind = device_type()
    native = next(name for name, device in _DEVICES.items() if device == kind)
    if backend is not None and backend != native:
        raise PlatformError(
            f"--distributed-backend = {backend} needs a {_DEVICES[backend].upper()} device, but MindSpore "
            f"{mindspore.__version__} runs on {kind.upper()}. Leave the flag out, or use {native}."
        )
    return native


def initialize(backend: str | None, micro_batch_size: int, global_batch_size: int, sequence_ranks: int = 1) -> None:
    """Join the group that msrun describes (without msrun, a group of one); ``sequence_ranks`` must be 1."""
    check_backend(backend)
    assert sequence_ranks == 1, "HAS_CONTEXT_PARALLEL"
    if world_size() > 1 and not _Job.joined:
        communication.init()
        _Job.joined = True
    _Job.num_microbatches = global_batch_size // (micro_batch_size * world_size())


def shutdown() -> None:
    """Leave the group."""
    if _Job.joined:
        communication.release()
        _Job.joined = False


def num_microbatches() -> int:
    return _Job.num_microbatches


def rank() -> int:
    return communication.get_rank() if _Job.joined else int(os.environ.get("RANK_ID", "0"))


def world_size() -> int:
    return communication.get_group_size() if _Job.joined else int(os.environ.get("MS_WORKER_NUM", "1"))


data_parallel_rank, data_parallel_size = rank, world_size  # ranks do not share samples


def device_name() -> str:
    if device_type() == "cpu":
        return f"CPU ({platform.processor() or platform.machine()})"
    return f"{mindspore.get_context('device_target')} {os.environ.get('DEVICE_ID', '0')}"


def device_memory_bytes() -> int | None:
    """Return the bytes of the machine on a CPU; None on an accelerator, which is not queried."""
    return host_memory_bytes() if device_type() == "cpu" else None


def to_device(batch: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Turn a batch of arrays into tensors; MindSpore copies them when an operator reads them."""
    return {name: Tensor(array) for name, array in batch.items()}


def to_host(x: Tensor) -> np.ndarray:
    """Return ``x`` as an array; low-precision floats come as float32."""
    return (x.astype(mindspore.float32) if x.dtype in (mindspore.float16, mindspore.bfloat16) else x).asnumpy()


@cache
def _sum_over_ranks() -> ops.AllReduce:
    return ops.AllReduce(ops.ReduceOp.SUM)  # float32 sum: the one reduction every device offers


def mean_over_ranks(values: list[Tensor]) -> list[Tensor]:
    """Average scalar tensors over all ranks."""
    joined = ops.cat([value.astype(mindspore.float32).reshape((1,)) for value in values], 0)
    if world_size() > 1:
        joined = _sum_over_ranks()(joined) / world_size()
    return [joined[i] for i in range(len(values))]


def mean_over_ranks_on_cpu(values: np.ndarray) -> np.ndarray:
    """Average an array of the host over all ranks, in float32."""
    return to_host(mean_vector_over_ranks(Tensor(values, mindspore.float32)))


def mean_vector_over_ranks(vector: Tensor) -> Tensor:
    """Average a vector over all ranks."""
    return vector if world_size() == 1 else _sum_over_ranks()(vector) / world_size()


class PendingRead:
    """Scalars that may still be on their way: MindSpore waits for a tensor only when it is read."""

    def __init__(self, values: list[Tensor]) -> None:
        self._values = values

    def is_ready(self) -> bool:
        """Return whether ``wait`` would return at once: true on a CPU, where the step has been waited for."""
        return ON_CPU

    def wait(self) -> list[float]:
        return [float(value.asnumpy()) for value in self._values]


def read_later(values: list[Tensor]) -> PendingRead:
    """Return scalars to be read later."""
    return PendingRead(values)


def any_over_ranks(flag: bool) -> bool:
    """Return whether ``flag`` is true on any rank."""
    return each_any_over_ranks([flag])[0]


def each_any_over_ranks(flags: list[bool]) -> list[bool]:
    """Return for each of ``flags`` whether it is true on any rank, in one exchange."""
    if world_size() == 1:
        return flags
    return [bool(count > 0) for count in _sum_over_ranks()(Tensor(np.array(flags, np.float32))).asnumpy()]


def barrier() -> None:
    any_over_ranks(False)


def load_arrays(module: mindspore.nn.Cell, arrays: Mapping[str, np.ndarray]) -> None:
    """Write ``arrays`` into the parameters of ``module``; every name must be there, in its shape."""
    parameters: dict[str, Parameter] = dict(module.parameters_and_names())
    for name, array in arrays.items():
        assert parameters[name].shape == array.shape, (name, parameters[name].shape, array.shape)
        parameters[name].set_data(Tensor(np.asarray(array), parameters[name].dtype))


def shapes(module: mindspore.nn.Cell) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in module.parameters_and_names()}


def meta_device_context() -> None:
    """Return None: MindSpore has no tensors without values."""


def to_runtime_device(module: mindspore.nn.Cell) -> mindspore.nn.Cell:
    """Return ``module``: MindSpore puts tensors on the device when an operator reads them."""
    return module


def autocast(bf16: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context that changes nothing; raises PlatformError if ``bf16``."""
    if bf16:
        raise PlatformError("--bf16 is not supported for sampling on MindSpore. Leave the flag out.")
    return contextlib.nullcontext()


def without_weights() -> NoReturn:
    raise _no_low_bit_weights()


def pack_weights(network: Any, formats: Mapping[str, str]) -> NoReturn:
    raise _no_low_bit_weights()


def _no_low_bit_weights() -> PlatformError:
    return PlatformError("--base-dtype is not offered on MindSpore. Leave it out, or use --ai-framework pytorch.")


def cast_matmul_weights_to_bf16(module: mindspore.nn.Cell) -> mindspore.nn.Cell:
    """Refuse --bf16, as ``autocast`` does."""
    autocast(True)
    return module


def free_memory() -> None:
    """Release unused memory."""
    gc.collect()


class Profiler:
    """Records what MindSpore's profiler sees from now on, on the host and an Ascend device, into ``folder``."""

    def __init__(self, folder: Path) -> None:
        profiler = mindspore.profiler
        activities = [profiler.ProfilerActivity.CPU]
        if not ON_CPU:
            activities.append(profiler.ProfilerActivity.NPU)
        self._folder = folder
        self._profile = profiler.profile(
            activities=activities, on_trace_ready=profiler.tensorboard_trace_handler(str(folder))
        )

    def stop(self) -> Path:
        """Write the trace (``trace_view.json``, for a browser), and return its folder."""
        self._profile.stop()
        return self._folder


def report_failure(error: BaseException) -> None:
    """Do nothing: msrun stores a worker's output, and checks its exit code."""


def prepare_frozen(module: mindspore.nn.Cell, dtype: str = "fp32") -> mindspore.nn.Cell:
    """Return ``module`` frozen, in precision "fp32" or "bf16"; raises PlatformError for bf16 on a CPU."""
    if dtype == "bf16" and device_type() == "cpu":
        raise PlatformError("dtype = bf16 is not supported: MindSpore has no bfloat16 products on a CPU. Use fp32.")
    for parameter in module.get_parameters():
        parameter.requires_grad = False
        parameter.set_dtype({"fp32": mindspore.float32, "bf16": mindspore.bfloat16}[dtype])
    return module.set_train(False)


def jit_forward(module: mindspore.nn.Cell) -> mindspore.nn.Cell:
    """Return ``module``, its forward compiled by ms.jit, once for every shape of its inputs."""
    module.construct = mindspore.jit(module.construct)
    return module


def compile_blocks(blocks: Iterable[mindspore.nn.Cell], shapes: int = 1) -> NoReturn:
    """Refuse --torch-compile."""
    raise PlatformError("--torch-compile is PyTorch's. Leave it out: MindSpore compiles by itself.")


def allow_tf32(allowed: bool) -> None:
    """Refuse --tf32 if ``allowed``."""
    if allowed:
        raise PlatformError("--tf32 is for NVIDIA GPUs under PyTorch. Leave it out.")


def versions() -> dict[str, str]:
    return {"mindspore": mindspore.__version__, "numpy": np.__version__}
