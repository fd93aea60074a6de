"""The command line of pretrain_dit.py: Megatron's flags with Megatron's meaning, and a few of our own.

``run.py`` lists the flags and what each means in each host. ``training/flags.py`` builds the full parser, including
the flags of metrics loggers and callbacks.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from mindspeed_mm_dit.configs.files import lines_of
from mindspeed_mm_dit.configs.flag import AddFlags, did_you_mean, rows_of, synonym
from mindspeed_mm_dit.configs.limits import FLOAT32, MAX_SAMPLES, check_path, shorten_repr
from mindspeed_mm_dit.configs.run import MEGATRON_FLAG_GROUPS, MINDSPEED_MM_ONLY_FLAGS, DiTArgs, RunConfig, rows
from mindspeed_mm_dit.configs.strict import read_text
from mindspeed_mm_dit.errors import ConfigError, flag_of, nearest
from mindspeed_mm_dit.optimizers.registry import check_flags, is_class


def read_train_args(path: str | Path, setting: str = "train.args") -> list[str]:
    """Return the flags and values in the file ``path``; ``setting`` is the option that named it.

    Quotes group words within a line; "#" at the start of a word starts a comment. A backslash at the end of a line, as
    in a shell script, is ignored.

    Raises:
        ConfigError: the file cannot be read, or a quote is not closed; names the line.
    """
    words: list[str] = []
    for number, line in enumerate(lines_of(read_text(path, setting)), 1):
        if "\0" in line:
            raise ConfigError(
                f"{path}, line {number} contains a NUL byte, so it is not a text file. Write the file again."
            )
        try:
            words += _Words(_CONTINUED.sub(r"\1", line))
        except ValueError as error:  # "No closing quotation", "No escaped character"
            raise ConfigError(f"{path}, line {number} has {str(error).lower()}: {line.strip()}") from None
    return words


_CONTINUED = re.compile(r"(?<!\\)((?:\\\\)*)\\\s*$")
"""A backslash that ends a line and is not escaped."""


class _Words(shlex.shlex):
    """Splits one line into words like a POSIX shell."""

    def __init__(self, line: str) -> None:
        super().__init__(line, posix=True)
        self.whitespace_split = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Follow the parser's state: inside a word (state "a") "#" is an ordinary character."""
        super().__setattr__(name, value)
        if name == "state":
            super().__setattr__("commenters", "" if value == "a" else "#")


def check_flag_dependencies(args: RunConfig) -> None:
    """Raise ConfigError for an empty flag, or one without a flag that it needs."""
    flags = args.flags()
    for name, value in flags.items():
        if isinstance(value, str) and not value.strip():
            raise ConfigError(f"{flag_of(name)} = {value!r} is empty. Write a value, or drop the flag.")
    for row in rows():
        missing = [flag_of(other) for other in row.needs if flags.get(row.name) and not flags.get(other)]
        if missing:
            raise alone(row.word, missing)


def alone(flag: str, missing: Sequence[str]) -> ConfigError:
    """Return the error for a flag that has no effect without the ``missing`` ones."""
    return ConfigError(f"{flag} has no effect without {' and '.join(missing)}. Add it, or drop this one.")


def check_tool(what: str, path: str | None) -> None:
    """Raise ConfigError if the tools.json ``path`` does not exist; ``what`` is the setting that named it."""
    if path and not os.path.isfile(path):
        raise ConfigError(f"{what} = {path} is not a file. Name MindSpeed-MM's tools.json, or drop it.")


def without_effect(args: RunConfig, framework: str, device: str) -> list[str]:
    """Return a note for each flag that has no effect with this framework on this kind of device."""
    notes = []
    if args.tf32 and framework == "pytorch" and device != "cuda":
        notes.append(f"note: --tf32 has no effect: it is for NVIDIA GPUs, and this device is a {device.upper()}")
    if args.pynative and framework == "pytorch":
        notes.append("note: --pynative has no effect: it is for MindSpore, and the framework is PyTorch")
    return notes


TRAINING = "pretrain_dit.py"
_TYPED = re.compile(r"[-\u2010-\u2015\u2212\ufe58\ufe63\uff0d]+([a-z][a-z0-9-]*)($|=|[^\S ])")
"""A word that was meant as a flag: dashes of any kind, its name, and what follows: nothing, "=", or an odd space."""


