"""Everything that can be checked before a device is touched."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

from mindspeed_mm_dit.checkpoint.store import check_is_no_checkpoint
from mindspeed_mm_dit.configs.arguments import check_arguments
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.fsdp2 import load_fsdp2_config
from mindspeed_mm_dit.configs.limits import MOST_GUIDANCE, check_between
from mindspeed_mm_dit.configs.model import AutoencoderKLConfig, ModelConfig, model_config_from_mapping, spelled_out
from mindspeed_mm_dit.configs.outputs import check_output_file, check_output_folder
from mindspeed_mm_dit.configs.precision import decide
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.data.dataset import check_fit
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import active, runtime
from mindspeed_mm_dit.framework.host_memory import host_memory_bytes
from mindspeed_mm_dit.models.autoencoder_kl.files import find_weights
from mindspeed_mm_dit.objectives.registry import find_sampler, objective_of
from mindspeed_mm_dit.planning.fit import Place, check_model_fits, check_state_fits, tight_step
from mindspeed_mm_dit.planning.memory import Layout
from mindspeed_mm_dit.training.batches import image_indices
from mindspeed_mm_dit.training.classes import say_data
from mindspeed_mm_dit.training.mm_args import MultiModalArguments, with_facts


def preflight(args: Namespace) -> MultiModalArguments:
    """Read every config file, check all of it together with the images, and return the configs.

    Raises:
        UserError: whatever is wrong, with setting, value, reason and cure.
    """
    world_size = runtime.world_size()
    check_arguments(args, world_size)
    model_json = spelled_out(read_json(args.mm_model, "--mm-model"), args.mm_model)
    fsdp2 = load_fsdp2_config(args.fsdp2_config_path) if args.use_torch_fsdp2 else None
    mm = MultiModalArguments(
        model=model_config_from_mapping(model_json, args.mm_model),
        data=load_data_config(args.mm_data),
        fsdp2=fsdp2,
        model_json=model_json,
        precision=decide(args.bf16, fsdp2, runtime.WAYS_TO_BF16, f"{active()} on {runtime.device_type()}"),
    )
    if mm.fsdp2 is not None:
        mm.fsdp2.shard_ranks(world_size)
    check_memory(args, mm, world_size)
    check_autoencoder(mm)
    train, valid = image_indices(mm, args.seed)
    check_fit(mm.model, mm.data, len(train), args.global_batch_size)
    check_report(args, mm.model)
    if runtime.rank() == 0:
        check_outputs(args)
        say_data(train, valid, mm.model.predictor.num_classes)
        if args.eval_interval and not len(valid):
            print(
                f"warning: --eval-interval = {args.eval_interval}: no image is held out "
                f"(dataset_param.valid_fraction = {mm.data.dataset_param.valid_fraction}), so nothing is validated",
                file=sys.stderr,
            )
    return with_facts(mm, train)


def check_memory(args: Namespace, mm: MultiModalArguments, world_size: int) -> None:
    """Raise ConfigError for a model that cannot fit here; warn on the first rank where a step may not."""
    assert mm.precision is not None
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    host = Place("this machine", host_memory_bytes(), min(int(ranks), world_size) if ranks.isdecimal() else 1)
    check_model_fits(mm.model, host)
    layout, num_bytes = Layout.of(mm.fsdp2, mm.precision, world_size), runtime.device_memory_bytes()
    if runtime.device_type() == "cpu":
        device = host
    elif num_bytes is None or (mm.fsdp2 is not None and mm.fsdp2.offload_to_cpu):
        return
    else:
        device = Place(runtime.device_name(), num_bytes)
    check_state_fits(mm.model, layout, device)
    online_vae = mm.data.dataset_param.latents is None
    warning = tight_step(mm.model, layout, args.micro_batch_size, online_vae, device)
    if warning and runtime.rank() == 0:
        print(warning, file=sys.stderr)


def check_autoencoder(mm: MultiModalArguments) -> None:
    """Raise CheckpointError unless the weights of the autoencoder that encodes the images are there."""
    if isinstance(mm.model.ae, AutoencoderKLConfig) and mm.data.dataset_param.latents is None:
        find_weights(mm.model.ae)


def check_report(args: Namespace, model: ModelConfig) -> None:
    """Raise ConfigError for a report that could not be drawn once the training is over."""
    check_between("--report-cfg-scale", args.report_cfg_scale, 0.0, MOST_GUIDANCE)
    if not args.report:
        return
    if not args.save:
        raise ConfigError("--report", "is drawn from a checkpoint, and none is saved", "add --save DIR")
    name = args.report_sampler = args.report_sampler or objective_of(model.diffusion).quick_sampler
    try:
        sampler = find_sampler(model.diffusion, name, "--report-sampler")
        sampler.check(model.diffusion, args.report_steps, sampler.options())
    except ConfigError as error:
        if error.what.startswith("--steps"):
            raise ConfigError(f"--report-steps = {args.report_steps}", error.reason, error.cure) from None
        raise


def check_outputs(args: Namespace) -> None:
    """Raise ConfigError or CheckpointError for a folder that a run could not, or should not, write to."""
    if args.save:
        check_output_folder("--save", args.save, make=False)
        check_is_no_checkpoint("--save", os.path.abspath(args.save))
        if args.report:
            check_output_file("--report", Path(args.save).parent / "samples.png")
    if args.tensorboard_dir:
        check_output_folder("--tensorboard-dir", args.tensorboard_dir, make=False)
