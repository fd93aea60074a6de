"""Any ``Cell``: its parameters, its computation, and the same perturbed by rounding noise or in float64.

Only MindSpore is imported here, because our ``framework`` package changes settings that the other program may not have.
Cells are watched operator by operator: a compiled graph does not call them. ``pytorch.py`` explains the functions.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.tools.verify.module_recorder import iter_leaves, map_leaves

Arrays = dict[str, np.ndarray]
Keep = Callable[[str, Tensor], None]
HAS_FLOAT64 = False
"""Whether all operators have float64."""
FLOATS = (mindspore.float64, mindspore.float32, mindspore.float16, mindspore.bfloat16)
_NARROW = (mindspore.float16, mindspore.bfloat16)


def named_modules(module: nn.Cell) -> Iterator[tuple[str, nn.Cell]]:
    return module.cells_and_names()


def parameters(module: nn.Cell) -> dict[str, Parameter]:
    return dict(module.parameters_and_names())


def to_numpy(x: Tensor) -> np.ndarray:
    return np.array((x.astype(mindspore.float32) if x.dtype in _NARROW else x).asnumpy())


def detached_copy(x: Tensor) -> Tensor:
    return ops.stop_gradient(x).copy()


def select_entries(x: Tensor, indices: np.ndarray) -> Tensor:
    return ops.gather(ops.stop_gradient(x).reshape(-1), Tensor(indices), 0)


def tensors(value: Any) -> list[tuple[str, Tensor]]:
    return [(at, x) for at, x in iter_leaves(value) if isinstance(x, Tensor)]


def to_tensors(value: Any, like: nn.Cell, exact: bool = False) -> Any:
    def convert(x: Any) -> Any:
        if not isinstance(x, Tensor):
            if not hasattr(x, "__array__"):
                return x
            x = Tensor(np.asarray(x))
        return x.astype(mindspore.float64) if exact and x.dtype in FLOATS else x

    return map_leaves(value, convert)


def like(array: np.ndarray, x: Tensor) -> Tensor:
    return Tensor(array).astype(x.dtype)


def settings() -> dict[str, str]:
    context = {name: mindspore.get_context(name) for name in ("device_target", "deterministic", "jit_level")}
    return {"mindspore": mindspore.__version__, **{name: str(value) for name, value in context.items()}}


def observe(module: nn.Cell, name: str, keep: Callable[[], Keep], add: Callable[[], Keep]) -> list[Any]:
    def forward(module: nn.Cell, args: Any, kwargs: Any, output: Any) -> None:
        record = keep()
        for at, x in tensors([*args]) + tensors(kwargs):
            record(f"input/{name}/{at}", x)
        for index, (_, y) in enumerate(tensors(output)):
            record(f"output/{name}{output_suffix(index)}", y)

    def backward(module: nn.Cell, of_inputs: Any, of_outputs: Any) -> None:
        record = keep()
        for kind, values in (("given", of_outputs), ("back", of_inputs)):
            for index, (_, x) in enumerate(tensors(values)):
                record(f"{kind}/{name}{output_suffix(index)}", x)

    return [module.register_forward_hook(forward, with_kwargs=True), module.register_backward_hook(backward)]


def output_suffix(index: int) -> str:
    return f"#{index}" if index else ""


def gradients(
    module: nn.Cell,
    run: Callable[[], Any],
    loss: Callable[[Any], Tensor],
    convert: Callable[[Tensor], np.ndarray] = to_numpy,
) -> tuple[Any, Tensor, Arrays]:
    trained = {name: p for name, p in parameters(module).items() if p.requires_grad}

    def forward() -> tuple[Any, Any, Any]:
        output = run()
        value = loss(output)
        return value.mean(), value, output

    (_, value, output), values = mindspore.value_and_grad(forward, None, list(trained.values()), has_aux=True)()
    frozen = {name: ops.zeros_like(p) for name, p in parameters(module).items() if name not in trained}
    return output, value, {name: convert(g) for name, g in (dict(zip(trained, values)) | frozen).items()}


class RoundingNoise:
    """Moves every cell's output, and each gradient that comes back to it, at random by up to ``size`` of themselves."""

    def __init__(self, module: nn.Cell, size: float, seed: int) -> None:
        self._size, self._draw = size, np.random.default_rng(seed)
        self._hooks = [each.register_forward_hook(self._output) for _, each in named_modules(module)]

    def __enter__(self) -> RoundingNoise:
        return self

    def __exit__(self, *failure: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def perturbed(self, x: Tensor, size: float) -> Tensor:
        """Return ``x`` with each entry moved by up to ``size`` of itself."""
        noise = self._draw.uniform(-size, size, x.shape).astype(np.float32)
        return x * Tensor(1 + noise).astype(x.dtype)

    def _output(self, module: nn.Cell, inputs: Any, output: Any) -> Any:
        return map_leaves(output, self._perturbed)

    def _perturbed(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype not in FLOATS:
            return x
        x = self.perturbed(x, self._size)
        with contextlib.suppress(RuntimeError):  # (no gradient flows through it)
            x.register_hook(lambda gradient: self.perturbed(gradient, self._size))
        return x


def flip_last_bits(module: nn.Cell, size: Callable[[str], float], seed: int) -> None:
    draw = np.random.default_rng(seed)
    for name, p in parameters(module).items():
        if p.dtype in FLOATS:
            _flip_bits(p, size(name), draw)


def _flip_bits(p: Parameter, size: float, draw: np.random.Generator) -> None:
    values, step = p.asnumpy().copy(), 2 * unit_roundoff(p)
    bits, length = values.view(f"i{values.itemsize}"), round(-math.log2(step))
    last = min(max(1, round(math.log2(size / step)) + 1), length)
    bits ^= draw.integers(2**last, size=values.shape, dtype=bits.dtype) * ((bits << 1) >> (length + 1) != 0)
    ops.assign(p, Tensor(values, p.dtype))  # (a compiled optimizer keeps the address of a weight)


@contextlib.contextmanager
def restored(module: nn.Cell, whole: bool = True) -> Iterator[None]:
    values = {p: p.asnumpy().copy() for p in module.get_parameters() if whole or "moving_" in p.name}
    training = module.training
    module.set_train(training and not whole)
    try:
        yield
    finally:
        for p, value in values.items():
            ops.assign(p, Tensor(value, p.dtype))
        module.set_train(training)


def load(module: nn.Cell, arrays: Mapping[str, np.ndarray]) -> None:
    targets = parameters(module)
    for name, array in arrays.items():
        targets[name].set_data(Tensor(array, targets[name].dtype))


def before_call(module: nn.Cell, callback: Callable[[Callable[[nn.Cell], Any]], None]) -> Any:
    def forward(module: nn.Cell, args: Any, kwargs: Any) -> None:
        callback(lambda cell: cell(*args, **kwargs))

    return module.register_forward_pre_hook(forward, with_kwargs=True)


def before_step(optimizer: Any, module: nn.Cell, callback: Callable[[dict[str, Tensor]], None]) -> Any:
    def step(cell: Any, args: Any) -> None:
        names = {id(p): name for name, p in parameters(module).items()}
        callback({names[id(p)]: gradient for p, gradient in zip(cell.parameters, args[0]) if id(p) in names})

    if not isinstance(optimizer, nn.Optimizer):
        raise ConfigError(f"optimizer = {type(optimizer).__name__} is not a mindspore.nn.Optimizer.")
    return optimizer.register_forward_pre_hook(step)


def unit_roundoff(x: Tensor) -> float:
    return dict(zip(FLOATS, (2.0**-53, 2.0**-24, 2.0**-11, 2.0**-8))).get(x.dtype, 0.0)


def num_entries(x: Tensor) -> int:
    return x.size


def norm(values: Iterable[Tensor]) -> np.ndarray:
    return np.sqrt(np.atleast_1d(sum(float(ops.square(x.astype(mindspore.float32)).sum()) for x in values)))


def norm_ratio(x: Tensor, y: Tensor) -> float:
    return float(norm([x])[0] / max(float(norm([y])[0]), 1e-30))


def tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else Tensor(value, mindspore.float32)


def rank() -> int:
    return int(os.environ.get("RANK_ID", "0"))
