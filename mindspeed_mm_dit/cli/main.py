"""``mm-dit COMMAND``: finds the command's module and prints our errors without a traceback."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from mindspeed_mm_dit import __version__
from mindspeed_mm_dit.configs.arguments import Parser
from mindspeed_mm_dit.errors import ConfigError, PlatformError, UserError, nearest

COMMANDS = {
    "train": "train what a config folder describes",
    "init": "look at your images and write a config folder that trains on them",
    "data": "say what a run would see of its images, and draw a contact sheet",
    "sample": "draw images from a trained model",
    "app": "draw from a trained model on a page in your browser",
    "evaluate": "score a model by many samples: FID, Inception Score, precision and recall",
    "plan": "say what a run will need: memory, largest micro-batch, traffic, time",
    "cache-latents": "encode a data set once, so that no training step has to",
    "parity": "compare this implementation with a file of reference values",
    "convert": "write a checkpoint in another format",
    "ema": "average the weights of a run over another share of it than it kept",
    "compare": "train and run a model on PyTorch and on MindSpore, and report every difference",
    "prove": "hold a training step to float64 in every layout: ranks, sharding, precision",
    "replay": "compute one step of a run again, and say what in it was not finite",
    "plot": "draw the loss curves of several runs over each other",
}


INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell has it: 128 + SIGINT."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0 good, 1 a negative verdict, 2 a mistake in the input, 130 Ctrl-C."""
    try:
        return _run_command(argv)
    except UserError as error:
        print(f"{error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who read the output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:  # a disk that is full, a file that went away: what could be checked before, was
        print(f"{PlatformError(error.filename or 'a file', error.strerror or str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.__stderr__)  # (torch swaps sys.stderr while it is imported)
        return INTERRUPTED


def _run_command(argv: Sequence[str] | None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    return int(args.run(args)) if args.command else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags of a command, ``run`` among them, which runs it; without a command list them all."""
    argv = list(argv)
    parser = Parser(
        prog="mm-dit",
        description="Diffusion transformers: train, draw, measure. 'mm-dit COMMAND --help' explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"mm-dit {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    chosen = argv[0] if argv else None
    if chosen and chosen not in COMMANDS and not chosen.startswith("-"):
        raise ConfigError(
            f"mm-dit {chosen[:100]}", "is no command", f"{nearest(chosen, COMMANDS)}mm-dit lists them all"
        )
    for name, summary in COMMANDS.items():
        if name != chosen:
            commands.add_parser(name, help=summary, add_help=False)
            continue
        _add_command(commands, name)
    if not argv:
        parser.print_help()
    return parser.parse_args(argv)


def _add_command(commands: argparse._SubParsersAction, name: str) -> argparse.ArgumentParser:
    """Add the parser of a command, whose module is imported for it, and return it."""
    module = importlib.import_module(f"mindspeed_mm_dit.cli.{name.replace('-', '_')}")
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=COMMANDS[name], description=module.DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(command)
    command.set_defaults(run=module.run)
    return command


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of one command, with its flags and what they mean."""
    return _add_command(Parser(prog="mm-dit").add_subparsers(), name)


if __name__ == "__main__":
    sys.exit(main())
