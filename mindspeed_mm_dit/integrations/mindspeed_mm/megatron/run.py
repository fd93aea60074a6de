"""Run an entry script of MindSpeed-MM, unmodified, with our models registered.

torchrun ... -m mindspeed_mm_dit.hosts.megatron.run path/to/pretrain_sora.py --mm-model ...
"""

from __future__ import annotations

import importlib
import runpy
import sys

from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.exits import end
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.commandline import wants_mindspore
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.contract import check_host

COMMAND = "mindspeed_mm_dit.hosts.megatron.run"


def main() -> None:
    """Register our models and run the script ``sys.argv[1]`` in this process."""
    if len(sys.argv) < 2:
        sys.exit(f"usage: python -m {COMMAND} SCRIPT [flags of the script]")
    activate("pytorch")
    script = sys.argv[1]
    sys.argv[:] = sys.argv[1:]
    try:
        check_host(wants_mindspore(sys.argv), in_their_scripts=True)
    except UserError as error:
        sys.exit(error.formatted)
    gate = ("mindspeed_mm.mindspore.mindspore_adaptor",) if wants_mindspore(sys.argv) else ()
    for name in ("torch", "torch_npu", "mindspeed.megatron_adaptor", *gate):
        importlib.import_module(name)
    try:
        importlib.import_module("mindspeed_mm_dit.integrations.mindspeed_mm.megatron.register").register()
    except UserError as error:
        end(error, collective_error=True)
    runpy.run_path(script, run_name="__main__")
