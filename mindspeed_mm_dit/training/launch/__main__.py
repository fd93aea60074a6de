"""``python -m mindspeed_mm_dit.training.launch SCRIPT [FLAGS]``: start a run as examples/dit/pretrain.sh documents it.

The variables CONFIG, AI_FRAMEWORK, NPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and MM_TOOL say how.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mindspeed_mm_dit.configs.flag_pairs import check_tool
from mindspeed_mm_dit.configs.train_args import read_train_args
from mindspeed_mm_dit.errors import ConfigError, UserError, nearest
from mindspeed_mm_dit.framework import FRAMEWORKS
from mindspeed_mm_dit.framework.interrupt import end_at_once_when_interrupted
from mindspeed_mm_dit.training.exit_codes import USER_ERROR
from mindspeed_mm_dit.training.launch.variables import read_launch, say_whom_it_waits_for, threads_of


def main(argv: Sequence[str]) -> int:
    """Start the processes and wait for them; return the exit code of the run."""
    end_at_once_when_interrupted()  # until a launcher takes it, which then passes it on
    try:
        return _launch(argv[0], argv[1:])
    except UserError as error:
        print(error, file=sys.stderr)
        return USER_ERROR


def _launch(script: str, flags: Sequence[str]) -> int:
    framework = os.environ.get("AI_FRAMEWORK") or FRAMEWORKS[0]
    if framework not in FRAMEWORKS:
        raise ConfigError(
            f"AI_FRAMEWORK = {framework}", f"must be one of {', '.join(FRAMEWORKS)}", nearest(framework, FRAMEWORKS)
        )
    command = [script, *_flags_of_config(framework), *flags]
    launcher = importlib.import_module(f"mindspeed_mm_dit.training.{framework}.launch")
    launch = read_launch(os.environ, lambda: launcher.count_accelerators() or launcher.CPU_PROCESSES)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of(launch.processes)))
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin keep a busy machine from working
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "2")  # FSDP2 in MindSpeed-MM refuses 1
    if launch.is_alone:
        os.execv(sys.executable, [sys.executable, *command])
    say_whom_it_waits_for(launch)
    return int(launcher.start(launch, command))


def _flags_of_config(framework: str) -> list[str]:
    folder = Path(os.environ.get("CONFIG", ""))
    if not (folder / "train.args").is_file():
        raise ConfigError(f"CONFIG = {folder}", "is no folder with a train.args, such as examples/dit/imagenet256")
    tool = os.environ.get("MM_TOOL")
    check_tool("MM_TOOL", tool)
    return [
        *("--ai-framework", framework),
        *("--mm-model", str(folder / "model.json"), "--mm-data", str(folder / "data.json")),
        *("--fsdp2-config-path", str(folder / "fsdp2.yaml")),
        *(("--mm-tool", tool) if tool else ()),
        *read_train_args(folder / "train.args"),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
