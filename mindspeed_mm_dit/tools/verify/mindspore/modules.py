"""Any ``Cell``: its parameters, its computation, and the same perturbed by rounding noise or in float64.

Only MindSpore is imported here, because our ``framework`` package changes settings that the other program may not have.
Cells are watched operator by operator: a compiled graph does not call them.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework.mindspore import runtime
from mindspeed_mm_dit.tools.verify.task import leaves, mapped
from mindspeed_mm_dit.training.mindspore.engine import Engine
from mindspeed_mm_dit.training.mindspore.flat_optimizer import Part

Arrays = dict[str, np.ndarray]
Keep = Callable[[str, Tensor], None]
HAS_FLOAT64 = False
"""Whether all operators have float64."""
FLOATS = (mindspore.float64, mindspore.float32, mindspore.float16, mindspore.bfloat16)
_NARROW = (mindspore.float16, mindspore.bfloat16)


def named(module: nn.Cell) -> Iterator[tuple[str, nn.Cell]]:
    """Yield name and cell of the cell and all its descendants."""
    return module.cells_and_names()


def parameters(module: nn.Cell) -> dict[str, Parameter]:
    """Return the parameters by name."""
    return dict(module.parameters_and_names())


def host(x: Tensor) -> np.ndarray:
    """Return a copy of a tensor as an array; floats of fewer than 32 bits become float32."""
    return np.array((x.astype(mindspore.float32) if x.dtype in _NARROW else x).asnumpy())


def copied(x: Tensor) -> Tensor:
    """Return a tensor of the same values."""
    return ops.stop_gradient(x).copy()


def picked(x: Tensor, indices: np.ndarray) -> Tensor:
    """Return the entries ``indices`` of a flattened tensor."""
    return ops.gather(ops.stop_gradient(x).reshape(-1), Tensor(indices), 0)


def tensors(value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors in a cell's inputs or outputs, each with its path."""
    return [(at, x) for at, x in leaves(value) if isinstance(x, Tensor)]


def to_tensors(value: Any, like: nn.Cell, exact: bool = False) -> Any:
    """Return arrays and tensors as tensors; exact: floats in float64."""

    def convert(x: Any) -> Any:
        if not isinstance(x, Tensor):
            if not hasattr(x, "__array__"):
                return x
            x = Tensor(np.asarray(x))
        return x.astype(mindspore.float64) if exact and x.dtype in FLOATS else x

    return mapped(value, convert)


def like(array: np.ndarray, x: Tensor) -> Tensor:
    """Return an array as a tensor of the dtype of ``x``."""
    return Tensor(array).astype(x.dtype)


def settings() -> dict[str, str]:
    """Return the version, the device and the settings that decide numbers."""
    context = {name: mindspore.get_context(name) for name in ("device_target", "deterministic", "jit_level")}
    return {"mindspore": mindspore.__version__, **{name: str(value) for name, value in context.items()}}


def observe(module: nn.Cell, name: str, keep: Callable[[], Keep], add: Callable[[], Keep]) -> list[Any]:
    """Record the inputs and outputs of ``module``, and the gradients of both; see the same function for PyTorch."""

    def forward(module: nn.Cell, args: Any, kwargs: Any, output: Any) -> None:
        record = keep()
        for at, x in tensors([*args]) + tensors(kwargs):
            record(f"input/{name}/{at}", x)
        for index, (_, y) in enumerate(tensors(output)):
            record(f"output/{name}{mark(index)}", y)

    def backward(module: nn.Cell, of_inputs: Any, of_outputs: Any) -> None:
        record = keep()
        for kind, values in (("given", of_outputs), ("back", of_inputs)):
            for index, (_, x) in enumerate(tensors(values)):
                record(f"{kind}/{name}{mark(index)}", x)

    return [module.register_forward_hook(forward, with_kwargs=True), module.register_backward_hook(backward)]


def mark(index: int) -> str:
    """Return the end of the name of one of several tensors; the first has none."""
    return f"#{index}" if index else ""