_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$", re.IGNORECASE)
"""A number, which argparse takes for a flag where it has an exponent."""


_IN_WORDS = (
    (r"must .*", r"\g<0>"),
    (r"expected one argument", r"needs a value"),
    (r"expected at least one argument", r"needs at least one value"),
    (r"expected (\d+) arguments", r"needs \1 values"),
    (r"invalid int value: (.*)", r"must be a whole number, not \1"),
    (r"invalid float value: (.*)", r"must be a number, not \1"),
    (r"not allowed with argument (\S+)", r"cannot be given together with \1"),
    (r"ignored explicit argument (.*)", r"takes no value, and has \1"),
)
"""What argparse says of an argument -> the same in words that follow its name."""


def _in_words(problem: str) -> str:
    """Return what argparse says of an argument as words that follow its name."""
    if choice := re.fullmatch(r"invalid choice: (.*) \(choose from (.*)\)", problem, re.S):
        return f"= {choice[1]} is none of {choice[2].replace(chr(39), '')}"
    for pattern, words in _IN_WORDS:
        if match := re.fullmatch(pattern, problem, re.S):
            return match.expand(words)
    return problem if problem.startswith("cannot be read: ") else f"cannot be used: {problem}"


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Adds to the help of a flag that it is required, or its default unless that is nothing or the help names it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.required:
            return f"{action.help} (required)"
        is_nothing = any(action.default is nothing for nothing in (None, False, ()))
        return action.help if is_nothing or "default" in (action.help or "") else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError and suggests the nearest flag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = _NEGATIVE

    @property
    def help_command(self) -> str:
        """The command that explains the flags."""
        return "mm-dit train CONFIG --help" if self.prog == TRAINING else f"{self.prog} --help"

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with ``message``; the middle of a very long one is cut out."""
        if ambiguous := re.fullmatch(r"ambiguous option: (\S+) could match (.*)", message):
            raise ConfigError(f"{ambiguous[1]} is short for several flags: {ambiguous[2]}. Write out the one you mean.")
        if message.startswith("the following arguments are required"):
            # The required flag may be there, but misspelt: then the error is about that.
            known = self._option_string_actions
            self.refuse([word for word in self._argv if word.startswith("--") and not any(
                flag.startswith(word.partition("=")[0]) for flag in known)])  # fmt: skip
            missing = [name for name in message.partition(": ")[2].split(", ") if name != "FLAGS"]
            words = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
            command = "training" if self.prog == TRAINING else self.prog
            raise ConfigError(f"{command} needs {words}. {self.help_command} explains every flag.")
        short = message if len(message) < 500 else f"{message[:240]} ... {message[-240:]}"
        match = re.fullmatch(r"argument (\S+): (.*)", short, re.S)  # (also of a flag in train.args)
        where, problem = match.groups() if match else ("The command line", f"cannot be read: {short}")
        raise ConfigError(f"{where} {_in_words(problem)}. {self.help_command} explains every flag.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does; raise ConfigError for a flag with other dashes or spaces, as pasted from a page."""
        self._argv = list(args or ())
        for word in self._argv:
            typed = _TYPED.match(word)
            flag = f"--{typed[1]}" if typed else ""
            if typed and flag in self._option_string_actions and typed[0] not in (flag, f"{flag}="):
                odd = ", ".join(unicodedata.name(letter, "") for letter in dict.fromkeys(word) if not letter.isascii())
                raise ConfigError(
                    f"{shorten_repr(word)} on the command line has the wrong dashes or spaces ({odd or word}). Write "
                    f"{flag}, and an ordinary space after it."
                )
        return super().parse_known_args(args, namespace)

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse ``argv``; raise ConfigError for an unknown flag, suggesting the nearest known one."""
        args, unknown = self.parse_known_args(list(argv))
        if unknown and (flag := unknown[0].partition("=")[0]) in MINDSPEED_MM_ONLY_FLAGS:
            raise ConfigError(
                f"{flag} is a flag of MindSpeed-MM, which the standalone host does not know. "
                f"{synonym(flag, self._option_string_actions)}Drop it, or train in MindSpeed-MM (docs/mindspeed_mm.md)."
            )
        self.refuse(unknown)
        return args

    def refuse(self, unknown: Sequence[str]) -> None:
        """Raise ConfigError if there are ``unknown`` words, with what each of the flags among them may have meant."""
        if not unknown:
            return
        flags = [word.partition("=")[0] for word in unknown if re.match("--?[a-zA-Z]", word)]
        names = list(dict.fromkeys(flags)) or unknown[:1]
        if not flags:
            problem = "is neither a flag nor the value of one"
        else:
            problem = "is an unknown flag" if len(names) == 1 else "are unknown flags"
        suggestions = {name: did_you_mean(name, self._option_string_actions) for name in names}
        hint = "".join(f"{name}: {text}" if len(names) > 1 else text for name, text in suggestions.items() if text)
        positionals = [action for action in self._actions if not action.option_strings]
        if any(action.nargs == argparse.REMAINDER for action in positionals):
            hint = f"Flags come last: {' '.join([self.prog, *(str(action.metavar) for action in positionals)])}. "
        raise ConfigError(f"{', '.join(names)[:100]} {problem}. {hint}{self.help_command} lists every flag.")


def build_parser() -> Parser:
    """Return the parser of the standalone host."""
    parser = Parser(
        prog=TRAINING,
        allow_abbrev=False,
        formatter_class=Defaults,
        description="Train a diffusion transformer on images or videos, conditioned on classes or text. --mm-model "
        "describes the model, --mm-data the data; --train-iters, --lr and a batch size are required too. The groups "
        "below are Megatron's flags with Megatron's meaning; the last one, DiT, is this project's own.",
    )
    megatron_flags(parser)
    return parser


def megatron_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of Megatron-LM and MindSpeed-MM that the standalone host understands."""
    for title, (flags, others) in MEGATRON_FLAG_GROUPS.items():
        group = parser.add_argument_group(title)
        adds: tuple[AddFlags, ...] = (*rows_of(flags), *others)
        for add in adds:
            add(group)


