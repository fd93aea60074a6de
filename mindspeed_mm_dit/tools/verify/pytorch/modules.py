"""Any ``nn.Module``: its names and values, what it computes, and the same with every number moved or in float64.

Only PyTorch is imported here, for the room of our framework makes settings that another program's run may not have.
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
from mindspeed_mm_dit.tools.verify.trees import leaves, mapped

Arrays = dict[str, np.ndarray]
Keep = Callable[[str, Tensor], None]
_WRAPPED = re.compile(r"(?:^module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?:\.|$)")
MOST_DRAWN = 2**20
"""Entries of larger tensors are moved by so many random numbers, again and again: drawing takes time."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
HAS_FLOAT64 = True
"""Whether all operators have float64."""
NARROW = {torch.float32, torch.float16, torch.bfloat16}


def plain_name(name: str) -> str:
    """Return a name without what DDP, FSDP, ``torch.compile`` and recomputation add to it."""
    return _WRAPPED.sub("", name).rstrip(".")


def named(module: nn.Module, at: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of all whose calls can be seen: what is inside of a compiled one cannot."""
    yield at, module
    if is_compiled(module):
        return
    for name, child in module.named_children():
        yield from named(child, plain_name(f"{at}.{name}" if at else name))


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


def host(x: Tensor) -> np.ndarray:
    """Return a tensor, sharded or not, as an array of its own; floats of fewer than 32 bits become float32."""
    x = x.detach()
    x = (x.full_tensor() if is_sharded(x) else x).cpu()
    return np.array(x.float() if x.is_floating_point() and x.dtype.itemsize < 4 else x)


def copied(x: Tensor) -> Tensor:
    """Return a tensor of the same values."""
    return x.detach().clone()


def picked(x: Tensor, indices: np.ndarray) -> Tensor:
    """Return the entries ``indices`` of a flattened tensor."""
    x = x.detach()
    x = x.full_tensor() if is_sharded(x) else x
    return x.reshape(-1)[torch.from_numpy(indices).to(x.device)]


def tensors(value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors in what a module takes or gives, each with its place."""
    return [(at, x) for at, x in leaves(value) if isinstance(x, Tensor)]


def placed(value: Any, like: nn.Module, exact: bool = False) -> Any:
    """Return arrays and tensors as tensors on the device of ``like``; exact: floats in float64."""
    device = next((p.device for p in like.parameters()), torch.device("cpu"))

    def place(x: Any) -> Any:
        if isinstance(x, (np.ndarray, np.generic)):
            x = torch.from_numpy(np.array(x))
        if not isinstance(x, Tensor):
            return x
        return x.detach().to(device, torch.float64 if exact and x.is_floating_point() else x.dtype)

    return mapped(value, place)


def like(array: np.ndarray, x: Tensor) -> Tensor:
    """Return an array as a tensor of the device and dtype of ``x``."""
    return torch.from_numpy(array).to(x.device, x.dtype)


def settings() -> dict[str, str]:
    """Return the version, the device and the settings that decide numbers."""
    found = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "float32 products": torch.get_float32_matmul_precision(),
        "TensorFloat-32 in convolutions": torch.backends.cudnn.allow_tf32,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }
    return {name: str(value) for name, value in found.items()}


# --- what a module computes ------------------------------------------------------------------------------------------


