"""``mm-dit COMMAND``: finds the command's module, runs it, and prints our errors without a traceback."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from mindspeed_mm_dit import __version__
from mindspeed_mm_dit.cli.commands import COMMANDS
from mindspeed_mm_dit.configs.arguments import Parser
from mindspeed_mm_dit.configs.files import error_text
from mindspeed_mm_dit.errors import ConfigError, PlatformError, UserError, nearest
from mindspeed_mm_dit.framework.exits import raise_outside_imports
from mindspeed_mm_dit.terminal import echo, open_streams, print_nowhere

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in a shell: 128 + SIGINT."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 good, 1 a negative verdict, 2 a mistake in the input, 130 Ctrl-C."""
    open_streams()
    try:
        return _run_command(argv)
    except UserError as error:
        echo(error.formatted, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the program that read our output has ended
        print_nowhere(sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:  # a full disk, a file that went away: whatever could be checked earlier was
        failure = PlatformError(f"{error.filename or 'A file'} cannot be used: {error_text(error)}.")
        echo(failure.formatted, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        echo("interrupted", file=sys.__stderr__)  # (torch swaps sys.stderr while it is imported)
        return INTERRUPTED


def _run_command(argv: Sequence[str] | None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    if not args.command:
        return 0
    COMMANDS[args.command].check(args.command)
    return int(args.run(args))


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
        hint = nearest(chosen, COMMANDS)
        raise ConfigError(f"mm-dit {chosen[:100]} is not a command. {hint}mm-dit --help lists all commands.")
    command_parser = parser
    if chosen is not None and chosen in COMMANDS:
        command_parser = _add_command(commands, chosen)
    else:
        for name, command in COMMANDS.items():
            commands.add_parser(name, help=command.summary, add_help=False)
    if not argv:
        parser.print_help()
    args, unknown = parser.parse_known_args(argv)
    command_parser.refuse(unknown)
    return args


def _add_command(commands: argparse._SubParsersAction, name: str) -> Parser:
    """Import the module of a command, add its parser, and return the parser."""
    record = COMMANDS[name]
    module = importlib.import_module(record.module)
    parser: Parser = commands.add_parser(
        name, help=record.summary, description=module.DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)
    return parser


def command_parser(name: str) -> Parser:
    """Return the parser of one command, with its flags and their help."""
    return _add_command(Parser(prog="mm-dit").add_subparsers(), name)


if __name__ == "__main__":
    raise_outside_imports()
    sys.exit(main())
