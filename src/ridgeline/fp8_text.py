"""An Fp8Plan as a table for a terminal or Markdown, as CSV, as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ridgeline import units
from ridgeline.fp8_plan import PASSES, Fp8Layer, Fp8Plan
from ridgeline.text_tables import Column, Facts, Section, markdown, terminal

FORMATS = ("table", "json", "csv", "md")
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class _Line:
    """Layers of one shape and choice: `first` stands for `count`."""

    first: Fp8Layer
    count: int

    @property
    def saved_s(self) -> float:
        return self.count * (self.first.before_s - self.first.after_s)


def render(
    plan: Fp8Plan,
    fmt: str = "table",
    *,
    max_rows: int | None = None,
    width: int | None = None,
    color: bool | None = None,
) -> str:
    """The plan in one of FORMATS, without a last newline. The tables put equal layers on one line, best first."""
    if fmt == "json":
        layers = [asdict(layer) for layer in plan.layers]
        return json.dumps({"schema_version": SCHEMA_VERSION, **_head(plan), "layers": layers})
    if fmt == "csv":
        return _csv(plan)
    lines = _lines(plan)
    shown = lines[:max_rows]
    more = f"… {len(lines) - len(shown)} more rows; --rows {len(lines)} shows all. " if len(shown) < len(lines) else ""
    sections = [Section("Layers, the largest saving first", _COLUMNS, tuple(shown), note=more + _NOTE)]
    if fmt == "md":
        return markdown(_facts(plan), sections)
    return terminal(_facts(plan), sections, bold="with FP8", width=width, color=color)


def _lines(plan: Fp8Plan) -> list[_Line]:
    groups: dict[tuple[str, tuple[str, ...], str], list[Fp8Layer]] = {}
    for layer in plan.layers:
        groups.setdefault((layer.shape, layer.chosen, layer.reason), []).append(layer)
    return sorted((_Line(same[0], len(same)) for same in groups.values()), key=lambda line: -line.saved_s)


def _head(plan: Fp8Plan) -> dict[str, str | float]:
    return {
        "gpu": plan.gpu,
        "ceilings": plan.source,
        "quantise": plan.quantise,
        "before_s": plan.before_s,
        "after_s": plan.after_s,
    }


def _facts(plan: Fp8Plan) -> Facts:
    chosen = sum(bool(layer.chosen) for layer in plan.layers)
    saved = plan.before_s - plan.after_s
    return (
        ("GPU", f"{plan.gpu} ({plan.source})"),
        ("quantising", _QUANTISE[plan.quantise]),
        ("products", f"{len(plan.layers)} convolutions and linear layers, {chosen} gain from FP8"),
        ("16-bit", f"{units.seconds(plan.before_s)} at the roofline, all passes"),
        (
            "with FP8",
            f"{units.seconds(plan.after_s)}, {units.seconds(saved)} less ({units.percent(saved / plan.before_s)})",
        ),
    )


_QUANTISE = {
    "static": "a pass of its own with a known scale (delayed scaling): 3 bytes an element",
    "dynamic": "a pass for the largest magnitude, then one to quantise: 5 bytes an element",
    "fused": "the kernel before writes one byte in place of two",
}
_NOTE = (
    "Roofline times: a model, not a measurement. A layer's x and dy are quantised once for the passes that share them."
)


def _passes(line: _Line) -> str:
    chosen = line.first.chosen
    return "all" if set(chosen) == set(line.first.bf16_s) else ", ".join(sorted(chosen, key=PASSES.index))


_COLUMNS = (
    Column("layer", lambda line: line.first.layer, numeric=False, cut="start"),
    Column("alike", lambda line: str(line.count)),
    Column("shape", lambda line: line.first.shape, numeric=False, rank=1, cut="end"),
    Column("16-bit", lambda line: units.seconds(line.first.before_s)),
    Column("with FP8", lambda line: units.seconds(line.first.after_s)),
    Column("saved", lambda line: units.seconds(line.saved_s)),
    Column("in FP8", lambda line: _passes(line) or line.first.reason, numeric=False),
)


def _csv(plan: Fp8Plan) -> str:
    out = io.StringIO()
    names = [f"{name}_{kind}_s" for kind in ("bf16", "fp8") for name in PASSES]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["layer", "shape", *names, "quantise_x_s", "quantise_dy_s", "chosen", "before_s", "after_s", "reason"]
    )
    for layer in plan.layers:
        times: Sequence[float | str] = [
            by_pass.get(name, "") for by_pass in (layer.bf16_s, layer.fp8_s) for name in PASSES
        ]
        quantise = [layer.quantise_s.get(name, "") for name in ("x", "dy")]
        chosen = " ".join(layer.chosen)
        writer.writerow(
            [layer.layer, layer.shape, *times, *quantise, chosen, layer.before_s, layer.after_s, layer.reason]
        )
    return out.getvalue().rstrip("\n")
