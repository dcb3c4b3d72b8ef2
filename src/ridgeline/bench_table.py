"""The ladder's results as the write-up's table, each change explained from its numbers; as JSON, CSV or Markdown too.

It imports rich (0.2 s), so import it when a table is due.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ridgeline import units
from ridgeline.atomic import write_file
from ridgeline.bench import Measured, Missing, Protocol, Traced
from ridgeline.errors import UsageError
from ridgeline.report import ABSENT
from ridgeline.text_tables import Column, Facts, Section, markdown, terminal
from ridgeline.timing import differs
from ridgeline.workloads.ddpm_ladder import WRITEUP_GPU

FORMATS = ("table", "json", "csv", "md")
BUSY_SHARE = 0.9  # of the wall: a GPU that works for less of it waits for the host
_TOLD_SHARE = 0.25  # of a change: a part, or a counterpart, as large as this is mentioned


@dataclass(frozen=True)
class LadderRow:
    """One rung beside the one before it in the run; times are of one step. None where nothing is known."""

    rung: str
    change: str
    batch: int
    wall_s: float
    spread_s: float
    gpu_busy_s: float | None
    gpu_busy_share: float | None  # of the wall
    kernels: float | None
    waits: float | None  # of the host for the GPU
    memory_bytes: int | None  # most that PyTorch held on the GPU
    images_per_s: float
    against_before: float | None  # relative change of the wall: -0.06 is 6 % less
    why: str
    writeup_s: float | None
    writeup_against_before: float | None
    steps: int
    data: str
    device: str
    driver: str | None
    power_limit_w: float | None
    clocks_mhz: float | None
    torch: str
    triton: str


def ladder_row(now: Measured, before: Measured | None) -> LadderRow:
    """The row of one rung."""
    traced, conditions, machine = now.traced, now.conditions, now.machine
    writeup_s, earlier_s = now.rung.writeup_s, before.rung.writeup_s if before else None
    return LadderRow(
        rung=now.rung.name,
        change=now.rung.change,
        batch=conditions.batch,
        wall_s=now.wall_s,
        spread_s=now.spread_s,
        gpu_busy_s=traced.busy_s if traced else None,
        gpu_busy_share=traced.busy_s / now.wall_s if traced else None,
        kernels=traced.kernels if traced else None,
        waits=traced.waits if traced else None,
        memory_bytes=now.memory_bytes,
        images_per_s=conditions.batch / now.wall_s,
        against_before=now.wall_s / before.wall_s - 1 if before else None,
        why=explain(now, before),
        writeup_s=writeup_s,
        writeup_against_before=writeup_s / earlier_s - 1 if writeup_s and earlier_s else None,
        steps=now.protocol.timed,
        data=str(conditions.data or "random images"),
        device=machine.device,
        driver=machine.driver,
        power_limit_w=machine.power_limit_w,
        clocks_mhz=now.timing.clocks_mhz,
        torch=machine.torch,
        triton=machine.triton,
    )


def ladder_rows(measured: Sequence[Measured]) -> tuple[LadderRow, ...]:
    """A row a rung, each beside the one before it."""
    return tuple(ladder_row(now, before) for now, before in zip(measured, [None, *measured], strict=False))


def explain(now: Measured, before: Measured | None) -> str:
    """Why the wall changed, in one clause, and what bounds it now, in another; from the numbers alone."""
    if now.traced is None:
        return "not traced: the step ran without a GPU"
    share = now.traced.busy_s / now.wall_s
    bound = f"{'GPU' if share >= BUSY_SHARE else 'host'}-bound: GPU busy {share:.0%} of the wall"
    if before is None or before.traced is None:
        return bound
    return f"{_cause(now, now.traced, before, before.traced)}; {bound}"


def line(row: LadderRow) -> str:
    """The row in one line, for who waits for the table."""
    busy = "" if row.gpu_busy_s is None else f", GPU busy {units.seconds(row.gpu_busy_s)}"
    return f"{row.rung}: wall {units.seconds(row.wall_s)}{busy}, {row.images_per_s:,.0f} images/s"


def render(
    results: Sequence[Measured | Missing],
    output_format: str = "table",
    *,
    width: int | None = None,
    color: bool | None = None,
) -> str:
    """What `bench.climb` gave, as a table in one of FORMATS, without a last newline.

    Rungs without numbers stand below it with their reasons, in "json" under "missing", and not in "csv".
    `width` and `color` default to what stdout is: plain text off a terminal or under NO_COLOR.
    """
    measured = [result for result in results if isinstance(result, Measured)]
    missing = [result for result in results if isinstance(result, Missing)]
    rows = ladder_rows(measured)
    facts = _facts(rows[0], measured[0].protocol) if rows else [("subject", "DDPM training step")]
    match output_format:
        case "table":
            return terminal(facts, _sections(rows, missing), bold="subject", width=width, color=color)
        case "md":
            return markdown(facts, _sections(rows, missing))
        case "csv":
            return _csv(rows)
        case "json":
            left = [{"rung": each.rung.name, "reason": each.reason} for each in missing]
            return json.dumps({"rows": [asdict(row) for row in rows], "missing": left}, indent=1, ensure_ascii=False)
    raise ValueError(f"render: format must be one of {', '.join(FORMATS)}, got {output_format!r}")


def append_rows(path: Path, rows: Iterable[LadderRow]) -> None:
    """Add the rows at the end of a JSONL file, one object a line; without rows, see that it can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = path.read_bytes() if path.exists() else b""
        added = "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)
        write_file(path, lambda file: file.write(kept + added.encode()))
    except OSError as error:
        raise UsageError(f"cannot write '{path}' ({error.strerror}): name another file with --out") from error


