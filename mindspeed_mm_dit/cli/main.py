"""``mm-dit COMMAND``: finds the command's module, runs it, and prints our errors without a traceback."""

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
    "train": "train the model that a config folder describes",
    "init": "look at your images and write a config folder that trains on them",
    "data": "show what a run would see of its data, and draw a contact sheet",
    "sample": "generate images or videos with a trained model",
    "app": "generate images or videos on a page in your browser",
    "evaluate": "score a model on many samples: FID, Inception Score, precision and recall",
    "plan": "estimate what a run will need: memory, largest micro-batch, traffic, time",
    "cache-latents": "encode a data set once, so that no training step has to",
    "parity": "check this implementation against a file of reference values",
    "convert": "write a checkpoint in another format",
    "ema": "make an EMA of another width after a run has ended (post-hoc EMA)",
    "compare": "train and run a model on PyTorch and on MindSpore, and report every difference",
    "prove": "check a training step against float64 in every layout: ranks, sharding, precision",
    "replay": "recompute one step of a run, and find what in it was not finite",
    "plot": "draw the loss curves of one run or several in one picture",
}


INTERRUPTED = 130
"""Exit code after Ctrl-C, as in a shell: 128 + SIGINT."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 good, 1 a negative verdict, 2 a mistake in the input, 130 Ctrl-C."""
    try:
        return _run_command(argv)
    except UserError as error:
        print(f"{error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the program that read our output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:  # a full disk, a file that went away: whatever could be checked earlier was
        print(f"{PlatformError(error.filename or 'a file', error.strerror or str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.__stderr__)  # (torch swaps sys.stderr while it is imported)
        return INTERRUPTED


def _run_command(argv: Sequence[str] | None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    return int(args.run(args)) if args.command else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags of a command; ``run`` in the result runs it. Without a command, list all commands."""
    argv = list(argv)
    parser = Parser(
        prog="mm-dit",
        description="Train, sample and measure diffusion transformers. 'mm-dit COMMAND --help' explains a command.",
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
    """Import the module of a command, add its parser, and return the parser."""
    module = importlib.import_module(f"mindspeed_mm_dit.cli.{name.replace('-', '_')}")
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=COMMANDS[name], description=module.DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(command)
    command.set_defaults(run=module.run)
    return command


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of one command, with its flags and their help."""
    return _add_command(Parser(prog="mm-dit").add_subparsers(), name)


if __name__ == "__main__":
    sys.exit(main())
