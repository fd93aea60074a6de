"""A file of reference values: its arrays, checks of its inputs, networks with its weights, and kinds of files.

To add a kind, write a module in this folder with a ``Kind`` and its program, which takes (arrays, weights by flag) and
computes the quantities of the rows. Then add the kind to ``parity.KINDS``.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.compatibility import check_names
from mindspeed_mm_dit.checkpoint.shapes import check_claimed_sizes
from mindspeed_mm_dit.configs.files import UnusableFile, check_file
from mindspeed_mm_dit.configs.limits import short_repr
from mindspeed_mm_dit.configs.numpy_file import read_npz
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.tools.verify.table import Rows

Tensor = Any
Weights = Mapping[str, "str | Path"]
"""Flag -> file or folder with the weights of one part of the model."""
FORMAT = "see docs/verification.md for the format"


class ReferenceArrays(dict[str, np.ndarray]):
    """The arrays of a file of reference values by name; looking up a missing one raises CheckpointError."""

    def __missing__(self, name: str) -> np.ndarray:
        raise CheckpointError(f"--reference: {name}", "is missing, but other values of the file need it", FORMAT)

    def tensor(self, name: str) -> Tensor:
        """Return an array as a tensor of int64 or float32, as networks take it."""
        return ops.tensor(self[name].astype(np.int64 if self[name].dtype.kind in "iub" else np.float32))

    def check_shape(self, name: str, expected: tuple[int | None, ...]) -> None:
        """Raise CheckpointError unless the array ``name`` has the ``expected`` shape; None is any size but 0."""
        actual = self[name].shape
        if len(actual) != len(expected) or any(
            size == 0 if other is None else size != other for size, other in zip(actual, expected)
        ):
            sizes = str(expected).replace("None", "any")
            raise CheckpointError(f"--reference: {name}", f"has the shape {actual}, expected {sizes}", FORMAT)

    def check_range(self, name: str, most: int, kinds: str = "iu", why: str = "") -> None:
        """Raise CheckpointError unless the array ``name`` holds whole ("iu") or real ("f") numbers up to ``most``."""
        values, words = self[name], "real" if kinds == "f" else "whole"
        if values.dtype.kind not in kinds or not ((values >= 0) & (values <= most)).all():  # not: NaN too
            raise CheckpointError(f"--reference: {name}", f"must hold {words} numbers from 0 to {most}{why}", FORMAT)

    def sizes(self, names: tuple[str, ...]) -> dict[str, int]:
        """Return the whole numbers in ``config`` by ``names``."""
        numbers = self["config"]
        if numbers.shape != (len(names),) or numbers.dtype.kind not in "iu":
            what = f"--reference: config = {short_repr(numbers.tolist())}"
            raise CheckpointError(what, f"must be {len(names)} whole numbers: {', '.join(names)}", FORMAT)
        return dict(zip(names, numbers.tolist()))


def read_arrays(path: str | Path) -> ReferenceArrays:
    """Read the arrays of an .npz; raises CheckpointError if it is no .npz, or an array does not hold real numbers."""
    try:
        check_file(path)
        if not zipfile.is_zipfile(path):
            raise UnusableFile("is not an .npz of arrays, or is cut short")
        if not (arrays := ReferenceArrays(read_npz(path))):
            raise UnusableFile("holds no arrays")
    except UnusableFile as problem:
        words = str(problem) if os.path.lexists(path) else "there is no such file"
        raise CheckpointError(f"--reference = {path}", words, FORMAT) from None
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
            raise CheckpointError(f"--reference: {name}", "must be an array of real numbers", FORMAT)
    return arrays


def unknown_quantity(name: str, hint: str = "") -> CheckpointError:
    """Return the error for an unknown key."""
    return CheckpointError(f"--reference: {name}", "is no quantity this command knows", hint or FORMAT)


def config_of(kind: type, sizes: Mapping[str, Any], what: str) -> Any:
    """Return the config of a network with these ``sizes``; ``what`` names their source in errors.

    Raises CheckpointError for invalid sizes, and for those that do not fit this machine's memory.
    """
    try:
        config: Any = from_mapping(kind, sizes, what)
    except ConfigError as error:
        raise CheckpointError(error.what, error.reason, error.cure) from None
    check_claimed_sizes(config, what)
    return config


def loaded(
    network: Callable[[Any], Any], config: Any, weights: Mapping[str, np.ndarray], flag: str, compiled: bool = True
) -> Any:
    """Return a network with the ``weights`` of ``flag``, ready to use; raises CheckpointError if they do not match.

    compiled: whether MindSpore may compile it; then its modules cannot be watched.
    """
    check_names(
        parameters_of(config).shapes(),
        {name: array.shape for name, array in weights.items()},
        flag,
        "is not of the network that config of --reference describes",
        "name the weights that the file was made with",
    )
    model = network(config)
    runtime.load_arrays(model, weights)
    model = runtime.to_runtime_device(model)
    return runtime.compiled(model) if compiled else model


def watched(network: Any, run: Callable[[], object]) -> dict[str, Any]:
    """Return the output of each module's first call during ``run``, by module name."""
    outputs: dict[str, Any] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            outputs.setdefault(name, output)

        return hook

    hooks = [module.register_forward_hook(record(name)) for name, module in network.named_modules()]
    run()
    for hook in hooks:
        hook.remove()
    return outputs


def evaluate(network: Any, *inputs: Tensor) -> Tensor:
    """Return the output of ``network`` for ``inputs``, without gradients."""
    with ops.no_grad():
        return network(*inputs)


@dataclass(frozen=True)
class Kind:
    """A kind of files of reference values; names are given as regular expressions."""

    signature: str
    """Names that appear in no file of a later kind in the registry."""
    inputs: str
    """Names that are inputs, or for information."""
    program: Callable[[ReferenceArrays, Weights], Any]
    """Recomputes a file, each quantity on demand."""
    rows: Rows
    """Every quantity that such a file may hold."""
    has_network: bool = True
    """Whether the values are those of a network, whose weights ``--checkpoint`` names."""
    not_checked: Mapping[str, str] = field(default_factory=dict)
    """Names that are not recomputed here -> the reason."""