def observe(module: nn.Module, name: str, keep: Callable[[], Keep], add: Callable[[], Keep]) -> list[Any]:
    """Have ``module`` tell what it takes and gives, and the gradients of both. No number of the run changes.

    keep: returns what receives values now. add: the same for parts of a sum. PyTorch's own hooks for backward would
    put copies of tensors into the graph: code that writes in place, or asks whether two tensors are one, takes another
    way then.
    """

    def forward(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found, given, results = keep(), tensors([*args]) + tensors(kwargs), tensors(output)
        for at, x in given:
            found(f"input/{name}/{at}", x)
        for place, (_, y) in enumerate(results):
            found(f"output/{name}{mark(place)}", y)
            if y.requires_grad:
                y.register_hook(partial(found, f"given/{name}{mark(place)}"))
        _look_back(name, [x for _, x in given if x.requires_grad], [y for _, y in results], add())

    return [module.register_forward_hook(forward, with_kwargs=True)]


def mark(place: int) -> str:
    """Return the end of the name of one of several tensors; the first has none."""
    return f"#{place}" if place else ""


def _look_back(name: str, given: list[Tensor], results: list[Tensor], add: Keep) -> None:
    """Have the nodes of the graph between results and inputs tell the gradients that they send to the inputs."""
    edges = {tuple(get_gradient_edge(x)[:2]): f"back/{name}{mark(n)}" for n, x in reversed(list(enumerate(given)))}
    made = [y.grad_fn for y in results if y.grad_fn is not None]
    floor = max((node._sequence_nr() for x in given if (node := x.grad_fn) is not None), default=-1)
    todo, seen = [node for node in made if node._sequence_nr() > floor], set[Any]()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
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
    taken: Callable[[Tensor], np.ndarray] = host,
) -> tuple[Any, Tensor, Arrays]:
    """Return output, loss, and every gradient of a forward and backward pass; the module's own gradients stay."""
    own = {p: p.grad for p in module.parameters()}
    try:
        for p in own:
            p.grad = None
        output = run()
        value = loss(output)
        if value.requires_grad:
            mean = value.mean()  # (its backward() would leave Roundings, also for what is recomputed)
            _engine_run_backward((mean,), (torch.ones_like(mean),), False, False, (), accumulate_grad=True)
        found = {n: taken(torch.zeros_like(p) if p.grad is None else p.grad) for n, p in parameters(module).items()}
        return output, value.detach(), found
    finally:
        for p, gradient in own.items():
            p.grad = gradient


# --- the same with every number moved, and in float64 ----------------------------------------------------------------


