"""`ridgeline bench ddpm`: the rungs are built as they say, timed apart, counted and explained from their numbers."""

import argparse
import csv
import io
import json
import os
import pickle
import re
import time
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ridgeline import bench, bench_table, cli_bench, own_process
from ridgeline.bench import Machine, Measured, Missing, Protocol, Traced
from ridgeline.bench_table import LadderRow, append_rows, explain, ladder_row, ladder_rows, render
from ridgeline.cli import main
from ridgeline.errors import EnvironmentUnusable, NotEngaged, UsageError
from ridgeline.own_process import Apart, OverBudget, call_apart
from ridgeline.specs import find_spec
from ridgeline.timing import Timing
from ridgeline.workloads import ddpm_ladder
from ridgeline.workloads.ddpm_ladder import BY_NAME, RUNGS, Conditions, build, chosen, images_of

ON_CPU = Conditions(batch=2, device="cpu", preset="tiny")
SHORT = Protocol(warmup=1, steps_a_run=1)
PUBLISHED_MS = (151.48, 142.50, 140.87, 137.45, 135.93, 133.60, 110.82, 103.28)


@pytest.fixture(autouse=True)
def restored_settings():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def few_images(monkeypatch):
    monkeypatch.setattr(ddpm_ladder, "RANDOM_IMAGES", 16)


def measured(
    rung: str, wall_ms: float, busy_ms: float, *, kernels: float = 1000, waits: float = 0, spread: float = 0.001
) -> Measured:
    """A rung whose step takes so long; runs are of ten steps."""
    run_s = wall_ms / 1e3 * 10
    timing = Timing(run_s, run_s * (1 - spread / 2), run_s * (1 + spread / 2), run_s, 5, "host", "warm", 1980)
    machine = Machine("NVIDIA H200", "570.1", 700.0, "2.11", "3.6")
    traced = Traced(busy_ms / 1e3, kernels, waits)
    return Measured(BY_NAME[rung], Conditions(), Protocol(), machine, timing, traced, memory_bytes=4_210_000_000)


LADDER = (
    measured("writeup-0", 58.6, 32.2, kernels=2900, waits=2),
    measured("writeup-2", 54.0, 32.0, kernels=2900),
    measured("writeup-5", 21.95, 21.6, kernels=1461),
)


# --- the rungs -------------------------------------------------------------------------------------------------------


def test_the_writeups_figures_stand_beside_its_rungs():
    given = [rung.writeup_s for rung in RUNGS if rung.writeup_s is not None]
    assert given == pytest.approx([ms / 1e3 for ms in PUBLISHED_MS])
    assert [rung.name for rung in RUNGS[:8]] == [f"writeup-{i}" for i in range(8)]
    assert len(BY_NAME) == len(RUNGS)


def test_neighbours_differ():
    told = {"name", "change", "writeup_s"}
    for before, after in pairwise(RUNGS):
        changed = {name for name, value in asdict(after).items() if value != asdict(before)[name]} - told
        assert changed, after.name


@pytest.mark.parametrize("name", ["writeup-0", "writeup-3"])
def test_a_step_trains_as_its_rung_says(name, few_images, monkeypatch):
    seen = {}

    def make(rung, loader, model, *rest):
        seen.update(model=model, optimizer=rest[1], ema=rest[2])
        return plain(rung, loader, model, *rest)

    plain = ddpm_ladder._plain_step
    monkeypatch.setattr(ddpm_ladder, "_plain_step", make)
    built = build(BY_NAME[name], ON_CPU)
    weight = seen["model"].conv_in.weight
    is_later = name == "writeup-3"
    assert weight.is_contiguous(memory_format=torch.channels_last) == is_later
    assert bool(seen["optimizer"].defaults["fused"]) == is_later
    before = weight.detach().clone()
    built.step()
    assert not torch.equal(weight, before)
    assert seen["ema"].updates.item() == 1
    assert weight.grad is None


