"""Any ``nn.Module``: its parameters, its computation, and the same perturbed by rounding noise or in float64.

Only PyTorch is imported here, because our ``framework`` package changes settings that the other program may not have.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward, get_gradient_edge
from torch.overrides import TorchFunctionMode

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.tools.verify.module_recorder import iter_leaves, map_leaves

Arrays = dict[str, np.ndarray]
Keep = Callable[[str, Tensor], None]
_WRAPPED = re.compile(r"(?:^module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?:\.|$)")
MAX_RANDOM_NUMBERS = 2**20
"""Larger tensors are perturbed by this many random numbers, repeated: generating more would take too long."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
HAS_FLOAT64 = True
"""Whether all operators have float64."""
NARROW = {torch.float32, torch.float16, torch.bfloat16}


def plain_name(name: str) -> str:
    """Return a name without the prefixes that DDP, FSDP, ``torch.compile`` and recomputation add to it."""
    return _WRAPPED.sub("", name).rstrip(".")


def named_modules(module: nn.Module, at: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of all whose calls can be observed, which those inside a compiled module cannot."""
    yield at, module
    if is_compiled(module):
        return
    for name, child in module.named_children():
        yield from named_modules(child, plain_name(f"{at}.{name}" if at else name))


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name."""
    return {plain_name(name): parameter for name, parameter in module.named_parameters()}


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` has made a graph of a module."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def is_sharded(x: Tensor) -> bool:
    """Return whether each rank has a part of a tensor."""
    return hasattr(x, "to_local")


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or the tensor."""
    return x.to_local() if is_sharded(x) else x


def to_numpy(x: Tensor) -> np.ndarray:
    """Return a copy of a tensor, sharded or not, as an array; floats of fewer than 32 bits become float32."""
    x = x.detach()
    x = (x.full_tensor() if is_sharded(x) else x).cpu()
    return np.array(x.float() if x.is_floating_point() and x.dtype.itemsize < 4 else x)


def detached_copy(x: Tensor) -> Tensor:
    """Return a tensor of the same values."""
    return x.detach().clone()


def select_entries(x: Tensor, indices: np.ndarray) -> Tensor:
    """Return the entries ``indices`` of a flattened tensor."""
    x = x.detach()
    x = x.full_tensor() if is_sharded(x) else x
    return x.reshape(-1)[torch.from_numpy(indices).to(x.device)]


def tensors(value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors in a module's inputs or outputs, each with its path."""
    return [(at, x) for at, x in iter_leaves(value) if isinstance(x, Tensor)]


def to_tensors(value: Any, like: nn.Module, exact: bool = False) -> Any:
    """Return arrays and tensors as tensors on the device of ``like``; exact: floats in float64."""
    device = next((p.device for p in like.parameters()), torch.device("cpu"))

    def convert(x: Any) -> Any:
        if isinstance(x, (np.ndarray, np.generic)):
            x = torch.from_numpy(np.array(x))
        if not isinstance(x, Tensor):
            return x
        return x.detach().to(device, torch.float64 if exact and x.is_floating_point() else x.dtype)

    return map_leaves(value, convert)


def like(array: np.ndarray, x: Tensor) -> Tensor:
    """Return an array as a tensor of the device and dtype of ``x``."""
    return torch.from_numpy(array).to(x.device, x.dtype)


def settings() -> dict[str, str]:
    """Return the version, the device and the settings that decide numbers."""
    values = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "float32 products": torch.get_float32_matmul_precision(),
        "TensorFloat-32 in convolutions": torch.backends.cudnn.allow_tf32,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }
    return {name: str(value) for name, value in values.items()}


# --- what a module computes ------------------------------------------------------------------------------------------


def observe(module: nn.Module, name: str, keep: Callable[[], Keep], add: Callable[[], Keep]) -> list[Any]:
    """Record the inputs and outputs of ``module``, and the gradients of both. No number of the run changes.

    keep: returns the function that receives values now. add: the same for parts of a sum. PyTorch's module hooks for
    backward would put copies of tensors into the graph, and code that writes in place, or tests whether two tensors are
    the same object, would behave differently.
    """

    def forward(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        record, inputs, results = keep(), tensors([*args]) + tensors(kwargs), tensors(output)
        for at, x in inputs:
            record(f"input/{name}/{at}", x)
        for index, (_, y) in enumerate(results):
            record(f"output/{name}{output_suffix(index)}", y)
            if y.requires_grad:
                y.register_hook(partial(record, f"given/{name}{output_suffix(index)}"))
        _hook_input_gradients(name, [x for _, x in inputs if x.requires_grad], [y for _, y in results], add())

    return [module.register_forward_hook(forward, with_kwargs=True)]


def output_suffix(index: int) -> str:
    """Return the end of the name of one of several tensors; the first has none."""
    return f"#{index}" if index else ""


def _hook_input_gradients(name: str, inputs: list[Tensor], results: list[Tensor], add: Keep) -> None:
    """Record the gradients that the graph nodes between results and inputs send to the inputs."""
    numbered = reversed(list(enumerate(inputs)))
    edges = {tuple(get_gradient_edge(x)[:2]): f"back/{name}{output_suffix(number)}" for number, x in numbered}
    nodes = [y.grad_fn for y in results if y.grad_fn is not None]
    floor = max((node._sequence_nr() for x in inputs if (node := x.grad_fn) is not None), default=-1)
    todo, visited = [node for node in nodes if node._sequence_nr() > floor], set[Any]()
    while todo:
        node = todo.pop()
        if node in visited:
            continue
        visited.add(node)
        for slot, edge in enumerate(node.next_functions):
            if tuple(edge[:2]) in edges:
                node.register_hook(partial(_notify, edges[tuple(edge[:2])], slot, add))
            elif edge[0] is not None and edge[0]._sequence_nr() > floor:
                todo.append(edge[0])


def _notify(name: str, slot: int, add: Keep, sent: Any, received: Any) -> None:
    if sent[slot] is not None:
        add(name, sent[slot])


def gradients(
    module: nn.Module,
    run: Callable[[], Any],
    loss: Callable[[Any], Tensor],
    convert: Callable[[Tensor], np.ndarray] = to_numpy,
) -> tuple[Any, Tensor, Arrays]:
    """Return output, loss, and every gradient of a forward and backward pass; ``.grad`` of the module is unchanged."""
    saved = {p: p.grad for p in module.parameters()}
    try:
        for p in saved:
            p.grad = None
        output = run()
        value = loss(output)
        if value.requires_grad:
            mean = value.mean()  # (its backward() would leave Roundings, also for what is recomputed)
            _engine_run_backward((mean,), (torch.ones_like(mean),), False, False, (), accumulate_grad=True)
        values = {n: convert(torch.zeros_like(p) if p.grad is None else p.grad) for n, p in parameters(module).items()}
        return output, value.detach(), values
    finally:
        for p, gradient in saved.items():
            p.grad = gradient


# --- the same with every number moved, and in float64 ----------------------------------------------------------------


class RoundingNoise(TorchFunctionMode):
    """Moves numbers at random, as rounding does but by a chosen ``size`` (Parker 1997).

    It changes every module's output, and each gradient that comes back to it, by up to ``size`` of themselves; while
    entered, also the result of every function, because modules compute much between their outputs.
    """

    def __init__(self, module: nn.Module, size: float, seed: int) -> None:
        super().__init__()
        self._size, self._draw = size, torch.Generator().manual_seed(seed)
        self._hooks = [each.register_forward_hook(self._output) for _, each in named_modules(module)]
        self._sees_functions = not any(map(is_compiled, module.modules())) and not any(
            map(is_sharded, module.parameters())
        )

    def __enter__(self) -> Any:
        return super().__enter__() if self._sees_functions else self

    def __exit__(self, *failure: Any) -> None:
        if self._sees_functions:
            super().__exit__(*failure)
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or function.__name__ == "__get__":  # (such as a parameter's gradient)
            return result
        storages = {local(x).untyped_storage().data_ptr() for _, x in tensors([args, kwargs or {}])}
        return result if local(result).untyped_storage().data_ptr() in storages else self._perturbed(result)

    def perturbed(self, x: Tensor, size: float) -> Tensor:
        """Return ``x`` with each entry moved by up to ``size`` of itself."""
        uniform = torch.rand(min(x.numel(), MAX_RANDOM_NUMBERS), generator=self._draw, dtype=x.dtype) * 2 - 1
        noise = uniform.to(x.device).repeat(-(-x.numel() // MAX_RANDOM_NUMBERS))[: x.numel()].reshape(x.shape)
        return x * (1 + size * noise)

    @torch.no_grad()
    def perturb_in_place(self, x: Tensor, size: float) -> None:
        """Move a weight or a constant in place."""
        shard = local(x)
        shard.copy_(self.perturbed(shard, size))

    def _output(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return map_leaves(output, self._perturbed)

    def _perturbed(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        x = self.perturbed(x, self._size)
        if x.requires_grad:
            x.register_hook(partial(self.perturbed, size=self._size))
        return x


def flip_last_bits(module: nn.Module, size: Callable[[str], float], seed: int) -> None:
    """Flip last bits of weights, which moves each by up to about ``size(name)`` of itself; twice restores them."""
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in parameters(module).items():
        x = local(parameter.detach())
        if x.is_floating_point() and x.itemsize in _BITS:
            _flip_bits(x, size(name), draw)


def _flip_bits(x: Tensor, size: float, draw: torch.Generator) -> None:
    """Change the last bits of the numbers of ``x`` that are not 0; their signs and exponents stay."""
    bits, step = x.view(_BITS[x.itemsize]), torch.finfo(x.dtype).eps
    length = round(-math.log2(step))  # (of a mantissa)
    last = min(max(1, round(math.log2(size / step)) + 1), length)
    random_bits = torch.randint(2**last, (min(x.numel(), MAX_RANDOM_NUMBERS),), generator=draw).to(x.device, bits.dtype)
    random_bits = random_bits.repeat(-(-x.numel() // MAX_RANDOM_NUMBERS))[: x.numel()].reshape(x.shape)
    bits ^= random_bits * ((bits << 1) >> (length + 1) != 0)


class InFloat64(TorchFunctionMode):
    """Makes code that casts to float32, float16 or bfloat16 by name compute in float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("float", "half", "bfloat16") and args and isinstance(args[0], Tensor):
            return args[0].double()
        wide = partial(map_leaves, change=lambda x: torch.float64 if isinstance(x, torch.dtype) and x in NARROW else x)
        args, kwargs = tuple(map(wide, args)), {key: wide(value) for key, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


@contextlib.contextmanager
def float64_arithmetic() -> Iterator[None]:
    """While entered, new tensors and casts are in float64."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            yield
    finally:
        torch.set_default_dtype(usual)


@contextlib.contextmanager
def restored(module: nn.Module, whole: bool = True) -> Iterator[None]:
    """Restore buffers and modes of a module on exit; whole: its weights too, and without dropout while entered."""
    state = (*module.buffers(), *(module.parameters() if whole else ()))
    values = {x: (local(x).detach().to("cpu", copy=True)) for x in state}
    modes = {each: each.training for each in module.modules()}
    module.train(module.training and not whole)
    try:
        yield
    finally:
        for x, value in values.items():
            with torch.no_grad():
                local(x).copy_(value)
        for each, mode in modes.items():
            each.training = mode


def load(module: nn.Module, arrays: Mapping[str, np.ndarray]) -> None:
    """Write values into the parameters."""
    targets = parameters(module)
    with torch.no_grad():
        for name, array in arrays.items():
            targets[name].copy_(torch.from_numpy(np.ascontiguousarray(array)))


# --- a step of a user's loop ------------------------------------------------------------------------------------------


class Call:
    """A call of a module that can be repeated: its inputs, random state and precision."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        device = next(module.parameters()).device
        self._inputs = map_leaves((args, kwargs), lambda x: x.detach() if isinstance(x, Tensor) else x)
        self._kind, self._random = device.type, torch.get_rng_state()
        self._device_random = getattr(torch, device.type).get_rng_state() if device.type != "cpu" else None
        self._low = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)

    def __call__(self, module: nn.Module) -> Any:
        args, kwargs = self._inputs
        devices = [] if self._device_random is None else [getattr(torch, self._kind).current_device()]
        with (
            torch.random.fork_rng(devices, device_type=self._kind if devices else "cuda"),
            torch.autocast(self._kind, self._low[1], self._low[0]),
        ):
            torch.set_rng_state(self._random)
            if self._device_random is not None:
                getattr(torch, self._kind).set_rng_state(self._device_random)
            return module(*args, **kwargs)


def before_call(module: nn.Module, callback: Callable[[Call], None]) -> Any:
    """Call ``see`` before each call that can be differentiated."""

    def forward(module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            callback(Call(module, args, kwargs))

    return module.register_forward_pre_hook(forward, with_kwargs=True)


def before_step(optimizer: Any, module: nn.Module, callback: Callable[[dict[str, Tensor]], None]) -> Any:
    """Call ``see`` with the gradients that the optimizer gets."""

    def step(*_: Any) -> None:
        callback({name: p.grad for name, p in parameters(module).items() if p.grad is not None})

    if not hasattr(optimizer, "register_step_pre_hook"):
        raise ConfigError(f"optimizer = {type(optimizer).__name__} is not a torch.optim.Optimizer.")
    return optimizer.register_step_pre_hook(step)


def unit_roundoff(x: Tensor) -> float:
    """Return the largest relative error of one rounding of ``x``, or of a product of its numbers."""
    if not x.is_floating_point():
        return 0.0
    products = 2.0**-11 if x.dtype == torch.float32 and x.is_cuda and torch.backends.cuda.matmul.allow_tf32 else 0.0
    return max(torch.finfo(x.dtype).eps / 2, products)


def num_entries(x: Tensor) -> int:
    """Return the number of entries."""
    return x.numel()


def norm(values: Iterable[Tensor]) -> np.ndarray:
    """Return the norm of all entries of all tensors, (1,)."""
    return np.sqrt(np.atleast_1d(sum(float(to_numpy(x.detach().float().norm())) ** 2 for x in values)))


def norm_ratio(x: Tensor, y: Tensor) -> float:
    """Return the norm of ``x`` over that of ``y``."""
    return float(x.float().norm() / y.float().norm().clamp(min=1e-30))


def tensor(value: Any) -> Tensor:
    """Return a number as a tensor."""
    return torch.as_tensor(value)


def rank() -> int:
    """Return the rank of this process."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
