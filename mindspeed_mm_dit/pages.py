"""Write HTML pages with embedded pictures from the ``templates/`` folders of the core and of each component."""

from __future__ import annotations

import base64
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm_dit.terminal import plain

if TYPE_CHECKING:
    from jinja2 import Environment

_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+(e[-+]?\d+)?%?( \([\d.]+\))?")


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader([here / "templates", *here.glob("tools/*/templates")]),
        autoescape=lambda name: not str(name).endswith(".md"),
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        finalize=lambda value: plain(value) if isinstance(value, str) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    environment.tests["figure"] = lambda text: bool(_NUMBER.fullmatch(str(text)))
    return environment


def write(path: Path, template: str, **values: Any) -> None:
    """Render ``template`` of a folder ``templates/`` with ``values`` and write it to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_environment().get_template(template).render(values), encoding="utf-8")
