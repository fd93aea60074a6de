"""Layers of the meta backend, and how a network is built on it."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib
import importlib.util
import math
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from mindspeed_mm_dit.configs.predictor import ONES, XAVIER_UNIFORM, ZEROS, Initializer, Normal
from mindspeed_mm_dit.configs.predictor import ParameterSpec as Declared
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import meta
from mindspeed_mm_dit.framework.meta import ops
from mindspeed_mm_dit.framework.meta.tensor import Shape, Storage, Tensor, current

_STANDARD = Normal(1.0)


class Parameter(Tensor):
    """A parameter of a module, with the declaration that the network made."""

    def __init__(self, declared: Declared) -> None:
        super().__init__(declared.shape, "float32", declared.trained, Storage(0, is_weight=True))
        self.declared = declared


class Module:
    """Base class; knows its parts by their names."""

    is_block = False
    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_block:
            return self.forward(*args, **kwargs)
        inputs = [x.storage for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        with current().block(self, inputs):
            return self.forward(*args, **kwargs)

    def named_modules(self, name: str = "") -> Iterator[tuple[str, Module]]:
        """Yield (dotted name, module) of this module ("") and all within it."""
        yield name, self
        for part, module in vars(self).items():
            if isinstance(module, Module):
                yield from module.named_modules(f"{name}.{part}" if name else part)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield (state-dict name, parameter)."""
        for name, module in self.named_modules():
            for part, value in vars(module).items():
                if isinstance(value, Parameter):
                    yield f"{name}.{part}" if name else part, value


class ModuleList(Module):
    """A list of modules; its parts are called 0, 1, ..."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        vars(self).update({str(number): module for number, module in enumerate(modules)})

    def __getitem__(self, number: int) -> Module:
        return list(vars(self).values())[number]

    def __setitem__(self, number: int, module: Module) -> None:
        vars(self)[str(number % len(self))] = module

    def __len__(self) -> int:
        return len(vars(self))

    def __iter__(self) -> Iterator[Module]:
        return iter(list(vars(self).values()))


class Blocks(ModuleList):
    """The blocks of a network."""

    def __init__(self, modules: Iterable[Module]) -> None:
        super().__init__(modules)
        for block in self:
            block.is_block = True


class Sequential(ModuleList):
    def __init__(self, *modules: Module) -> None:
        super().__init__(modules)

    def forward(self, x: Any) -> Any:
        for module in self:
            x = module(x)
        return x


class Linear(Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        init: Initializer = XAVIER_UNIFORM,
        matrices: int = 1,
    ) -> None:
        super().__init__()
        self.weight = parameter((out_features, in_features), init, matrices=matrices)
        self.bias = parameter((out_features,)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class Conv2d(Module):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        bias: bool = True,
        init: Initializer = XAVIER_UNIFORM,
    ) -> None:
        super().__init__()
        self.stride, self.padding = stride, padding
        self.weight = parameter((out_channels, in_channels, kernel_size, kernel_size), init)
        self.bias = parameter((out_channels,)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.convolution(x, self.weight, self.bias, self.stride, self.padding)


class Embedding(Module):
    def __init__(self, num_embeddings: int, embedding_dim: int, init: Initializer = _STANDARD) -> None:
        super().__init__()
        self.weight = parameter((num_embeddings, embedding_dim), init)

    def forward(self, index: Tensor) -> Tensor:
        return ops.take(self.weight, index)


class LayerNorm(Module):
    def __init__(self, width: int, eps: float = 1e-5, elementwise_affine: bool = True) -> None:
        super().__init__()
        self.weight = parameter((width,), ONES) if elementwise_affine else None
        self.bias = parameter((width,)) if elementwise_affine else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.norm(x, math.prod(x.shape[:-1]), self.weight, self.bias)


class RMSNorm(Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = parameter((width,), ONES)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight)


class GroupNorm(Module):
    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.weight, self.bias = parameter((num_channels,), ONES), parameter((num_channels,))

    def forward(self, x: Tensor) -> Tensor:
        return ops.norm(x, x.shape[0] * self.num_groups, self.weight, self.bias)


class SiLU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.silu(x)


class GELU(Module):
    def __init__(self, approximate: str = "none") -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return ops.gelu(x)


def parameter(shape: Sequence[int], init: Initializer = ZEROS, trained: bool = True, matrices: int = 0) -> Parameter:
    """Declare a parameter of a module."""
    return Parameter(Declared(tuple(shape), init, trained, matrices=matrices))


def set_constant(module: Module, name: str, shape: Shape, make: Callable[[], Any]) -> None:
    """Give ``module`` a tensor that is neither saved nor trained; ``make`` is not called."""
    setattr(module, name, Tensor(shape))


def freeze_parameters(module: Module) -> None:
    """Declare that the parameters of ``module`` are not trained."""
    for _, parameter in module.named_parameters():
        parameter.declared = dataclasses.replace(parameter.declared, trained=False)
        parameter.needs_gradient = False


_FRAMEWORK = "mindspeed_mm_dit.framework"
_IMPORT = re.compile(r"^(?:from\s+([.\w]+)\s+import\b|import\s+([.\w]+))", re.M)
"""An import at the top level of a file."""
_lock = threading.RLock()


def meta_reference(reference: str) -> Any:
    """Return ``reference``, "package.module:name", on the meta backend; raises ConfigError if the import fails."""
    module, _, name = reference.partition(":")
    try:
        with _lock:
            return getattr(_executed(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"network = {reference!r} cannot be imported for the meta backend: {error}. Write "
            '"package.module:Class", and use the layers and operators of mindspeed_mm_dit.framework alone.'
        ) from error


@functools.cache
def _executed(name: str) -> ModuleType:
    """Return the module ``name``, executed for the meta backend."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no module {name!r}")
    module = ModuleType(f"{name} on the meta backend")
    module.__package__, module.__file__ = spec.parent, spec.origin
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
    sys.modules[module.__name__] = module  # (dataclasses look there)
    exec(spec.loader.get_code(name), vars(module))  # type: ignore[attr-defined]
    return module


