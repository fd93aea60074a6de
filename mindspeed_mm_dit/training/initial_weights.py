"""The initial weights of a run with --init-from, and a report of which are loaded and which are new.

If the run trains adapters, they are the base: every process reads them again and checks them against the digest in the
run's checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.checkpoint.adapting import InitialValue, SourceWeights, begin, digest_of_base, read_source
from mindspeed_mm_dit.checkpoint.store import ADAPTERS, BASE
from mindspeed_mm_dit.configs.model import ModelConfig, model_config_from_mapping
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import CheckpointError, UserError
from mindspeed_mm_dit.models.init import initial_value
from mindspeed_mm_dit.models.meta import adapters_of, parameters_of
from mindspeed_mm_dit.training.resume import Start, differences, print_rank_0


class First(NamedTuple):
    """The initial weights of a run."""

    weights: dict[str, np.ndarray] | None
    """Initial value of each parameter, float32; None if the seed or a checkpoint decides."""
    base: str = ""
    """Digest of the base weights of adapters; empty without adapters."""


def first_weights(args: RunConfig, start: Start | None) -> First:
    """Return the initial weights of a run, as --init-from decides.

    Every rank must call this: they read a checkpoint folder together. No model is needed.

    Raises:
        UserError: --init-from cannot be read, cannot be adapted to this model, or is not the base of the adapters in
            ``start``.
    """
    model: ModelConfig = args.mm.model
    if args.init_from is None:
        return First(None)
    if start is not None and not adapters_of(model):
        print_rank_0(f"note: --init-from = {args.init_from} is not read: the run resumes from {start.path}")
        return First(None)
    try:
        source = read_source(args.init_from, model.predictor)
        adapted = begin(source, model.predictor, args.mm.classes, args.seed)
        weights = {name: value for name, value, _ in adapted}
        base = digest_of_base(weights) if adapters_of(model) else ""
        if start is not None:
            _check_base(args.init_from, base, start)
    except UserError as error:
        error.is_shared = True  # all ranks read the same file
        raise
    print_rank_0("\n".join(_report_lines(source, adapted, model, args.init_verbose)))
    new = {name: initial_value(name, p, args.seed) for name, p in parameters_of(model).items() if name not in weights}
    return First(weights | new, base)


def _check_base(init_from: str, base: str, start: Start) -> None:
    there = start.facts[ADAPTERS][BASE]
    if base != there:
        raise CheckpointError(
            f"--init-from = {init_from}",
            f"is not the base of the adapters in {start.path}: its digest is {base[:12]}, theirs {there[:12]}",
            "name the weights that the run started from",
        )


def _report_lines(
    source: SourceWeights, adapted: Sequence[InitialValue], model: ModelConfig, every_tensor: bool
) -> Iterator[str]:
    """Yield the lines that report which tensors are loaded and which are new."""
    unchanged = sum(not how for _, _, how in adapted)
    yield f"initial weights: {source.path} ({source.format}): {unchanged} of {len(adapted)} tensors as they are"
    yield from (f"    note: {note}" for note in source.notes)
    for name, value, how in adapted:
        if how or every_tensor:
            yield f"    {name} {tuple(value.shape)}: {how or 'as it is'}"
    if "model" in source.facts:
        there = model_config_from_mapping(source.facts["model"], f"{source.path}: its model.json")
        sections = ("diffusion", "ae") if there.ae.model_id != model.ae.model_id else ("diffusion",)
        for line in differences(there, model, sections):
            yield f"    note: {line}"
    if adapters := adapters_of(model):
        if new := [name for name, _, how in adapted if "drawn anew" in how]:
            names = ", ".join(new[:3])
            yield f"    note: {names} are randomly initialised and frozen, so new classes will be hard to distinguish"
        trained = parameters_of(model).num_elements(trained_only=True)
        yield f"frozen, with adapters in {len(adapters)} layers: {trained:,} parameters are trained"