def test_a_loss_is_read_only_where_the_rung_says(few_images, monkeypatch):
    reads = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append(self.shape) or item(self))
    steps = {name: build(BY_NAME[name], ON_CPU).step for name in ("writeup-1", "writeup-2")}
    counts = {}
    for name, step in steps.items():
        reads.clear()
        step()
        counts[name] = len(reads)
    # the optimizer on a CPU reads its own step counts; the loss is one more
    assert counts["writeup-1"] == counts["writeup-2"] + 1


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if rung.graph != "none"], ids=lambda rung: rung.name)
def test_cuda_graphs_are_refused_elsewhere(rung):
    with pytest.raises(EnvironmentUnusable, match=f"rung {rung.name} is made of CUDA graphs, and the device is cpu"):
        build(rung, ON_CPU)


@pytest.mark.parametrize(
    ("found", "refused"), [({"expand_upsample": 3, "fuse_group_norm_silu": 0}, True), (None, False)]
)
def test_a_rewrite_that_changes_nothing_is_no_rung(found, refused, few_images, monkeypatch):
    rung = BY_NAME["fused-norms"]
    recipes = []

    def compiled(*_args, recipe, **_kwargs):
        recipes.append(recipe)
        return SimpleNamespace(report=SimpleNamespace(rewrites=found or dict.fromkeys(rung.rewrites, 5), findings=()))

    monkeypatch.setattr(ddpm_ladder, "compile_step", compiled)
    made = partial(ddpm_ladder._captured, rung, None, None, None, None, None)
    if refused:
        with pytest.raises(NotEngaged, match="fused-norms: the rewrite fuse_group_norm_silu found nothing to change"):
            made()
    else:
        assert made().report.rewrites
    (recipe,) = recipes
    assert (recipe.require, recipe.optimizer_kernel, recipe.rewrites) == (True, "always", rung.rewrites)


def test_conditions_and_names_are_checked():
    with pytest.raises(UsageError, match="batch must be at least 1, got 0"):
        Conditions(batch=0)
    with pytest.raises(UsageError, match="preset must be one of cifar10, tiny, got 'large'"):
        Conditions(preset="large")
    with pytest.raises(UsageError, match=r"rung must be one of writeup-0, .*, got 'writeup-9'"):
        chosen(["writeup-0", "writeup-9"])
    assert [rung.name for rung in chosen(["nchw", "writeup-0"])] == ["nchw", "writeup-0"]


def test_images_fit_the_network(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "cache"))
    draw = np.random.default_rng(0)
    np.save(tmp_path / "large.npy", draw.integers(0, 256, (4, 16, 12, 3), dtype=np.uint8))
    np.save(tmp_path / "grey.npy", draw.integers(0, 256, (4, 8, 8, 1), dtype=np.uint8))
    assert images_of(replace(ON_CPU, data=tmp_path / "large.npy")).shape == (4, 8, 8, 3)
    with pytest.raises(UsageError, match="holds images of 1 channels, and the network takes 3"):
        images_of(replace(ON_CPU, data=tmp_path / "grey.npy"))


# --- the protocol ----------------------------------------------------------------------------------------------------


def test_steps_are_counted(few_images, monkeypatch):
    taken = []
    built = ddpm_ladder.Built(lambda: taken.append(1), ("a finding",), {"a_rewrite": 2})
    monkeypatch.setattr(bench, "build", lambda *_: built)
    result = bench.measure(RUNGS[0], ON_CPU)
    # warm-up, the run that the clock leaves out, and the write-up's fifty
    assert len(taken) == 5 + 10 + 50
    assert result.protocol.timed == 50
    assert result.timing.n == 5
    assert result.wall_s == result.timing.median_s / 10
    assert (result.findings, result.rewrites, result.traced) == (("a finding",), {"a_rewrite": 2}, None)


@pytest.fixture
def here(monkeypatch):
    """`Apart` in this process, without the seconds to import torch: what was asked of which rung's call."""
    asked = []

    class Here:
        def __init__(self, work, *, budget_s):
            self.work = work
            self.name = work.args[0].name
            asked.append(("begin", self.name, budget_s))

        def prepare(self):
            asked.append(("prepare", self.name))

        def result(self):
            asked.append(("time", self.name))
            return self.work()

        def close(self):
            asked.append(("close", self.name))

    monkeypatch.setattr(own_process, "Apart", Here)
    return asked


