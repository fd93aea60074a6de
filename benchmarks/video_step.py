"""Time training steps of Wan's transformer: ours against diffusers' WanTransformer3DModel, same weights and batch.

    python benchmarks/video_step.py [--layers 4] [--heads 4] [--latents 5 16 16] [--precision fp32 bf16]

Both sides take a full step in one run, each in a process of its own: forward, loss, backward, AdamW. bf16 is autocast
on both sides. The losses of the first step are compared before anything is timed. On a GPU, these sizes are Wan 1.3B:
--layers 30 --heads 12 --head-dim 128 --ffn-dim 8960 --text-dim 4096 --latents 21 60 104 --batch 1.
"""

from __future__ import annotations

import argparse
import statistics
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import CLOCKS, Apart, Report, interleave, order, ratio

from mindspeed_mm_dit.configs.wan import WanConfig
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.models.video_transformer import Wan

SIDES = ("ours", "diffusers")


def main() -> None:
    """Measure and write the result file."""
    args = parse()
    F, H, W = args.latents
    report = Report("video_step", f"Train step of Wan, {args.layers} layers of width {args.heads * args.head_dim}")
    report.say(f"Latents {F} x {H} x {W}, {args.text_length} states of text, batch {args.batch}.\n")
    compare_first_losses(args, report)
    steps = {f"{p} {side}": Apart(build, args, p, side) for p in args.precision for side in SIDES}
    seconds = interleave(steps, args.rounds, args.warm_up, args.clock)
    report.raw(seconds)
    report.say()
    rows = []
    for precision in args.precision:
        ours, theirs = (seconds[f"{precision} {side}"] for side in SIDES)
        medians = [f"{statistics.median(values):.4f}" for values in (ours, theirs)]
        rows.append([precision, *medians, f"{ratio(ours, theirs):.2f}"])
    report.table(["precision", "ours, median s", "diffusers, median s", "x"], rows)
    report.say(f"{args.clock} seconds a step, {order()}. x: diffusers / ours, median of rounds.")
    report.save()


def parse() -> Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 4), ("heads", 4), ("head-dim", 128), ("ffn-dim", 1536), ("text-dim", 512),
                        ("text-length", 64), ("batch", 1), ("rounds", 9)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--latents", type=int, nargs=3, default=[5, 16, 16], metavar=("F", "H", "W"))
    parser.add_argument("--warm-up", type=int, default=3, help="rounds before those that count")
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS), help="cpu: for a busy CPU, one thread")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    return parser.parse_args()


def wan_config(args: Namespace) -> WanConfig:
    """Return the network of the command line."""
    return WanConfig(
        num_layers=args.layers, num_attention_heads=args.heads, attention_head_dim=args.head_dim, ffn_dim=args.ffn_dim,
        text_dim=args.text_dim,
    )  # fmt: skip


def our_network(args: Namespace) -> Callable[..., Any]:
    """Return our network on the device, in a process set up as pretrain_dit.py's."""
    runtime.initialize(None, args.batch, args.batch)
    model = Wan(wan_config(args))
    runtime.load_arrays(model, weights(args))
    return runtime.to_runtime_device(model)


def their_network(args: Namespace) -> Callable[..., Any]:
    """Return diffusers' network on the device, answering with a tensor."""
    from diffusers import WanTransformer3DModel

    config = wan_config(args)
    model = WanTransformer3DModel(
        num_layers=config.num_layers, num_attention_heads=config.num_heads, attention_head_dim=config.head_dim,
        ffn_dim=config.ffn_dim, text_dim=config.text_dim,
    )  # fmt: skip
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights(args).items()})
    return runtime.to_runtime_device(model)


def weights(args: Namespace) -> dict[str, np.ndarray]:
    """Return weights drawn from a seed, by name; large ones repeat what was drawn, which else takes minutes."""
    drawn = np.random.default_rng(0).standard_normal(1_000_003, np.float32) * np.float32(0.02)
    shapes = runtime.shapes(Wan(wan_config(args)))
    return {name: np.resize(drawn, shape) for name, shape in shapes.items()}


def batch(args: Namespace) -> dict[str, np.ndarray]:
    """Return noised latents, times, states of text and the velocity to learn."""
    draw, shape = np.random.default_rng(1), (args.batch, 16, *args.latents)
    return {
        "x": draw.standard_normal(shape, np.float32),
        "t": draw.uniform(0, 1000, args.batch).astype(np.float32),
        "text": draw.standard_normal((args.batch, args.text_length, args.text_dim), np.float32),
        "target": draw.standard_normal(shape, np.float32),
    }


def build(args: Namespace, precision: str, side: str) -> Callable[[], float]:
    """Return one train step of one side; it returns the loss before the step."""
    network = our_network(args) if side == "ours" else their_network(args)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, weight_decay=0.0, fused=True)  # type: ignore[attr-defined]
    given = runtime.to_device(batch(args))

    def step() -> float:
        with runtime.low_precision(precision == "bf16"):
            output = network(given["x"], given["t"], given["text"])
        output = output if side == "ours" else output.sample
        loss = (output.float() - given["target"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def compare_first_losses(args: Namespace, report: Report) -> None:
    """Say how far the two sides' first losses are apart."""
    for precision in args.precision:
        ours, theirs = (Apart(build, args, precision, side).result() for side in SIDES)
        report.say(f"First loss in {precision}: ours {ours:.8f}, diffusers {theirs:.8f}.")
    report.say()


if __name__ == "__main__":
    main()
