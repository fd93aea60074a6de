"""Start MindSpeed-MM, with its imports in the order it requires, after checks.

The host would find these errors late, report them less clearly, or miss them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mindspeed_mm_dit import __version__
from mindspeed_mm_dit.checkpoint.store import TRACKER
from mindspeed_mm_dit.configs.fsdp2 import ComputeMode
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.configs.model import spelled_out as looked_up
from mindspeed_mm_dit.configs.run import MultiModalArguments, RunConfig
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.errors import ConfigError, PlatformError, UserError, flag_of
from mindspeed_mm_dit.framework.contract import host_memory_bytes
from mindspeed_mm_dit.framework.exits import raise_when_interrupted, set_single_process_variables, write_temporary_file
from mindspeed_mm_dit.hosts.preflight import HostFacts, check_configs, fsdp2_of, log_data_set, with_report
from mindspeed_mm_dit.hosts.registry import Host
from mindspeed_mm_dit.integrations.mindspeed_mm.flags import check_supported
from mindspeed_mm_dit.integrations.mindspeed_mm.installed import package_folder, tools_json
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron import contract
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.commandline import (
    complete,
    launch_rank,
    parse,
    uses_mindspore,
    without_effect,
)
from mindspeed_mm_dit.planning import MemoryLimit
from mindspeed_mm_dit.terminal import logger
from mindspeed_mm_dit.training.dry_run import plan_of_run

HEADS = "--num-attention-heads"


def check_before_import(argv: Sequence[str]) -> MultiModalArguments | None:
    """Check flags, files and environment, and return the configs; None for --help. A --dry-run ends here, with code 0.

    Raises:
        ConfigError: naming the flag.
    """
    if "--help" in argv or "-h" in argv:
        return None  # the host prints its help while it is imported
    flags = parse(argv)
    for names in (("mm_model",), ("mm_data",), ("micro_batch_size", "global_batch_size")):
        if all(getattr(flags, name) is None for name in names):
            raise ConfigError(f"{' or '.join(map(flag_of, names))} is required.")
    _check_tool(flags)
    resumes = flags.load is not None and (Path(flags.load) / TRACKER).is_file()
    check_supported(flags, "megatron", resumes)
    with_fsdp2 = flags.use_torch_fsdp2 and flags.ai_framework != "mindspore"
    if with_fsdp2:
        _check_flags_of_fsdp2(flags)
    rank, world_size = launch_rank()
    if rank == 0:
        _warn_without_effect(argv, with_fsdp2)
    mm = read_configs(flags)
    flags = with_report(replace(flags, mm=mm), mm.model)
    if with_fsdp2:
        _check_wrapped(flags, mm)
    if rank == 0:
        log_data_set(flags, mm)
    if flags.dry_run:
        if rank == 0:
            logger.info(plan_of_run(flags, world_size, iteration=None))
            logger.info("  not looked at: --load, and the flags that MindSpeed-MM alone reads")
        sys.exit(0)
    return mm


def spelled_out(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` with a model.json that spells out all sizes, because the host reads them from it.

    The host reads the number of heads only from ``num_heads``; for networks with another key we pass its flag.
    """
    path, words = parse(argv).mm_model, list(argv)
    content = read_json(path, "--mm-model") if path else {}
    whole = looked_up(content, path)
    if HEADS not in argv and "num_heads" not in whole["predictor"]:
        words += [HEADS, str(model_config_from_mapping(whole, path).predictor.num_heads)]
    if whole == content:
        return words
    written_out = write_temporary_file("model.json", json.dumps(whole))
    return [word.replace(path, str(written_out)) if word in (path, f"--mm-model={path}") else word for word in words]


def _check_tool(flags: RunConfig) -> None:
    if flags.mm_tool is None:
        raise ConfigError(f"--mm-tool is missing, and MindSpeed-MM needs it. Add --mm-tool {tools_json()}.")
    if not Path(flags.mm_tool).is_file():
        raise ConfigError(f"--mm-tool = {flags.mm_tool} is no file. Use {tools_json()}.")


def _check_flags_of_fsdp2(flags: RunConfig) -> None:
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ConfigError(
            "CUDA_DEVICE_MAX_CONNECTIONS = 1 is refused by Megatron with --use-torch-fsdp2, as the gathering of "
            "weights would wait for computation. Set it to 2 or more, e.g. export CUDA_DEVICE_MAX_CONNECTIONS=2."
        )
    if flags.fsdp2_config_path is None:
        raise ConfigError("--fsdp2-config-path is missing, and --use-torch-fsdp2 needs it. Name an fsdp2.yaml.")
    fp16 = flags.parts["fp16"]
    if fp16 or flags.parts["use_distributed_optimizer"]:
        flag = "--fp16" if fp16 else "--use-distributed-optimizer"
        raise ConfigError(f"{flag} cannot be combined with --use-torch-fsdp2. Drop it (fsdp2.yaml sets the precision).")
    if flags.ckpt_format not in (None, "torch_dcp"):
        raise ConfigError(
            f"--ckpt-format = {flags.ckpt_format} is not possible with --use-torch-fsdp2: a DiT is saved as torch_dcp "
            "then, which the standalone host reads as well. Drop --ckpt-format."
        )