def test_a_ladder_on_a_cpu(few_images, here):
    (result,) = bench.climb(chosen(["writeup-3"]), ON_CPU, SHORT)
    result = pickle.loads(pickle.dumps(result))  # as between processes
    assert isinstance(result, Measured)
    assert (result.rung.name, result.machine.device, result.traced) == ("writeup-3", "cpu", None)
    assert 0 < result.wall_s < 60
    (row,) = ladder_rows([result])
    assert (row.gpu_busy_s, row.against_before, row.writeup_s) == (None, None, 0.13745)
    assert row.images_per_s == pytest.approx(2 / result.wall_s)
    assert re.search(r"^writeup-3 +fused AdamW +[\d,.]+ +- +- +- +- +- +- +137.45 +-$", render([result]), re.MULTILINE)


def test_rungs_are_compiled_side_by_side_and_timed_one_at_a_time(here, monkeypatch):
    def measure(rung, *_):
        if rung is RUNGS[0]:
            raise NotEngaged("it broke")
        return LADDER[0]

    monkeypatch.setattr(bench, "measure", measure)
    found = list(bench.climb(RUNGS[:3], ON_CPU, SHORT, budget_s=9, at_once=2))
    assert found == [Missing(RUNGS[0], "it broke", 5), LADDER[0], LADDER[0]]
    first, second, third = (rung.name for rung in RUNGS[:3])
    assert here == [
        *(("begin", name, 9) for name in (first, second)),
        *((what, name) for what in ("prepare", "time", "close") for name in (first, second)),
        ("begin", third, 9),
        *((what, third) for what in ("prepare", "time", "close")),
    ]
    with pytest.raises(UsageError, match="at least 1 must prepare at once, got 0"):
        next(bench.climb(RUNGS, ON_CPU, at_once=0))


def test_a_step_waits_for_its_turn_between_warm_up_and_timing(few_images, monkeypatch):
    taken = []
    monkeypatch.setattr(bench, "build", lambda *_: ddpm_ladder.Built(lambda: taken.append("step")))
    bench.measure(RUNGS[0], ON_CPU, SHORT, lambda: taken.append("wait"))
    assert taken == ["step", "wait", *["step"] * 6]


def test_an_answer_from_a_process_of_its_own():
    assert call_apart(os.getpid, budget_s=60) != os.getpid()
    with pytest.raises(UsageError, match="no spec for GPU 'no such'"):
        call_apart(partial(find_spec, "no such"), budget_s=60)


def prepared(path: Path, wait) -> float:
    """Say that it is prepared, wait, and return what the clock showed after that."""
    path.touch()
    wait()
    return time.time()


def test_a_call_waits_in_the_middle(tmp_path):
    calls = [Apart(partial(prepared, tmp_path / name), budget_s=60) for name in "ab"]
    try:
        for call in calls:
            call.prepare()
        assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
        time.sleep(0.1)
        before = time.time()
        first = calls[0].result()
        assert before <= first <= calls[1].result()
    finally:
        for call in calls:
            call.close()


def test_a_call_that_waits_is_not_late(tmp_path):
    """Its alarm rings while it waits, before anybody has asked whether it is prepared."""
    first, second = (Apart(partial(prepared, tmp_path / name), budget_s=60) for name in "ab")
    try:
        second.prepare()
        while not (tmp_path / "a").exists():
            time.sleep(0.05)
        time.sleep(0.2)
        first._ring()
        assert first.result() <= second.result()
    finally:
        for call in (first, second):
            call.close()


def test_a_process_that_ends_while_it_waits_is_told_of():
    call = Apart(hanging, budget_s=60)
    try:
        call.prepare()
        call._child.kill()
        call._child.join()
        with pytest.raises(EnvironmentUnusable, match="its process ended with exit code -9"):
            call.result()
    finally:
        call.close()


def hanging(wait) -> None:
    wait()
    time.sleep(60)


def test_a_call_that_hangs_after_its_wait_is_given_up():
    call = Apart(hanging, budget_s=20)
    call._budget_s = 0.2  # of what follows
    try:
        with pytest.raises(OverBudget, match=r"given up after 0.2 s"):
            call.result()
    finally:
        call.close()


