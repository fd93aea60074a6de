"""This project's own flags of pretrain_dit.py, which the real host's parser is given as well."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from mindspeed_mm_dit.configs.flag_types import (
    finite_float,
    fraction,
    positive_float,
    positive_int,
    std,
    unsigned_int,
)


def dit_flags(parser: argparse.ArgumentParser, *of_parts: Callable[[Any], None]) -> argparse.ArgumentParser:
    """Add this project's own flags, and then ``of_parts``, to one group."""
    group = parser.add_argument_group("DiT")
    for add in (_begin, _averages, _computation, _checkpoints, _pictures, *of_parts):
        add(group)
    return parser


def _begin(group: Any) -> None:
    """Add the flags of where a run takes place and begins."""
    group.add_argument(
        "--host",
        default="auto",
        help="what runs the training: standalone, mindspeed-mm, mindspeed-mm-native (its FSDP2 engine) or a plugin's; "
        "auto: the real MindSpeed-MM where it is installed",
    )
    group.add_argument(
        "--init-from",
        metavar="WEIGHTS",
        help="begin with weights of the same kind of network, in any format, of other classes or another size; "
        "a checkpoint in --load comes first",
    )
    group.add_argument("--init-verbose", action="store_true", help="say of each tensor what --init-from made of it")
    group.add_argument(
        "--dry-run", action="store_true", help="check everything, say what would be trained, and end with code 0"
    )


def _averages(group: Any) -> None:
    """Add the flags of averages of the weights."""
    group.add_argument(
        "--ema-decay",
        type=fraction,
        default=0.9999,
        help="decay of the moving average of the weights that samples are drawn from",
    )
    group.add_argument(
        "--power-ema-stds",
        type=std,
        nargs="+",
        default=(),
        metavar="STD",
        help="also keep averages over a share of the run (Karras et al. 2024), one for each width, 0.05 0.1 as "
        "published; mm-dit ema makes any other width of them afterwards. Each takes the memory of the weights",
    )


def _computation(group: Any) -> None:
    """Add the flags of how a step is computed."""
    group.add_argument(
        "--pynative", action="store_true", help="MindSpore: run operator by operator instead of compiling the step"
    )
    group.add_argument(
        "--tf32",
        action="store_true",
        help="let float32 products round their inputs to TensorFloat-32 (NVIDIA GPUs, PyTorch): faster, and off by "
        "about 1e-3; facebookresearch/DiT trains so",
    )
    group.add_argument(
        "--torch-compile",
        action="store_true",
        help="compile the transformer blocks (PyTorch): faster steps after a minute or so of compiling",
    )
    group.add_argument(
        "--peak-tflops",
        type=positive_float,
        metavar="TFLOPS",
        help="peak of one device, for the MFU in TensorBoard and the progress bar; default: from a table, if known",
    )


def _checkpoints(group: Any) -> None:
    """Add the flags of which checkpoints stay."""
    group.add_argument("--keep-last", type=positive_int, default=2, metavar="N", help="checkpoints to keep")
    group.add_argument(
        "--keep-best",
        action="store_true",
        help="save whenever a validation finds a smaller loss than all before, and keep the last of these: DIR/best",
    )
    group.add_argument("--no-async-save", action="store_true", help="write checkpoints in the training thread")


def _pictures(group: Any) -> None:
    """Add the flags of what is drawn."""
    group.add_argument(
        "--report",
        nargs="?",
        const="short",
        choices=["short", "always"],
        help="at the end draw samples.png and, of what --tensorboard-dir keeps, loss.png beside the checkpoint folder, "
        "where that takes no longer than the training did; always: however long it takes",
    )
    group.add_argument(
        "--sample-interval",
        type=unsigned_int,
        default=0,
        metavar="N",
        help="steps between grids of samples, of the same noise and classes, by the moving average; 0: none",
    )
    group.add_argument(
        "--report-sampler", metavar="NAME", help="sampler of the report; default: the quick one of what is learned"
    )
    group.add_argument("--report-steps", type=positive_int, default=50, help="sampling steps of the report")
    group.add_argument(
        "--report-cfg-scale",
        type=finite_float,
        default=2.0,
        help="guidance scale of the report and of --sample-interval",
    )
