"""Error handling for commands that several ranks run together; torchrun or msrun gives each rank the same flags."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework.launched import says_it
from mindspeed_mm_dit.hosts.early_exit import SECONDS_TO_SAY_IT
from mindspeed_mm_dit.training.exit_codes import USER_ERROR


@contextmanager
def found_by_all() -> Iterator[None]:
    """Context in which every rank raises the same UserError: one rank reports it, the others exit in silence."""
    try:
        yield
    except UserError:
        if says_it():
            raise
        time.sleep(SECONDS_TO_SAY_IT)
        raise SystemExit(USER_ERROR) from None
