"""Train steps from latents: ours against facebookresearch/DiT, same model, batch and precision, in one run.

    python benchmarks/train_throughput.py --reference DIR [--preset DiT-S/2] [--batch 8] [--precision fp32 bf16]

DIR is a checkout of https://github.com/facebookresearch/DiT (which needs timm). Both sides take a full step:
noising, forward, loss, backward, AdamW, moving average. bf16 is autocast on both sides: the reference has no
precision flag, and this is how its users run it. On a GPU pass --preset DiT-XL/2 --batch 256 --torch-compile --tf32
(its train.py allows TensorFloat-32); that batch wants a GPU of 140 GiB.
"""

from __future__ import annotations

import argparse
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from common import CLOCKS, Apart, Report, engine_flags, interleave, ratio, reference_checkout

from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.model import AutoencoderKLConfig, GaussianDiffusionConfig, ModelConfig
from mindspeed_mm_dit.configs.precision import AUTOCAST, FLOAT32
from mindspeed_mm_dit.configs.presets import PRESETS
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.planning.arithmetic import train_flop
from mindspeed_mm_dit.planning.peaks import peak_tflops
from mindspeed_mm_dit.training.pytorch.engine import Engine

NUM_CLASSES = 1000


def main() -> None:
    """Measure and write the result file."""
    args = parse()
    report = Report("train_throughput", f"Train step from latents, {args.preset} on {args.size} x {args.size} latents")
    steps = {}
    for precision in args.precision:
        steps[f"{precision} ours"] = Apart(our_step, args, precision)
        if args.reference:
            steps[f"{precision} reference"] = Apart(reference_step, args, precision)
    seconds = interleave(steps, args.rounds, args.warm_up, args.clock)
    report.raw(seconds)
    report.say()
    headings = ["step", "median s", "images/s", "TFLOP/s", "MFU", "x same precision", "x its train.py (fp32)"]
    report.table(headings, [row_of(args, name, seconds) for name in seconds])
    report.say(
        f"Batch {args.batch}; {args.clock} seconds a step, rounds interleaved. x: reference / ours, median of rounds."
    )
    report.save()


def parse() -> Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", metavar="DIR", help="checkout of facebookresearch/DiT; without it, ours alone")
    parser.add_argument("--preset", default="DiT-S/2", choices=list(PRESETS))
    parser.add_argument("--size", type=int, default=32, help="height of the latents (32: 256 pixels)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=3, help="rounds before those that count")
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS), help="cpu: for a busy CPU, one thread")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--torch-compile", action="store_true", help="compile our blocks")
    parser.add_argument("--tf32", action="store_true", help="TensorFloat-32 on both sides, as the reference's train.py")
    parser.add_argument("--peak-tflops", type=float, help="peak of the device; default: from the table, if known")
    return parser.parse_args()


def row_of(args: Namespace, name: str, seconds: dict[str, list[float]]) -> list[str]:
    """Return the table row of one kind of step."""
    precision = name.split()[0]
    median = statistics.median(seconds[name])
    flop = args.batch * train_flop(model_config(args).predictor) / median
    peak = args.peak_tflops or peak_tflops(runtime.device_name(), precision)
    peers = [seconds.get(f"{p} reference") if name.endswith("ours") else None for p in (precision, "fp32")]
    ratios = [f"{ratio(seconds[name], peer):.2f}" if peer else "" for peer in peers]
    mfu = f"{flop / 1e12 / peak:.1%}" if peak else "peak not known"
    return [name, f"{median:.4f}", f"{args.batch / median:.2f}", f"{flop / 1e12:.3f}", mfu, *ratios]


def model_config(args: Namespace) -> ModelConfig:
    """Return the published training set-up of ``--preset``."""
    return ModelConfig(
        ae=AutoencoderKLConfig(from_pretrained="not used"),
        diffusion=GaussianDiffusionConfig(),
        predictor=DiTConfig(input_size=args.size, num_classes=NUM_CLASSES, **PRESETS[args.preset]),
    )


def batches(args: Namespace) -> Iterator[dict[str, np.ndarray]]:
    """Yield one batch of cached latents again and again."""
    draw, shape = np.random.default_rng(0), (args.batch, 4, args.size, args.size)
    batch = {
        "labels": draw.integers(0, NUM_CLASSES, args.batch),
        "timesteps": draw.integers(0, 1000, args.batch),
        **{name: draw.standard_normal(shape, np.float32) for name in ("noise", "posterior_noise", "latent_mean")},
        "latent_std": np.full(shape, 0.1, np.float32),
    }
    while True:
        yield batch


def our_step(args: Namespace, precision: str) -> Callable[[], Any]:
    """Return one step of our engine, as pretrain_dit.py takes it."""
    config = model_config(args)
    runtime.initialize(None, args.batch, args.batch)
    flags = engine_flags(torch_compile=args.torch_compile, tf32=args.tf32)
    own_precision = AUTOCAST if precision == "bf16" else FLOAT32
    engine = Engine(DiTModel(config, with_autoencoder=False), flags, None, own_precision)

    def forward_step(stream: Iterator[Any], model: Any) -> tuple[Any, Any]:
        return model(**runtime.to_device(next(stream))), lambda losses: (losses.mean(), {"loss": losses.mean()})

    stream = batches(args)
    return lambda: engine.train_step(forward_step, stream, 1e-4)


def reference_step(args: Namespace, precision: str) -> Callable[[], Any]:
    """Return one step as the reference's train.py takes it, from latents on."""
    with reference_checkout(args.reference):
        from diffusion import create_diffusion
        from models import DiT_models
    runtime.allow_tf32(args.tf32)
    device = runtime.device()
    model = DiT_models[args.preset](input_size=args.size, num_classes=NUM_CLASSES).to(device)
    average = deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    diffusion = create_diffusion(timestep_respacing="")
    arrays = next(batches(args))

    def step() -> float:
        batch = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
        latents = (batch["latent_mean"] + batch["latent_std"] * torch.randn_like(batch["noise"])).mul_(0.18215)
        t = torch.randint(0, diffusion.num_timesteps, (args.batch,), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            losses = diffusion.training_losses(model, latents, t, {"y": batch["labels"]})
        loss = losses["loss"].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters()):
                mean.mul_(0.9999).add_(weight, alpha=0.0001)
        return loss.item()

    return step


if __name__ == "__main__":
    main()