def _cause(now: Measured, traced: Traced, before: Measured, earlier: Traced) -> str:
    """The change of the wall as one of GPU work and one of idle time, which add up to it."""
    wall_s = now.wall_s - before.wall_s
    work_s = traced.busy_s - earlier.busy_s
    idle_s = wall_s - work_s
    fewer = [f"{earlier.kernels:,.0f} → {traced.kernels:,.0f} kernels"] if traced.kernels != earlier.kernels else []
    waits = [f"{earlier.waits:.1f} → {traced.waits:.1f} waits"] if traced.waits != earlier.waits else []
    work, idle = _part("GPU work takes", work_s, fewer), _part("the GPU idles", idle_s, waits + fewer)
    if not differs(now.timing, before.timing):
        hidden = abs(work_s) > max(now.spread_s, before.spread_s)
        return f"no change beyond the spread of the runs{f', though {work}' if hidden else ''}"
    main_s, main, other_s, other = (
        (work_s, work, idle_s, _part("the GPU idles", idle_s, waits))
        if work_s / wall_s >= 0.5
        else (idle_s, idle, work_s, _part("GPU work takes", work_s, []))
    )
    if abs(other_s) < _TOLD_SHARE * abs(main_s):
        return main
    return f"{main}, {'and' if other_s * main_s > 0 else 'though'} {other}"


def _part(what: str, change_s: float, details: Sequence[str]) -> str:
    text = f"{what} {units.seconds(abs(change_s))} {'less' if change_s < 0 else 'more'}"
    return f"{text} ({', '.join(details)})" if details else text


def _facts(row: LadderRow, protocol: Protocol) -> Facts:
    driver = f", driver {row.driver}" if row.driver else ""
    watts = f", power limit {row.power_limit_w:.0f} W" if row.power_limit_w else ""
    clocks = f", {row.clocks_mhz:.0f} MHz after the first rung" if row.clocks_mhz else ""
    return [
        ("subject", f"DDPM training step, batch {row.batch}, bf16 autocast, {row.data}"),
        ("device", f"{row.device}{driver}{watts}{clocks}"),
        ("versions", f"torch {row.torch}, triton {row.triton}"),
        (
            "protocol",
            f"{protocol.warmup} steps of warm-up, {protocol.timed} timed in {protocol.runs} runs with the loader, then "
            f"{protocol.traced} traced, a process a rung",
        ),
    ]


def _sections(rows: Sequence[LadderRow], missing: Sequence[Missing]) -> list[Section]:
    sections = []
    if rows:
        note = f"{WRITEUP_GPU}: the write-up's own means of 50 steps"
        sections.append(Section("ladder", _COLUMNS, tuple(rows), note=note))
        sections.append(Section("each rung against the one before", facts=[(row.rung, row.why) for row in rows]))
    if missing:
        sections.append(Section("not measured", facts=[(each.rung.name, each.reason) for each in missing]))
    return sections


def _ms(value_s: float | None) -> str:
    return ABSENT if value_s is None else f"{units.milliseconds(value_s):.2f}"


def _percent(fraction: float | None, sign: str = "+") -> str:
    return ABSENT if fraction is None else f"{fraction * 100:{sign}.1f} %"


def _number(value: float | None, digits: int) -> str:
    return ABSENT if value is None else f"{value:,.{digits}f}"


_COLUMNS = (
    Column("rung", lambda row: row.rung, numeric=False),
    Column("what changes", lambda row: row.change, numeric=False, cut="end", rank=1),
    Column("wall ms", lambda row: _ms(row.wall_s)),
    Column("GPU busy ms", lambda row: _ms(row.gpu_busy_s)),
    Column("busy", lambda row: _percent(row.gpu_busy_share, "")),
    Column("kernels", lambda row: _number(row.kernels, 0), rank=2),
    Column("waits", lambda row: _number(row.waits, 1), rank=2),
    Column("memory", lambda row: ABSENT if row.memory_bytes is None else units.nbytes(row.memory_bytes), rank=3),
    Column("change", lambda row: _percent(row.against_before)),
    Column(f"{WRITEUP_GPU} ms", lambda row: _ms(row.writeup_s), rank=3),
    Column("change there", lambda row: _percent(row.writeup_against_before), rank=3),
)


def _csv(rows: Sequence[LadderRow]) -> str:
    """The fields of LadderRow, an empty cell where nothing is known."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([each.name for each in fields(LadderRow)])
    writer.writerows(asdict(row).values() for row in rows)
    return out.getvalue().rstrip("\n")
