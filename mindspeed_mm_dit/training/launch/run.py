"""Start a run of a config folder, as ``mm-dit train`` does, and through it examples/dit/pretrain.sh.

The environment variables AI_FRAMEWORK, NPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and MM_TOOL
configure it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mindspeed_mm_dit.configs.embedded import CONFIG_FILES, ENTRY_SCRIPT, FLAGS_FILE, config_folder
from mindspeed_mm_dit.configs.flag_combinations import check_tool
from mindspeed_mm_dit.configs.train_args import read_train_args
from mindspeed_mm_dit.errors import ConfigError, nearest
from mindspeed_mm_dit.framework import FRAMEWORKS
from mindspeed_mm_dit.framework.exits import exit_on_sigint, hold_ctrl_c
from mindspeed_mm_dit.training.launch.variables import log_waiting_for_nodes, read_launch, threads_of


def train(config: str, flags: Sequence[str]) -> int:
    """Start the processes of a run and wait for them; return its exit code.

    config: a folder, or the name of an embedded one. flags: override those of its train.args.
    """
    exit_on_sigint()  # until a launcher handles the signal and passes it on
    framework = os.environ.get("AI_FRAMEWORK") or FRAMEWORKS[0]
    if framework not in FRAMEWORKS:
        raise ConfigError(
            f"AI_FRAMEWORK = {framework}", f"must be one of {', '.join(FRAMEWORKS)}", nearest(framework, FRAMEWORKS)
        )
    return start(framework, [str(ENTRY_SCRIPT), *_flags_of_config(config_folder(config), framework, flags), *flags])


def start(framework: str, command: Sequence[str]) -> int:
    """Start a script and its flags in the processes that the variables describe; return the exit code of the run."""
    launcher = importlib.import_module(f"mindspeed_mm_dit.training.{framework}.launch")
    launch = read_launch(os.environ, lambda: launcher.count_accelerators() or launcher.CPU_PROCESSES)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of(launch.processes)))
    for name, value in launcher.VARIABLES.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "2")  # FSDP2 in MindSpeed-MM refuses 1
    if launch.is_alone:
        hold_ctrl_c()  # the script handles it from its first lines on
        os.execv(sys.executable, [sys.executable, *command])
    log_waiting_for_nodes(launch)
    return int(launcher.start(launch, command))


def _flags_of_config(folder: Path, framework: str, flags: Sequence[str]) -> list[str]:
    """Return the flags of a config folder; raises ConfigError for files that it lacks and ``flags`` do not replace."""
    tool = os.environ.get("MM_TOOL")
    check_tool("MM_TOOL", tool)
    words = read_train_args(folder / FLAGS_FILE)
    replaced = {word.partition("=")[0] for word in (*words, *flags)}
    sharding = {"fsdp2.yaml": "--fsdp2-config-path"}
    needed = {**CONFIG_FILES, **(sharding if "--use-torch-fsdp2" in replaced else {})}
    missing = [file for file, flag in needed.items() if flag not in replaced and not (folder / file).is_file()]
    if missing:
        instead = " ".join(f"{needed[file]} FILE" for file in missing)
        raise ConfigError(f"CONFIG = {folder}", f"lacks {', '.join(missing)}", f"write them, or add {instead}")
    return [
        *("--ai-framework", framework),
        *(word for file, flag in (CONFIG_FILES | sharding).items() for word in (flag, str(folder / file))),
        *(("--mm-tool", tool) if tool else ()),
        *words,
    ]