def _check_wrapped(flags: RunConfig, mm: MultiModalArguments) -> None:
    if mm.fsdp2 is not None and not mm.fsdp2.sub_modules_to_wrap:
        raise ConfigError(
            f"{flags.fsdp2_config_path}: sub_modules_to_wrap is missing or empty, and MindSpeed-MM needs it. Name the "
            "modules to wrap, e.g. predictor.blocks.{*}."
        )


def _warn_without_effect(argv: Sequence[str], with_fsdp2: bool) -> None:
    """Print a note for each flag that MindSpeed-MM accepts from us and ignores."""
    for flag in without_effect(argv):
        logger.warning(f"note: {flag} is a flag of the standalone host; MindSpeed-MM does not know it")
    if parse(argv).report and not with_fsdp2:
        logger.warning(
            "note: --report draws nothing without --use-torch-fsdp2: only the host can read that checkpoint format"
        )


def read_configs(flags: RunConfig) -> MultiModalArguments:
    """Call ``check_configs`` with what is known about MindSpeed-MM before it is imported."""
    rank, world_size = launch_rank()
    modes: tuple[ComputeMode, ...] = ("fsdp2",)  # the host has no autocast
    host = HostFacts(
        name="MindSpeed-MM",
        rank=rank,
        world_size=world_size,
        machine=MemoryLimit("this machine", host_memory_bytes()),
        device=None,
        bf16_modes=modes if flags.use_torch_fsdp2 else None,
        check_sharding=_check_sharding,
    )
    return check_configs(flags, host, fsdp2_of(flags))


def _check_sharding(mm: MultiModalArguments) -> None:
    if mm.fsdp2 is not None:
        from mindspeed_mm_dit.training.pytorch.engine import check_sharding  # (only PyTorch has FSDP2)

        check_sharding(mm)


PACKAGE = "mindspeed_mm_dit.integrations.mindspeed_mm.megatron"


def attach(argv: Sequence[str]) -> Host:
    """Import MindSpeed-MM and return the host on top of it.

    Checks and completes the command line first, because the host reads it while it is imported.

    Raises:
        UserError: the command line or a config file cannot be used.
        PlatformError: the host is installed but broken, or lacks what we rely on; the cause is named.
    """
    mm = check_before_import(argv)
    words = list(argv)
    sys.argv[1:] = complete(spelled_out(argv))
    if "MS_WORKER_NUM" not in os.environ:  # (msrun sets its own variables)
        set_single_process_variables()
    for name in import_order(uses_mindspore(argv)):
        try:
            importlib.import_module(name)
        except UserError:
            raise
        except Exception as error:  # (whatever a broken installation raises)
            raise _broken(name, error) from error
    _announce()
    from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.host import MindSpeedMM

    raise_when_interrupted()  # (during training MindSpeed-MM handles signals itself)
    return MindSpeedMM(words, mm)


def _broken(name: str, error: Exception) -> PlatformError:
    """Return the error to report if the import of ``name`` failed with ``error``."""
    torch = getattr(sys.modules.get("torch"), "__version__", "none")
    return PlatformError(
        f"--host = mindspeed-mm cannot start, as importing {name} fails with {type(error).__name__}: {error}. Repair "
        f"the installation (PyTorch {torch} is here, MindSpeed-MM asks for {contract.TORCH}; docs/mindspeed_mm.md "
        "lists versions that go together), or pass --host standalone."
    )


def _announce() -> None:
    if launch_rank()[0] == 0:
        logger.info(f"mindspeed_mm_dit {__version__}, host: MindSpeed-MM in {package_folder('mindspeed_mm')}")
        from megatron.core.package_info import __version__ as megatron

        for line in contract.warnings(str(megatron)):
            logger.warning(line)


def import_order(mindspore: bool) -> tuple[str, ...]:
    """Return the modules to import, in MindSpeed-MM's order; mindspore: whether the run uses MindSpore."""
    gate = ("mindspeed_mm.mindspore.mindspore_adaptor",) if mindspore else ()
    return (
        "torch",
        "torch_npu",
        "mindspeed.megatron_adaptor",
        *gate,
        f"{PACKAGE}.composite",
        "mindspeed_mm.patchs.torch_dcp_patch",
        f"{PACKAGE}.host",
    )