def _import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    """Import for a module on the meta backend, as ``import`` does."""
    whole = importlib.util.resolve_name("." * level + name, globals["__package__"]) if level else name
    if whole == _FRAMEWORK and fromlist:
        for part in fromlist:
            importlib.import_module(f"{meta.__name__}.{part}")
        return meta
    if fromlist and _is_bound(whole):
        return _executed(whole)
    imported = builtins.__import__(name, globals, locals, fromlist, level)
    if fromlist and hasattr(imported, "__path__"):  # from a package: modules of it may be bound
        parts = {part: f"{whole}.{part}" for part in fromlist if isinstance(getattr(imported, part, None), ModuleType)}
        bound = {part: _executed(module) for part, module in parts.items() if _is_bound(module)}
        return SimpleNamespace(**{part: getattr(imported, part) for part in fromlist} | bound) if bound else imported
    return imported


@functools.cache
def _is_bound(name: str) -> bool:
    """Return whether a module takes ``nn`` or ``ops`` of the framework, directly or through another."""
    visited, pending = {name}, [name]
    while pending:
        new = _imported_by(pending.pop()) - visited
        if _FRAMEWORK in new:
            return True
        visited |= new
        pending += new
    return False


@functools.cache
def _imported_by(name: str) -> frozenset[str]:
    """Return the modules of its package and of this project that a module imports at its top level."""
    spec = importlib.util.find_spec(name)
    get_source = getattr(spec and spec.loader, "get_source", None)
    if spec is None or spec.submodule_search_locations or get_source is None:
        return frozenset()
    modules = (importlib.util.resolve_name(a or b, spec.parent) for a, b in _IMPORT.findall(get_source(name) or ""))
    packages = (name.partition(".")[0], "mindspeed_mm_dit")
    return frozenset(module for module in modules if module.partition(".")[0] in packages)
