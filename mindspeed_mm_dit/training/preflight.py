"""Everything that can be checked before a device is touched."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.configs.arguments import check_arguments
from mindspeed_mm_dit.configs.data import DataConfig, DatasetParam, load_data_config
from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config, load_fsdp2_config
from mindspeed_mm_dit.configs.model import AutoencoderKLConfig, ModelConfig, model_config_from_mapping
from mindspeed_mm_dit.configs.outputs import check_output_file, check_output_folder
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.data.dataset import check_fit
from mindspeed_mm_dit.data.folder import ImageIndex, open_index, split_index
from mindspeed_mm_dit.data.latents import digest_of_files
from mindspeed_mm_dit.diffusion.schedule import respaced_steps
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.training.classes import say_data


@dataclass(frozen=True)
class MultiModalArguments:
    """What Megatron's ``args.mm`` holds: the parsed config files."""

    model: ModelConfig
    data: DataConfig
    fsdp2: Fsdp2Config | None
    """None without --use-torch-fsdp2."""
    model_json: dict[str, Any]
    """model.json as it was read; it is kept in every checkpoint."""
    classes: tuple[str, ...] = ()
    """Name of each label, kept in every checkpoint."""
    pictures: str = ""
    """``ImageIndex.pictures``, kept in every checkpoint."""
    autoencoder: str = ""
    """Which autoencoder it is: a digest of its files; kept in every checkpoint."""


def preflight(args: Namespace) -> MultiModalArguments:
    """Read every config file, check all of it together with the images, and return the configs.

    Raises:
        UserError: whatever is wrong, with setting, value, reason and cure.
    """
    world_size = runtime.world_size()
    check_arguments(args, world_size)
    model_json = read_json(args.mm_model, "--mm-model")
    mm = MultiModalArguments(
        model=model_config_from_mapping(model_json, args.mm_model),
        data=load_data_config(args.mm_data),
        fsdp2=load_fsdp2_config(args.fsdp2_config_path) if args.use_torch_fsdp2 else None,
        model_json=model_json,
    )
    if mm.fsdp2 is not None:
        mm.fsdp2.shard_ranks(world_size)
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


def with_facts(mm: MultiModalArguments, images: ImageIndex) -> MultiModalArguments:
    """Return ``mm`` with what every checkpoint keeps of the images and the autoencoder."""
    ae = mm.model.ae
    autoencoder = f"files {digest_of_files(ae.from_pretrained)[:12]}" if isinstance(ae, AutoencoderKLConfig) else ""
    return replace(mm, classes=images.classes, pictures=images.pictures, autoencoder=autoencoder)


def check_report(args: Namespace, model: ModelConfig) -> None:
    """Raise ConfigError for a report that could not be drawn once the training is over."""
    if not 0 <= args.report_cfg_scale < math.inf:
        raise ConfigError(f"--report-cfg-scale = {args.report_cfg_scale}", "must be a number of at least 0")
    if not args.report:
        return
    if not args.save:
        raise ConfigError("--report", "is drawn from a checkpoint, and none is saved", "add --save DIR")
    from mindspeed_mm_dit.diffusion.samplers import find_sampler

    total = model.diffusion.num_train_timesteps
    try:
        respaced_steps(total, find_sampler(args.report_sampler).respacing.format(args.report_steps))
    except ConfigError as error:
        more = f"is more than the {total} timesteps there are (diffusion.num_train_timesteps)"
        reason = more if args.report_steps > total else error.reason
        raise ConfigError(f"--report-steps = {args.report_steps}", reason, f"use a divisor of {total}") from None


def check_outputs(args: Namespace) -> None:
    """Make the folders a run writes to; raise ConfigError for one that it could not write to."""
    if args.save:
        check_output_folder("--save", args.save)
        if args.report:
            check_output_file("--report", Path(args.save).parent / "samples.png")
    if args.tensorboard_dir:
        check_output_folder("--tensorboard-dir", args.tensorboard_dir)


def image_indices(mm: MultiModalArguments, seed: int) -> tuple[ImageIndex, ImageIndex]:
    """Return the images to train on and those held out."""
    param = mm.data.dataset_param
    return split_index(_index(param, mm.model.predictor.num_classes), param.valid_fraction, seed)


@lru_cache(maxsize=1)
def _index(param: DatasetParam, num_classes: int) -> ImageIndex:
    """Open an index once a process: checking every image takes a while."""
    return open_index(param, num_classes)