def dit_flags(parser: argparse.ArgumentParser, *part_flags: AddFlags) -> argparse.ArgumentParser:
    """Add this project's own flags, and those of ``part_flags``, to one group."""
    group = parser.add_argument_group("DiT")
    adds: tuple[AddFlags, ...] = (*rows_of(DiTArgs), *part_flags)
    for add in adds:
        add(group)
    return parser


def default_micro_batch(global_batch_size: int, world_size: int) -> int:
    """Return the default micro-batch size: each rank processes its part of the global batch in one pass."""
    if global_batch_size % world_size:
        raise ConfigError(
            f"--global-batch-size = {global_batch_size} is not divisible by the {world_size} ranks. Change it, or "
            "the number of ranks (NPUS_PER_NODE of pretrain.sh)."
        )
    return global_batch_size // world_size


def checked(args: RunConfig, world_size: int) -> RunConfig:
    """Return ``args`` with both batch sizes set, after checking all flags, before any device work.

    Raises:
        ConfigError: a flag is invalid, or contradicts another one or ``world_size``; names the flag.
    """
    check_flag_dependencies(args)
    args = _with_batches(args, world_size)
    _check_schedule(args)
    _check_optimizer(args)
    if len(set(args.power_ema_stds)) < len(args.power_ema_stds):
        widths = " ".join(map(str, args.power_ema_stds))
        raise ConfigError(f"--power-ema-stds = {widths} lists a width twice. List each width once.")
    if args.load:
        check_path("--load", args.load)
    return args


def _check_optimizer(args: RunConfig) -> None:
    if args.ai_framework == "mindspore" and is_class(args.optimizer):
        raise ConfigError(
            f"--optimizer = {args.optimizer} is a class of PyTorch, and MindSpore trains by adam, muon or a plugin's "
            "optimizer. Use one of these, or --ai-framework pytorch."
        )
    check_flags(args.optimizer, args.flags())


