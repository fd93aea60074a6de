"""Checks of the standalone host before it touches a device: flags, output paths, and the report."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from mindspeed_mm_dit.checkpoint.store import check_is_no_checkpoint
from mindspeed_mm_dit.configs.arguments import checked
from mindspeed_mm_dit.configs.flag_combinations import without_effect
from mindspeed_mm_dit.configs.limits import MOST_GUIDANCE, check_between
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.outputs import check_output_file, check_output_folder
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.configs.tuning_flags import tuning_of_run
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import active, runtime
from mindspeed_mm_dit.framework.host_memory import host_memory_bytes
from mindspeed_mm_dit.hosts.preflight import HostFacts, check_configs, fsdp2_of, say_data_set
from mindspeed_mm_dit.objectives.registry import find_sampler, objective_of
from mindspeed_mm_dit.planning.fit import Place
from mindspeed_mm_dit.terminal import tell
from mindspeed_mm_dit.training.contract import engine_module
from mindspeed_mm_dit.training.trackers.registry import check_trackers
from mindspeed_mm_dit.training.watchers.registry import check_places, check_watchers


def preflight(args: RunConfig) -> RunConfig:
    """Check flags, config files, images and outputs, and return the run with its configs and dependent flags.

    Raises:
        UserError: whatever is wrong, with setting, value, reason and cure.
    """
    host = host_facts()
    args = checked(args, host.world_size)
    args = replace(args, mm=check_configs(args, host, fsdp2_of(args), tuning_of_run(args, args.init_from)))
    args = with_report(args, args.mm.model)
    check_watchers(args, host.world_size)
    runtime.check_backend(args.distributed_backend)
    if host.rank == 0:
        check_outputs(args)
        check_places(args)
        check_trackers(args)
        say_data_set(args, args.mm)
        for note in without_effect(args, active(), runtime.device_type()):
            tell(note, file=sys.stderr)
    return args


def host_facts() -> HostFacts:
    """Return the facts about this host that the shared checks need."""
    world_size, machine = runtime.world_size(), _machine()
    num_bytes = runtime.device_memory_bytes()
    device = Place(runtime.device_name(), num_bytes) if num_bytes is not None else None
    return HostFacts(
        name=f"{active()} on {runtime.device_type()}",
        rank=runtime.rank(),
        world_size=world_size,
        machine=machine,
        device=machine if runtime.device_type() == "cpu" else device,
        ways_to_bf16=runtime.WAYS_TO_BF16,
        shares_sequences=runtime.SHARES_SEQUENCES,
        check_sharding=engine_module().check_sharding,
    )


def _machine() -> Place:
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    sharers = min(int(ranks), runtime.world_size()) if ranks.isdecimal() else 1
    return Place("this machine", host_memory_bytes(), sharers)


def with_report(args: RunConfig, model: ModelConfig) -> RunConfig:
    """Return ``args`` with the sampler of its report; raises ConfigError for a report that could not be made."""
    check_between("--report-cfg-scale", args.report_cfg_scale, 0.0, MOST_GUIDANCE)
    if not args.report:
        return args
    if not args.save:
        raise ConfigError("--report", "is drawn from a checkpoint, and none is saved", "add --save DIR")
    name = args.report_sampler or objective_of(model.diffusion).quick_sampler
    try:
        sampler = find_sampler(model.diffusion, name, "--report-sampler")
        sampler.check(model.diffusion, args.report_steps, sampler.options())
    except ConfigError as error:
        if error.what.startswith("--steps"):
            raise ConfigError(f"--report-steps = {args.report_steps}", error.reason, error.cure) from None
        raise
    return replace(args, report_sampler=name)


def check_outputs(args: RunConfig) -> None:
    """Raise ConfigError or CheckpointError for a folder that a run cannot or should not write to."""
    if args.save:
        check_output_folder("--save", args.save, make=False)
        check_is_no_checkpoint("--save", os.path.abspath(args.save))
        if args.report:
            check_output_file("--report", Path(args.save).parent / "samples.png", make=False)
            if not args.parts["tensorboard_dir"]:
                tell(
                    "note: --report draws no loss.png without --tensorboard-dir, which keeps the losses",
                    file=sys.stderr,
                )
