"""Time training steps of published transformers: ours against diffusers' class, same weights and batch, in one run.

    python benchmarks/network_step.py [--network FluxTransformer2DModel ...] [--size laptop] [--precision fp32 bf16]

Each side is a process of its own and takes full steps: forward, loss, backward, AdamW. bf16 is autocast on both sides.
The losses of their first steps are told beside the times. --size gpu: published widths at 1024 x 1024 pixels (Wan:
240 x 416 x 81), and fewer blocks, for one GPU of 80 GB.
"""

from __future__ import annotations

import argparse
import statistics
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common import CLOCKS, Apart, Report, interleave, order, ratio

from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.integrations.formats.config_json import from_diffusers
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.registry import network_of
from mindspeed_mm_dit.tools.verify.against import (
    KINDS,
    diffusers_inputs,
    diffusers_settings,
    inputs_of,
    tensor_of,
)

SIDES = ("ours", "diffusers")


@dataclass(frozen=True)
class Work:
    """A network as diffusers describes it, and what it is given."""

    settings: dict[str, Any]
    latents: tuple[int, ...]
    text: int
    """States of text."""


SD35_MEDIUM = {"in_channels": 16, "out_channels": 16, "sample_size": 128, "pooled_projection_dim": 2048,
               "joint_attention_dim": 4096, "attention_head_dim": 64, "pos_embed_max_size": 384,
               "qk_norm": "rms_norm"}  # fmt: skip
FLUX_DEV = {"in_channels": 64, "attention_head_dim": 128, "joint_attention_dim": 4096, "pooled_projection_dim": 768,
            "guidance_embeds": True, "axes_dims_rope": [16, 56, 56]}  # fmt: skip
QWEN_IMAGE = {"in_channels": 64, "out_channels": 16, "attention_head_dim": 128, "joint_attention_dim": 3584,
              "axes_dims_rope": [16, 56, 56]}  # fmt: skip
WORK = {
    "laptop": {
        "WanTransformer3DModel": Work(
            {"num_layers": 4, "num_attention_heads": 4, "attention_head_dim": 128, "ffn_dim": 1536, "text_dim": 512},
            (5, 16, 16), 64),
        "FluxTransformer2DModel": Work(
            {**FLUX_DEV, "num_layers": 2, "num_single_layers": 4, "num_attention_heads": 4}, (32, 32), 64),
        "SD3Transformer2DModel": Work(
            {**SD35_MEDIUM, "num_layers": 4, "num_attention_heads": 8, "caption_projection_dim": 512,
             "pos_embed_max_size": 64, "dual_attention_layers": [0, 1]}, (32, 32), 64),
        "QwenImageTransformer2DModel": Work({**QWEN_IMAGE, "num_layers": 4, "num_attention_heads": 4}, (32, 32), 64),
    },
    "gpu": {
        "WanTransformer3DModel": Work(
            {"num_layers": 15, "num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "text_dim": 4096},
            (21, 30, 52), 512),
        "FluxTransformer2DModel": Work(
            {**FLUX_DEV, "num_layers": 3, "num_single_layers": 6, "num_attention_heads": 24}, (128, 128), 512),
        "SD3Transformer2DModel": Work(
            {**SD35_MEDIUM, "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536,
             "dual_attention_layers": list(range(13))}, (128, 128), 333),
        "QwenImageTransformer2DModel": Work(
            {**QWEN_IMAGE, "num_layers": 6, "num_attention_heads": 24}, (128, 128), 256),
    },
}  # fmt: skip
"""FLUX.1-dev has 19 and 38 blocks, Qwen-Image 60 and Wan 1.3B 30; Stable Diffusion 3.5 medium is whole."""


def main() -> None:
    """Measure and write the result file."""
    args = parse()
    report = Report("network_step", "Train step of published transformers, ours against diffusers'")
    kinds = [(name, precision) for name in args.network for precision in args.precision]
    steps = {f"{n} {p} {side}": Apart(build, args, n, p, side) for n, p in kinds for side in SIDES}
    seconds: dict[str, list[float]] = {}
    for name in args.network:  # (one after the other, for the memory)
        of_it = {side: step for side, step in steps.items() if side.startswith(name)}
        seconds |= interleave(of_it, args.rounds, args.warm_up, args.clock)
        for step in of_it.values():
            step.end()
    report.raw(seconds)
    report.echo()
    rows = []
    for name, precision in kinds:
        names = [f"{name} {precision} {side}" for side in SIDES]
        ours, theirs = (steps[side] for side in names)
        rows.append([
            name, precision, *(f"{statistics.median(seconds[side]):.4f}" for side in names),
            f"{ratio(*(seconds[side] for side in names)):.2f}", *(f"{side.first():.8f}" for side in (ours, theirs)),
            *(f"{side.peak_bytes() / 2**30:.2f}" if side.peak_bytes() else "" for side in (ours, theirs)),
        ])  # fmt: skip
    report.table(["network", "precision", "ours, median s", "diffusers, median s", "x", "first loss, ours", "diffusers",
                  "peak GiB, ours", "diffusers"], rows)  # fmt: skip
    for name in args.network:
        work = WORK[args.size][name]
        parameters = parameters_of(from_diffusers(KINDS[name], work.settings, "WORK")).num_elements()
        report.echo(f"{name}: {parameters / 1e9:.3f}B parameters, latents {' x '.join(map(str, work.latents))}, "
                   f"{work.text} states of text, batch {args.batch}.")  # fmt: skip
    report.echo(f"{args.clock} seconds a step, {order()}. x: diffusers / ours, median of rounds.")
    report.save()


def parse() -> Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", default=list(KINDS), choices=list(KINDS), metavar="CLASS",
                        help=f"diffusers' classes, of {', '.join(KINDS)}; default: all")  # fmt: skip
    parser.add_argument("--size", default="laptop", choices=list(WORK))
    for name, value in (("batch", 1), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--warm-up", type=int, default=3, help="rounds before those that count")
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS), help="cpu: for a busy CPU, one thread")
    parser.add_argument("--torch-compile", action="store_true", help="compile the blocks of both sides")
    parser.add_argument("--tf32", action="store_true", help="TensorFloat-32 on both sides")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    return parser.parse_args()


