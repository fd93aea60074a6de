"""Names of torch_npu and its kin that MindSpeed-MM imports, and uses on an NPU only; what would compute raises."""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

WITHOUT_EFFECT = ("torch_npu.profiler.", "torchair.")
"""Beginnings of what may be called."""


def autoload() -> None:
    """Do nothing: PyTorch's entry point wants a function, and the import before has done it all."""


class _Type(type):
    """A type that holds nothing but types: levels of a profiler, options of a group."""

    def __getattr__(cls, name: str) -> Any:
        if not name[:1].isupper():
            raise AttributeError(name)
        return _named(cls.__module__, name)


class Names(ModuleType):
    """A module with whatever is asked of it; it may be called, too, and raises."""

    __path__ = ()  # a package

    def __getattr__(self, name: str) -> Any:
        return _named(self.__name__, name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        if self.__name__.startswith(WITHOUT_EFFECT):
            return lambda decorated=None: decorated
        raise NotImplementedError(f"{self.__name__} is not on this device")


def _named(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name.lstrip("_")[:1].isupper():
        return _Type(name, (), {"__module__": module, "__init__": lambda self, *_, **__: None})
    return Names(f"{module}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what no file here is."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_theirs = name.partition(".")[0] in ("torch_npu", "torchair", "acl")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_theirs else None

    def create_module(self, spec: Any) -> ModuleType:
        return Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
