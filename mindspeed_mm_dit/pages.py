"""Writes pages from the templates in ``templates/``, such as a single HTML file with its pictures embedded."""

from __future__ import annotations

import base64
import io
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm_dit.terminal import plain

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure

_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+(e[-+]?\d+)?%?( \([\d.]+\))?")


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("mindspeed_mm_dit"),
        autoescape=lambda name: not str(name).endswith(".md"),
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        finalize=lambda value: plain(value) if isinstance(value, str) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["base64"] = lambda content: base64.b64encode(content).decode()
    found.tests["figure"] = lambda text: bool(_NUMBER.fullmatch(str(text)))
    return found


def write(path: Path, template: str, **values: Any) -> None:
    """Render ``template`` of the folder ``templates/`` with ``values`` and write it to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_environment().get_template(template).render(values), encoding="utf-8")


def png_of_figure(figure: Figure) -> bytes:
    """Return a matplotlib figure as PNG bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
