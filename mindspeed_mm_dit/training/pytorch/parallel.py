"""Spread a model over the ranks: recompute, FSDP2 or plain data parallelism, frozen blocks in the machine's memory."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config, resolve_paths
from mindspeed_mm_dit.configs.predictor import ParameterSpecs
from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.framework.pytorch.low_bit import PackedWeight, packed_weights
from mindspeed_mm_dit.framework.pytorch.optim import is_fsdp, is_sharded

if TYPE_CHECKING:
    from torch.distributed.fsdp import OffloadPolicy


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, None: None}


def replicate(model: nn.Module) -> nn.Module:
    """Hold the whole model on every rank and average the gradients."""
    model = model.to(runtime.device())
    if runtime.world_size() == 1:
        return model
    with warnings.catch_warnings():  # its new name would still broadcast the buffers, which are constants, once
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        return DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)


def shard(model: nn.Module, config: Fsdp2Config) -> nn.Module:
    """Apply fsdp2.yaml to ``model`` in place: recompute, wrap the named modules, then the root."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    # FSDP2 warns of modules that return a view, at every call; nothing here changes an output in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    recompute(model, config)
    mesh = _mesh(config.shard_ranks(runtime.world_size()))
    check_averages(mesh)
    for weight in packed_weights(model).values():
        weight.shard_with(_DTYPES[config.param_dtype])
    ignored = {p for module in _modules(model, config.ignored, "ignored_modules") for p in module.parameters()}
    for parameter in ignored:
        parameter.data = parameter.data.to(runtime.device())
    options = {
        "mesh": mesh,
        "reshard_after_forward": config.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=_DTYPES[config.param_dtype],
            reduce_dtype=_DTYPES[config.reduce_dtype],
            output_dtype=_DTYPES[config.output_dtype],
            cast_forward_inputs=config.cast_forward_inputs,
        ),
        "offload_policy": _offload(config),
        "ignored_params": ignored or None,
    }
    units = _modules(model, config.sub_modules_to_wrap, "sub_modules_to_wrap")
    for unit in units:
        fully_shard(unit, **options)
    fully_shard(model, **options)
    register_fsdp_forward_method(model, "predict")
    _prefetch(units, config)
    if not config.offload_to_cpu:
        model.to(runtime.device())  # constants; the parameters are there already
    return model


def reshard(model: nn.Module) -> None:
    """Drop the gathered weights of a sharded model; they are gathered again when they are next needed."""
    for module in model.modules():
        if is_fsdp(module):
            module.reshard()


def check_averages(mesh: DeviceMesh) -> None:
    """Raise PlatformError if the ranks' gradients would be added up instead of averaged, as gloo once did."""
    if runtime.device_type() != "cpu":
        return
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # (its new name, its old)
    for dimension in range(mesh.ndim):
        group = mesh.get_group(dimension)
        received = torch.zeros(1)
        reduce_scatter(received, torch.ones(group.size()), op=dist.ReduceOp.AVG, group=group)
        if received.item() != 1:
            error = PlatformError(
                f"--use-torch-fsdp2 needs averages of gradients, but gloo of PyTorch {torch.__version__} adds them up. "
                "Install a newer PyTorch (2.13 averages), or leave the flag out on a CPU."
            )
            error.is_shared = True
            raise error


def _offload(config: Fsdp2Config) -> OffloadPolicy:
    """Return the offload policy of fsdp2.yaml; on a CPU, pinning memory is useless and left out."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    if not config.offload_to_cpu:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=config.pin_memory and runtime.device_type() != "cpu")


def average_ignored(model: nn.Module) -> None:
    """Average the gradients that FSDP ignores: those of modules named in ``ignored_modules``."""
    if is_fsdp(model) and runtime.world_size() > 1:
        for parameter in model.parameters():
            if parameter.grad is not None and not is_sharded(parameter):
                dist.all_reduce(parameter.grad)
                parameter.grad /= runtime.world_size()


def recompute(model: nn.Module, config: Fsdp2Config) -> None:
    """Make the named modules drop their activations in forward and compute them again in backward."""
    for module in _modules(model, config.recompute_modules, "recompute_modules"):
        module.forward = functools.partial(
            checkpoint, module.forward, use_reentrant=config.use_reentrant, preserve_rng_state=False
        )  # a model uses no random numbers


def check_paths(config: Fsdp2Config, modules: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError if a path of fsdp2.yaml names no module, or a list of modules, which is never called itself."""
    paths = {"sub_modules_to_wrap": config.sub_modules_to_wrap, "recompute_modules": config.recompute_modules}
    for setting, named in {**paths, "ignored_modules": config.ignored}.items():
        for name in resolve_paths(named or (), modules, setting):
            if isinstance(modules[name], nn.ModuleList) and setting != "ignored_modules":
                raise ConfigError(
                    f"{setting} of fsdp2.yaml names {name}, a list of modules that are called one by one. Name the "
                    f"modules: {name}.{{*}}."
                )


