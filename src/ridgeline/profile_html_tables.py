"""The tables of a profile's page: kernels by name and by shape, roofline points, copies, waits of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ridgeline import units
from ridgeline.html_page import Column, bar_cell, cell, table
from ridgeline.profile_record import KernelRow, Point, Profile
from ridgeline.profile_summary import ABOVE_ROOF, share_text, spread
from ridgeline.profile_svg import UNCLASSED, category_slots, of_roof, place, point_categories
from ridgeline.report import ABSENT, count_text
from ridgeline.text_cut import cut

# With every name at its longest the three long tables stay under 250 KB.
MAX_POINTS = 150
MAX_NAMES = 120
MAX_SHAPES = 120
_NAME = 72  # characters of a kernel's name; JSON and CSV have all of them
_SHORT = 44  # of shapes, operators, modules


def top_points(profile: Profile) -> tuple[Point, ...]:
    """The points with the most seconds, as plot and table show them."""
    return tuple(sorted(profile.points, key=lambda point: -point.seconds)[:MAX_POINTS])


def point_table(profile: Profile, points: tuple[Point, ...], *, plotted: bool = True) -> str:
    """The table twin of the roofline: row i is point i, and the page links them where there is a plot."""
    slots, categories = category_slots(profile), point_categories(profile)
    longest_s = points[0].seconds if points else 0.0

    def kind(point: Point) -> str:
        name = categories.get(point.name, UNCLASSED)
        return cell(f"k{slots[name]}", name)

    columns = (
        _named("kernel and shape", lambda point: point.name),
        Column("class", kind, textual=True),
        Column("time", lambda point: bar_cell(units.seconds(point.seconds), _part(point.seconds, longest_s))),
        Column("of roof", lambda point: _roof(of_roof(point, profile.peaks))),
        _plain("FLOPs", lambda point: count_text(point.flops)),
        _plain("bytes", lambda point: units.nbytes(point.bytes)),
        _plain("FLOP/B", lambda point: count_text(place(point).intensity)),
        _plain("FLOP/s", lambda point: count_text(place(point).rate)),
        _text("pipe", lambda point: point.pipe.replace("_", " ")),
    )
    return table("roofline points", columns, points, style="kernels long" if plotted else "long")


def kernel_tables(profile: Profile) -> str:
    """Kernels by name, and folded away by name and shape where shapes were recorded."""
    note = (
        "σ is the spread of one launch's time; σ/avg far above 0 within one shape means something disturbs the kernel. "  # noqa: RUF001
        "Exposed is the time in which nothing else runs on the GPU: the most that removing a kernel can save."
    )
    by_name = profile.by_name[:MAX_NAMES]
    parts = [
        "<h3>By name</h3>" if by_name else "<p>No kernel ran.</p>",
        f'<p class="note">{note}{_cut_note(profile.by_name, by_name)}</p>' if by_name else "",
        table("kernels by name", _kernel_columns(profile, by_shape=False), by_name, style="long") if by_name else "",
    ]
    if any(row.shapes for row in profile.kernels):
        rows = profile.kernels[:MAX_SHAPES]
        parts.append(
            f"<details><summary>By name and shape: {len(profile.kernels)} rows</summary>"
            f'<p class="note">{_cut_note(profile.kernels, rows)}</p>'
            + table("kernels by name and shape", _kernel_columns(profile, by_shape=True), rows, style="long")
            + "</details>"
        )
    return "".join(parts)


def copy_table(profile: Profile) -> str:
    columns = (
        _named("name", lambda row: row.name),
        _plain("count", lambda row: str(row.count)),
        _plain("total", lambda row: units.seconds(row.total_s)),
        _plain("bytes", lambda row: units.nbytes(row.bytes)),
        _plain("rate", lambda row: units.bandwidth(row.bytes / row.total_s) if row.total_s else ABSENT),
        _plain("exposed", lambda row: units.seconds(row.exposed_s)),
    )
    rows = profile.copies[:MAX_NAMES]
    return f"<h3>Copies and fills</h3>{table('copies and fills', columns, rows)}" if rows else ""


def sync_table(profile: Profile) -> str:
    columns = (
        _text("call", lambda row: row.call or ABSENT),
        _text("where", lambda row: row.source or ABSENT),
        _text("under", lambda row: row.under or ABSENT),
        _plain("count", lambda row: str(row.count)),
        _plain("host waited", lambda row: units.seconds(row.waited_s)),
        _plain("GPU bubble", lambda row: units.seconds(row.bubble_s)),
    )
    note = "Waiting is mostly the GPU's real work; removing a wait saves the bubble behind it."
    rows = profile.syncs[:MAX_NAMES]
    return (
        f'<h3>Host waits for the GPU</h3><p class="note">{note}</p>{table("host waits", columns, rows)}' if rows else ""
    )


def _kernel_columns(profile: Profile, *, by_shape: bool) -> tuple[Column, ...]:
    slots = category_slots(profile)
    longest_s = max((row.total_s for row in profile.by_name), default=0.0)
    shapes = (_text("shapes", lambda row: row.shapes or ABSENT),) if by_shape else ()
    return (
        _named("kernel", lambda row: row.name),
        *shapes,
        Column("class", lambda row: cell(f"k{slots.get(row.category, 0)}", row.category), textual=True),
        _plain("count", lambda row: str(row.count)),
        Column("total", lambda row: bar_cell(units.seconds(row.total_s), _part(row.total_s, longest_s))),
        _plain("%", lambda row: share_text(_part(row.total_s, profile.step_s))),
        _plain("avg", lambda row: units.seconds(row.mean_s)),
        _plain("median", lambda row: units.seconds(row.median_s)),
        _plain("min", lambda row: units.seconds(row.min_s)),
        _plain("max", lambda row: units.seconds(row.max_s)),
        _plain("σ", lambda row: units.seconds(row.sigma_s)),  # noqa: RUF001
        _plain("σ/avg", _spread),  # noqa: RUF001
        _text("grid", lambda row: row.grid or ABSENT),
        _text("dtype", lambda row: row.dtype or ABSENT),
        _text("layout", lambda row: row.layout or ABSENT),
        _text("tensor core", lambda row: row.tensor_core),
        _plain("FLOP/B", lambda row: count_text(row.intensity or 0.0)),
        Column("bound", lambda row: cell(row.bound[:1] or "l", row.bound or ABSENT), textual=True),
        Column("of roof", lambda row: _roof(row.of_roof)),
        _plain("exposed", lambda row: units.seconds(row.exposed_s)),
        _text("phase", lambda row: row.phase),
        _text("operator", lambda row: row.op or ABSENT),
        _text("module", lambda row: row.module or ABSENT),
    )


def _named(title: str, name: Callable[[Any], str]) -> Column:
    return Column(title, lambda item: cell("n", cut(name(item), _NAME, "middle")), textual=True)


def _text(title: str, content: Callable[[Any], str]) -> Column:
    return Column(title, lambda item: cell("l", cut(content(item), _SHORT, "middle")), textual=True)


def _plain(title: str, content: Callable[[Any], str]) -> Column:
    return Column(title, lambda item: f"<td>{content(item)}")


def _roof(share: float | None) -> str:
    return cell("over", share_text(share)) if share is not None and share > ABOVE_ROOF else f"<td>{share_text(share)}"


def _spread(row: KernelRow) -> str:
    value = spread(row)
    return ABSENT if value is None else f"{value:.2f}"


def _part(seconds: float, whole_s: float) -> float:
    return seconds / whole_s if whole_s else 0.0


def _cut_note(rows: tuple[KernelRow, ...], shown: tuple[KernelRow, ...]) -> str:
    hidden_s = sum(row.total_s for row in rows[len(shown) :])
    hidden = len(rows) - len(shown)
    return f" The {hidden} shortest ({units.seconds(hidden_s)} together) are in --format csv only." if hidden else ""
