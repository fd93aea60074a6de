"""The micro-batches of one step, of training or of a validation, as this rank reads them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.training.signals import StopRequest


def next_batches(batches: Iterator[Any], stop: StopRequest) -> list[Any]:
    """Return this rank's micro-batches of one optimizer step.

    They are all made before the step, so that an error of the reader, which is noted, finds the weights as they were.
    """
    count, own = runtime.num_microbatches(), []
    try:
        own = list(itertools.islice(batches, count))
        if len(own) < count:
            raise DataError("the batches of this run", "have come to an end")
    except Exception as error:  # (a reader's, whatever its kind)
        stop.note(error)
    return own
