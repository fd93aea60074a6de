"""Observe the modules of a network, and find the first one where two computations of a step diverge.

On MindSpore modules are watched operator by operator (``--pynative``): a compiled graph does not call them.
"""

from __future__ import annotations

import copy
import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.tools.verify.table import MODULES, Finding


def iter_leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path: the keys and indices that lead to it, joined by dots."""
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        yield at, value
        return
    for key, inside in items:
        yield from iter_leaves(inside, f"{at}.{key}" if at else str(key))


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same structure with every leaf changed."""
    if isinstance(value, Mapping):
        mapping = copy.copy(value)
        for key, inside in value.items():
            mapping[key] = map_leaves(inside, change)  # type: ignore[index]
        return mapping
    if isinstance(value, (list, tuple)):
        changed = [map_leaves(inside, change) for inside in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return change(value)


AFTER_BACKWARD = "after backward: all outputs and gradients of every module are right, what follows is wrong"


class ModuleRecorder:
    """Records the inputs, outputs and gradients of each module of ``network`` in its first step, by sample.

    The values of a step's micro-batches are concatenated. If a module is called several times for a micro-batch, the
    first call is recorded, and of the gradients those of the call from which the first ones come; recomputation calls
    it again with the same result.

    Args:
        is_watched: name of a module -> whether to watch it; the network itself, whose name is empty, must be watched.
        convert: tensor -> what is recorded of it; None: all of it, as an array.
        of_scalars: whether tensors without axes are recorded, too: they cannot be joined.
    """

    def __init__(
        self,
        network: Any,
        is_watched: Callable[[str], bool] = lambda name: True,
        convert: Callable[[Any], np.ndarray] | None = None,
        of_scalars: bool = False,
    ) -> None:
        backend, self._of_scalars = functions_for(network), of_scalars
        self._values: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
        self._convert, self._micro_batch = convert or backend.to_numpy, -1
        self._calls, self._summed = count(), dict[tuple[int, str], int]()
        self._hooks: list[Any] = []
        for name, module in backend.named_modules(network):
            if is_watched(name):
                self._hooks += backend.observe(module, name, partial(self._now, self._keep), self._next_sum)

    def next(self) -> None:
        """Start the next micro-batch."""
        self._micro_batch += 1

    def end(self) -> dict[str, np.ndarray]:
        """Stop watching and return the values, in the order in which they were computed.

        They are ``input/MODULE/ARGUMENT``, ``output/MODULE``, and the gradients of output and input,
        ``given/MODULE`` and ``back/MODULE``; of several outputs, all but the first have ``#NUMBER`` at the end.
        """
        self.remove()
        return {name: self._joined([each[n] for n in sorted(each)]) for name, each in self._values.items() if each}

    def remove(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()

    def parts(self, begin: str) -> dict[int, dict[str, Any]]:
        """Return the values whose names start with ``begin``, by micro-batch and the rest of the name, as recorded."""
        by_micro_batch: dict[int, dict[str, Any]] = defaultdict(dict)
        for name in sorted(name for name in self._values if name.startswith(begin)):
            for micro_batch, value in self._values[name].items():
                by_micro_batch[micro_batch][name.removeprefix(begin)] = value
        return dict(by_micro_batch)

    def _joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Join the values of micro-batches; a table, whose rows are not samples, is the same in all of them."""
        network = [each for name, each in self._values.items() if name == "output/" or name.startswith("input//")]
        samples = {len(x) for each in network for x in each.values()}
        return np.concatenate(parts) if not samples or len(parts[0]) in samples else parts[0]

    def _now(self, record: Callable[[int, str, Any], None]) -> Callable[[str, Any], None]:
        return partial(record, self._micro_batch)

    def _keep(self, micro_batch: int, name: str, tensor: Any) -> None:
        if (tensor.ndim or self._of_scalars) and micro_batch not in self._values[name]:
            self._values[name][micro_batch] = self._convert(tensor)

    def _next_sum(self) -> Callable[[str, Any], None]:
        return self._now(partial(self._add, next(self._calls)))

    def _add(self, call: int, micro_batch: int, name: str, tensor: Any) -> None:
        if self._summed.setdefault((micro_batch, name), call) == call:
            sums = self._values[name] = self._values.pop(name, {})  # (a sum is computed when its last part is)
            sums[micro_batch] = sums.get(micro_batch, 0.0) + self._convert(tensor)


def functions_for(network: Any) -> Any:
    """Return the module of functions for the framework of ``network``; UserError if it is of neither."""
    for kind in type(network).__mro__:
        framework = {"torch": "pytorch", "mindspore": "mindspore"}.get(kind.__module__.partition(".")[0])
        if framework:
            return importlib.import_module(f"mindspeed_mm_dit.tools.verify.{framework}")
    raise ConfigError(f"{type(network).__name__} must be a torch.nn.Module or a mindspore.nn.Cell.")


@contextmanager
def perturbed_weights(module: Any, size: Callable[[str], float], seed: int) -> Iterator[None]:
    """While entered, each weight of ``module`` is moved by about ``size(name)`` of itself; no copy is needed."""
    flip = partial(functions_for(module).flip_last_bits, module, size, seed)
    flip()
    try:
        yield
    finally:
        flip()


def describe_first_wrong(findings: Sequence[Finding], theirs: Callable[[str], str] = lambda name: "") -> str:
    """Return in words where the error starts; ``findings``: of MODULES, each kind in the order of computation.

    The wrong module is the first one whose inputs are right and whose output is not. Submodules finish before their
    parent, so it is the smallest such module. If a parent's own code between its submodules is wrong, a submodule shows
    that first. theirs: module -> its name in the other program, or "".
    """

    def label(module: str) -> str:
        return (module or "the network") + (f" (theirs: {other})" if (other := theirs(module)) else "")

    inputs, out, output_gradients, input_gradients = (
        [f.which for f in findings if not f.good and f.kind == kind] for kind in MODULES
    )
    fed = [name.rpartition("/")[0] for name in inputs]
    out, output_gradients, input_gradients = (
        [name.partition("#")[0] for name in names] for names in (out, output_gradients, input_gradients)
    )
    if "" in fed:
        numbers = " and ".join(name[1:] for name in inputs if name.startswith("/"))
        return f"forward: the data: input {numbers} of the network"
    if out:
        module = next((name for name in out if name not in fed), out[0])
        return f"forward: module {label(module)}" + (f", first seen in {label(out[0])}" if module != out[0] else "")
    if wrong := [name for name in input_gradients if name not in output_gradients]:
        return f"backward: module {label(wrong[0])}"
    if output_gradients:
        return f"backward: behind module {label('' if '' in output_gradients else output_gradients[0])}"
    return AFTER_BACKWARD
