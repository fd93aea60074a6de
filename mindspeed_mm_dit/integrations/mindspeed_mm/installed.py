"""What an installed package contains, read from its sources; its tracker file."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

from mindspeed_mm_dit.checkpoint.store import TRACKER, CheckpointStore
from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.errors import CheckpointError

ReliedOn = Mapping[str, Mapping[str, tuple[str, ...] | None]]
"""Module -> name -> parameters of the function or of the class's constructor (None: not called by us)."""


def missing_from(relied_on: ReliedOn) -> list[str]:
    """Return the missing names of ``relied_on``. A file that is not valid Python is skipped: its import will fail."""
    missing = []
    for module, names in relied_on.items():
        file = source_of(module)
        if file is None:
            missing.append(module)
            continue
        try:
            defined = {name: node for node in _top_level(ast.parse(file.read_bytes())) for name in _names(node)}
        except (SyntaxError, ValueError):
            continue
        for name, parameters in names.items():
            if name not in defined and not {"*", "__getattr__"} & defined.keys():
                missing.append(f"{module}.{name}")
            elif parameters is not None and not _takes(defined.get(name), parameters):
                missing.append(f"{module}.{name}({', '.join(parameters)})")
    return missing


def folders(package: str) -> list[Path]:
    """Return the folders of a top-level package, installed or unpacked; a namespace package can have several."""
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def package_folder(package: str) -> Path | None:
    """Return the first folder of a package; None if there is none."""
    return next(iter(folders(package)), None)


def tools_json() -> Path:
    """Return the path of the installed host's tools.json."""
    return (package_folder("mindspeed_mm") or Path("mindspeed_mm")) / "tools" / "tools.json"


def is_installed(name: str) -> bool:
    """Return whether a module can be imported; for a module in a package, this imports the package."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def source_of(module: str) -> Path | None:
    """Return the file of ``module``; None if there is none."""
    package, _, rest = module.partition(".")
    for folder in folders(package):
        path = folder / rest.replace(".", "/")
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def _top_level(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module, including those under an ``if`` or ``try``."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.If | ast.Try):
            yield from _top_level(child)


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return [alias.asname or alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []


def _takes(node: ast.AST | None, parameters: tuple[str, ...]) -> bool:
    """Return whether a function or constructor can be called with ``parameters``; True if its source does not show."""
    if isinstance(node, ast.ClassDef):
        node = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if not isinstance(node, ast.FunctionDef) or node.args.vararg:
        return True
    names = tuple(argument.arg for argument in node.args.args if argument.arg != "self")
    return names[: len(parameters)] == parameters and len(names) - len(parameters) <= len(node.args.defaults)


RELEASE = "release"
"""Content of the tracker file, instead of an iteration, for converted weights without a run."""


def newest(what: str, folder: str) -> Path:
    """Return the checkpoint that a host will load from ``folder``; ``what`` names the setting, as in "--load = DIR".

    Raises:
        CheckpointError: the tracker names no checkpoint that exists.
    """
    name = (Path(folder) / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    iterations = [str(iteration) for iteration in CheckpointStore(folder).iterations()]
    if not name:
        advice = f"Write {iterations[-1]} into it." if iterations else "Name another folder."
        raise CheckpointError(f"{what} has an empty {TRACKER}: a run was killed while it wrote the file. {advice}")
    if name != RELEASE and not name.isdecimal():
        raise CheckpointError(
            f"{what} has a {TRACKER} that says {shorten_repr(name)}. Write the number of a checkpoint into it."
        )
    path = Path(folder) / RELEASE if name == RELEASE else CheckpointStore(folder).path(int(name))
    if not path.is_dir():
        raise CheckpointError(
            f"{what} has no {path.name}, which its {TRACKER} names. Write the number of another into it."
        )
    return path
