"""How a run of the engine ends where something is wrong."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.hosts.choose import SECONDS_TO_SAY_IT, says_it
from mindspeed_mm_dit.training.exit_codes import USER_ERROR


def give_up(error: UserError, is_shared: bool) -> NoReturn:
    """Say ``error``, on one rank if all of them find it, and end this process at once with code 2."""
    runtime.report_failure(error)
    if says_it() or not is_shared:
        print(f"\n{error}", file=sys.stderr, flush=True)
    else:
        time.sleep(SECONDS_TO_SAY_IT)
    sys.stdout.flush()
    os._exit(USER_ERROR)  # the other ranks may wait for this one, and the launcher ends them