def adapted_starter(network: Any) -> Any:
    """Return a network on the device, with the same random numbers for all that a checkpoint holds on both sides."""
    network = runtime.to_runtime_device(network)
    drawn = 0.02 * torch.from_numpy(np.random.default_rng(0).standard_normal(1_000_003, np.float32))
    drawn = drawn.to(runtime.device())
    with torch.no_grad():
        for held in network.state_dict().values():
            held.copy_(drawn.repeat(-(-held.numel() // len(drawn)))[: held.numel()].view_as(held))
    return network


def build(args: Namespace, name: str, precision: str, side: str) -> Callable[[], float]:
    """Return one train step of one side; it returns the loss before the step."""
    import diffusers

    runtime.allow_tf32(args.tf32)
    work = WORK[args.size][name]
    config = from_diffusers(KINDS[name], work.settings, "WORK")
    given = runtime.to_device(inputs_of(config, work.latents, work.text, args.batch))
    target = torch.randn(given["x"].shape, generator=torch.Generator().manual_seed(1)).to(runtime.device())
    if side == "ours":
        runtime.initialize(None, args.batch, args.batch)
    with torch.device(runtime.device()):
        network = (network_of(config) if side == "ours"
                   else getattr(diffusers, name)(**diffusers_settings(config, work.settings)))  # fmt: skip
    if side == "diffusers":
        tensor, asked = tensor_of(config, given), diffusers_inputs(config, given, network)
        asked |= runtime.to_device({key: array for key, array in asked.items() if isinstance(array, np.ndarray)})
    network = adapted_starter(network)
    if args.torch_compile:
        lists = (child for child in network.children() if isinstance(child, torch.nn.ModuleList))
        runtime.compile_blocks(block for blocks in lists for block in blocks)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)  # type: ignore[attr-defined]

    def step() -> float:
        with runtime.autocast(precision == "bf16"):
            output = network(*given.values()) if side == "ours" else tensor(network(**asked))
        loss = (output.float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


if __name__ == "__main__":
    main()
