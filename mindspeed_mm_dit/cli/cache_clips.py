"""``mm-dit cache-latents`` where data.json is of clips."""

from __future__ import annotations

import argparse
import sys
import time
from functools import cache
from pathlib import Path

from mindspeed_mm_dit.errors import ConfigError, PlatformError


def cache_clips(args: argparse.Namespace, shard_clips: int) -> int:
    """Encode the clips and captions that are missing; all that can be is checked first."""
    if args.ai_framework != "pytorch":
        raise PlatformError(
            f"--ai-framework = {args.ai_framework}", "Wan's autoencoder and UMT5 run on PyTorch alone", "drop the flag"
        )
    from mindspeed_mm_dit.framework import activate

    activate(args.ai_framework)
    from tqdm import tqdm

    from mindspeed_mm_dit.configs.clips import load_clips_config
    from mindspeed_mm_dit.configs.model import load_model_config
    from mindspeed_mm_dit.configs.outputs import check_output_folder
    from mindspeed_mm_dit.data.clip_samples import ClipReader
    from mindspeed_mm_dit.data.features import feature_identity
    from mindspeed_mm_dit.framework import runtime
    from mindspeed_mm_dit.models.clip_data import check_clips, open_clip_data
    from mindspeed_mm_dit.models.encode_clips import ClipCacheWriter
    from mindspeed_mm_dit.models.registry import load_autoencoder, load_text_encoder

    param, model = load_clips_config(args.data, "--data").dataset_param, load_model_config(args.model)
    if not model.text_encoders:
        raise ConfigError(f"{args.model}: text_encoder", "this section is required for clips and missing")
    text = model.text_encoders[0]
    check_clips(param, model)
    output = Path(args.output).resolve()
    if Path(param.data_folder).resolve() in (output, *output.parents):
        raise ConfigError(
            f"--output = {args.output}", f"lies among the clips, in {param.data_folder}", "name a folder elsewhere"
        )
    check_output_folder("--output", args.output)
    index = open_clip_data(param, model.ae, text).index
    if runtime.rank() == 0:
        for note in index.notes:
            print(note, file=sys.stderr)
    identity = feature_identity(index.digest, param, model.ae, text)
    reader = ClipReader(index, param, model.ae.channels)
    writer = ClipCacheWriter(Path(args.output), reader, identity, shard_clips, args.dtype)
    shards = writer.missing(runtime.rank(), runtime.world_size())
    clips = sum(len(writer.index.clips_of(shard)) for shard in shards)
    text_encoder = cache(lambda: load_text_encoder(text))
    started = time.perf_counter()
    if shards:
        autoencoder = load_autoencoder(model.ae)
        with tqdm(total=clips, desc="encoding", unit="clip", disable=not sys.stderr.isatty()) as bar:
            for shard in shards:
                writer.write(shard, autoencoder, text_encoder(), bar.update)
    complete = writer.finish(text_encoder)
    seconds = time.perf_counter() - started
    print(
        f"{args.output}: {clips} of {len(index)} clips encoded in {seconds:.1f} s; "
        + ("complete" if complete else "other ranks are still at work")
    )
    return 0
