"""Report and Row: one joined table of what ran, what it costs and what bounds it; groupings, totals, and the schema."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ridgeline import units
from ridgeline.errors import UsageError

SCHEMA_VERSION = 1
ABSENT = "-"  # what tables print for a number that does not apply
NO_MODULE = "(no module)"
LIMITERS = ("compute", "memory")


@dataclass(frozen=True)
class Row:
    """One call (or, in `by_layer`/`by_kind` tables, the sum of several). SI units throughout.

    `seconds` is the roofline time: the larger of compute and memory time on the report's GPU, summed over `calls`.
    Raises ValueError on a number that is not finite: what cannot be printed is not kept.
    """

    layer: str  # dotted module path, "" outside any module
    phase: str  # "forward", "backward" or "optimizer"
    kind: str  # "conv3x3", "conv1x1", "depthwise", "matmul", "attention", "norm", "pool", "pointwise", "concat", …
    op: str  # "aten.convolution"
    shape: str  # the problem, in words: "1x64x80x80 * 64x64x3x3 s1 p1"
    calls: int
    flops: float
    read_bytes: float
    write_bytes: float
    pipe: str  # the unit that does the FLOPs: "tensor_bf16", "cuda_fp32", …
    compute_s: float
    memory_s: float
    seconds: float
    limiter: str  # "compute" or "memory"
    tiles: int = 0  # output tiles of a matrix-shaped op, 0 where the notion does not apply
    waves: float = 0.0  # tiles over streaming multiprocessors
    wave_efficiency: float = 0.0  # waves / ceil(waves)

    def __post_init__(self) -> None:
        if self.limiter not in LIMITERS:
            raise ValueError(f"Row: limiter must be one of {', '.join(LIMITERS)}, got {self.limiter!r}")
        for name in _ROW_NUMBERS:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"Row: {name} of {self.op} must be finite and not negative, got {value}")

    @property
    def bytes(self) -> float:
        return self.read_bytes + self.write_bytes

    @property
    def intensity(self) -> float:
        """FLOP per byte of compulsory traffic; 0 for an op that moves nothing."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def attainable(self) -> float:
        """FLOP/s at the roofline time; 0 for an op that takes none."""
        return self.flops / self.seconds if self.seconds else 0.0


_ROW_NUMBERS = tuple(field.name for field in fields(Row) if field.type in ("int", "float"))


@dataclass(frozen=True)
class UnknownOp:
    """An operator without a cost formula: counted, never guessed."""

    op: str
    calls: int


@dataclass(frozen=True)
class Report:
    """The static report of one module or training step on one GPU.

    `rows` is one row a call, as PyTorch would run it (one kernel an op). `fused_rows` is one row a fused kernel:
    every pointwise op, copy and concat folded into the kernel that produces or consumes its data.
    """

    subject: str
    gpu: str
    dtype: str
    batch: int
    train: bool
    parameters: int
    rows: tuple[Row, ...]
    fused_rows: tuple[Row, ...]
    unknown: tuple[UnknownOp, ...]
    chain_length: int  # longest chain of fused kernels that wait for one another
    unfused_chain_length: int
    weight_bytes: float
    peaks: dict[str, float]  # FLOP/s by pipe, and "bandwidth" in B/s, of the GPU's data sheet
    gpu_source: str
    sm_count: int
    measured: dict[str, float] | None = None  # ceilings measured by `ridgeline doctor`, same keys as `peaks`

    def __post_init__(self) -> None:
        if "bandwidth" not in self.peaks:
            raise ValueError(f"Report: peaks of {self.gpu} must name the bandwidth, got {sorted(self.peaks)}")
        for name, value in [*self.peaks.items(), *(self.measured or {}).items()]:
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"Report: the {name} ceiling of {self.gpu} must be finite and positive, got {value}")

    @property
    def unfused_s(self) -> float:
        """Sum of roofline times, one kernel an op."""
        return sum(row.seconds for row in self.rows)

    @property
    def floor_s(self) -> float:
        """Sum of roofline times of the fused kernels: no schedule of these kernels runs faster."""
        return sum(row.seconds for row in self.fused_rows)

    @property
    def flops(self) -> float:
        return sum(row.flops for row in self.rows)


