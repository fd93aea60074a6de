"""Time training steps from latents: ours against facebookresearch/DiT and diffusers, same model and precision, in one
run.

    python benchmarks/train_throughput.py --reference DIR --diffusers [--preset DiT-S/2] [--batch 8] [--precision fp32]

DIR is a checkout of https://github.com/facebookresearch/DiT (which needs timm). All sides take a full step: noising,
forward, loss, backward, AdamW, EMA. The step of diffusers' DiT is the one of its training example, with only the mean
squared error. bf16 is autocast on all sides: the reference has no precision flag, and this is how its users run it.
--fsdp2 adds ours as examples/dit/imagenet256 shards it, on one rank: weights gathered in bfloat16 in place of autocast.
--torch-compile compiles all of them. Given several --batch, each side takes the largest that fits its device. On a GPU:
--preset DiT-XL/2 --batch 128 --precision bf16 --torch-compile --tf32 (the reference's train.py allows TensorFloat-32).
"""

from __future__ import annotations

import argparse
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import CLOCKS, Apart, Report, engine_flags, interleave, order, ratio, reference_checkout

from mindspeed_mm_dit.configs.autoencoder import AutoencoderKLConfig
from mindspeed_mm_dit.configs.diffusion import GaussianDiffusionConfig
from mindspeed_mm_dit.configs.dit import PRESETS, DiTConfig
from mindspeed_mm_dit.configs.fsdp2 import AUTOCAST, FLOAT32, SHARDED_BF16, load_fsdp2_config
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.models.autoencoder import NoAutoencoder
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.planning import Placement, memory, peak_tflops, train_flop
from mindspeed_mm_dit.training.pytorch.engine import Engine

NUM_CLASSES = 1000
SHARDED = Path(__file__).parents[1] / "examples/dit/imagenet256/fsdp2.yaml"
PRECISIONS = {"fp32": FLOAT32, "bf16": AUTOCAST}
Kind = tuple[str, str]
"""Precision and side."""


def main() -> None:
    """Measure and write the result file."""
    args = parse()
    report = Report("train_throughput", f"Train step from latents, {args.preset} on {args.size} x {args.size} latents")
    kinds = [(precision, side) for precision in args.precision for side in sides_of(args, precision)]
    batch = {kind: largest_batch(args, *kind) for kind in kinds}
    steps = {kind: Apart(SIDES[kind[1]], args, kind[0], batch[kind]) for kind in kinds}
    measured = interleave({" ".join(kind): step for kind, step in steps.items()}, args.rounds, args.warm_up, args.clock)
    report.raw(measured)
    report.echo()
    headings = ["step", "batch", "median s", "images/s", "TFLOP/s", "MFU", "peak GiB", "planned GiB", "ours is x"]
    seconds = {kind: measured[" ".join(kind)] for kind in kinds}
    report.table(headings, [row_of(args, kind, batch, seconds, steps[kind].peak_bytes()) for kind in kinds])
    report.echo(f"{args.clock} seconds a step, {order()}. x: images a second of ours / of it, median of rounds.")
    report.save()


def parse() -> Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", metavar="DIR", help="checkout of facebookresearch/DiT, to run against")
    parser.add_argument("--diffusers", action="store_true", help="run against diffusers' DiT too")
    parser.add_argument("--fsdp2", action="store_true", help="run ours sharded by FSDP2 too, in bf16")
    parser.add_argument("--preset", default="DiT-S/2", choices=list(PRESETS))
    parser.add_argument("--size", type=int, default=32, help="height of the latents (32: 256 pixels)")
    parser.add_argument("--batch", type=int, nargs="+", default=[8], help="several: the largest that fits, of each")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=3, help="rounds before those that count")
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS), help="cpu: for a busy CPU, one thread")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--torch-compile", action="store_true", help="compile all sides")
    parser.add_argument("--tf32", action="store_true", help="TensorFloat-32 on all sides, as the reference's train.py")
    parser.add_argument("--peak-tflops", type=float, help="peak of the device; default: from the table, if known")
    return parser.parse_args()


def sides_of(args: Namespace, precision: str) -> list[str]:
    """Return who takes part."""
    ours = ["ours", *(["ours, FSDP2"] if args.fsdp2 and precision == "bf16" else [])]
    return [*ours, *(["reference"] if args.reference else []), *(["diffusers"] if args.diffusers else [])]


def row_of(args: Namespace, kind: Kind, batch: dict[Kind, int], seconds: dict[Kind, list[float]], peak: int) -> list:
    """Return the table row of one kind of step."""
    ours, median = (kind[0], "ours"), statistics.median(seconds[kind])
    tflops = batch[kind] * train_flop(model_config(args).predictor) / median / 1e12
    most = args.peak_tflops or peak_tflops(runtime.device_name(), kind[0])
    faster = ratio(seconds[ours], seconds[kind]) * batch[ours] / batch[kind]
    plan = memory(model_config(args), Placement(precision=PRECISIONS[kind[0]]), online_vae=False).total(batch[kind])
    return [
        " ".join(kind), batch[kind], f"{median:.4f}", f"{batch[kind] / median:.2f}", f"{tflops:.3f}",
        f"{tflops / most:.1%}" if most else "peak not known", f"{peak / 2**30:.2f}" if peak else "",
        f"{plan / 2**30:.2f}" if kind == ours else "",
        "" if kind == ours else f"{faster:.2f}",
    ]  # fmt: skip


