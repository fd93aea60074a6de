"""Run upstream's trainer, unmodified, on a given yaml, after our checks, which report errors more clearly.

torchrun ... -m mindspeed_mm_dit.hosts.native CONFIG.yaml
"""

from __future__ import annotations

import sys

from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.exits import USER_ERROR, end
from mindspeed_mm_dit.terminal import echo_if_open, open_streams

COMMAND = "mindspeed_mm_dit.hosts.native"


def main() -> None:
    """Check the engine and the yaml ``sys.argv[1]``, then run the trainer in this process."""
    open_streams()
    if len(sys.argv) < 2:
        echo_if_open(f"usage: python -m {COMMAND} CONFIG.yaml", file=sys.stderr)
        sys.exit(USER_ERROR)
    activate("pytorch")
    from mindspeed_mm_dit.integrations.mindspeed_mm.native import contract, host, run

    try:
        contract.check_engine(f"-m {COMMAND}")
        host.attach()
        run.engine_arguments(sys.argv)
    except UserError as error:
        end(error, collective_error=True)
    host.become_trainer(sys.argv[1:])
