"""``mm-dit cache-latents``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm_dit.configs.limits import LARGEST, MOST_THREADS, check_between
from mindspeed_mm_dit.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_mm_dit.configs.model import ModelConfig
    from mindspeed_mm_dit.data.folder import ImageIndex
    from mindspeed_mm_dit.data.latents import CacheIdentity

DESCRIPTION = """\
Encode a data set once, so that no training step has to.

  mm-dit cache-latents --model model.json --data data.json --output data/imagenet256-latents
  torchrun --nproc_per_node 8 -m mindspeed_mm_dit.cli.main cache-latents ...     # one shard a rank at a time

Every image is decoded before the first is encoded, by each rank: one that cannot be stops the command, or is left
out with skip_bad_images.

Then add "latents": "data/imagenet256-latents" to dataset_param of data.json. Mean and standard deviation of each
image's posterior are kept, as it is and mirrored, so training draws its latents anew every epoch and loses
nothing. Run again after an interruption: finished shards are kept. Size on disk at 256 pixels and fp32: 64 KiB an
image, of which fp16 takes half.

Where data.json is of clips (dataset_type "clips"), their latents and the states of their captions are kept; of
model.json also the section text_encoder is read, and clips are encoded one at a time (docs/clips.md)."""

SHARD_IMAGES, SHARD_CLIPS = 4096, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("--model", required=True, metavar="JSON", help="model.json: its ae section is what encodes")
    parser.add_argument("--data", required=True, metavar="JSON", help="data.json: the images")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the cache")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="images encoded together (default 16)")
    shard = f"images in a file (default {SHARD_IMAGES}), or clips (default {SHARD_CLIPS})"
    parser.add_argument("--shard-images", type=int, metavar="N", help=shard)
    parser.add_argument("--dtype", choices=("fp32", "fp16"), default="fp32", help="precision on disk (default fp32)")
    parser.add_argument("--num-workers", type=int, default=2, metavar="N", help="threads that decode (default 2)")
    parser.add_argument("--ai-framework", choices=("pytorch", "mindspore"), default="pytorch")


def run(args: argparse.Namespace) -> int:
    """Encode what is missing."""
    _check_flags(args)
    from mindspeed_mm_dit.configs.clips import ClipsParam
    from mindspeed_mm_dit.configs.data_kinds import dataset_type

    if dataset_type(args.data, "--data") == ClipsParam.dataset_type:
        from mindspeed_mm_dit.cli.cache_clips import cache_clips

        return cache_clips(args, args.shard_images or SHARD_CLIPS)
    from mindspeed_mm_dit.framework import activate

    activate(args.ai_framework)
    from tqdm import tqdm

    from mindspeed_mm_dit.configs.model import load_model_config
    from mindspeed_mm_dit.framework import runtime
    from mindspeed_mm_dit.models.encode_data import CacheWriter, EncodeSettings
    from mindspeed_mm_dit.models.registry import load_autoencoder

    model = load_model_config(args.model)
    model.require_labels(f"--model = {args.model}", "name the model.json of these images, or a data.json of clips")
    identity, index, names = _checked_images(args, model, says_notes=runtime.rank() == 0)
    settings = EncodeSettings(args.batch_size, args.shard_images or SHARD_IMAGES, args.dtype, args.num_workers)
    writer = CacheWriter(Path(args.output), index, names, identity, settings)
    shards = writer.missing(runtime.rank(), runtime.world_size())
    images = sum(len(writer.index.rows_of(shard)) for shard in shards)
    started = time.perf_counter()
    if shards:
        autoencoder = load_autoencoder(model.ae)
        with tqdm(total=images, desc="encoding", unit="image", disable=not sys.stderr.isatty()) as bar:
            for shard in shards:
                writer.write(shard, autoencoder, bar.update)
    complete = writer.finish()
    seconds = time.perf_counter() - started
    print(
        f"{args.output}: {images} of {len(index)} images encoded in {seconds:.1f} s, {images / seconds:.2f} images/s; "
        + ("complete" if complete else "other ranks are still at work")
    )
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    check_between("--batch-size", args.batch_size, 1, LARGEST)
    if args.shard_images is not None:
        check_between("--shard-images", args.shard_images, 1, LARGEST)
    check_between("--num-workers", args.num_workers, 0, MOST_THREADS)


def _checked_images(
    args: argparse.Namespace, model: ModelConfig, says_notes: bool
) -> tuple[CacheIdentity, ImageIndex, list[str]]:
    """Return the identity of the cache, its images and their names; all that can be is checked first."""
    from mindspeed_mm_dit.configs.data import load_data_config
    from mindspeed_mm_dit.configs.outputs import check_output_folder
    from mindspeed_mm_dit.data.dataset import check_fit, check_sizes
    from mindspeed_mm_dit.data.folder import open_index
    from mindspeed_mm_dit.data.latents import identity_of
    from mindspeed_mm_dit.training.classes import say_notes

    data = load_data_config(args.data, "--data")
    data = dataclasses.replace(data, dataset_param=dataclasses.replace(data.dataset_param, latents=None))
    folder = Path(data.dataset_param.data_folder)
    if folder.resolve() in Path(args.output).resolve().parents:
        raise ConfigError(f"--output = {args.output}", f"lies among the images, in {folder}", "name a folder elsewhere")
    check_output_folder("--output", args.output)
    identity = identity_of(model, data)
    check_sizes(model, data)
    index = open_index(data.dataset_param, model.num_classes, decode_all=True)
    if says_notes:
        say_notes(index)
    check_fit(model, data, len(index), 1)
    return identity, index, [str(Path(path).relative_to(folder)) for path in index.paths]