def test_a_process_that_dies_or_hangs_is_its_own():
    with pytest.raises(EnvironmentUnusable, match="its process ended with exit code 7: what it said on stderr"):
        call_apart(partial(os._exit, 7), budget_s=60)
    with pytest.raises(OverBudget, match=r"given up after 0.01 s: raise the budget"):
        call_apart(partial(time.sleep, 60), budget_s=0.01)
    assert OverBudget.exit_code == 1


@pytest.mark.parametrize("budget_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_budget_is_a_time(budget_s):
    with pytest.raises(UsageError, match="more than 0 s and at most a day, got "):
        call_apart(os.getpid, budget_s=budget_s)
    with pytest.raises(UsageError, match="more than 0 s and at most a day, got "):
        next(bench.climb(RUNGS, ON_CPU, budget_s=budget_s))


def event(name: str, start_us: float, end_us: float, *, device: str = "CUDA", annotation: bool = False):
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        is_user_annotation=annotation,
        time_range=SimpleNamespace(start=start_us, end=end_us),
    )


def test_overlapping_work_counts_once_and_waits_are_the_hosts():
    events = [
        event("conv", 0, 100),
        event("Memcpy HtoD", 50, 150),  # on another stream: busy, but no kernel
        event("norm", 200, 250),
        event("Optimizer.step", 0, 1000, annotation=True),
        event("aten::conv2d", 0, 900, device="CPU"),
        event("cudaStreamSynchronize", 0, 90, device="CPU"),
        event("cudaMemcpy", 100, 120, device="CPU"),
        event("cudaDeviceSynchronize", 300, 900, device="CPU"),  # the trace's own
    ]
    found = bench.counted(events, 2)
    assert found.busy_s == pytest.approx(100e-6)
    assert (found.kernels, found.waits) == (1, 1)


def test_a_trace_without_gpu_events_is_refused():
    with pytest.raises(EnvironmentUnusable, match="no GPU events: another profiler may hold the device"):
        bench.counted([event("aten::conv2d", 0, 1, device="CPU")], 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["writeup-0", "writeup-5"])
def test_a_rung_on_a_gpu(name):
    (result,) = bench.climb(chosen([name]), Conditions(batch=8), SHORT)
    assert isinstance(result, Measured), result.reason
    assert result.traced is not None
    assert 0 < result.traced.busy_s < 2 * result.wall_s
    assert result.traced.kernels > 100
    assert result.memory_bytes is not None and result.memory_bytes > 1e8
    assert (result.traced.waits >= 1) == (name == "writeup-0")


# --- why -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (None, LADDER[0], "host-bound: GPU busy 55% of the wall"),
        (
            LADDER[0],
            LADDER[1],
            "the GPU idles 4.40 ms less (2.0 → 0.0 waits); host-bound: GPU busy 59% of the wall",
        ),
        (
            LADDER[1],
            LADDER[2],
            "the GPU idles 21.7 ms less (2,900 → 1,461 kernels), and GPU work takes 10.4 ms less; "
            "GPU-bound: GPU busy 98% of the wall",
        ),
        (
            measured("one-pass", 21.0, 20.7),
            measured("nchw", 26.0, 25.7, kernels=1060),
            "GPU work takes 5.00 ms more (1,000 → 1,060 kernels); GPU-bound: GPU busy 99% of the wall",
        ),
        (
            measured("writeup-0", 50.0, 30.0),
            measured("writeup-1", 48.0, 33.0),
            "the GPU idles 5.00 ms less, though GPU work takes 3.00 ms more; host-bound: GPU busy 69% of the wall",
        ),
        (
            measured("writeup-0", 50.0, 30.0, spread=0.05),
            measured("writeup-1", 49.5, 26.0, spread=0.05),
            "no change beyond the spread of the runs, though GPU work takes 4.00 ms less; "
            "host-bound: GPU busy 53% of the wall",
        ),
        (
            measured("writeup-5", 21.0, 20.7, spread=0.05),
            measured("one-pass", 20.9, 20.6, spread=0.05),
            "no change beyond the spread of the runs; GPU-bound: GPU busy 99% of the wall",
        ),
    ],
)
def test_a_change_is_explained_from_its_numbers(before, after, why):
    assert explain(after, before) == why


# --- formats ---------------------------------------------------------------------------------------------------------