@dataclass(frozen=True)
class Summary:
    """The headline numbers of a report. Shares are fractions of the fused floor."""

    flops: float
    unfused_s: float
    floor_s: float
    unfused_bytes: float
    fused_bytes: float
    unfused_kernels: int
    fused_kernels: int
    unfused_chain_length: int
    chain_length: int
    compute_share: float
    memory_share: float
    wave_loss_s: float
    unknown_calls: int


def summary(report: Report) -> Summary:
    """Totals of both schedules and what bounds the fused one."""
    compute_share = limited_share(report.fused_rows, "compute")
    return Summary(
        flops=report.flops,
        unfused_s=report.unfused_s,
        floor_s=report.floor_s,
        unfused_bytes=sum(row.bytes for row in report.rows),
        fused_bytes=sum(row.bytes for row in report.fused_rows),
        unfused_kernels=sum(row.calls for row in report.rows),
        fused_kernels=sum(row.calls for row in report.fused_rows),
        unfused_chain_length=report.unfused_chain_length,
        chain_length=report.chain_length,
        compute_share=compute_share,
        memory_share=1.0 - compute_share if report.floor_s else 0.0,
        wave_loss_s=wave_loss_s(report.fused_rows),
        unknown_calls=sum(unknown.calls for unknown in report.unknown),
    )


def limited_share(rows: Iterable[Row], limiter: str) -> float:
    """Fraction of the rows' seconds bound by `limiter`; 0 when the rows take no time."""
    rows = tuple(rows)
    total_s = sum(row.seconds for row in rows)
    return sum(row.seconds for row in rows if row.limiter == limiter) / total_s if total_s else 0.0


def wave_loss_s(rows: Iterable[Row]) -> float:
    """Seconds added by part-filled last waves: idle multiprocessors stretch the compute time, not the memory time.

    Takes rows of single calls; a group has forgotten which of its calls were memory-bound.
    """
    return sum(
        max(row.compute_s / row.wave_efficiency, row.memory_s) - row.seconds for row in rows if row.wave_efficiency
    )


def by_layer(rows: Iterable[Row], *, depth: int | None = None) -> tuple[Row, ...]:
    """One row a module path in the order met; `depth` keeps only that many leading parts of the path."""
    groups = _groups(rows, lambda row: layer_prefix(row.layer, depth))
    return tuple(replace(_sum(group), layer=layer) for layer, group in groups.items())


def by_kind(rows: Iterable[Row]) -> tuple[Row, ...]:
    """One row a kind, most seconds first."""
    groups = _groups(rows, lambda row: row.kind)
    return top(map(_sum, groups.values()), len(groups))


def by_phase(rows: Iterable[Row]) -> tuple[Row, ...]:
    """One row a phase in the order met."""
    return tuple(map(_sum, _groups(rows, lambda row: row.phase).values()))


def top(rows: Iterable[Row], n: int) -> tuple[Row, ...]:
    """The `n` rows with the most seconds, most first; equal rows keep their order."""
    return tuple(sorted(rows, key=lambda row: -row.seconds)[:n])


@dataclass(frozen=True)
class Pair:
    """One group of both schedules; a side is None when fusion folded the group away or made it."""

    name: str
    unfused: Row | None
    fused: Row | None

    @property
    def row(self) -> Row:
        """The fused side where there is one."""
        row = self.fused or self.unfused
        assert row is not None
        return row


def kinds_compared(report: Report) -> tuple[Pair, ...]:
    """Unfused beside fused per kind, most unfused seconds first."""
    return _compared(by_kind(report.rows), by_kind(report.fused_rows), lambda row: row.kind)


def phases_compared(report: Report) -> tuple[Pair, ...]:
    """Unfused beside fused per phase."""
    return _compared(by_phase(report.rows), by_phase(report.fused_rows), lambda row: row.phase)


def layers_compared(report: Report) -> tuple[Pair, ...]:
    """Unfused beside fused per layer, at `block_depth`, in network order."""
    depth = block_depth(report.rows + report.fused_rows)
    unfused, fused = by_layer(report.rows, depth=depth), by_layer(report.fused_rows, depth=depth)
    return _compared(unfused, fused, lambda row: row.layer)


def layer_prefix(layer: str, depth: int | None) -> str:
    """`layer_prefix("model.2.cv1.conv", 2) == "model.2"`; None keeps the whole path."""
    return ".".join(layer.split(".")[:depth])


