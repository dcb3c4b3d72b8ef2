"""One self-contained HTML document and the tables in it, readable offline and without scripts.

The page loads nothing: styles, script and pictures are inside, and its content policy forbids the rest.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ridgeline.atomic import write_file
from ridgeline.errors import UsageError
from ridgeline.report import one_line


@dataclass(frozen=True)
class Section:
    """One part of a page: `html` is trusted markup, `title` is plain text for the navigation."""

    ident: str
    title: str
    html: str


@dataclass(frozen=True)
class Column:
    """One column of a table: its heading, plain text, and what makes a cell of an item."""

    title: str
    cell: Callable[[Any], str]  # one <td>, its closing tag left out as HTML allows
    textual: bool = False  # read from the left, sorted as text


def page(sections: Sequence[Section], *, title: str, assets: Sequence[str] = ("report",)) -> str:
    """The whole document, a few kilobytes more than its sections. `assets` are pairs of a style and a script, in order.

    Raises ValueError on two sections of one ident.
    """
    repeated = [ident for ident, count in Counter(section.ident for section in sections).items() if count > 1]
    if repeated:
        raise ValueError(f"page: every section needs its own ident, got {repeated[0]!r} twice")
    style = "".join(_asset(f"{name}.css") for name in assets)
    # one script of all parts: they share the tooltip, and the policy needs one hash
    script = "".join(_asset(f"{name}.js") for name in assets)
    # only this script may run, so a name that slipped through as markup still could not
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    links = "".join(f'<a href="#{section.ident}">{text(section.title)}</a>' for section in sections)
    navigation = f'<nav aria-label="Sections">{links}</nav>' if len(sections) > 1 else ""
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{text(title)}</title>\n<style>\n{style}</style></head>\n"
        f"<body><header><h1>{text(title)}</h1>{navigation}</header>\n<main>\n"
        + "\n".join(section.html for section in sections)
        + "\n</main><footer><p>Written by ridgeline. This file needs no network.</p></footer>\n"
        f"<script>{script}</script></body></html>\n"
    )


def write_html(path: str | Path, html: str) -> Path:
    """Write the page whole or not at all. Raises UsageError where the folder takes no file."""
    path = Path(path)
    try:
        write_file(path, lambda file: file.write(html.encode()))
    except OSError as error:
        raise UsageError(f"cannot write {path} ({error.strerror}): name a file in a writable folder") from error
    return path


def table(caption: str, columns: Sequence[Column], items: Iterable[Any], *, style: str = "") -> str:
    """A table in a box that scrolls by itself; row and cell end tags are left out, which HTML allows.

    `style` are classes: "long" gets a filter and its own vertical scroll, "kernels" has the plot's points as rows.
    """
    heads = "".join(f'<th scope="col"{" class=l" if column.textual else ""}>{text(column.title)}' for column in columns)
    rows = "\n".join("<tr>" + "".join(column.cell(item) for column in columns) for item in items)
    box, label = "scroll tall" if "long" in style else "scroll", text(caption)
    return (
        f'<div class="{box}" tabindex="0" role="region" aria-label="{label}"><table class="{style}">'
        f"<caption hidden>{label}</caption><thead><tr>{heads}</thead><tbody>\n{rows}</tbody></table></div>"
    )


def cell(style: str, content: str) -> str:
    """One <td> of a class."""
    return f"<td class={style}>{text(content)}"


def bar_cell(content: str, share: float) -> str:
    """A number over a bar of `share` (0 to 1) of the cell."""
    return f"<td class=t style=--p:{share * 100:.3g}%>{text(content)}"


def text(content: str) -> str:
    """Text of any origin as markup that shows it."""
    return escape(one_line(content))


def _asset(name: str) -> str:
    return files("ridgeline").joinpath("assets", name).read_text(encoding="utf-8")
