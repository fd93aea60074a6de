"""Checks before a run touches a device, in their order: flags, config files, memory, images, outputs.

:func:`preflight` is that of the standalone host. Other hosts call its parts with other facts.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_mm_dit.checkpoint.store import check_is_no_checkpoint, read_classes
from mindspeed_mm_dit.configs.arguments import checked, without_effect
from mindspeed_mm_dit.configs.data import DataConfig, load_data_config
from mindspeed_mm_dit.configs.fsdp2 import ComputeMode, Fsdp2Config, decide_precision, load_fsdp2_config
from mindspeed_mm_dit.configs.limits import MAX_GUIDANCE, check_between
from mindspeed_mm_dit.configs.model import ModelConfig, model_config_from_mapping, spelled_out
from mindspeed_mm_dit.configs.run import (
    MultiModalArguments,
    RunConfig,
    check_output_file,
    check_output_folder,
    with_facts,
)
from mindspeed_mm_dit.configs.source import MAX_GRAPHS, SourceParam
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.configs.tuning import FULL_TUNING, Tuning, run_tuning
from mindspeed_mm_dit.data.sources import source_of
from mindspeed_mm_dit.errors import ConfigError, DataError, PlatformError
from mindspeed_mm_dit.framework import active, runtime
from mindspeed_mm_dit.framework.contract import host_memory_bytes
from mindspeed_mm_dit.models.data import check_sizes, models_by_shape, most_expensive_shape, with_budget
from mindspeed_mm_dit.models.meta import parameters_of, with_tuning
from mindspeed_mm_dit.models.registry import check_encoders
from mindspeed_mm_dit.objectives.registry import find_sampler, objective_of
from mindspeed_mm_dit.planning import (
    MemoryLimit,
    Placement,
    check_model_fits,
    check_offloaded_blocks,
    check_state_fits,
    memory_warning,
)
from mindspeed_mm_dit.sampling.conditions import check_prompts, read_prompts
from mindspeed_mm_dit.terminal import logger
from mindspeed_mm_dit.training.callbacks.registry import check_callback_folders, check_callbacks
from mindspeed_mm_dit.training.data_set import DataSet
from mindspeed_mm_dit.training.loggers.registry import check_metrics_loggers
from mindspeed_mm_dit.training.loop import engine_module
from mindspeed_mm_dit.training.resume import check_restorable

MAX_PROMPTS = 100
"""Prompts of --sample-prompts: each is sampled in every grid."""


@dataclass(frozen=True)
class HostFacts:
    """What the checks need to know about a host."""

    name: str
    """Name of the host in errors: "pytorch on cpu", "MindSpeed-MM"."""
    rank: int
    world_size: int
    machine: MemoryLimit
    """Where the model is built."""
    device: MemoryLimit | None
    """Where a rank computes; None if unknown."""
    bf16_modes: Collection[ComputeMode] | None
    """How a step may compute in bfloat16; None: flags of the host decide the precision of a step."""
    check_sharding: Callable[[MultiModalArguments], None]
    """Raises ConfigError if something in fsdp2.yaml does not fit the model, or is not supported."""
    has_context_parallel: bool = False
    """Whether ranks can share the tokens of a sample."""
    has_low_bit_weights: bool = False
    """Whether a frozen base can be stored in few bits."""
    mm_model: str = "--mm-model"
    """Setting that names model.json."""
    mm_data: str = "--mm-data"
    """Setting that names data.json."""


def preflight(args: RunConfig) -> RunConfig:
    """Check a run in the order below, and return it with its configs, its opened data and dependent flags.

    Raises:
        UserError: a check failed; it names setting and value, and what to do.
    """
    host = host_facts()
    args = checked(args, host.world_size)  # flags
    args = replace(args, mm=check_configs(args, host, fsdp2_of(args), run_tuning(args, args.init_from)))
    check_restorable(args)  # what a checkpoint stores of the run
    args = with_report(args, args.mm.model)
    check_callbacks(args, host.world_size)
    runtime.check_backend(args.distributed_backend)
    if host.rank == 0:  # folders
        check_outputs(args)
        check_callback_folders(args)
        check_metrics_loggers(args)
        log_data_set(args, args.mm)
        for note in without_effect(args, active(), runtime.device_type()):
            logger.warning(note)
    return args


def check_configs(
    args: RunConfig, host: HostFacts, fsdp2: Fsdp2Config | None, tuning: Tuning = FULL_TUNING
) -> MultiModalArguments:
    """Check config files, model, placement and data, in this order, and return the configs with the opened data.

    ``args``: the flags --mm-model, --mm-data, --mm-valid-data, --load, --bf16, --seed, --context-parallel-size,
    --power-ema-stds, --optimizer with its settings, --micro-batch-size and --global-batch-size; one of the last
    two may be None. ``tuning``: what is trained, if that is not the whole model.

    Raises:
        UserError: a check failed; it names setting and value, and what to do.
    """
    mm = _read(args, host, fsdp2)
    # the model
    check_model_fits(mm.model, host.machine, tuning.base_dtype)  # (before its parameters are counted one by one)
    check_sizes(mm.model, mm.data.dataset_param)  # (before the memory of a step of each shape)
    mm = replace(mm, model=with_tuning(mm.model, tuning), offload_blocks=args.offload_blocks)
    _check_base(args, mm, host)
    # how the ranks share the work, and whether it fits their memory
    if mm.fsdp2 is not None:
        mm.fsdp2.shard_ranks(host.world_size)
    _check_context_parallel(args.context_parallel_size, mm, host)
    _check_memory(args, mm, host)
    if mm.encodes:
        source_of(mm.data.dataset_param).provide(mm.data.dataset_param)  # a text encoder may come with built-in data
        check_encoders(mm.model)
    host.check_sharding(mm)
    # the data: it is opened here, once, and every sample is looked at
    _check_cache_exists(args, mm.data.dataset_param)
    data_set = DataSet(mm, args.seed)
    data_set.check(args.global_batch_size or args.micro_batch_size * host.world_size, args.micro_batch_size)
    return with_facts(replace(mm, data_set=data_set), data_set.facts())


def _read(args: RunConfig, host: HostFacts, fsdp2: Fsdp2Config | None) -> MultiModalArguments:
    model_json = spelled_out(read_json(args.mm_model, host.mm_model), args.mm_model)
    model = model_config_from_mapping(model_json, args.mm_model)
    if args.timestep_window is not None:
        if not hasattr(model.diffusion, "timestep_window"):
            raise ConfigError(
                f"--timestep-window is not for diffusion.model_id = {model.diffusion.model_id} of {args.mm_model}, "
                "which is trained on all noise levels. Leave it out."
            )
        model_json |= {"diffusion": {**model_json["diffusion"], "timestep_window": list(args.timestep_window)}}
        model = model_config_from_mapping(model_json, args.mm_model)
    modes, valid = host.bf16_modes, args.mm_valid_data

    def load_data(path: str, flag: str) -> DataConfig:
        config = load_data_config(path, flag)
        return replace(config, dataset_param=with_budget(model, config.dataset_param))

    return MultiModalArguments(
        model=model,
        data=load_data(args.mm_data, host.mm_data),
        fsdp2=fsdp2,
        model_json=model_json,
        valid_data=load_data(valid, "--mm-valid-data") if valid else None,
        saved_classes=read_classes(args.load),
        precision=None if modes is None else decide_precision(args.bf16, fsdp2, modes, host.name),
    )


def _check_base(args: RunConfig, mm: MultiModalArguments, host: HostFacts) -> None:
    """Raise ConfigError or PlatformError unless a base in few bits, and blocks that wait, are possible here."""
    if args.base_dtype and not host.has_low_bit_weights:
        raise PlatformError(f"--base-dtype = {args.base_dtype} is not offered in {host.name}. Leave it out.")
    if not args.offload_blocks:
        return
    check_offloaded_blocks(args.offload_blocks, args.base_dtype, parameters_of(mm.model))
    what = f"--offload-blocks = {args.offload_blocks}"
    if mm.fsdp2 is None or not mm.fsdp2.recompute_modules:
        raise ConfigError(
            f"{what} needs the blocks to be recomputed in backward. Add --use-torch-fsdp2, and recompute_modules in "
            "fsdp2.yaml (mm-dit plan --write-fsdp2 writes them)."
        )
    if mm.fsdp2.shard_ranks(host.world_size) > 1 or mm.fsdp2.offload_to_cpu:
        raise ConfigError(
            f"{what} is for one device: several ranks share the weights by sharding_size of fsdp2.yaml, and "
            "offload_to_cpu there already keeps them in the machine's memory. Use one of them."
        )


def _check_context_parallel(ranks: int, mm: MultiModalArguments, host: HostFacts) -> None:
    """Raise ConfigError or PlatformError unless ``ranks`` ranks can share a sample here."""
    if ranks > 1 and not host.has_context_parallel:
        raise PlatformError(f"--context-parallel-size = {ranks} is not offered in {host.name}. Use 1.")
    for model in models_by_shape(mm.model, mm.data.dataset_param):
        model.predictor.check_context_parallel(ranks)


def _check_memory(args: RunConfig, mm: MultiModalArguments, host: HostFacts) -> None:
    """Raise ConfigError for a model that cannot fit here; warn on the first rank if a step may not fit."""
    offloaded = mm.fsdp2 is not None and mm.fsdp2.offload_to_cpu and host.device != host.machine
    if host.device is None or mm.precision is None or offloaded:
        return
    placement = Placement(
        host.world_size,
        1,
        mm.precision,
        sequence_ranks=args.context_parallel_size,
        averages=1 + len(args.power_ema_stds or ()),
        optimizer=args.chosen_optimizer(),
        offloaded_blocks=args.offload_blocks,
    ).with_sharding(mm.fsdp2)
    check_state_fits(mm.model, placement, host.device)
    warning = memory_warning(
        most_expensive_shape(mm.model, mm.data.dataset_param), placement, args.micro_batch_size, mm.encodes, host.device
    )
    if warning and host.rank == 0:
        logger.warning(warning)


def _check_cache_exists(args: RunConfig, param: SourceParam) -> None:
    """Raise DataError, with the whole command, if the cache that data.json names does not exist yet."""
    if param.cache is not None and not os.path.lexists(param.cache):
        files = ["--model", str(args.mm_model), "--data", str(args.mm_data), "--output", param.cache]
        raise DataError(
            f"{param.cache_key} = {param.cache} does not exist yet: there is no {os.path.abspath(param.cache)}. Run: "
            + shlex.join(["mm-dit", "cache-latents", *files])
        )


def with_report(args: RunConfig, model: ModelConfig) -> RunConfig:
    """Return ``args`` with the sampler of its report; raises ConfigError for samples that could not be generated."""
    check_between("--report-cfg-scale", args.report_cfg_scale, 0.0, MAX_GUIDANCE)
    if args.sample_prompts is not None:
        _check_prompts(args.sample_prompts, model)
    if not args.report:
        return args
    if not args.save:
        raise ConfigError("--report needs a checkpoint to sample from, and none is saved. Add --save DIR.")
    name = args.report_sampler or objective_of(model.diffusion).quick_sampler
    try:
        sampler = find_sampler(model.diffusion, name, "--report-sampler")
        sampler.check(model.diffusion, args.report_steps, sampler.options())
    except ConfigError as error:
        raise ConfigError(re.sub("^--steps", "--report-steps", str(error))) from None
    return replace(args, report_sampler=name)


def _check_prompts(file: str, model: ModelConfig) -> None:
    prompts, conditions = read_prompts("--sample-prompts", file), model.predictor.conditions
    if "caption" not in conditions.items or conditions.needs_frames:
        words = "needs first frames" if conditions.needs_frames else "is not conditioned on text"
        raise ConfigError(f"--sample-prompts = {file} does not fit this model, which {words}. Leave it out.")
    if len(prompts) > MAX_PROMPTS:
        raise ConfigError(
            f"--sample-prompts = {file} holds {len(prompts):,} prompts, more than {MAX_PROMPTS}. Use fewer prompts."
        )
    check_prompts(model, prompts, "--sample-prompts")


def check_outputs(args: RunConfig) -> None:
    """Raise ConfigError or CheckpointError for a folder that a run cannot or should not write to."""
    if args.save:
        check_output_folder("--save", args.save, make=False)
        check_is_no_checkpoint("--save", os.path.abspath(args.save))
        if args.report:
            check_output_file("--report", Path(args.save).parent / "samples.png", make=False)
            if not args.parts["tensorboard_dir"]:
                logger.warning("note: --report writes no loss.png without --tensorboard-dir, which stores the losses")


def log_data_set(args: RunConfig, mm: MultiModalArguments) -> None:
    """Print the data that the run trains on, and warn if --eval-interval is given and nothing is held out."""
    data = mm.data_set
    data.echo()
    shapes = len(mm.data.dataset_param.sizes)
    if args.torch_compile and shapes > 1:
        graphs = "a graph for each of" if shapes <= MAX_GRAPHS else "one graph, with open sizes, for all of"
        logger.info(f"compiled  {graphs} up to {shapes} shapes")
    if args.eval_interval and not data.num_valid:
        logger.warning(
            f"warning: --eval-interval = {args.eval_interval}: no {data.noun} is held out "
            f"(dataset_param.valid_fraction = {mm.data.dataset_param.valid_fraction}), so nothing is validated"
        )


def host_facts() -> HostFacts:
    """Return the facts about this host that the shared checks need."""
    world_size, machine = runtime.world_size(), _machine()
    num_bytes = runtime.device_memory_bytes()
    device = MemoryLimit(runtime.device_name(), num_bytes) if num_bytes is not None else None
    return HostFacts(
        name=f"{active()} on {runtime.device_type()}",
        rank=runtime.rank(),
        world_size=world_size,
        machine=machine,
        device=machine if runtime.device_type() == "cpu" else device,
        bf16_modes=runtime.BF16_MODES,
        has_context_parallel=runtime.HAS_CONTEXT_PARALLEL,
        has_low_bit_weights=runtime.HAS_LOW_BIT_WEIGHTS,
        check_sharding=engine_module().check_sharding,
    )


def _machine() -> MemoryLimit:
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    sharers = min(int(ranks), runtime.world_size()) if ranks.isdecimal() else 1
    return MemoryLimit("this machine", host_memory_bytes(), sharers)


def fsdp2_of(args: RunConfig) -> Fsdp2Config | None:
    """Return the fsdp2.yaml of a run; None without --use-torch-fsdp2."""
    return load_fsdp2_config(args.fsdp2_config_path) if args.use_torch_fsdp2 else None
