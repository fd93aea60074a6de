"""``mm-dit app``."""

from __future__ import annotations

import argparse

from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.sampling.request import ModelRequest, add_flags

DESCRIPTION = """\
Serve a page on which you generate samples with a model in your browser: pick classes or write prompts, choose guidance,
steps, sampler and seed, and watch the samples emerge from noise. mm-dit sample gives the same samples for the same
settings.

  mm-dit app --checkpoint outputs/digits
  mm-dit app --checkpoint outputs/high --low-noise-checkpoint outputs/low          two experts, guided alike

Only this machine can open the page, until you press Ctrl-C. It needs Gradio: pip install 'gradio<6.18' 'pandas<3'."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    add_flags(parser, ModelRequest)
    parser.add_argument("--port", type=int, default=7860, metavar="N", help="port of the page (default 7860)")


def run(args: argparse.Namespace) -> int:
    """Load the model and serve the page."""
    check_between("--port", args.port, 1, 65535)
    activate(args.ai_framework)
    from mindspeed_mm_dit.sampling.pipeline import Pipeline
    from mindspeed_mm_dit.tools.visualize.app import gradio, serve

    gradio()  # checks that Gradio is there, before weights are read
    serve(Pipeline.load(ModelRequest.from_flags(args)), f"mm-dit: {args.checkpoint}", args.port)
    return 0
