"""``mm-dit cache-latents``."""

from __future__ import annotations

import argparse
import time
from functools import cache
from pathlib import Path

from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.limits import MAX_INT64, MAX_THREADS, check_between
from mindspeed_mm_dit.configs.model import ModelConfig, load_model_config
from mindspeed_mm_dit.configs.run import check_output_folder
from mindspeed_mm_dit.data.samples import OpenedDataset
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.models.data import cache_identity, check_sizes, open_data, with_budget
from mindspeed_mm_dit.models.registry import check_encoders, load_encoders, load_image_encoder, load_teachers
from mindspeed_mm_dit.sampling.request import ModelRequest, add_flags
from mindspeed_mm_dit.terminal import echo, progress
from mindspeed_mm_dit.training.data_set import log_notes

DESCRIPTION = """\
Encode a data set once, so that no training step has to: images or videos with the VAE, captions with the text encoders.

  mm-dit cache-latents --model model.json --data data.json --output data/imagenet256-latents
  torchrun --nproc_per_node 8 -m mindspeed_mm_dit.cli.main cache-latents ...     # one shard a rank at a time

Then add "latents": "data/imagenet256-latents" (for clips "features") to dataset_param of data.json.

Each rank first decodes every sample. A sample that cannot be decoded stops the command, or is left out with
skip_bad_images or skip_bad_clips. If the command is interrupted, run it again: finished shards are kept.

The cache keeps mean and standard deviation of each posterior, for each image and its mirror image, so training samples
new latents every epoch as without a cache. Captions are kept as the states of model.json's text encoders. Size on disk
at 256 pixels: 64 KiB an image with fp32, half of that with fp16."""

SHARD_IMAGES, SHARD_CAPTIONED, SHARD_VIDEOS = 4096, 512, 64
BATCH_IMAGES, BATCH_VIDEOS = 16, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument(
        "--model", required=True, metavar="JSON", help="model.json: its ae and text_encoder sections name the encoders"
    )
    parser.add_argument("--data", required=True, metavar="JSON", help="data.json: the samples")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the cache")
    together = f"samples encoded together (default {BATCH_IMAGES} images or {BATCH_VIDEOS} video)"
    parser.add_argument("--batch-size", type=int, metavar="N", help=together)
    shard = (
        f"samples per file (default {SHARD_IMAGES} images, {SHARD_CAPTIONED} with captions, or {SHARD_VIDEOS} videos)"
    )
    parser.add_argument("--shard-images", type=int, metavar="N", help=shard)
    parser.add_argument("--dtype", choices=("fp32", "fp16"), default="fp32", help="precision on disk (default fp32)")
    parser.add_argument(
        "--num-workers", type=int, default=2, metavar="N", help="threads that decode samples (default 2)"
    )
    tf32 = "PyTorch on NVIDIA GPUs: faster, with errors of about 1e-3; on other devices it changes nothing"
    parser.add_argument("--tf32", action="store_true", help=f"round the inputs of products to TensorFloat-32 ({tf32})")
    add_flags(parser, ModelRequest, "framework")


def run(args: argparse.Namespace) -> int:
    """Encode the shards that are missing."""
    _check_flags(args)

    activate(args.ai_framework)
    from mindspeed_mm_dit.framework import runtime
    from mindspeed_mm_dit.models.fill_cache import CacheWriter, EncodeSettings

    runtime.allow_tf32(args.tf32)
    model = load_model_config(args.model)
    opened = _open(args, model)
    if runtime.rank() == 0:
        log_notes(opened.rows, opened.param.noun)
    videos = len(model.sample_size) == 3
    shard_images = SHARD_CAPTIONED if model.text_encoders else SHARD_IMAGES
    settings = EncodeSettings(
        args.batch_size or (BATCH_VIDEOS if videos else BATCH_IMAGES),
        args.shard_images or (SHARD_VIDEOS if videos else shard_images),
        args.dtype,
        args.num_workers,
    )
    writer = CacheWriter(Path(args.output), opened, settings)
    shards = writer.missing(runtime.rank(), runtime.world_size())
    count = sum(len(writer.index.rows_of(shard)) for shard in shards)
    encoders = cache(lambda: (*load_encoders(model), load_teachers(model), load_image_encoder(model.image_encoder)))
    started = time.perf_counter()
    with progress("encoding", total=count, unit=opened.param.noun) as bar:
        for shard in shards:
            writer.write(shard, *encoders(), bar.update)
    complete = writer.finish(lambda: encoders()[1])
    seconds = time.perf_counter() - started
    echo(
        f"{args.output}: {count} of {len(opened.rows)} {opened.param.noun}s encoded in {seconds:.1f} s, "
        f"{count / seconds:.2f} a second; " + ("complete" if complete else "other ranks are still encoding")
    )
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    for flag, value in (("--batch-size", args.batch_size), ("--shard-images", args.shard_images)):
        if value is not None:
            check_between(flag, value, 1, MAX_INT64)
    check_between("--num-workers", args.num_workers, 0, MAX_THREADS)


def _open(args: argparse.Namespace, model: ModelConfig) -> OpenedDataset:
    """Check everything that can be checked, and return the samples, read from files and not from a cache."""
    param = with_budget(model, load_data_config(args.data, "--data").dataset_param).without_cache()
    folder, output = Path(param.data_folder).resolve(), Path(args.output).resolve()
    if folder in (output, *output.parents):
        raise ConfigError(
            f"--output = {args.output} lies among the {param.noun}s, in {param.data_folder}. Name another folder."
        )
    check_output_folder("--output", args.output)
    check_encoders(model)
    cache_identity(model, param)
    check_sizes(model, param)
    return open_data(model, param, decode_all=True)
