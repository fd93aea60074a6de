"""Find the module where two computations of a step diverge, from every module's inputs, outputs and gradients.

On MindSpore modules are watched operator by operator (``--pynative``): a compiled graph does not call them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_mm_dit.wings.lab.table import MODULES, Finding

AFTER_BACKWARD = "after backward: every module gives and is given back what it should, what follows is wrong"


class Watch:
    """Records the inputs, outputs and gradients of each module of ``network`` in its first step, by sample.

    The values of a step's micro-batches are concatenated. If a module is called several times for a micro-batch, the
    first call is recorded; recomputation calls it again with the same result.

    Args:
        is_watched: name of a module -> whether to watch it; the network itself, whose name is empty, must be watched.
    """

    def __init__(self, network: Any, is_watched: Callable[[str], bool] = lambda name: True) -> None:
        self._found: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
        self._micro_batch = -1
        self._hooks: list[Any] = []
        for name, module in network.named_modules():
            if is_watched(name):
                self._look_at(name, module)

    def next(self) -> None:
        """Begin the next micro-batch."""
        self._micro_batch += 1

    def end(self) -> Mapping[str, np.ndarray]:
        """Stop watching and return the values, in the order in which they were computed.

        They are ``input/MODULE/NUMBER``, ``output/MODULE``, and the gradients of output and input, ``given/MODULE`` and
        ``back/MODULE``.
        """
        for hook in self._hooks:
            hook.remove()
        return {name: self._joined(list(each.values())) for name, each in self._found.items() if each}

    def _joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Join the values of micro-batches; a table, whose rows are not samples, is the same in all of them."""
        samples = {len(x) for name in ("input//0", "output/") for x in self._found.get(name, {}).values()}
        return np.concatenate(parts) if not samples or len(parts[0]) in samples else parts[0]

    def _look_at(self, name: str, module: Any) -> None:
        from mindspeed_mm_dit.framework import nn

        def forward(module: Any, inputs: Any, output: Any) -> None:
            for number, tensor in enumerate(inputs):
                self._keep(f"input/{name}/{number}", tensor)
            self._keep(f"output/{name}", _first(output))

        def backward(module: Any, of_inputs: Any, of_outputs: Any) -> None:
            self._keep(f"given/{name}", _first(of_outputs))
            self._keep(f"back/{name}", _first(of_inputs))

        self._hooks += [module.register_forward_hook(forward), getattr(module, nn.BACKWARD_HOOK)(backward)]

    def _keep(self, name: str, tensor: Any) -> None:
        from mindspeed_mm_dit.framework import ops

        if getattr(tensor, "ndim", 0) and self._micro_batch not in self._found[name]:
            self._found[name][self._micro_batch] = np.array(ops.numpy(tensor))


def _first(values: Any) -> Any:
    """Return the first tensor in a module's output; None if there is none."""
    listed = values if isinstance(values, (tuple, list)) else [values]
    return next((tensor for tensor in listed if tensor is not None), None)


def first_wrong(findings: Sequence[Finding]) -> str:
    """Return in words where the error begins; ``findings``: of MODULES, each kind in the order of computation.

    The wrong module is the first one whose inputs are right and whose output is not. Submodules finish before their
    parent, so it is the smallest such module. If a parent's own code between its submodules is wrong, a submodule shows
    that first.
    """
    inputs, out, given, back = ([f.which for f in findings if not f.good and f.kind == kind] for kind in MODULES)
    fed = [name.rpartition("/")[0] for name in inputs]
    if "" in fed:
        number = inputs[fed.index("")][1:]
        return f"forward: the data: input {number} of the network (0 is what is noised, 1 the time)"
    if out:
        module = next((name for name in out if name not in fed), out[0])
        return f"forward: module {_said(module)}" + (f", first seen in {out[0]}" if module != out[0] else "")
    if wrong := [name for name in back if name not in given]:
        return f"backward: module {_said(wrong[0])}"
    return f"backward: behind module {_said(given[0])}" if given else AFTER_BACKWARD


def _said(module: str) -> str:
    return module or "the network"
