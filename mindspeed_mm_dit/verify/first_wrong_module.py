"""Where two computations of a step part: what every module of a network is given, gives, and is given back.

On MindSpore modules are looked at operator by operator (``--pynative``): a compiled graph calls none of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_mm_dit.verify.table import MODULES, Finding

AFTER_BACKWARD = "after backward: every module gives and is given back what it should, what follows is wrong"


class Watch:
    """What goes through each module of ``network`` in its first step, by sample.

    Of the micro-batches of a step the values stand one after the other. A module that is called several times for a
    micro-batch is watched the first time; recomputation calls it again, with the same result.

    Args:
        is_watched: whether a module is, by its name; the network itself, whose name is empty, must be.
    """

    def __init__(self, network: Any, is_watched: Callable[[str], bool] = lambda name: True) -> None:
        self._found: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
        self._micro_batch = -1
        self._hooks: list[Any] = []
        for name, module in network.named_modules():
            if is_watched(name):
                self._look_at(name, module)

    def next(self) -> None:
        """Count up the micro-batches."""
        self._micro_batch += 1

    def end(self) -> Mapping[str, np.ndarray]:
        """Look no longer; return ``input/MODULE/NUMBER``, ``output/MODULE``, ``given/MODULE`` and ``back/MODULE``,
        gradients of its output and its input, in the order in which they were computed."""
        for hook in self._hooks:
            hook.remove()
        return {name: self._joined(list(each.values())) for name, each in self._found.items() if each}

    def _joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Join the values of micro-batches; a table, which has other rows than samples, is the same in all."""
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
    """Return the first tensor of what a module gives; None: there is none."""
    listed = values if isinstance(values, (tuple, list)) else [values]
    return next((tensor for tensor in listed if tensor is not None), None)


def first_wrong(findings: Sequence[Finding]) -> str:
    """Return in words where it begins, of findings of MODULES, each kind in the order in which it is computed.

    Wrong is the first module whose inputs are right and whose output is not. Parts finish before the module that holds
    them, so it is the smallest; where what a module does between its parts is wrong, a part sees that first.
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
