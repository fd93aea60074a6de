"""Has a program that asks for CUDA find this device, as torch_npu's module of this name does."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


def _moved(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("npu", value.index)
    return value.replace("cuda", "npu", 1) if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


class _ToNpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = torch.Tensor.npu if function is torch.Tensor.cuda else function
        return function(*map(_moved, args), **{name: _moved(value) for name, value in (kwargs or {}).items()})


def _over_hccl(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        kept = {name: value for name, value in kwargs.items() if name not in ("device_id", "pg_options")}
        given = {name: "hccl" if value == "nccl" else value for name, value in kept.items()}
        return make(*("hccl" if value == "nccl" else value for value in args), **given)

    return made


for _name in ("init_process_group", "new_group"):
    _made = _over_hccl(getattr(dist, _name))
    for _module in (dist, dist.distributed_c10d):
        setattr(_module, _name, _made)
for _name, _value in vars(torch.npu).items():
    if not _name.startswith("__"):
        setattr(torch.cuda, _name, _value)
torch.nn.Module.cuda = torch.nn.Module.npu
_ToNpu().__enter__()
torch._utils._get_available_device_type = lambda: "npu"  # not CUDA, though that is available now; checkpoints ask
