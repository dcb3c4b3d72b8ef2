"""A profile's unprofiled step as CSV: kernels, copies, overlap, idle, a row each; `total_seconds` adds up to it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from ridgeline.profile_record import UNTRACED, KernelRow, Profile
from ridgeline.report import one_line

# Names carry their unit. A cell that does not apply is empty; overlap is negative: it was counted twice above.
HEADER = (
    "part", "name", "shapes", "count", "total_seconds", "of_step", "mean_seconds", "median_seconds", "min_seconds",
    "max_seconds", "sigma_seconds", "sigma_over_mean", "grid", "category", "dtype", "layout", "tensor_core", "phase",
    "op", "module", "intensity_flop_per_byte", "bound", "of_roof", "exposed_seconds", "bytes",
)  # fmt: skip


def to_csv(profile: Profile) -> str:
    """Every row of the profile under HEADER, without a last newline.

    `part` is kernel, copy, overlap, idle or untraced.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADER)
    for row in _rows(profile):
        writer.writerow([_cell(row.get(name, "")) for name in HEADER])
    return out.getvalue().rstrip("\n")


def _rows(profile: Profile) -> Iterator[dict[str, object]]:
    def part(kind: str, name: str, total_s: float) -> dict[str, object]:
        of_step = total_s / profile.step_s if profile.step_s else ""
        return {"part": kind, "name": name, "total_seconds": total_s, "of_step": of_step}

    copied_bytes = {row.name: row.bytes for row in profile.copies}
    for row in profile.kernels:
        copied = row.name in copied_bytes
        moved = {"bytes": copied_bytes[row.name]} if copied else {}
        yield part("copy" if copied else "kernel", row.name, row.total_s) | _kernel(row) | moved
    if profile.overlap_s:
        yield part("overlap", "overlap", -profile.overlap_s)
    for cause, idle_s in profile.idle.items():
        yield part("idle", cause, idle_s)
    for bar in profile.waterfall:
        if bar.name == UNTRACED:
            yield part("untraced", bar.name, bar.seconds)


def _kernel(row: KernelRow) -> dict[str, object]:
    return {
        "shapes": row.shapes,
        "count": row.count,
        "mean_seconds": row.mean_s,
        "median_seconds": row.median_s,
        "min_seconds": row.min_s,
        "max_seconds": row.max_s,
        "sigma_seconds": row.sigma_s,
        "sigma_over_mean": row.sigma_s / row.mean_s if row.mean_s else "",
        "grid": row.grid,
        "category": row.category,
        "dtype": row.dtype,
        "layout": row.layout,
        "tensor_core": row.tensor_core,
        "phase": row.phase,
        "op": row.op,
        "module": row.module,
        "intensity_flop_per_byte": "" if row.intensity is None else row.intensity,
        "bound": row.bound,
        "of_roof": "" if row.of_roof is None else row.of_roof,
        "exposed_seconds": row.exposed_s,
    }


def _cell(value: object) -> object:
    return one_line(value) if isinstance(value, str) else value
