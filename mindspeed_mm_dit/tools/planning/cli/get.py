"""``mm-dit get``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mindspeed_mm_dit.terminal import echo
from mindspeed_mm_dit.tools.planning.fetch import PUBLISHED, fetch, with_needs
from mindspeed_mm_dit.tools.planning.hubs import HUBS

DESCRIPTION = """\
Download published weights, with the models they depend on, into weights/. Size, licence and checksums, as the hub
states them, are shown before the download and verified after it. Interrupted downloads resume. Without a NAME: list the
names.

  mm-dit get DiT-XL/2
  mm-dit get stabilityai/sd-vae-ft-ema                any other repository of the hub
  HF_ENDPOINT=https://hf-mirror.com mm-dit get DiT-XL/2
  mm-dit get DiT-XL/2 --hub modelscope

No other command downloads anything."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="model to download; without one, list the known names")
    parser.add_argument("--hub", choices=tuple(HUBS)[:2], help="where to download from (default huggingface)")
    parser.add_argument("--output", metavar="DIR", default="weights", help="folder to download into (default weights)")


def run(args: argparse.Namespace) -> int:
    """Fetch, or list the names."""
    if not args.names:
        for name, record in PUBLISHED.items():
            echo(f"  {name:<16} {record.summary}\n{'':<19}{', '.join(dict.fromkeys(record.repos.values()))}")
        return 0
    for name, record in with_needs(args.names, args.hub).items():
        fetch(name, record, args.hub, Path(args.output))
    return 0
