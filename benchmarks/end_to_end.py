"""Time training from image files to optimizer step at 256 pixels, SD-VAE included: cached latents, encoding online, and
the reference.

    python benchmarks/end_to_end.py --reference DIR [--vae DIR] [--preset DiT-S/2] [--batch 4]

DIR is a checkout of facebookresearch/DiT (which needs timm). Without --vae the SD-VAE has random weights, which cost
the same time. The images are random noise in PNG files of 300 x 280 pixels, written to a temporary folder. The cache is
filled before the clock starts, as once for a whole training; the result also has the cost of filling it. The reference
decodes as we do, and encodes with diffusers in float32, as its train.py does.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import CLOCKS, Apart, Report, engine_flags, interleave, order, ratio, timed
from PIL import Image
from train_throughput import reference_step

from mindspeed_mm_dit.cli.main import main as mm_dit
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.dit import PRESETS
from mindspeed_mm_dit.configs.fsdp2 import AUTOCAST, FLOAT32
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.data.transforms import load_pixels
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.data import open_data
from mindspeed_mm_dit.models.registry import load_autoencoder
from mindspeed_mm_dit.objectives.registry import training_draw
from mindspeed_mm_dit.training.pytorch.engine import Engine


def main() -> None:
    """Measure and write the result file."""
    args = parse()
    report = Report("end_to_end", f"Image files to optimizer step, {args.preset} at 256 pixels with SD-VAE")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_inputs(home, args)
        caching = timed(lambda: fill_cache(home, args), args.clock)
        steps = {
            "cached, bf16": Apart(our_step, home, args, True, True),
            "cached, fp32": Apart(our_step, home, args, True, False),
            "online, fp32": Apart(our_step, home, args, False, False),
        }
        if args.reference:
            steps["reference"] = Apart(full_reference_step, home, args)
        seconds = interleave(steps, args.rounds, warm_up=1, clock=args.clock)
    report.raw(seconds)
    rows = [
        [name, f"{statistics.median(values):.3f}", f"{args.batch / statistics.median(values):.3f}",
         f"{ratio(values, seconds.get('reference', values)):.2f}"]
        for name, values in seconds.items()
    ]  # fmt: skip
    report.echo()
    report.table(["images come", "median s a step", "images/s", "x the reference"], rows)
    report.echo(f"Batch {args.batch}, {args.clock} seconds a step, {order()}; the reference in fp32, as its train.py.")
    report.echo(f"Filling the cache: {caching / args.images:.2f} s an image for both flips, once for a training.")
    report.save()


def write_inputs(home: Path, args: Namespace) -> None:
    """Write images, autoencoder and configs."""
    draw = np.random.default_rng(0)
    for number in range(args.images):
        path = home / "images" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (280, 300, 3), np.uint8)).save(path)
    vae = args.vae or str(random_vae(home / "vae"))
    predictor = {"model_id": "dit", "input_size": 32, "num_classes": 1000, **PRESETS[args.preset]}
    ae = {"model_id": "autoencoder_kl", "from_pretrained": vae}
    model = {"ae": ae, "diffusion": {"model_id": "gaussian_diffusion"}, "predictor": predictor}
    (home / "model.json").write_text(json.dumps(model))
    param = {"data_folder": str(home / "images"), "image_size": 256, "random_flip": True}
    (home / "data.json").write_text(json.dumps({"dataset_param": param}))


def random_vae(folder: Path) -> Path:
    """Save the architecture of Stable Diffusion's autoencoder, with random weights."""
    from diffusers import AutoencoderKL

    AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        sample_size=256,
    ).save_pretrained(folder)
    return folder


def fill_cache(home: Path, args: Namespace) -> None:
    """Run mm-dit cache-latents."""
    configs = ["--model", str(home / "model.json"), "--data", str(home / "data.json")]
    code = mm_dit(["cache-latents", *configs, "--output", str(home / "latents"), "--batch-size", str(args.batch)])
    assert code == 0


def our_step(home: Path, args: Namespace, cached: bool, bf16: bool) -> Callable[[], Any]:
    """Return our step, batch preparation included (in the same thread, so that its time counts)."""
    model, data = load_model_config(home / "model.json"), load_data_config(home / "data.json")
    if cached:
        param = dataclasses.replace(data.dataset_param, latents=str(home / "latents"))
        data = dataclasses.replace(data, dataset_param=param)
    opened = open_data(model, data.dataset_param)
    samples = opened.samples(opened.rows, 0, data.dataloader_param.shuffle, training_draw(model.diffusion))
    if not cached:
        samples.visuals._decoded = None  # a real data set does not fit into memory
    runtime.initialize(None, args.batch, args.batch)
    precision = AUTOCAST if bf16 else FLOAT32
    engine = Engine(DiTModel(model, load_autoencoder(model.ae, encodes=not cached)), engine_flags(), None, precision)
    stream = (samples.batch(np.arange(n, n + args.batch)) for n in itertools.count(0, args.batch))

    def forward_step(source: Any, composite: Any) -> Any:
        return composite(**runtime.to_device(next(source))), lambda losses: (losses.mean(), {"loss": losses.mean()})

    return lambda: engine.train_step(forward_step, stream, 1e-4)


def full_reference_step(home: Path, args: Namespace) -> Callable[[], Any]:
    """Return the reference's step: decode, encode and sample the posterior, then its train step."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(load_model_config(home / "model.json").ae.from_pretrained)
    vae = vae.to(runtime.device())
    args.size = 32
    step = reference_step(args, "fp32", args.batch)
    paths = itertools.cycle(sorted((home / "images").rglob("*.png")))

    def whole() -> None:
        pixels = np.stack([load_pixels(str(path), 256, 3) for path in itertools.islice(paths, args.batch)])
        images = torch.from_numpy(pixels).to(runtime.device()).float() / 127.5 - 1
        with torch.no_grad():
            vae.encode(images).latent_dist.sample().mul_(0.18215)
        step()

    return whole


def parse() -> Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", metavar="DIR", help="checkout of facebookresearch/DiT; without it, ours alone")
    parser.add_argument("--vae", metavar="DIR", help="diffusers folder of an AutoencoderKL; default: random weights")
    parser.add_argument("--preset", default="DiT-S/2", choices=list(PRESETS))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.set_defaults(tf32=False)  # for the reference's step
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS), help="cpu: for a busy CPU, one thread")
    return parser.parse_args()


if __name__ == "__main__":
    main()
