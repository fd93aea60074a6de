"""What of the site is generated (a hook of mkdocs): its first pages from the READMEs, the reference from the code."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from mindspeed_mm_dit.cli.commands import COMMANDS
from mindspeed_mm_dit.cli.main import command_parser
from mindspeed_mm_dit.configs.data import SOURCE_CONFIGS, DataloaderParam
from mindspeed_mm_dit.configs.dit import PRESETS
from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config
from mindspeed_mm_dit.configs.model import (
    AE_CONFIGS,
    DIFFUSION_CONFIGS,
    PREDICTOR_CONFIGS,
    TEACHER_CONFIGS,
    TEXT_ENCODER_CONFIGS,
)
from mindspeed_mm_dit.configs.strict import describe_type
from mindspeed_mm_dit.errors import flag_of
from mindspeed_mm_dit.integrations.mindspeed_mm.flags import FLAGS, HOST_NAMES, IGNORED, SAME, Key, Meaning, Unsupported
from mindspeed_mm_dit.training.flags import full_parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"index.md": "README.md", "index.zh-CN.md": "README.zh-CN.md", "contributing.md": "CONTRIBUTING.md",
         "changelog.md": "CHANGELOG.md"}  # fmt: skip
"""Page -> the file beside docs/ that it is."""
API = {
    "load": "api", "ModelRequest": "sampling.request", "create": "api", "Pipeline": "sampling.pipeline",
    "SampleRequest": "sampling.request", "GeneratedSamples": "sampling.outputs",
}  # fmt: skip
"""What Python offers, and the modules that explain it: a request has the arguments of a function."""
_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)(#[^)]*)?\)")


# --- what mkdocs calls -----------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, and every file of the repository that a page links to."""
    from mkdocs.structure.files import File

    for name, text in generated().items():
        files.append(File.generated(config, name, content=text))
    for path in sorted(linked_files()):
        files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links out of docs/ lead to the copy of that file in the site, or nowhere where it is a folder."""
    if page.file.src_uri.startswith("repository/"):
        return re.sub(r"\]\((?!http)[^)]+\)", "]", markdown)  # (a result of a benchmark: its links are of its folder)
    return _OUTSIDE.sub(_inside, markdown)


def _inside(link: re.Match) -> str:
    names = {file: page for page, file in PAGES.items()}
    if link[1] in names:
        return f"]({names[link[1]]}{link[2] or ''})"
    return f"](repository/{link[1]})" if (ROOT / link[1]).is_file() else "]"


def linked_files() -> set[str]:
    """Return the files outside docs/ that pages link to."""
    texts = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")] + [
        _of_root(file) for file in PAGES.values()
    ]
    links = {link for text in texts for link, _ in _OUTSIDE.findall(text)}
    return {link for link in links if (ROOT / link).is_file() and link not in PAGES.values()}


# --- the pages -------------------------------------------------------------------------------------------------


def generated() -> dict[str, str]:
    """Return the text of each generated page."""
    return {
        **{page: _of_root(file) for page, file in PAGES.items()},
        "reference/flags.md": flags_page(),
        "reference/keys.md": keys_page(),
        "reference/commands.md": commands_page(),
        "reference/python.md": python_page(),
    }


def _of_root(file: str) -> str:
    """Return a file beside docs/ as a page inside it: links to docs/x are links to x."""
    text = (ROOT / file).read_text(encoding="utf-8").replace("](docs/", "](")
    for page, name in PAGES.items():
        text = text.replace(f"]({name})", f"]({page})")
    return re.sub(r"\]\((benchmarks|tests|examples)/", r"](../\1/", text)


def flags_page() -> str:
    """Every flag of a run, by group, with what it means inside MindSpeed-MM."""
    meanings = {flag_of(name): meaning for name, meaning in FLAGS.items()}
    text = ["# Flags of a run", "They follow the config of `mm-dit train`, or stand in its `train.args`. "
            "Megatron's flags have Megatron's meaning; those of the group DiT are this project's own.", ""]  # fmt: skip
    for group in full_parser()._action_groups:
        actions = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        if group.title and actions and actions[0].dest != "help":
            lines = [[*_row(action), _in_hosts(meanings.get(action.option_strings[0]))] for action in actions]
            text += [f"## {group.title}", "", *_table(("flag", "default", "meaning", "inside MindSpeed-MM"), lines)]
    return "\n".join(text)


def _in_hosts(meaning: Meaning | None) -> str:
    words = []
    for route, host in HOST_NAMES.items():
        in_host = getattr(meaning, route, SAME)
        words += [f"native engine: `{in_host.name}`"] if isinstance(in_host, Key) else []
        words += [f"no effect in {host}"] if in_host == IGNORED else []
        words += [f"refused in {host}"] if isinstance(in_host, Unsupported) else []
    return "; ".join(words)


def commands_page() -> str:
    """Every command with its flags."""
    text = ["# Commands", ""]
    for name in COMMANDS:
        parser = command_parser(name)
        flags = [_row(action) for action in parser._actions if action.dest != "help"]
        text += [f"## mm-dit {name}", "", "```text", (parser.description or "").strip(), "```", "",
                 *_table(("argument", "default", "meaning"), flags)]  # fmt: skip
    return "\n".join(text)


def _row(action: argparse.Action) -> list[str]:
    word = ", ".join(f"`{one}`" for one in action.option_strings) or f"`{action.metavar or action.dest}`"
    taken = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
    taken = "" if not action.option_strings or action.nargs == 0 else str(taken or action.dest.upper())
    required = action.required and action.nargs != argparse.REMAINDER
    default = "required" if required else _value(action.default)
    meaning = (action.help or "").replace("%%", "%").replace("%(default)s", str(action.default))
    return [f"{word} {_text(taken)}".strip(), default, _text(meaning)]


def _value(value: Any) -> str:
    nothing = value is None or value is False or value in ("", (), argparse.SUPPRESS) or value == []
    return "" if nothing else f"`{value}`"


def keys_page() -> str:
    """Every key of the config files, by section and kind."""
    first = "A run is described by model.json, data.json and, where it is sharded, fsdp2.yaml. A key that is not "
    first += "listed here is an error, which names the nearest one that is. model.json and data.json may have a `note`."
    text = ["# Keys of the config files", "", first, "", "## model.json", "", *_presets()]
    for section, kinds in (
        ("predictor", PREDICTOR_CONFIGS),
        ("diffusion", DIFFUSION_CONFIGS),
        ("ae", AE_CONFIGS),
        ("text_encoder", TEXT_ENCODER_CONFIGS),
        ("teacher", TEACHER_CONFIGS),
    ):
        text += _section(section, "model_id", kinds)
    text += ["", "## data.json", *_section("dataset_param", "dataset_type", SOURCE_CONFIGS)]
    text += ["", "### dataloader_param", "", *_keys(DataloaderParam)]
    return "\n".join([*text, "", "## fsdp2.yaml", "", *_keys(Fsdp2Config)])


def _presets() -> list[str]:
    """A key of section predictor that stands for several others."""
    named = " ".join(f"`{name}`" for name in PRESETS)
    line = ("`preset`", "a string", "", f"Of `predictor`: the sizes of a published model, one of {named}.")
    return _table(("key", "takes", "default", "meaning"), [line])


def _section(section: str, key: str, kinds: Mapping[str, type]) -> Iterator[str]:
    for cls in dict.fromkeys(kind for kind in kinds.values() if kind.__module__.startswith("mindspeed_mm_dit.")):
        names = " or ".join(f"`{name}`" for name, kind in kinds.items() if kind is cls)
        yield from ("", f"### {section}: {names.replace('`', '')}", "", f"With `{key}` {names}.", "", *_keys(cls))


def _keys(cls: Any) -> list[str]:
    hints, lines, inner = get_type_hints(cls), [], list[Any]()
    for field in dataclasses.fields(cls):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        inner += [kind for kind in (hints[field.name], *get_args(hints[field.name])) if dataclasses.is_dataclass(kind)]
        value = "required" if default is dataclasses.MISSING else _json(default)
        takes, meaning = describe_type(hints[field.name]), said_of(cls, field.name)
        lines.append([f"`{field.name}`", _text(takes), value, _text(meaning)])
    found = _table(("key", "takes", "default", "meaning"), lines)
    for kind in inner:
        found += ["", f"Keys of such an object ({kind.__name__}):", "", *_keys(kind)]
    return found


def _json(value: Any) -> str:
    return "" if dataclasses.is_dataclass(value) else f"`{json.dumps(value)}`"


@lru_cache(maxsize=1)
def _documented() -> Any:
    import griffe

    return griffe.load("mindspeed_mm_dit.configs", search_paths=[str(ROOT)])


def said_of(cls: type, name: str) -> str:
    """Return the line under a field of a config class, its own or an inherited one."""
    for base in cls.__mro__:
        if base.__module__.startswith("mindspeed_mm_dit.configs."):
            member = _documented()[base.__module__.rpartition(".")[2]][base.__name__].members.get(name)
            if member is not None and member.docstring:
                return member.docstring.value
    return ""


def python_page() -> str:
    """What ``import mindspeed_mm_dit as dit`` offers; mkdocstrings fills it in."""
    found = [f"::: mindspeed_mm_dit.{module}.{name}" for name, module in API.items()]
    first = "`import mindspeed_mm_dit as dit`. [From Python](../sampling.md#from-python) shows it in use."
    return "\n\n".join(["# Python", first, *found])


def _text(text: str) -> str:
    """Return ``text`` for a cell: on one line, code as code, nothing of it HTML or a column."""
    parts = " ".join(text.split()).replace("``", "`").replace("|", "\\|").split("`")
    parts[::2] = [re.sub(r"([*_\[])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines)] + [""]
