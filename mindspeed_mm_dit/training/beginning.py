"""The weights that a run begins with, where --init-from names some; what was taken of them, and what is new."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence

import numpy as np

from mindspeed_mm_dit.checkpoint.adapting import Beginning, Source, begin, read_source
from mindspeed_mm_dit.configs.model import ModelConfig, model_config_from_mapping
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.training.start import Start, differences, print_rank_0


def first_weights(args: Namespace, start: Start | None) -> dict[str, np.ndarray] | None:
    """Return what each parameter begins as, float32, by --init-from; None where the seed or a checkpoint decides.

    Every rank must call this: they read a checkpoint folder together. No model is needed.

    Raises:
        UserError: --init-from cannot be read, or not be adapted to this model.
    """
    if args.init_from is None:
        return None
    if start is not None:
        print_rank_0(f"note: --init-from = {args.init_from} is not read: the run goes on from {start.path}")
        return None
    try:
        source = read_source(args.init_from, args.mm.model.predictor)
        begun = begin(source, args.mm.model.predictor, args.mm.classes, args.seed)
    except UserError as error:
        error.is_shared = True  # all ranks read one file
        raise
    print_rank_0("\n".join(_said(source, begun, args.mm.model, args.init_verbose)))
    return {name: value for name, value, _ in begun}


def _said(source: Source, begun: Sequence[Beginning], model: ModelConfig, every_tensor: bool) -> Iterator[str]:
    """Yield the lines that say what was taken and what is new."""
    taken = sum(not how for _, _, how in begun)
    yield f"initial weights: {source.path} ({source.format}): {taken} of {len(begun)} tensors as they are"
    for name, value, how in begun:
        if how or every_tensor:
            yield f"    {name} {tuple(value.shape)}: {how or 'as it is'}"
    if "model" in source.facts:
        there = model_config_from_mapping(source.facts["model"], f"{source.path}: its model.json")
        sections = ("diffusion", "ae") if there.ae.model_id != model.ae.model_id else ("diffusion",)
        for line in differences(there, model, sections):
            yield f"    note: {line}"
