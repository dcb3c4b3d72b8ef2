"""Report: groupings against sums by hand, schema round trip, and the four text formats. Also the synthetic reports
the HTML tests render: a YOLO26n-shaped detector and a small diffusion training step, deterministic."""

import csv
import io
import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from ridgeline import report as rp
from ridgeline import units
from ridgeline.errors import UsageError
from ridgeline.report import Report, Row, UnknownOp
from ridgeline.report_text import FORMATS, facts, render

SM_COUNT = 132
PEAKS = {"tensor_fp16": 989.4e12, "tensor_bf16": 989.4e12, "cuda_fp32": 66.9e12, "bandwidth": 4.8e12}
MEASURED = {"tensor_fp16": 780e12, "tensor_bf16": 785e12, "cuda_fp32": 58e12, "bandwidth": 4.3e12}


def make_row(layer, kind, op, shape, flops, read, write, *, pipe="cuda_fp32", phase="forward", tiles=0, calls=1):
    compute_s, memory_s = flops / PEAKS[pipe], (read + write) / PEAKS["bandwidth"]
    waves = tiles / SM_COUNT
    return Row(
        layer=layer,
        phase=phase,
        kind=kind,
        op=op,
        shape=shape,
        calls=calls,
        flops=flops,
        read_bytes=read,
        write_bytes=write,
        pipe=pipe,
        compute_s=compute_s,
        memory_s=memory_s,
        seconds=max(compute_s, memory_s),
        limiter="compute" if compute_s > memory_s else "memory",
        tiles=tiles,
        waves=waves,
        wave_efficiency=waves / math.ceil(waves) if tiles else 0.0,
    )


