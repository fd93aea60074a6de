"""Time guided sampling: DPM-Solver++ in 20 steps and DDPM in 250, against the reference's DDPM in 250.

    python benchmarks/sampling.py --reference DIR [--preset DiT-S/2] [--images 2]
    python benchmarks/sampling.py --checkpoint outputs/digits/checkpoints      # the score of every sampler too

DIR is a checkout of facebookresearch/DiT (which needs timm). Weights are random; time does not depend on them. Every
step of a chain costs the same, so chains of 250 steps run only the first --timed-steps, and the time is scaled; the
chain of 20 runs whole. With --checkpoint, a model of the digits demo, the result has the fraction of samples that are
read as the digit asked for, by sampler and steps.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import CLOCKS, Apart, Report, interleave, ratio, reference_checkout
from train_throughput import NUM_CLASSES, model_config

from mindspeed_mm_dit.configs.dit import PRESETS
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.models.autoencoder import NoAutoencoder
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.sampling.conditions import SampleConditions
from mindspeed_mm_dit.sampling.generate import generate, trajectory_states, with_defaults
from mindspeed_mm_dit.sampling.load import describe, load_model
from mindspeed_mm_dit.sampling.request import ModelRequest, SampleRequest
from mindspeed_mm_dit.tools.evaluate.digits import digits_accuracy

LONG, SHORT, SCALE = 250, 20, 4.0


def main() -> None:
    """Measure and write the result file."""
    args = parse()
    name, what = ("sampling_score", "the digits demo") if args.only_score else ("sampling", args.preset)
    report = Report(name, f"Sampling with guidance, {what}")
    if args.checkpoint:
        score(args, report)
    if not args.only_score:
        time_samplers(args, report)
    report.save()


def time_samplers(args: Namespace, report: Report) -> None:
    """Time our samplers and the reference's, interleaved."""
    steps = {}
    for precision in args.precision:
        steps[f"{precision} dpm++ {SHORT}"] = Apart(our_sampler, args, "dpm++", SHORT, SHORT, precision)
        steps[f"{precision} ddpm {LONG}"] = Apart(our_sampler, args, "ddpm", LONG, args.timed_steps, precision)
    if args.reference:
        steps[f"reference {LONG}"] = Apart(reference_sampler, args)
    measured = interleave(steps, args.rounds, args.warm_up, args.clock)
    report.raw(measured)
    scale = {name: 1.0 if name.endswith(str(SHORT)) else LONG / args.timed_steps for name in measured}
    seconds = {name: [value * scale[name] for value in values] for name, values in measured.items()}
    peer = seconds.get(f"reference {LONG}")
    rows = [
        [name, f"{statistics.median(values):.2f}", f"{args.images / statistics.median(values):.4f}",
         f"{ratio(values, peer):.2f}" if peer else ""]
        for name, values in seconds.items()
    ]  # fmt: skip
    report.echo()
    report.table(["sampler", "median s", "images/s", "x the reference"], rows)
    report.echo(
        f"{args.images} images a batch, guidance {SCALE}, {args.clock} seconds; chains of {LONG} timed over "
        f"{args.timed_steps} steps and scaled (the raw figures above are not)."
    )


def score(args: Namespace, report: Report) -> None:
    """Say how many samples of each digit are read as that digit."""
    described = describe(ModelRequest(args.checkpoint))
    model, config = load_model(described), described.config
    labels = np.repeat(np.arange(10), args.per_class)
    rows = []
    for sampler, steps in (("dpm++", 20), ("dpm++", 10), ("ddim", 20), ("ddpm", LONG)):
        request = SampleRequest(sampler=sampler, steps=steps, guidance=2.0, seed=args.seed, batch_size=len(labels))
        conditions = SampleConditions({"label": labels.tolist()})
        samples = generate(model, config, conditions, with_defaults(request, config))
        rows.append([sampler, steps, f"{digits_accuracy(samples, labels):.1%}"])
    report.table(["sampler", "steps", "read as the digit asked for"], rows)
    report.echo(f"{len(labels)} samples of the digits demo, guidance 2, seed {args.seed}.\n")


def our_model(args: Namespace, precision: str) -> Any:
    """Return the composite with random weights, as ``load_model`` prepares it."""
    torch.manual_seed(0)
    config = model_config(args)
    model = runtime.prepare_frozen(DiTModel(config, NoAutoencoder(config.ae)))
    if precision == "bf16":
        runtime.cast_matmul_weights_to_bf16(model.predictor)
    if args.torch_compile:
        runtime.compile_blocks(model.blocks)
    return model


def our_sampler(args: Namespace, sampler: str, steps: int, timed: int, precision: str) -> Callable[[], Any]:
    """Return a call that takes the first ``timed`` steps of a chain of ``steps``."""
    model = our_model(args, precision)
    request = SampleRequest(
        sampler=sampler, steps=steps, guidance=SCALE, batch_size=args.images, bf16=precision == "bf16"
    )
    request = with_defaults(request, model_config(args))
    numbers = np.arange(args.images)
    asked = {"labels": numbers % NUM_CLASSES}

    def run() -> None:
        with torch.no_grad():
            for _ in itertools.islice(trajectory_states(model, model_config(args), asked, numbers, request), timed):
                pass

    return run


def reference_sampler(args: Namespace) -> Callable[[], Any]:
    """Return a call that takes the first steps of the reference's chain, as its sample.py does."""
    with reference_checkout(args.reference):
        from diffusion import create_diffusion
        from models import DiT_models
    device = runtime.device()
    model = DiT_models[args.preset](input_size=args.size, num_classes=NUM_CLASSES).to(device).eval()
    diffusion = create_diffusion(str(LONG))
    z = torch.randn(args.images, 4, args.size, args.size, device=device)
    y = torch.tensor([*range(args.images), *[NUM_CLASSES] * args.images], device=device)
    arguments = {"y": y, "cfg_scale": SCALE}

    def run() -> None:
        with torch.no_grad():
            trajectory = diffusion.p_sample_loop_progressive(
                model.forward_with_cfg, (2 * len(z), *z.shape[1:]), torch.cat([z, z]), clip_denoised=False,
                model_kwargs=arguments, device=device,
            )  # fmt: skip
            for _ in itertools.islice(trajectory, args.timed_steps):
                pass

    return run


def parse() -> Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", metavar="DIR", help="checkout of facebookresearch/DiT; without it, ours alone")
    parser.add_argument("--checkpoint", metavar="DIR", help="a model of the digits demo, to score the samplers")
    parser.add_argument("--only-score", action="store_true", help="with --checkpoint: no timing")
    parser.add_argument("--per-class", type=int, default=50, help="samples of each digit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", default="DiT-S/2", choices=list(PRESETS))
    parser.add_argument("--size", type=int, default=32, help="height of the latents (32: 256 pixels)")
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--timed-steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--torch-compile", action="store_true", help="compile our blocks")
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS), help="cpu: for a busy CPU, one thread")
    return parser.parse_args()


if __name__ == "__main__":
    main()
