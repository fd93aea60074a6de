"""A device "npu" on a machine that has none: memory apart, late copies, streams, counts.

PyTorch imports this by itself (entry point torch.backends) where the folder above is on PYTHONPATH.
Variables: DEVICE_APART_COUNT, number of devices (4); DEVICE_APART_REPORT, a file that a process writes its counts to.
"""

import atexit
import json
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from torch_npu.build import extension
from torch_npu.names import Names

DEVICE = extension()
torch.utils.rename_privateuse1_backend("npu")


def _index(device: Any) -> int:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return DEVICE.current_device() if index is None else index


class _Device:
    """The context in which ``device`` is the current one."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = DEVICE.exchange_device(self._index)

    def __exit__(self, *error: object) -> None:
        DEVICE.exchange_device(self._before)


def counts() -> dict[str, Any]:
    """Return operators by name, waits of the host and where, bytes copied, and bytes in use, since the last reset."""
    found = DEVICE.counts()
    names = [name for name in dir(found) if not name.startswith("_")]
    return {**{name: getattr(found, name) for name in names}, "waited_at": [*_waited_at]}


_waited_at: list[str] = []


def _note(reason: str) -> None:
    """Note what the host waits for, and the lines of the project that it came by."""
    lines = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_stack()[:-1]]
    _waited_at.append(f"{reason}: {' '.join(lines[-8:])}")


def reset() -> None:
    """Count from zero; the most bytes in use begin at those that are."""
    _waited_at.clear()
    DEVICE.reset()


DEVICE.tell_waits(_note)
atexit.register(DEVICE.tell_waits, None)  # while there is a Python to forget it

npu = ModuleType("torch.npu")
vars(npu).update(
    __file__=__file__,  # MindSpeed-MM puts the module into messages, and so asks for it
    counts=counts, reset=reset, device=_Device, set_stream=torch.accelerator.set_stream,
    is_available=lambda: os.environ.get("DEVICE_APART_COUNT") != "0",
    is_initialized=lambda: True, _is_in_bad_fork=lambda: False, _lazy_init=lambda: None,
    device_count=DEVICE.device_count, current_device=DEVICE.current_device,
    set_device=lambda device: DEVICE.exchange_device(_index(device)),
    Stream=lambda device=None, priority=0: torch.Stream(torch.device("npu", _index(device))),
    Event=lambda **_: torch.Event("npu"),
    stream=lambda stream: stream,  # a stream is a context itself
    current_stream=lambda device=None: torch.accelerator.current_stream(_index(device)),
    synchronize=lambda device=None: torch.accelerator.synchronize(_index(device)),
    manual_seed=lambda seed: DEVICE.default_generator(-1).manual_seed(seed),
    manual_seed_all=lambda seed: [DEVICE.default_generator(n).manual_seed(seed) for n in range(DEVICE.device_count())],
    get_rng_state=lambda device=None: DEVICE.default_generator(_index(device)).get_state(),
    set_rng_state=lambda state, device=None: DEVICE.default_generator(_index(device)).set_state(state),
    get_device_name=lambda device=None: "a CPU with memory apart",
    get_device_properties=lambda device=None: SimpleNamespace(name="a CPU with memory apart", total_memory=16 << 30),
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16], is_bf16_supported=lambda: True,
    empty_cache=lambda: None, _lazy_call=lambda call, **_: call(), config=SimpleNamespace(), aclnn=SimpleNamespace(),
    memory_allocated=lambda device=None: DEVICE.counts().device_bytes,
    memory_reserved=lambda device=None: DEVICE.counts().device_bytes,
    max_memory_allocated=lambda device=None: DEVICE.counts().most_device_bytes,
    max_memory_reserved=lambda device=None: DEVICE.counts().most_device_bytes,
    default_generators=[DEVICE.default_generator(number) for number in range(DEVICE.device_count())],
)  # fmt: skip
sys.modules["torch_npu.npu"] = npu
torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)


def _hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return DEVICE.hccl_over(dist.ProcessGroupGloo(store, rank, size, timeout))


dist.Backend.register_backend("hccl", _hccl, devices=["npu"])


def npu_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor]:
    """Norm the last axis of ``x``: the one fused operator that the tests call, in diffusers' DC-AE."""
    return (torch.nn.functional.rms_norm(x, x.shape[-1:], weight, epsilon),)


__getattr__ = Names("torch_npu").__getattr__
_C = Names("torch_npu._C")
unsupported_dtype: list[torch.dtype] = []


def _report() -> None:
    if place := os.environ.get("DEVICE_APART_REPORT"):
        Path(f"{place}.{os.environ.get('RANK', '0')}.json").write_text(json.dumps(counts()))


atexit.register(_report)