class _Network:
    """Collects the rows of a convnet written down layer by layer; 2 bytes an element, NHWC."""

    def __init__(self, batch, pipe):
        self.batch, self.pipe, self.rows, self.fused = batch, pipe, [], []

    def conv(self, layer, c_in, c_out, kernel, size, *, stride=1, groups=1, norm=True, act=True):
        """Conv, normalisation and SiLU: three kernels apart, one fused. `size` is the output's."""
        pixels = self.batch * size * size
        x_bytes, y_bytes = 2 * pixels * stride**2 * c_in, 2 * pixels * c_out
        w_bytes = 2 * c_out * c_in // groups * kernel**2
        kind = "depthwise" if groups == c_in > 1 else f"conv{kernel}x{kernel}"
        shape = f"{self.batch}x{c_in}x{size * stride}x{size * stride} * {c_out}x{c_in // groups}x{kernel}x{kernel}"
        shape += f" s{stride}"
        tiles = 0 if kind == "depthwise" else math.ceil(pixels / 128) * math.ceil(c_out / 64)
        pipe = "cuda_fp32" if kind == "depthwise" else self.pipe
        work = 2 * pixels * c_out * c_in // groups * kernel**2
        args = (f"{layer}.conv", kind, "aten.convolution", shape, work, x_bytes + w_bytes, y_bytes)
        self.rows.append(make_row(*args, pipe=pipe, tiles=tiles))
        self.fused.append(make_row(*args, pipe=pipe, tiles=tiles))
        if norm:
            self.pointwise(f"{layer}.bn", "norm", "aten.batch_norm", c_out, size, flops_per_element=2)
        if act:
            self.pointwise(f"{layer}.act", "pointwise", "aten.silu", c_out, size, flops_per_element=4)

    def pointwise(self, layer, kind, op, channels, size, *, reads=1, flops_per_element=1, fused=False):
        elements = self.batch * channels * size * size
        shape = f"{self.batch}x{channels}x{size}x{size}"
        row = make_row(layer, kind, op, shape, flops_per_element * elements, 2 * reads * elements, 2 * elements)
        self.rows.append(row)
        if fused:
            self.fused.append(row)

    def attention(self, layer, channels, tokens):
        heads = max(channels // 64, 1)
        shape = f"{self.batch}x{heads}x{tokens}x64"
        scores = self.batch * heads * tokens**2
        work, qkv, out = 2 * scores * 96, 4 * self.batch * tokens * channels, 2 * self.batch * tokens * channels
        for op, share in (("aten.matmul", 3), ("aten.matmul", 2)):
            args = (layer, "matmul", op, shape, work // share, qkv, 2 * scores)
            self.rows.append(make_row(*args, pipe=self.pipe, tiles=math.ceil(tokens / 64) * heads))
        self.rows.append(make_row(layer, "softmax", "aten.softmax", shape, 5 * scores, 2 * scores, 2 * scores))
        tiles = math.ceil(tokens / 64) * heads
        self.fused.append(make_row(layer, "attention", "attention", shape, work, qkv, out, pipe=self.pipe, tiles=tiles))


def _c3k2(net, layer, c_in, c_out, size, inner):
    net.conv(f"{layer}.cv1", c_in, 2 * inner, 1, size)
    net.conv(f"{layer}.m.0.cv1", inner, inner // 2, 3, size)
    net.conv(f"{layer}.m.0.cv2", inner // 2, inner, 3, size)
    net.pointwise(f"{layer}.m.0", "pointwise", "aten.add", inner, size, reads=2)
    net.pointwise(layer, "concat", "aten.cat", 3 * inner, size, flops_per_element=0)
    net.conv(f"{layer}.cv2", 3 * inner, c_out, 1, size)


def detector_report(*, repeats=1, hostile=False, measured=True):
    """A YOLO26n-shaped detector at 640 pixels, batch 1; `repeats` copies make a large model out of it."""
    net = _Network(batch=1, pipe="tensor_fp16")
    for copy in range(repeats):
        root = "model" if repeats == 1 else f"ensemble.{copy}.model"
        for index, (c_in, c_out, size) in enumerate(((3, 16, 320), (16, 32, 160))):
            net.conv(f"{root}.{index}", c_in, c_out, 3, size, stride=2)
        _c3k2(net, f"{root}.2", 32, 64, 160, 16)
        for index, c_in, c_out, size in ((3, 64, 64, 80), (5, 128, 128, 40), (7, 128, 256, 20)):
            net.conv(f"{root}.{index}", c_in, c_out, 3, size, stride=2)
            _c3k2(net, f"{root}.{index + 1}", c_out, 2 * c_out if index == 3 else c_out, size, c_out // 2)
        net.conv(f"{root}.9.cv1", 256, 128, 1, 20, act=False)
        for _ in range(3):
            net.pointwise(f"{root}.9.m", "pool", "aten.max_pool2d", 128, 20, flops_per_element=25, fused=True)
        net.conv(f"{root}.9.cv2", 512, 256, 1, 20)
        net.conv(f"{root}.10.m.0.attn.qkv", 128, 256, 1, 20, act=False)
        net.attention(f"{root}.10.m.0.attn", 128, 400)
        net.conv(f"{root}.10.m.0.attn.pe", 128, 128, 3, 20, groups=128, act=False)
        net.conv(f"{root}.10.m.0.ffn.0", 128, 256, 1, 20)
        for index, c_in, c_out, size in ((13, 384, 128, 40), (16, 256, 64, 80), (19, 192, 128, 40), (22, 384, 256, 20)):
            net.pointwise(f"{root}.{index - 1}", "concat", "aten.cat", c_in, size, flops_per_element=0)
            _c3k2(net, f"{root}.{index}", c_in, c_out, size, c_out // 2)
        for level, (channels, size) in enumerate(((64, 80), (128, 40), (256, 20))):
            net.conv(f"{root}.23.cv2.{level}.0", channels, 16, 3, size)
            net.conv(f"{root}.23.cv2.{level}.2", 16, 4, 1, size, norm=False, act=False)
            net.conv(f"{root}.23.cv3.{level}.0.0", channels, channels, 3, size, groups=channels)
            net.conv(f"{root}.23.cv3.{level}.0.1", channels, 80, 1, size)
            net.conv(f"{root}.23.cv3.{level}.2", 80, 80, 1, size, norm=False, act=False)
        gather = make_row(f"{root}.23", "copy", "aten.gather", "1x8400x4", 0, 4 * 8400, 4 * 300)
        net.rows.append(gather)
        net.fused.append(gather)
    if hostile:
        shape = '"><img src=x onerror=y>&\x1b[31m'
        net.fused[0] = replace(net.fused[0], layer="<script>alert('x')</script>", shape=shape)
        net.rows[0] = replace(net.rows[0], layer="[red]|`a`|[/red]", op="<b>aten</b>")
    chain = len([row for row in net.fused if row.kind != "depthwise"])
    return Report(
        subject="<script>yolo</script>" if hostile else "yolo26n",
        gpu="NVIDIA H200",
        dtype="fp16",
        batch=1,
        train=False,
        parameters=2_408_932 * repeats,
        rows=tuple(net.rows),
        fused_rows=tuple(net.fused),
        unknown=(UnknownOp("aten.<img>" if hostile else "aten.topk", 2),),
        chain_length=chain - 8,
        unfused_chain_length=3 * chain - 24,
        weight_bytes=2 * 2_408_932 * repeats,
        peaks=PEAKS,
        gpu_source="NVIDIA H200 data sheet; sparse figures halved",
        sm_count=SM_COUNT,
        measured=MEASURED if measured else None,
    )


def step_report():
    """A small diffusion training step, batch 128, with backward and optimizer rows."""
    net = _Network(batch=128, pipe="tensor_bf16")
    for index, (c_in, c_out, size) in enumerate(((64, 128, 32), (128, 256, 16), (256, 256, 8), (256, 512, 8))):
        for part in ("block1", "block2"):
            net.conv(f"down.{index}.{part}", c_in if part == "block1" else c_out, c_out, 3, size)
    forward, fused = list(net.rows), list(net.fused)
    for rows, source in ((net.rows, forward), (net.fused, fused)):
        for row in reversed(source):
            for gradient in ("dgrad", "wgrad") if row.kind == "conv3x3" else ("backward",):
                rows.append(replace(row, phase="backward", op=f"{row.op}_{gradient}"))
    optimizer = make_row("", "optimizer", "aten._fused_adamw_", "32.05 M parameters", 0, 16 * 32.05e6, 12 * 32.05e6)
    net.rows.append(replace(optimizer, phase="optimizer"))
    net.fused.append(replace(optimizer, phase="optimizer"))
    return Report(
        subject="ddpm-cifar10",
        gpu="NVIDIA H200",
        dtype="bf16",
        batch=128,
        train=True,
        parameters=32_050_000,
        rows=tuple(net.rows),
        fused_rows=tuple(net.fused),
        unknown=(),
        chain_length=len(net.fused),
        unfused_chain_length=len(net.rows),
        weight_bytes=4 * 32_050_000,
        peaks=PEAKS,
        gpu_source="NVIDIA H200 data sheet; sparse figures halved",
        sm_count=SM_COUNT,
    )


A = make_row("net.0.conv", "conv3x3", "aten.convolution", "s", 1e9, 1e6, 2e6, pipe="tensor_fp16", tiles=200)
B = make_row("net.0.act", "pointwise", "aten.silu", "t", 1e6, 8e6, 8e6)
C = make_row("net.1.conv", "conv3x3", "aten.convolution", "u", 4e9, 1e6, 1e6, pipe="tensor_fp16", tiles=132, calls=3)


def test_by_layer_sums_and_keeps_network_order():
    first, second = rp.by_layer([A, B, C], depth=2)
    assert (first.layer, second.layer) == ("net.0", "net.1")
    assert first.flops == 1e9 + 1e6
    assert first.bytes == 3e6 + 16e6
    assert first.seconds == A.seconds + B.seconds
    assert (first.calls, second.calls) == (2, 3)
    assert first.op == first.shape == "", "a mix has no single op or shape"
    assert replace(second, layer=C.layer) == C, "a group of one is its row under a shorter name"


def test_the_limiter_of_a_group_is_the_one_holding_more_seconds():
    assert (A.limiter, B.limiter) == ("compute", "memory")
    assert B.seconds > A.seconds
    assert rp.by_layer([A, B], depth=2)[0].limiter == "memory"
    assert rp.by_layer([A, A, A, A, B], depth=2)[0].limiter == "compute"


def test_by_kind_is_sorted_by_seconds_and_complete():
    rows = detector_report().rows
    groups = rp.by_kind(rows)
    assert all(first.seconds >= second.seconds for first, second in pairwise(groups))
    assert sum(row.seconds for row in groups) == pytest.approx(sum(row.seconds for row in rows))
    assert {row.kind for row in groups} == {row.kind for row in rows}


def test_top_takes_the_longest_and_keeps_ties_in_order():
    tie = replace(B, layer="second")
    assert C.seconds > B.seconds > A.seconds
    assert rp.top([A, B, C, tie], 3) == (C, B, tie)
    assert rp.top([A], 5) == (A,)


def test_wave_loss_counts_only_compute_that_outgrows_memory():
    half = replace(A, wave_efficiency=0.5)
    assert rp.wave_loss_s([half]) == pytest.approx(2 * A.compute_s - A.seconds)
    hidden = replace(half, memory_s=3 * A.compute_s, seconds=3 * A.compute_s, limiter="memory")
    assert rp.wave_loss_s([hidden]) == 0.0
    assert rp.wave_loss_s([B]) == 0.0


def test_group_wave_efficiency_weighs_by_compute_time():
    good, bad = replace(A, wave_efficiency=1.0), replace(A, wave_efficiency=0.5)
    assert rp.by_kind([good, bad])[0].wave_efficiency == pytest.approx(2 / 3)


def test_block_depth_finds_the_numbered_blocks():
    assert rp.block_depth(detector_report().rows) == 2
    assert rp.block_depth(detector_report(repeats=2).rows) == 4
    assert rp.block_depth([B]) == 3, "too few blocks: the whole path"
    assert rp.block_depth([]) == 1


def test_summary_adds_up():
    report = detector_report()
    total = rp.summary(report)
    assert total.compute_share + total.memory_share == pytest.approx(1.0)
    assert 0 < total.floor_s < total.unfused_s
    assert total.unfused_kernels == len(report.rows) > total.fused_kernels == len(report.fused_rows)
    assert total.unknown_calls == 2
    empty = rp.summary(replace(report, rows=(), fused_rows=()))
    assert (empty.compute_share, empty.memory_share, empty.floor_s) == (0.0, 0.0, 0)


@pytest.mark.parametrize("field, value", [("seconds", math.nan), ("flops", math.inf), ("memory_s", -1.0)])
def test_rows_refuse_numbers_that_cannot_be_printed(field, value):
    with pytest.raises(ValueError, match=f"{field} of aten.convolution"):
        replace(A, **{field: value})


def test_reports_refuse_ceilings_that_cannot_be_divided_by():
    with pytest.raises(ValueError, match="must name the bandwidth"):
        replace(detector_report(), peaks={"tensor_fp16": 1.0})
    with pytest.raises(ValueError, match="tensor_fp16 ceiling"):
        replace(detector_report(), measured={"tensor_fp16": 0.0})
    with pytest.raises(ValueError, match="limiter"):
        replace(A, limiter="launch")


@pytest.mark.parametrize("report", [detector_report(), detector_report(measured=False), step_report()])
def test_json_round_trip_is_exact(report):
    data = json.loads(render(report, "json"))
    assert data["schema_version"] == rp.SCHEMA_VERSION
    assert data["summary"]["floor_s"] == report.floor_s
    assert rp.from_dict(data) == report


@pytest.mark.parametrize(
    "change, message",
    [
        ({"schema_version": 99}, "schema_version must be 1, got 99"),
        ({"schema_version": None}, "got None"),
        ({"surprise": 1}, "surprise"),
        ({"rows": [{"layer": "x"}]}, "missing"),
        ({"rows": 3}, "not iterable"),
    ],
)
def test_foreign_json_is_refused_in_one_sentence(change, message):
    with pytest.raises(UsageError, match=message) as refusal:
        rp.from_dict({**rp.to_dict(detector_report()), **change})
    assert "\n" not in str(refusal.value)


def test_a_missing_field_is_named():
    data = rp.to_dict(detector_report())
    del data["fused_rows"]
    with pytest.raises(UsageError, match="fused_rows"):
        rp.from_dict(data)


def test_csv_is_one_line_a_row_with_plain_si_numbers():
    report = detector_report()
    lines = list(csv.DictReader(io.StringIO(render(report, "csv"))))
    assert len(lines) == len(report.rows) + len(report.fused_rows)
    assert [line["schedule"] for line in lines].count("fused") == len(report.fused_rows)
    first = lines[0]
    assert int(first["flops"]) == report.rows[0].flops
    assert float(first["seconds"]) == report.rows[0].seconds
    assert float(first["intensity_flop_per_byte"]) == report.rows[0].intensity
    assert sum(float(line["seconds"]) for line in lines if line["schedule"] == "fused") == report.floor_s


def test_the_table_names_every_headline_number():
    report = detector_report()
    text = render(report, "table", width=160, color=False)
    for label, value in facts(report):
        assert label in text
        assert value.split(",")[0] in text
    assert "aten.topk (2 calls)" in text
    assert f"… {len(report.fused_rows) - 20} more rows; --format csv shows all" in text
    assert "\x1b" not in text
    assert "unknown ops        none" in render(step_report(), "table", width=160, color=False)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
@pytest.mark.parametrize("report", [detector_report(), step_report()], ids=["inference", "training"])
def test_the_table_fits_the_terminal_and_cuts_no_number(width, report):
    text = render(report, "table", width=width, color=False)
    assert max(map(len, text.splitlines())) <= width
    for row in rp.top(report.fused_rows, 5):
        assert units.seconds(row.seconds) in text
        assert (row.layer or "(no module)")[-20:] in text


def test_color_only_when_asked_or_on_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in render(detector_report(), "table", width=120, color=True)
    assert "\x1b" not in render(detector_report(), "table"), "captured stdout is not a terminal"


def test_no_color_is_respected_on_a_terminal(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not any(code in render(detector_report(), "table") for code in ("\x1b[35m", "\x1b[36m"))


def test_training_steps_show_their_phases():
    text = render(step_report(), "table", width=160, color=False)
    assert "Per phase" in text
    assert all(phase in text for phase in ("forward", "backward", "optimizer"))
    assert "Per phase" not in render(detector_report(), "table", width=160, color=False)


def test_names_cannot_steer_the_terminal_or_the_markdown():
    report = detector_report(hostile=True)
    table = render(report, "table", width=200, color=False, max_rows=999)
    assert "\x1b" not in table
    assert "<script>alert('x')</script>" in table, "a terminal shows the name as it is"
    markdown = render(report, "md", max_rows=999)
    assert "<script>" not in markdown.replace("\\<script", "")
    rows = [line for line in markdown.splitlines() if line.startswith("| ") and "conv3x3" in line]
    assert len({line.replace("\\|", "").count("|") for line in rows}) <= 2, "one column count a table"


def test_markdown_tables_are_rectangular():
    for block in render(detector_report(), "md").split("\n\n"):
        widths = {line.count("|") for line in block.splitlines() if line.startswith("|")}
        assert len(widths) <= 1


@pytest.mark.parametrize("output_format", FORMATS)
def test_an_empty_report_renders_without_a_division_by_zero(output_format):
    empty = replace(step_report(), rows=(), fused_rows=(), parameters=0, weight_bytes=0)
    text = render(empty, output_format)
    assert not any(word in text for word in ("nan", "inf ", "Infinity", "NaN"))
    assert not text.endswith("\n"), "print adds the last newline"


def test_render_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="table, json, csv, md, got 'xml'"):
        render(step_report(), "xml")
    with pytest.raises(ValueError, match="max_rows must not be negative, got -1"):
        render(step_report(), "table", max_rows=-1)