def largest_batch(args: Namespace, precision: str, side: str) -> int:
    """Return the largest of --batch of which two steps fit the device; one alone is not tried."""
    return args.batch[0] if len(args.batch) == 1 else int(Apart(trial, args, precision, side).result())


def trial(args: Namespace, precision: str, side: str) -> Callable[[], int]:
    """Return what finds the largest batch."""

    def largest() -> int:
        for batch in sorted(args.batch, reverse=True):
            try:
                step = SIDES[side](args, precision, batch)
                step(), step()
                return batch
            except torch.OutOfMemoryError:
                step = None
                runtime.free_memory()
        raise SystemExit(f"no batch of {args.batch} fits: {side}, {precision}")

    return largest


def model_config(args: Namespace) -> ModelConfig:
    """Return the published training set-up of ``--preset``."""
    return ModelConfig(
        ae=AutoencoderKLConfig(from_pretrained="not used"),
        diffusion=GaussianDiffusionConfig(),
        predictor=DiTConfig(input_size=args.size, num_classes=NUM_CLASSES, **PRESETS[args.preset]),
    )


def batches(args: Namespace, count: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield one batch of cached latents again and again."""
    draw, shape = np.random.default_rng(0), (count, 4, args.size, args.size)
    batch = {
        "labels": draw.integers(0, NUM_CLASSES, count),
        "timesteps": draw.integers(0, 1000, count),
        **{name: draw.standard_normal(shape, np.float32) for name in ("noise", "posterior_noise", "latent_mean")},
        "latent_std": np.full(shape, 0.1, np.float32),
    }
    while True:
        yield batch


def our_step(args: Namespace, precision: str, batch: int, yaml: Path | None = None) -> Callable[[], Any]:
    """Return one step of our engine, as pretrain_dit.py takes it, sharded by the settings of a ``yaml`` if given."""
    config = model_config(args)
    runtime.initialize(None, batch, batch)
    flags = engine_flags(torch_compile=args.torch_compile, tf32=args.tf32)
    model = DiTModel(config, NoAutoencoder(config.ae))
    precise = SHARDED_BF16 if yaml else PRECISIONS[precision]
    engine = Engine(model, flags, load_fsdp2_config(yaml) if yaml else None, precise)

    def forward_step(stream: Iterator[Any], model: Any) -> tuple[Any, Any]:
        return model(**runtime.to_device(next(stream))), lambda losses: (losses.mean(), {"loss": losses.mean()})

    stream = batches(args, batch)
    return lambda: engine.train_step(forward_step, stream, 1e-4)


def reference_step(args: Namespace, precision: str, batch: int) -> Callable[[], Any]:
    """Return one step as the reference's train.py takes it, from latents on."""
    with reference_checkout(args.reference):
        from diffusion import create_diffusion
        from models import DiT_models
    diffusion = create_diffusion(timestep_respacing="")

    def losses(model: Any, latents: Any, t: Any, labels: Any) -> Any:
        return diffusion.training_losses(model, latents, t, {"y": labels})["loss"]

    network = DiT_models[args.preset](input_size=args.size, num_classes=NUM_CLASSES)
    return peer_step(args, precision, batch, network, losses)


def diffusers_step(args: Namespace, precision: str, batch: int) -> Callable[[], Any]:
    """Return one step of diffusers' DiT with its DDPM scheduler."""
    from diffusers import DDPMScheduler, DiTTransformer2DModel

    config, scheduler = model_config(args).predictor, DDPMScheduler()
    network = DiTTransformer2DModel(
        num_attention_heads=config.num_heads, attention_head_dim=config.hidden_size // config.num_heads, in_channels=4,
        out_channels=8, num_layers=config.num_layers, sample_size=args.size, patch_size=config.patch_size,
        num_embeds_ada_norm=NUM_CLASSES,
    )  # fmt: skip

    def losses(model: Any, latents: Any, t: Any, labels: Any) -> Any:
        noise = torch.randn_like(latents)
        output = model(scheduler.add_noise(latents, noise, t), timestep=t, class_labels=labels, return_dict=False)[0]
        return torch.nn.functional.mse_loss(output[:, :4].float(), noise)

    return peer_step(args, precision, batch, network, losses)


def peer_step(args: Namespace, precision: str, batch: int, network: Any, losses: Callable[..., Any]) -> Callable:
    """Return a step of ``network`` with AdamW and a moving average; ``losses(model, latents, t, labels)``."""
    runtime.allow_tf32(args.tf32)
    device = runtime.device()
    model = network.to(device)
    average = deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    arrays = next(batches(args, batch))
    forward = torch.compile(model) if args.torch_compile else model

    def step() -> float:
        given = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
        latents = (given["latent_mean"] + given["latent_std"] * torch.randn_like(given["noise"])).mul_(0.18215)
        t = torch.randint(0, 1000, (batch,), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = losses(forward, latents, t, given["labels"]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters()):
                mean.mul_(0.9999).add_(weight, alpha=0.0001)
        return loss.item()

    return step


SIDES: dict[str, Callable[[Namespace, str, int], Callable[[], Any]]] = {
    "ours": our_step,
    "ours, FSDP2": partial(our_step, yaml=SHARDED),
    "reference": reference_step,
    "diffusers": diffusers_step,
}


if __name__ == "__main__":
    main()