def check_recompute(config: Fsdp2Config, parameters: ParameterSpecs) -> None:
    """Raise ConfigError for the kind of recompute that gives no gradient to a module whose inputs have none."""
    before = itertools.takewhile(lambda name: not parameters.block_of(name), parameters)
    if config.recompute_modules and config.use_reentrant and not any(parameters[name].trained for name in before):
        raise ConfigError(
            "use_reentrant = true in fsdp2.yaml gives the recomputed blocks no gradient, as all modules before the "
            "first block are frozen. Write use_reentrant: false."
        )


def unwrap(model: nn.Module) -> nn.Module:
    """Return the composite inside a data-parallel wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _mesh(shard_ranks: int) -> DeviceMesh:
    replicas = runtime.world_size() // shard_ranks
    if replicas == 1:
        return init_device_mesh(runtime.device_type(), (shard_ranks,), mesh_dim_names=("Shard",))
    return init_device_mesh(runtime.device_type(), (replicas, shard_ranks), mesh_dim_names=("Replicate", "Shard"))


def _modules(model: nn.Module, paths: Iterable[str] | None, setting: str) -> list[nn.Module]:
    modules = dict(model.named_modules())
    return [modules[name] for name in resolve_paths(paths or (), modules, setting)]


def _prefetch(units: list[nn.Module], config: Fsdp2Config) -> None:
    for position, unit in enumerate(units):
        assert is_fsdp(unit)
        if config.num_to_forward_prefetch:
            unit.set_modules_to_forward_prefetch(units[position + 1 :][: config.num_to_forward_prefetch])
        if config.num_to_backward_prefetch:
            unit.set_modules_to_backward_prefetch(units[:position][::-1][: config.num_to_backward_prefetch])


_ALIGNED = 256
"""Bytes at whose multiples parts begin."""


class BlockOffload:
    """Copies the frozen weights of blocks to the device when they are needed.

    Args:
        blocks: the blocks that are offloaded, in the order of forward, each with its packed weights on the host. Their
            ``forward`` is replaced; backward must recompute them, so wrap them in recompute afterwards.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._device = runtime.device()
        self._stored = [_Stored(block, self._device) for block in blocks]
        size = max((len(stored.host) for stored in self._stored), default=0)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._resident: list[int | None] = [None, None]
        self._stream = torch.get_device_module(self._device).Stream() if self._device.type != "cpu" else None
        self._copied: list[Any] = [None, None]
        self._last = -1
        for number, block in enumerate(blocks):
            block.forward = functools.partial(self._forward, number, block.forward)

    def _forward(self, number: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        backward = self._last >= number > 0 or (number == 0 and self._last == 1)
        self._copy(number)
        if self._stream is not None:
            torch.get_device_module(self._device).current_stream().wait_event(self._copied[number % 2])
        self._stored[number].use_buffer(self._buffers[number % 2])
        following = number - 1 if backward else number + 1
        if 0 <= following < len(self._stored):
            self._copy(following)
        self._last = number
        return forward(*args, **kwargs)

    @torch.no_grad()
    def _copy(self, number: int) -> None:
        """Start copying a block's bytes into its buffer once what computes from that buffer is done."""
        which = number % 2
        if self._resident[which] == number:
            return
        self._resident[which] = number
        host, buffer = self._stored[number].host, self._buffers[which]
        if self._stream is None:
            buffer[: len(host)].copy_(host)
            return
        devices = torch.get_device_module(self._device)
        self._stream.wait_stream(devices.current_stream())
        with devices.stream(self._stream):
            buffer[: len(host)].copy_(host, non_blocking=True)
            self._copied[which] = self._stream.record_event()


class _Stored:
    """The bytes of a block in the machine's memory."""

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self._weights: list[tuple[PackedWeight, dict[str, tuple[int, int]]]] = []
        parts, end = [], 0
        for weight in packed_weights(block).values():
            places = {}
            for name, part in weight.take_parts().items():
                places[name] = (end, end + part.numel())
                parts.append((end, part.cpu()))
                end += -(-part.numel() // _ALIGNED) * _ALIGNED
            self._weights.append((weight, places))
        self.host = torch.empty(end, dtype=torch.uint8, pin_memory=device.type != "cpu")
        for begin, part in parts:
            self.host[begin : begin + part.numel()] = part

    def use_buffer(self, buffer: Tensor) -> None:
        """Let the weights of the block be those in ``buffer``."""
        for weight, places in self._weights:
            weight.place_parts({name: buffer[begin:end] for name, (begin, end) in places.items()})