def test_rows_stand_beside_the_rung_before():
    rows = ladder_rows(LADDER)
    assert [row.against_before for row in rows] == [None, pytest.approx(54 / 58.6 - 1), pytest.approx(21.95 / 54 - 1)]
    assert rows[1].writeup_against_before == pytest.approx(140.87 / 151.48 - 1)
    assert ladder_row(measured("nchw", 1, 1), LADDER[-1]).writeup_against_before is None
    assert rows[2].gpu_busy_share == pytest.approx(21.6 / 21.95)
    assert rows[2].images_per_s == pytest.approx(128 / 21.95e-3)


def test_the_table_holds_the_writeups_beside_ours():
    lost = Missing(BY_NAME["nchw"], "given up after 9 s: raise --budget-s", 1)
    text = render([LADDER[0], lost, *LADDER[1:]], width=200)
    lines = text.splitlines()
    assert re.fullmatch("subject +DDPM training step, batch 128, bf16 autocast, random images", lines[0])
    assert "NVIDIA H200, driver 570.1, power limit 700 W, 1980 MHz after the first rung" in text
    (last,) = [each for each in lines if each.startswith("writeup-5   one")]
    assert last.split("  ")[-1].strip() == "-5.2 %"
    cells = "21.95 21.60 98.4 % 1,461 0.0 4.21 GB -59.4 % 133.60 -5.2 %"
    assert " ".join(last.split()).endswith(cells)
    assert "host-bound: GPU busy 55% of the wall" in text
    assert lines[-1].split(maxsplit=1) == ["nchw", "given up after 9 s: raise --budget-s"]


def test_a_ladder_without_a_number_says_why():
    lost = [Missing(BY_NAME["nchw"], "the network broke", 5)]
    for output_format in ("table", "md"):
        text = render(lost, output_format)
        assert "not measured" in text and "the network broke" in text and "each rung" not in text
    assert json.loads(render(lost, "json")) == {
        "rows": [],
        "missing": [{"rung": "nchw", "reason": "the network broke"}],
    }
    assert render(lost, "csv") == ",".join(field.name for field in fields(LadderRow))


