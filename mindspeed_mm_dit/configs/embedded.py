"""The config folders that come with the package: examples/dit in a checkout, or its copy in the wheel."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm_dit.errors import ConfigError, nearest

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
