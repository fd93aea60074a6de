"""Attach to the engine when it imports this package: check the run, register model and data, install the hooks.

The engine imports the modules of a plugin in the order of their names, before it creates a process group or a model.
"""

from __future__ import annotations

import sys

from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.exits import ended_by_ctrl_c, process_files
from mindspeed_mm_dit.integrations.mindspeed_mm.native.contract import check_engine
from mindspeed_mm_dit.integrations.mindspeed_mm.native.settings import PLUGIN


def attach() -> None:
    """Attach to the running engine; an error is printed by one rank, and ends this process with code 2."""
    activate("pytorch")
    from mindspeed_mm_dit.framework.exits import end

    try:
        check_engine(f"training.plugin: {PLUGIN}")
        from mindspeed_mm_dit.integrations.mindspeed_mm.native import register, run

        run.begin(sys.argv)
        process_files.close()  # (the yaml of a command line has been read)
        register.register()
        run.current().meeting.enter_context(ended_by_ctrl_c())
    except UserError as error:
        end(error, collective_error=True)