class Roundings(TorchFunctionMode):
    """Moves numbers at random, as rounding does but by a chosen ``size`` (Parker 1997).

    It changes every module's output, and each gradient that comes back to it, by up to ``size`` of themselves; while
    entered, also the result of every function, for modules compute much between what they give.
    """

    def __init__(self, module: nn.Module, size: float, seed: int) -> None:
        super().__init__()
        self._size, self._draw = size, torch.Generator().manual_seed(seed)
        self._hooks = [each.register_forward_hook(self._output) for _, each in named(module)]
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
        given = {local(x).untyped_storage().data_ptr() for _, x in tensors([args, kwargs or {}])}
        return result if local(result).untyped_storage().data_ptr() in given else self._moved(result)

    def moved(self, x: Tensor, size: float) -> Tensor:
        """Return ``x`` with each entry moved by up to ``size`` of itself."""
        drawn = torch.rand(min(x.numel(), MOST_DRAWN), generator=self._draw, dtype=x.dtype) * 2 - 1
        share = drawn.to(x.device).repeat(-(-x.numel() // MOST_DRAWN))[: x.numel()].reshape(x.shape)
        return x * (1 + size * share)

    @torch.no_grad()
    def move(self, x: Tensor, size: float) -> None:
        """Move a weight or a constant in place."""
        own = local(x)
        own.copy_(self.moved(own, size))

    def _output(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return mapped(output, self._moved)

    def _moved(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        x = self.moved(x, self._size)
        if x.requires_grad:
            x.register_hook(partial(self.moved, size=self._size))
        return x


def flip(module: nn.Module, size: Callable[[str], float], seed: int) -> None:
    """Change last bits of weights, which moves each by up to about ``size(name)`` of itself; twice gives them back."""
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in parameters(module).items():
        x = local(parameter.detach())
        if x.is_floating_point() and x.itemsize in _BITS:
            _flip(x, size(name), draw)


def _flip(x: Tensor, size: float, draw: torch.Generator) -> None:
    """Change the last bits of the numbers of ``x`` that are not 0; their signs and exponents stay."""
    bits, step = x.view(_BITS[x.itemsize]), torch.finfo(x.dtype).eps
    length = round(-math.log2(step))  # (of a mantissa)
    last = min(max(1, round(math.log2(size / step)) + 1), length)
    drawn = torch.randint(2**last, (min(x.numel(), MOST_DRAWN),), generator=draw).to(x.device, bits.dtype)
    drawn = drawn.repeat(-(-x.numel() // MOST_DRAWN))[: x.numel()].reshape(x.shape)
    bits ^= drawn * ((bits << 1) >> (length + 1) != 0)


class InFloat64(TorchFunctionMode):
    """Has code that asks for float32, float16 or bfloat16 by name compute in float64 all the same."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("float", "half", "bfloat16") and args and isinstance(args[0], Tensor):
            return args[0].double()
        wide = partial(mapped, change=lambda x: torch.float64 if isinstance(x, torch.dtype) and x in NARROW else x)
        args, kwargs = tuple(map(wide, args)), {key: wide(value) for key, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


@contextlib.contextmanager
def exactly() -> Iterator[None]:
    """While entered, new tensors and casts are in float64."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            yield
    finally:
        torch.set_default_dtype(usual)


@contextlib.contextmanager
def restored_afterwards(module: nn.Module, whole: bool = True) -> Iterator[None]:
    """Give a module its buffers and modes back at the end; whole: its weights too, and while entered no dropout."""
    kept = (*module.buffers(), *(module.parameters() if whole else ()))
    values = {x: (local(x).detach().to("cpu", copy=True)) for x in kept}
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
    own = parameters(module)
    with torch.no_grad():
        for name, array in arrays.items():
            own[name].copy_(torch.from_numpy(np.ascontiguousarray(array)))


# --- a step of somebody's loop ---------------------------------------------------------------------------------------


class Call:
    """A call of a module, to be repeated: its inputs, random numbers and precision."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        device = next(module.parameters()).device
        self._given = mapped((args, kwargs), lambda x: x.detach() if isinstance(x, Tensor) else x)
        self._kind, self._random = device.type, torch.get_rng_state()
        self._device_random = getattr(torch, device.type).get_rng_state() if device.type != "cpu" else None
        self._low = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)

    def __call__(self, module: nn.Module) -> Any:
        args, kwargs = self._given
        devices = [] if self._device_random is None else [getattr(torch, self._kind).current_device()]
        with (
            torch.random.fork_rng(devices, device_type=self._kind if devices else "cuda"),
            torch.autocast(self._kind, self._low[1], self._low[0]),
        ):
            torch.set_rng_state(self._random)
            if self._device_random is not None:
                getattr(torch, self._kind).set_rng_state(self._device_random)
            return module(*args, **kwargs)


def before_call(module: nn.Module, see: Callable[[Call], None]) -> Any:
    """Have each call that can be differentiated seen before it is made."""

    def forward(module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            see(Call(module, args, kwargs))

    return module.register_forward_pre_hook(forward, with_kwargs=True)


def before_step(optimizer: Any, module: nn.Module, see: Callable[[dict[str, Tensor]], None]) -> Any:
    """Have the gradients seen that the optimizer is given."""

    def step(*_: Any) -> None:
        see({name: p.grad for name, p in parameters(module).items() if p.grad is not None})

    if not hasattr(optimizer, "register_step_pre_hook"):
        raise ConfigError(f"optimizer = {type(optimizer).__name__}", "is no optimizer of PyTorch")
    return optimizer.register_step_pre_hook(step)


def unit(x: Tensor) -> float:
    """Return the largest relative error of one rounding of ``x``, or of a product of its numbers."""
    if not x.is_floating_point():
        return 0.0
    products = 2.0**-11 if x.dtype == torch.float32 and x.is_cuda and torch.backends.cuda.matmul.allow_tf32 else 0.0
    return max(torch.finfo(x.dtype).eps / 2, products)


def size(x: Tensor) -> int:
    """Return the number of entries."""
    return x.numel()


def norm(values: Iterable[Tensor]) -> np.ndarray:
    """Return the norm of all entries of all tensors, (1,)."""
    return np.sqrt(np.atleast_1d(sum(float(host(x.detach().float().norm())) ** 2 for x in values)))


def share(x: Tensor, y: Tensor) -> float:
    """Return the norm of ``x`` over that of ``y``."""
    return float(x.float().norm() / y.float().norm().clamp(min=1e-30))


def tensor(value: Any) -> Tensor:
    """Return a number as a tensor."""
    return torch.as_tensor(value)


def rank() -> int:
    """Return the rank of this process."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