def test_the_example_of_the_page_prints_rungs_with_and_without_numbers(monkeypatch, capsys):
    page = (Path(__file__).parents[1] / "docs" / "howto-ddpm-ladder.md").read_text(encoding="utf-8")
    code = page.partition("## In Python")[2].partition("```python\n")[2].partition("```")[0]
    asked = []

    def climb(rungs, conditions):
        asked.append((tuple(rung.name for rung in rungs), conditions.batch))
        return iter([LADDER[2], Missing(rungs[1], "the network broke", 5)])

    monkeypatch.setattr(bench, "climb", climb)
    exec(compile(code, "<howto-ddpm-ladder.md>", "exec"), {"__name__": "__main__"})
    shown = capsys.readouterr().out
    assert asked == [(("writeup-5", "one-pass"), 64)]
    assert re.search(r"^writeup-5 .*21\.95", shown, re.MULTILINE)
    assert re.search(r"^one-pass +the network broke$", shown, re.MULTILINE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_climb_without_a_gpu_is_refused_at_the_call():
    with pytest.raises(EnvironmentUnusable, match="the ladder is timed on a GPU and torch sees none"):
        bench.climb(RUNGS, Conditions())


def test_formats_agree():
    rows = ladder_rows(LADDER)
    assert [LadderRow(**row) for row in json.loads(render(LADDER, output_format="json"))["rows"]] == list(rows)
    table = list(csv.DictReader(io.StringIO(render(LADDER, output_format="csv"))))
    assert list(table[0]) == [field.name for field in fields(LadderRow)]
    assert [float(row["wall_s"]) for row in table] == [row.wall_s for row in rows]
    assert table[0]["against_before"] == ""
    markdown = render(LADDER, output_format="md")
    assert markdown.count("| 21.95 | 21.60 | 98.4 % | 1,461 | 0.0 | 4.21 GB | -59.4 % | 133.60 | -5.2 % |") == 1
    with pytest.raises(ValueError, match="format must be one of table, json, csv, md, got 'xml'"):
        render(LADDER, output_format="xml")


def test_rows_are_added_and_earlier_ones_stay(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    rows = ladder_rows(LADDER)
    append_rows(path, ())
    assert path.read_bytes() == b""
    for row in rows:
        append_rows(path, [row])
    assert [LadderRow(**json.loads(text)) for text in path.read_text().splitlines()] == list(rows)
    (tmp_path / "a_file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write '.*a_file/rows.jsonl' .*: name another file with --out"):
        append_rows(tmp_path / "a_file" / "rows.jsonl", rows)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def climbed(monkeypatch):
    """The command on a machine with a GPU whose rungs take what LADDER says, those of graphs beyond the budget."""
    asked = []

    def climb(rungs, conditions, *, budget_s, at_once):
        asked.append(([rung.name for rung in rungs], conditions, budget_s, at_once))
        known = {result.rung.name: result for result in LADDER}
        return (known.get(rung.name, Missing(rung, "the network broke", 5)) for rung in rungs)

    monkeypatch.setattr(bench, "require_gpu", lambda: None)
    monkeypatch.setattr(bench, "climb", climb)
    return asked


def test_the_command_prints_the_table_and_keeps_the_rows(climbed, capsys, tmp_path):
    out = tmp_path / "rows.jsonl"
    names = ["writeup-0", "writeup-2", "nchw", "writeup-5"]
    argv = ["bench", "ddpm", "--rung", *names, "--out", str(out), "--format", "json", "--batch", "64"]
    assert main([*argv, "--budget-s", "9", "--at-once", "4"]) == 5
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["missing"] == [{"rung": "nchw", "reason": "the network broke"}]
    assert [row["rung"] for row in found["rows"]] == ["writeup-0", "writeup-2", "writeup-5"]
    assert [json.loads(text) for text in out.read_text().splitlines()] == found["rows"]
    assert shown.err.splitlines()[0] == ("ridgeline bench: writeup-0: wall 58.6 ms, GPU busy 32.2 ms, 2,184 images/s")
    assert "ridgeline bench: nchw: the network broke" in shown.err.splitlines()
    assert climbed == [(names, Conditions(batch=64), 9.0, 4)]


@pytest.mark.parametrize(("flags", "asked"), [(["--ladder"], list(BY_NAME)), ([], [RUNGS[-1].name])])
def test_the_whole_ladder_or_its_last_rung(flags, asked, climbed, capsys):
    assert main(["bench", "ddpm", *flags]) == 5
    assert climbed == [(asked, Conditions(), bench.BUDGET_S, 1)]
    assert bool(capsys.readouterr().out) == bool(flags)  # a table without a row is no table


def test_refusals_come_before_the_work(climbed, capsys, tmp_path):
    (tmp_path / "a_file").write_text("")
    for flags, reason in (
        (["--batch", "0"], "batch must be at least 1, got 0"),
        (["--rung", "writeup-8"], "rung must be one of writeup-0"),
        (["--data", "absent.zip"], "data 'absent.zip' does not exist"),
        (["--out", str(tmp_path / "a_file" / "rows.jsonl")], "cannot write"),
    ):
        assert main(["bench", "ddpm", *flags]) == 2
        assert capsys.readouterr().err.startswith(f"ridgeline bench: {reason}")
    with pytest.raises(SystemExit) as stop:
        main(["bench", "ddpm", "--ladder", "--rung", "nchw"])
    assert stop.value.code == 2
    assert "argument --rung: not allowed with argument --ladder" in capsys.readouterr().err
    assert climbed == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu(capsys):
    assert main(["bench", "ddpm", "--ladder"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ridgeline bench: the ladder is timed on a GPU and torch sees none: ")
    assert err.count("\n") == 1


def test_options_are_those_of_the_library_and_documented():
    parser = argparse.ArgumentParser()
    cli_bench.add_commands(parser.add_subparsers())
    assert cli_bench.FORMATS == bench_table.FORMATS
    reference = (Path(__file__).parents[1] / "docs" / "reference.md").read_text(encoding="utf-8")
    section = reference.partition("### Options of `ridgeline bench ddpm`")[2].partition("\n### ")[0]
    options = vars(parser.parse_args(["bench", "ddpm"])).keys() - {"run", "workload"}
    assert set(re.findall(r"^\| `--([a-z-]+)` \|", section, re.MULTILINE)) == {o.replace("_", "-") for o in options}
