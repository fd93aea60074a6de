"""Pages of one HTML file with their pictures inside."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .2rem .8rem; border-bottom: 1px solid #ddd }
th { text-align: left } img { max-width: 100% }
td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
.PASS { color: #176f2c; font-weight: bold } .FAIL { color: #b3261e; font-weight: bold } tr.bad { background: #fde8e6 }
figure { display: inline-block; margin: 0 1rem 1rem 0 } code { font-size: .92em }
"""


def write_page(path: Path, title: str, parts: Sequence[str]) -> None:
    """Write ``parts`` of HTML as one page."""
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + "\n".join(parts) + "</html>\n", encoding="utf-8")


def image(figure: Figure) -> str:
    """Return a figure of matplotlib as a picture inside the page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return embed(buffer.getvalue(), "")


def embed(png: bytes, alt: str, width: int | None = None) -> str:
    """Return a PNG as a picture inside the page, shown ``width`` pixels wide, or as wide as it is."""
    wide = f" width={width}" if width else ""
    return f'<img alt="{escape(alt)}"{wide} src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], bad: Sequence[bool] = ()) -> str:
    """Return a table; rows that are ``bad`` are coloured, and texts that begin with a digit stand right."""
    head = f"<tr>{''.join(f'<th>{escape(text)}</th>' for text in heads)}</tr>" if any(heads) else ""
    lines = [
        f"<tr{' class=bad' if number < len(bad) and bad[number] else ''}>{''.join(map(_cell, row))}</tr>"
        for number, row in enumerate(rows)
    ]
    return f"<table>{head}{''.join(lines)}</table>"


def _cell(text: str) -> str:
    kind = text if text in ("PASS", "FAIL") else "n" if text[:1].isdigit() else ""
    return f"<td class='{kind}'>{escape(text)}</td>"


def folded(summary: str, content: str) -> str:
    """Return ``content`` behind a line that opens it."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"
