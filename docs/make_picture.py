"""Draw docs/roofline.svg: the roofline of YOLO26n on an H200, as a page of `ridgeline roofline` shows it.

    .venv/bin/python docs/make_picture.py

Nothing is timed: the picture follows from the cost model and the data sheet, so it needs no GPU.
"""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path

from ridgeline import targets, units
from ridgeline.profiler import estimate_target
from ridgeline.report import Report, by_kind, summary
from ridgeline.report_svg import HEIGHT, WIDTH, kind_slots, roofline_plot
from ridgeline.specs import find_spec

PICTURE = Path(__file__).with_name("roofline.svg")
MODEL, GPU = "yolo26n", "NVIDIA H200"

HEAD, LEGEND, MARGIN = 92, 36, 24  # heights above and below the plot, and the frame, in the plot's units
LETTER = 7.6  # width of a legend letter


def main() -> None:
    report = estimate_target(targets.resolve(MODEL), find_spec(GPU))
    PICTURE.write_text(picture(report), encoding="utf-8")
    print(f"wrote {PICTURE}")


def picture(report: Report) -> str:
    """The plot with a headline, a legend and the page's own style sheet: a file that stands alone."""
    width, height = WIDTH + 2 * MARGIN, HEAD + HEIGHT + LEGEND + MARGIN
    style = files("ridgeline").joinpath("assets", "report.css").read_text(encoding="utf-8")
    plot = roofline_plot(report).replace("<svg ", f'<svg x="{MARGIN}" y="{HEAD}" width="{WIDTH}" height="{HEIGHT}" ', 1)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<title>{escape(headline(report))}</title>",
            # the page's sheet lets a plot shrink inside a scrolling box; a picture has its own size
            f"<style>{escape(style, quote=False)}svg {{ min-width: 0; width: auto; }}</style>",
            f'<rect width="{width}" height="{height}" style="fill: var(--surface)"/>',
            f'<text class="strong" x="{MARGIN}" y="36" style="font-size: 19px">{escape(headline(report))}</text>',
            *(
                f'<text x="{MARGIN}" y="{58 + 18 * i}">{escape(line)}</text>'
                for i, line in enumerate(explanation(report))
            ),
            plot,
            *legend(report),
            "</svg>\n",
        )
    )


def headline(report: Report) -> str:
    return (
        f"{report.subject} on an {report.gpu}, {report.dtype}, batch {report.batch}: "
        f"fused floor {units.seconds(report.floor_s)}, unfused {units.seconds(report.unfused_s)}"
    )


def explanation(report: Report) -> tuple[str, ...]:
    total = summary(report)
    return (
        "Computed from shapes and the data sheet, nothing timed. "
        "Each dot is one fused kernel at its bound, its area the share of the time.",
        f"{total.fused_kernels} fused kernels move {units.nbytes(total.fused_bytes)}; "
        f"one kernel per operator means {total.unfused_kernels} kernels and {units.nbytes(total.unfused_bytes)}.",
    )


def legend(report: Report) -> list[str]:
    slots, x, y = kind_slots(report), MARGIN + 62.0, HEAD + HEIGHT + LEGEND / 2
    parts = []
    for row in by_kind(report.fused_rows):
        parts.append(f'<circle class="k{slots[row.kind]}" cx="{x:.0f}" cy="{y - 4:.0f}" r="5"/>')
        parts.append(f'<text x="{x + 11:.0f}" y="{y:.0f}">{escape(row.kind)}</text>')
        x += 40 + LETTER * len(row.kind)
    return parts


if __name__ == "__main__":
    main()