def gradients(
    module: nn.Cell,
    run: Callable[[], Any],
    loss: Callable[[Any], Tensor],
    convert: Callable[[Tensor], np.ndarray] = host,
) -> tuple[Any, Tensor, Arrays]:
    """Return output, loss, and every gradient of a forward and backward pass."""
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
        self._hooks = [each.register_forward_hook(self._output) for _, each in named(module)]

    def __enter__(self) -> RoundingNoise:
        return self

    def __exit__(self, *failure: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def moved(self, x: Tensor, size: float) -> Tensor:
        """Return ``x`` with each entry moved by up to ``size`` of itself."""
        noise = self._draw.uniform(-size, size, x.shape).astype(np.float32)
        return x * Tensor(1 + noise).astype(x.dtype)

    def _output(self, module: nn.Cell, inputs: Any, output: Any) -> Any:
        return mapped(output, self._moved)

    def _moved(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype not in FLOATS:
            return x
        x = self.moved(x, self._size)
        with contextlib.suppress(RuntimeError):  # (no gradient flows through it)
            x.register_hook(lambda gradient: self.moved(gradient, self._size))
        return x


def flip(module: nn.Cell, size: Callable[[str], float], seed: int) -> None:
    """Flip last bits of weights, which moves each by up to about ``size(name)`` of itself; twice restores them."""
    draw = np.random.default_rng(seed)
    for name, p in parameters(module).items():
        if p.dtype in FLOATS:
            _flip(p, size(name), draw)


def _flip(p: Parameter, size: float, draw: np.random.Generator) -> None:
    values, step = p.asnumpy().copy(), 2 * unit(p)
    bits, length = values.view(f"i{values.itemsize}"), round(-math.log2(step))
    last = min(max(1, round(math.log2(size / step)) + 1), length)
    bits ^= draw.integers(2**last, size=values.shape, dtype=bits.dtype) * ((bits << 1) >> (length + 1) != 0)
    ops.assign(p, Tensor(values, p.dtype))  # (a compiled optimizer keeps the address of a weight)


@contextlib.contextmanager
def restored_afterwards(module: nn.Cell, whole: bool = True) -> Iterator[None]:
    """Restore mode and moving averages of a cell on exit; whole: its weights too, and without dropout while entered."""
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
    """Write values into the parameters."""
    targets = parameters(module)
    for name, array in arrays.items():
        targets[name].set_data(Tensor(array, targets[name].dtype))


def before_call(module: nn.Cell, see: Callable[[Callable[[nn.Cell], Any]], None]) -> Any:
    """Call ``see`` before each call, with a function that repeats it."""

    def forward(module: nn.Cell, args: Any, kwargs: Any) -> None:
        see(lambda cell: cell(*args, **kwargs))

    return module.register_forward_pre_hook(forward, with_kwargs=True)


def before_step(optimizer: Any, module: nn.Cell, see: Callable[[dict[str, Tensor]], None]) -> Any:
    """Call ``see`` with the gradients that the optimizer gets."""

    def step(cell: Any, args: Any) -> None:
        names = {id(p): name for name, p in parameters(module).items()}
        see({names[id(p)]: gradient for p, gradient in zip(cell.parameters, args[0]) if id(p) in names})

    if not isinstance(optimizer, nn.Optimizer):
        raise ConfigError(f"optimizer = {type(optimizer).__name__}", "is not a mindspore.nn.Optimizer")
    return optimizer.register_forward_pre_hook(step)


def unit(x: Tensor) -> float:
    """Return the largest relative error of one rounding of ``x``."""
    return {mindspore.float64: 2.0**-53, mindspore.float32: 2.0**-24, mindspore.float16: 2.0**-11,
            mindspore.bfloat16: 2.0**-8}.get(x.dtype, 0.0)  # fmt: skip


def size(x: Tensor) -> int:
    """Return the number of entries."""
    return x.size


def norm(values: Iterable[Tensor]) -> np.ndarray:
    """Return the norm of all entries of all tensors, (1,)."""
    return np.sqrt(np.atleast_1d(sum(float(ops.square(x.astype(mindspore.float32)).sum()) for x in values)))


def norm_ratio(x: Tensor, y: Tensor) -> float:
    """Return the norm of ``x`` over that of ``y``."""
    return float(norm([x])[0] / max(float(norm([y])[0]), 1e-30))


def tensor(value: Any) -> Tensor:
    """Return a number as a tensor."""
    return value if isinstance(value, Tensor) else Tensor(value, mindspore.float32)


def rank() -> int:
    """Return the rank of this process."""
    return int(os.environ.get("RANK_ID", "0"))


IS_DIVIDED_AFTER = True
"""Whether gradients are divided by the number of micro-batches only after they went back through the modules."""


class StepObserver:
    """Observes ``engine`` from outside. Every worker must make the same calls, and gets whole arrays."""

    def __init__(self, engine: Engine) -> None:
        self.gradients: Arrays = {}
        """Gradients of the first step, by parameter, as the optimizer got them: reduced and clipped."""
        self._engine = engine
        for part in engine.parts:
            part.step = partial(self._step, part, part.step)  # type: ignore[method-assign]

    def tree(self, name: str) -> Arrays:
        """Return the weights ("model") or their EMA ("ema"), by parameter."""
        state = self._engine.state(False)
        return {key[len(name) + 1 :]: array for key, array in state.items() if key.startswith(f"{name}.")}

    def _step(self, part: Part, step: Any, gradient: Any, lr: float) -> None:
        if not self.gradients.keys() >= set(part.names):
            self.gradients |= part.named(runtime.to_host(gradient))
        step(gradient, lr)


def whole(tensor: Any) -> np.ndarray:
    """Return a tensor as an array."""
    return runtime.to_host(tensor)


def forget() -> None:
    """Do nothing: no state carries over from one layout to the next."""
