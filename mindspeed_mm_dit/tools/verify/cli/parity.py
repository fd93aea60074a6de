"""``mm-dit parity``."""

from __future__ import annotations

import argparse
import sys

from mindspeed_mm_dit.errors import ConfigError, flag_of
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.sampling.request import ModelRequest, add_flags
from mindspeed_mm_dit.terminal import echo

DESCRIPTION = """\
Check this implementation against reference values, for example of the published code: recompute every quantity in a
file with the weights of a checkpoint, and compare.

  mm-dit parity --reference dit_tiny_p2.npz --checkpoint dit_tiny_p2.pt
  mm-dit parity --reference t2v_tiny.npz --checkpoint t2v_tiny.pt --wan wan_tiny.pt --vae wan_vae_tiny \\
      --text-encoder umt5_tiny
  mm-dit parity --reference muon_tiny.npz
  mm-dit parity --reference lora_values.npz --checkpoint wan_tiny.pt --lora wan_lora_tiny

Prints for each quantity our value, the reference, the relative error (norm of the difference over norm of the
reference) and a verdict. The exit code is 1 if an error exceeds its tolerance. If the file has float64 values beside
the published float32 ones, the float64 values are the reference, and an error up to twice the published one passes too.
docs/verification.md describes the file format."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    add = parser.add_argument
    add("--reference", required=True, metavar="NPZ", help="file of reference values")
    add(
        "--checkpoint",
        metavar="PATH",
        help="weights the values were computed with: a file, a checkpoint folder, or a folder of checkpoints (the "
        "newest); leave it out for the steps of an optimizer",
    )
    add("--wan", metavar="PATH", help="weights of Wan, to check wan/ in a text-to-video file")
    add("--vae", metavar="DIR", help="Wan's autoencoder, to check vae/ and step/latents in it")
    add("--text-encoder", metavar="DIR", help="UMT5, to check umt5/ and step/prompt_embeds in it")
    add("--lora", metavar="DIR", help="folder of adapters, to check a file of LoRA values")
    add_flags(parser, ModelRequest, "framework")
    add("--tolerance", type=float, default=1e-5, help="largest relative error (default 1e-5)")
    add("--table-tolerance", type=float, default=1e-12, help="the same for the float64 schedule tables (default 1e-12)")


def run(args: argparse.Namespace) -> int:
    """Compare, print, and return 1 if any error exceeds its tolerance."""
    for flag in ("tolerance", "table_tolerance"):
        if not getattr(args, flag) >= 0:
            raise ConfigError(f"{flag_of(flag)} = {getattr(args, flag)} must be a number of at least 0.")
    for flag in ("vae", "text_encoder"):
        if getattr(args, flag) and args.ai_framework != "pytorch":
            raise ConfigError(
                f"{flag_of(flag)} = {getattr(args, flag)} runs on PyTorch alone. Leave it out: the rest of the file is "
                "compared without it."
            )
    from rich.console import Console
    from rich.table import Table

    activate(args.ai_framework)
    from mindspeed_mm_dit.framework import runtime
    from mindspeed_mm_dit.tools.verify.parity import compare
    from mindspeed_mm_dit.tools.verify.table import worst

    paths = {"--wan": args.wan, "--vae": args.vae, "--text-encoder": args.text_encoder, "--lora": args.lora}
    parts = {flag: path for flag, path in paths.items() if path}
    left_out: dict[str, str] = {}
    findings = compare(
        args.reference, args.checkpoint, args.tolerance, args.table_tolerance, parts, left_out.__setitem__
    )
    table = Table(title=f"{args.reference} on {', '.join(f'{k} {v}' for k, v in runtime.versions().items())}")
    for heading in ("quantity", "ours (norm)", "reference (norm)", "our error", "published error", "bound", "verdict"):
        table.add_column(heading, justify="left" if heading == "quantity" else "right", overflow="fold")
    for f in findings:
        norms, noise = (f"{f.ours:.6e}", f"{f.reference:.6e}"), "" if f.noise is None else f"{f.noise:.2e}"
        errors = f"{f.error:.2e}", noise, f"{f.tolerance:.1e}"
        table.add_row(f.name, *norms, *errors, "good" if f.good else "DIFFERS")
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    bad = [f for f in findings if not f.good]
    last = worst(findings)
    echo(
        f"{len(findings) - len(bad)} of {len(findings)} quantities within tolerance; "
        f"closest to its bound: {last.name}, {last.error:.2e} of {last.tolerance:.1e}"
    )
    if left_out:
        echo(f"not checked: {'; '.join(f'{group}/ ({why})' for group, why in left_out.items())}")
    return 1 if bad else 0
