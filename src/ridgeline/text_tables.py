"""Tables for a terminal and for Markdown. It imports rich (0.2 s), so import it when a table is due."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ridgeline.report import one_line
from ridgeline.text_cut import cut

# Without a terminal rich assumes 80 columns and would cut names; a pipe has no edge to respect.
PIPE_WIDTH = 160
NAME_WIDTH = 24  # what a narrow terminal leaves of a name
GAP = 3  # between two columns


Facts = Sequence[tuple[str, str]]  # (label, text); a label of "" goes on with the one above


@dataclass(frozen=True)
class Column:
    """One column: its heading and what makes the text of a cell out of an item."""

    title: str
    cell: Callable[[Any], str]
    numeric: bool = True
    rank: int = 0  # a narrow terminal leaves columns out, the highest rank first; rank 0 stays
    cut: str = ""  # the side a long name may lose, "start", "middle" or "end"; numbers lose none
    styles: Mapping[str, str] = field(default_factory=dict)  # rich style by cell text


@dataclass(frozen=True)
class Section:
    """A titled table, or with no columns the facts alone."""

    title: str
    columns: tuple[Column, ...] = ()
    items: tuple[Any, ...] = ()  # what each column's `cell` is called with
    note: str = ""
    facts: Facts = ()


def terminal(facts: Facts, sections: Sequence[Section], *, bold: str, width: int | None, color: bool | None) -> str:
    """Facts, then sections, as lines without a last newline; the fact labelled `bold` stands out.

    `width` and `color` default to what stdout is: plain text off a terminal or under NO_COLOR.
    """
    console = Console(width=width, force_terminal=color, no_color=None if color is None else not color)
    if width is None and not console.is_terminal:
        console.width = PIPE_WIDTH
    with console.capture() as capture:
        console.print(_rich_facts(facts, bold))
        for section in sections:
            console.print()
            console.print(Text(section.title, style="bold"))
            if section.columns:
                console.print(_rich_table(section, console.width))
            if section.facts:
                console.print(_rich_facts(section.facts, bold))
            if section.note:
                console.print(Text(section.note, style="dim"))
    # rich pads every line to the table's width; a pipe or a file has no use for it
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def markdown(facts: Facts, sections: Sequence[Section]) -> str:
    """The same as GitHub's Markdown, without a last newline."""
    parts = ["\n".join(_md_facts(facts)) + "\n"]
    for section in sections:
        lines = [f"**{_md(section.title)}**", ""]
        if section.columns:
            rule = "|".join("--:" if column.numeric else "---" for column in section.columns)
            lines += [f"| {' | '.join(column.title for column in section.columns)} |", f"|{rule}|"]
            lines += [
                f"| {' | '.join(_md(column.cell(item)) for column in section.columns)} |" for item in section.items
            ]
        if any(label for label, _ in section.facts):
            lines += _md_facts(section.facts)
        else:
            lines += [f"- {_md(value)}" for _, value in section.facts]
        if section.note:
            lines += ["", _md(section.note)]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts).rstrip("\n")


def _rich_facts(facts: Facts, bold: str) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in facts:
        grid.add_row(label, Text(one_line(value), style="bold" if label and label == bold else ""))
    return grid


def _rich_table(section: Section, width: int) -> Table:
    """The section's columns that fit, names cut to what the numbers leave."""
    columns = [(column, [column.cell(item) for item in section.items]) for column in section.columns]
    while sum(_least_width(*entry) for entry in columns) > width + GAP:
        last = max(columns, key=lambda entry: entry[0].rank)
        if last[0].rank == 0:
            break
        columns.remove(last)
    spare = width + GAP - sum(_least_width(*entry) for entry in columns)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for index, (column, cells) in enumerate(columns):
        if column.cut:
            shortened = [cut(cell, NAME_WIDTH + max(spare, 0), column.cut) for cell in cells]
            spare -= max(map(len, [column.title, *shortened])) + GAP - _least_width(column, cells)
            columns[index] = (column, shortened)
        table.add_column(column.title, justify="right" if column.numeric else "left", no_wrap=True)
    for row in zip(*(cells for _, cells in columns), strict=True):
        styled = (Text(cell, style=column.styles.get(cell, "")) for (column, _), cell in zip(columns, row, strict=True))
        table.add_row(*styled)
    return table


def _least_width(column: Column, cells: list[str]) -> int:
    """Characters a column needs with its gap: all of a number, enough of a name to know it by."""
    longest = max(map(len, [column.title, *cells]))
    return GAP + (min(longest, NAME_WIDTH) if column.cut else longest)


def _md_facts(facts: Facts) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {_md(label)} | {_md(value)} |" for label, value in facts)]


def _md(text: str) -> str:
    """A cell GitHub shows as written: no column break, no markup from a name."""
    escaped = one_line(text).replace("\\", "\\\\").replace("|", "\\|")
    for character in "*_`[]<>":
        escaped = escaped.replace(character, "\\" + character)
    return escaped
