"""The kinds of files of reference values."""

from __future__ import annotations

import re
from collections.abc import Collection

from mindspeed_mm_dit.verify.reference.contract import Kind
from mindspeed_mm_dit.verify.reference.dit import DIT
from mindspeed_mm_dit.verify.reference.jit import JIT
from mindspeed_mm_dit.verify.reference.lightningdit import LIGHTNING_DIT
from mindspeed_mm_dit.verify.reference.lora import LORA
from mindspeed_mm_dit.verify.reference.meanflow import MEAN_FLOW
from mindspeed_mm_dit.verify.reference.muon import MUON
from mindspeed_mm_dit.verify.reference.repa import REPA
from mindspeed_mm_dit.verify.reference.sit import SIT
from mindspeed_mm_dit.verify.reference.text_to_video import TEXT_TO_VIDEO

KINDS = (MUON, LORA, TEXT_TO_VIDEO, MEAN_FLOW, LIGHTNING_DIT, JIT, REPA, SIT, DIT)
"""A file is of the first kind whose signature one of its names has."""


def kind_of(names: Collection[str]) -> Kind:
    """Return the kind of a file with the keys ``names``."""
    return next(kind for kind in KINDS if any(re.fullmatch(kind.signature, name) for name in names))