def _with_batches(args: RunConfig, world_size: int) -> RunConfig:
    """Return ``args`` with the missing batch size filled in."""
    if world_size % args.context_parallel_size:
        raise ConfigError(
            f"--context-parallel-size = {args.context_parallel_size} does not divide the {world_size} ranks. Use a "
            "divisor of them, or start more (NPUS_PER_NODE of pretrain.sh)."
        )
    world_size //= args.context_parallel_size  # groups of ranks with different samples
    if args.global_batch_size is None and args.micro_batch_size is None:
        raise ConfigError("--micro-batch-size or --global-batch-size is required.")
    if args.global_batch_size is None:
        return dataclasses.replace(args, global_batch_size=args.micro_batch_size * world_size)
    if args.micro_batch_size is None:
        return dataclasses.replace(args, micro_batch_size=default_micro_batch(args.global_batch_size, world_size))
    if args.global_batch_size % (args.micro_batch_size * world_size):
        raise ConfigError(
            f"--global-batch-size = {args.global_batch_size} is not divisible by "
            f"micro-batch-size({args.micro_batch_size}) * ranks({world_size}) = "
            f"{args.micro_batch_size * world_size}. Change one of the three so that it divides."
        )
    return args


def _check_schedule(args: RunConfig) -> None:
    samples = f"times --global-batch-size {args.global_batch_size} is more samples than a run can count (2**62)"
    _check(args, "train_iters", args.train_iters * args.global_batch_size < MAX_SAMPLES, samples)
    _check(args, "min_lr", 0 <= args.min_lr <= args.lr, f"must lie between 0 and --lr ({args.lr})")
    _check(args, "lr_warmup_init", 0 <= args.lr_warmup_init <= args.lr, f"must lie between 0 and --lr ({args.lr})")
    for name in ("weight_decay", "clip_grad"):
        _check(args, name, 0 <= getattr(args, name) <= FLOAT32[1], "must be at least 0 and in the range of float32")
    decay_iters = args.lr_decay_iters or args.train_iters
    decay_flag = "--lr-decay-iters" if args.lr_decay_iters else "--train-iters (or set --lr-decay-iters)"
    if args.lr_decay_style != "constant":
        _check(
            args,
            "lr_warmup_iters",
            args.lr_warmup_iters < decay_iters,
            f"must be smaller than the steps of decay ({decay_iters})",
            f"Set --lr-warmup-iters below {decay_iters}, raise {decay_flag}, or use --lr-decay-style constant.",
        )


def _check(args: RunConfig, name: str, good: bool, problem: str, hint: str = "") -> None:
    if not good:
        raise ConfigError(f"{flag_of(name)} = {getattr(args, name)} {problem}. {hint}")


PACKAGE = Path(__file__).parents[1]
ENTRY_SCRIPT = PACKAGE.parent / "pretrain_dit.py"
"""Next to the package, both in a checkout and in site-packages."""
FLAGS_FILE = "train.args"
CONFIG_FILES = {"model.json": "--mm-model", "data.json": "--mm-data"}
"""The other files of a config folder, and the flags that replace them."""


def embedded_configs() -> dict[str, Path]:
    """Return the embedded config folders by name, the default first."""
    in_wheel = PACKAGE / "examples"
    folder = in_wheel if in_wheel.is_dir() else PACKAGE.parent / "examples/dit"
    return {"digits": folder, **{file.parent.name: file.parent for file in sorted(folder.glob(f"*/{FLAGS_FILE}"))}}


def config_folder(name: str) -> Path:
    """Return the config folder ``name``: a path, or the name of an embedded one.

    Raises:
        ConfigError: it is neither; suggests the nearest embedded one.
    """
    known = embedded_configs()
    if (Path(name) / FLAGS_FILE).is_file():
        return Path(name)
    if name in known:
        return known[name]
    if Path(name).is_dir():
        missing = [file for file in (*CONFIG_FILES, FLAGS_FILE) if not (Path(name) / file).is_file()]
        raise ConfigError(
            f"CONFIG = {name} is not a config folder: it lacks {', '.join(missing)}. mm-dit init IMAGES --output "
            "CONFIG writes a whole config folder; docs/extending.md shows one by hand."
        )
    raise ConfigError(
        f"CONFIG = {name} is neither a folder with a {FLAGS_FILE} nor an embedded config. "
        f"{nearest(name, known)}mm-dit train --help names the embedded ones."
    )