def block_depth(rows: Iterable[Row], *, at_least: int = 16) -> int:
    """The fewest path parts that tell `at_least` blocks apart, or the most there are: 2 for "model.0" … "model.23"."""
    layers = {row.layer for row in rows}
    deepest = max((layer.count(".") + 1 for layer in layers), default=1)
    for depth in range(1, deepest):
        if len({layer_prefix(layer, depth) for layer in layers}) >= at_least:
            return depth
    return deepest


def to_dict(report: Report) -> dict[str, Any]:
    """The report as plain JSON types, with `schema_version` and the derived `summary`."""
    return {"schema_version": SCHEMA_VERSION, "summary": asdict(summary(report)), **asdict(report)}


def from_dict(data: Mapping[str, Any]) -> Report:
    """The report `to_dict` wrote; `summary` is derived again. Raises UsageError on any other schema."""
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UsageError(f"report: schema_version must be {SCHEMA_VERSION}, got {version!r}; write the report anew")
    known = {key: value for key, value in data.items() if key not in ("schema_version", "summary")}
    try:
        return Report(
            **{
                **known,
                "rows": tuple(Row(**row) for row in known["rows"]),
                "fused_rows": tuple(Row(**row) for row in known["fused_rows"]),
                "unknown": tuple(UnknownOp(**unknown) for unknown in known["unknown"]),
            }
        )
    except KeyError as error:
        raise UsageError(f"report: field {error} is missing; write the report anew") from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"report: {error}; write the report anew") from error


def count_text(value: float) -> str:
    """A bare number with its decimal prefix, as tables print it: `count_text(2_408_932) == "2.41 M"`."""
    return units.si(value, "").strip() if value else ABSENT


def seconds_text(value_s: float) -> str:
    """A duration with its unit, or ABSENT for none."""
    return units.seconds(value_s) if value_s else ABSENT


def bytes_text(row: Row | None) -> str:
    """A row's traffic with its unit, or ABSENT where there is no row."""
    return units.nbytes(row.bytes) if row else ABSENT


def intensity_text(row: Row) -> str:
    """FLOP per byte without the unit, or ABSENT for a row without arithmetic."""
    return count_text(row.intensity) if row.flops else ABSENT


def share_text(part: float, whole: float) -> str:
    """`part / whole` in percent, or ABSENT where there is no whole."""
    return units.percent(part / whole) if whole else ABSENT


def one_line(text: str) -> str:
    """`text` with control characters replaced, so that a module name cannot steer a terminal or break a page."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _compared(unfused: Iterable[Row], fused: Iterable[Row], key: Callable[[Row], str]) -> tuple[Pair, ...]:
    before = {key(row): row for row in unfused}
    after = {key(row): row for row in fused}
    return tuple(Pair(name, before.get(name), after.get(name)) for name in dict.fromkeys([*before, *after]))


def _groups(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _sum(rows: Sequence[Row]) -> Row:
    """Numbers add up; of the texts the one that holds more seconds stays, or "" where a mix would mislead."""
    stretched_s = sum(row.compute_s / row.wave_efficiency for row in rows if row.wave_efficiency)
    tiled_s = sum(row.compute_s for row in rows if row.wave_efficiency)
    return Row(
        layer=_common(rows, "layer"),
        phase="+".join(dict.fromkeys(row.phase for row in rows)),
        kind=_dominant(rows, "kind"),
        op=_common(rows, "op"),
        shape=_common(rows, "shape"),
        calls=sum(row.calls for row in rows),
        flops=sum(row.flops for row in rows),
        read_bytes=sum(row.read_bytes for row in rows),
        write_bytes=sum(row.write_bytes for row in rows),
        pipe=_dominant(rows, "pipe"),
        compute_s=sum(row.compute_s for row in rows),
        memory_s=sum(row.memory_s for row in rows),
        seconds=sum(row.seconds for row in rows),
        limiter=_dominant(rows, "limiter"),
        tiles=sum(row.tiles for row in rows),
        waves=sum(row.waves for row in rows),
        wave_efficiency=tiled_s / stretched_s if stretched_s else 0.0,
    )


def _common(rows: Sequence[Row], name: str) -> str:
    values = {getattr(row, name) for row in rows}
    return values.pop() if len(values) == 1 else ""


def _dominant(rows: Sequence[Row], name: str) -> str:
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[getattr(row, name)] = seconds.get(getattr(row, name), 0.0) + row.seconds
    return max(seconds, key=lambda value: seconds[value])
