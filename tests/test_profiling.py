"""Steps are found in loops that know nothing of it, timed and traced, and the command that makes them stays itself."""

import gzip
import importlib
import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import profile as torch_profile
from torch.utils.data.dataloader import _BaseDataLoaderIter

import ridgeline
from gpu_company import alone_on_gpu
from ridgeline import profile_child, profile_loop, profiling, step_marks
from ridgeline.cudagraph import capture
from ridgeline.errors import EnvironmentUnusable, NotEngaged, UsageError
from ridgeline.profile_child import Finished, Watch
from ridgeline.profile_plan import (
    LONGEST_SETTLING,
    TRACE,
    Facts,
    Plan,
    Traced,
    facts_beside,
    read_facts,
    read_traced,
    result_path,
    write_record,
)
from ridgeline.profile_record import WallTime
from ridgeline.profile_run import CommandFailed, fitted, time_steps, trace_steps
from ridgeline.profile_steps import Follower, Timer, Tracer, recorder_for, wall_time

TRACES = Path(__file__).parent / "fixtures" / "traces"
SCRIPT = """\
import sys, torch
net = torch.nn.Linear(16, 16)
every, rare = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.Adam(net.parameters())
made = 0
try:
    for _ in range(int(sys.argv[1])):
        net(torch.ones(4, 16)).sum().backward()
        every.step()
        rare.step()
        made += 1
finally:
    print(f"cleaned up after {made} whole steps", flush=True)
"""
MARKED = """\
import ridgeline, torch
while True:
    torch.ones(4, 16) @ torch.ones(16, 4)
    ridgeline.mark_step()
"""


def quiet(_: str) -> None:
    """Said to nobody."""


def time_plan(folder: Path | str = "", **choices) -> Plan:
    return Plan("time", str(folder), **{"steps": 4, "skip": 2, **choices})


def trace_plan(folder: Path | str = "", **choices) -> Plan:
    return Plan("trace", str(folder), **{"steps": 2, "skip": 1, "warmup": 1, **choices})


def python(text: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", text, *arguments]


def facts(**changes) -> Facts:
    return replace(Facts(WallTime(1.0, 1.0, 1.0, 30), seen=40, first=10, complete=True, gpu="NVIDIA H200"), **changes)


def step_names(path: Path) -> list[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("name", "").startswith("ProfilerStep#")]


# --- marks and hooks -------------------------------------------------------------------------------------------------


def test_a_mark_tells_who_listens_and_else_does_nothing(monkeypatch):
    monkeypatch.setattr(step_marks, "_listeners", [])
    ridgeline.mark_step()
    heard = []
    monkeypatch.setattr(step_marks, "_of_steps", [])
    step_marks.listen(lambda: heard.append("mark"), steps=lambda: heard.append("step"))
    ridgeline.mark_step()
    step_marks.step_taken()
    ridgeline.mark_step()
    assert heard == ["mark", "step", "mark"]


def test_a_mark_loads_no_torch():
    code = "import ridgeline, sys; ridgeline.mark_step(); print('torch' in sys.modules)"
    assert subprocess.run(python(code), capture_output=True, text=True, check=True).stdout == "False\n"


class Counted:
    """A recorder that has seen enough after `enough` steps."""

    def __init__(self, enough: int) -> None:
        self.steps, self.finished, self.enough = 0, 0, enough

    def step(self) -> bool:
        self.steps += 1
        return self.steps >= self.enough

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def watched(monkeypatch):
    """A watch whose recorder counts to three."""
    watch, recorder = Watch(time_plan()), Counted(3)
    monkeypatch.setattr(watch, "_make", lambda _: recorder)
    return watch, recorder


def test_the_optimizer_that_steps_first_counts(watched):
    watch, recorder = watched
    first, second = object(), object()
    for _ in range(2):
        watch.stepped(first, (), {})
        watch.stepped(second, (), {})
    assert recorder.steps == 2
    with pytest.raises(Finished) as ended:
        watch.stepped(first, (), {})
    assert ended.value.code == 0
    assert recorder.finished == 1
    watch.stepped(first, (), {})  # a script that goes on all the same is left alone
    assert (recorder.steps, recorder.finished) == (3, 1)


def test_marks_win_over_optimizers(watched):
    watch, recorder = watched
    watch.stepped(watch, (), {})
    watch.marked()  # the mark of the step that the optimizer told of
    assert recorder.steps == 1
    watch.stepped(watch, (), {})
    watch.marked()
    assert recorder.steps == 2


def test_steps_of_a_graph_count_where_the_optimizer_is_inside(watched):
    watch, recorder = watched
    watch.stepped(watch, (), {})  # while the step was made
    watch.taken()
    assert recorder.steps == 1
    watch.taken()
    watch.stepped(watch, (), {})
    assert recorder.steps == 2
    watch.marked()  # who marks a loop of such steps is asked from then on
    watch.taken()
    assert recorder.steps == 2


def test_a_process_may_run_on_to_its_end(monkeypatch):
    watch, recorder = Watch(time_plan(to_end=True)), Counted(1)
    monkeypatch.setattr(watch, "_make", lambda _: recorder)
    watch.marked()
    watch.marked()
    assert (recorder.steps, recorder.finished) == (1, 1)


def test_a_forked_worker_is_not_watched(watched, monkeypatch):
    watch, recorder = watched
    monkeypatch.setattr(profile_child.os, "getpid", lambda: -1)
    watch.marked()
    watch.at_exit()
    assert (recorder.steps, recorder.finished) == (0, 0)


def test_what_was_seen_of_a_short_loop_is_kept(watched):
    watch, recorder = watched
    watch.marked()
    watch.at_exit()
    watch.at_exit()
    assert recorder.finished == 1


def test_one_process_of_several_is_watched(tmp_path, monkeypatch):
    # the first is told of both until the test ends
    monkeypatch.setattr(torch.nn.Module, "train", torch.nn.Module.train)
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", _BaseDataLoaderIter.__next__)
    first, second = Watch(time_plan(tmp_path)), Watch(time_plan(tmp_path))
    first.marked()
    second.marked()
    assert isinstance(first._recorder, Timer)
    assert first._validation is not None
    assert first._batches is first._recorder.batches
    assert second._recorder is None
    assert second._validation is None


def test_a_module_is_hooked_when_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text("def f(): return 'source'\n")
    monkeypatch.syspath_prepend(tmp_path)
    told = []
    monkeypatch.setattr(sys, "meta_path", [profile_child._AfterImport("late_module", told.append), *sys.meta_path])
    module = importlib.import_module("late_module")
    assert told == [module]
    assert module.f() == "source"
    assert module.__loader__.get_source("late_module").startswith("def f")
    sys.modules.pop("late_module")


# --- timing and tracing ----------------------------------------------------------------------------------------------


def test_steps_are_timed_after_those_left_out(tmp_path):
    timer = Timer(time_plan(tmp_path), on_gpu=False)
    timer.parameters = (((4, 3), "float"),)
    assert [timer.step() for _ in range(6)] == [False] * 5 + [True]
    timer.finish()
    found = read_facts(result_path(tmp_path, "time"))
    assert (found.seen, found.first, found.complete, found.wall.n) == (6, 2, True, 4)
    assert 0 < found.wall.low_s <= found.wall.median_s <= found.wall.high_s < 1
    assert (found.gpu, found.gpu_s, found.parameters) == ("", None, (((4, 3), "float"),))
    assert found.settings["torch"] == torch.__version__
    assert {"cudnn.benchmark", "cpus", "threads", "recompiles"} <= found.settings.keys()


def test_timing_begins_when_steps_have_settled(tmp_path, monkeypatch):
    times_s = [9.0, 5.0, 1.0, 1.0, 1.05, 1.0, 1.0]
    timer = Timer(time_plan(tmp_path, skip=None, steps=2), on_gpu=False)
    monkeypatch.setattr(timer._clock, "host_seconds", lambda: times_s[: timer._seen - 1])
    assert [timer.step() for _ in range(8)] == [False] * 7 + [True]
    timer.finish()
    found = read_facts(result_path(tmp_path, "time"))
    assert (found.first, found.wall) == (6, WallTime(1.0, 1.0, 1.0, 2))


def test_timing_begins_though_steps_never_settle(monkeypatch):
    timer = Timer(time_plan(skip=None, steps=1), on_gpu=False)
    monkeypatch.setattr(timer._clock, "host_seconds", lambda: [1.0, 2.0, 1.0, 2.0][: timer._seen])
    steps = 0
    while not timer.step():
        steps += 1
    assert steps == LONGEST_SETTLING


@pytest.mark.parametrize(("steps", "first", "timed"), [(1, None, 0), (2, 1, 1), (8, 4, 4), (12, 6, 6)])
def test_of_a_short_loop_the_second_half_is_timed(tmp_path, steps, first, timed):
    timer = Timer(time_plan(tmp_path, skip=10, steps=30), on_gpu=False)
    for _ in range(steps):
        assert not timer.step()
    timer.finish()
    path = result_path(tmp_path, "time")
    assert path.exists() == (timed > 0)
    if timed:
        found = read_facts(path)
        assert (found.first, found.wall.n, found.complete, found.seen) == (first, timed, False, steps)


def test_quartiles():
    assert wall_time([4.0, 1.0, 2.0, 3.0, 5.0]) == WallTime(3.0, 2.0, 4.0, 5)
    assert wall_time([2.0, 1.0]) == WallTime(1.5, 1.0, 2.0, 2)


def drive_tracer(plan: Plan, steps: int) -> tuple[int, Tracer]:
    """Steps made until the tracer had enough, at most `steps`."""
    tracer = Tracer(plan, on_gpu=False)
    for made in range(1, steps + 1):
        torch.ones(3, 3).matmul(torch.ones(3, 3))
        if tracer.step():
            return made, tracer
    return steps, tracer


def test_as_many_steps_are_traced_as_planned(tmp_path):
    made, tracer = drive_tracer(trace_plan(tmp_path, skip=2), 9)
    tracer.finish()
    assert made == 5  # two left out, one to warm the profiler up, two traced
    assert read_traced(result_path(tmp_path, "trace")) == Traced(2, complete=True)
    assert len(step_names(tmp_path / TRACE)) == 2
    events = json.loads(gzip.decompress((tmp_path / TRACE).read_bytes()))["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert [event["args"]["Input Dims"] for event in products] == [[[3, 3], [3, 3]]] * 2


def test_a_trace_beyond_the_cap_is_taken_again_of_one_step(tmp_path):
    made, tracer = drive_tracer(trace_plan(tmp_path, max_bytes=10), 9)
    tracer.finish()
    assert made == 6
    traced = read_traced(result_path(tmp_path, "trace"))
    assert (traced.steps, traced.complete) == (1, True)
    assert "one step was traced, because 2" in traced.note
    assert len(step_names(tmp_path / TRACE)) == 1


@pytest.mark.parametrize(("steps", "left"), [(1, False), (2, False), (3, True)])
def test_a_loop_that_ends_early_leaves_the_steps_it_made(tmp_path, steps, left):
    made, tracer = drive_tracer(trace_plan(tmp_path), steps)
    tracer.finish()
    assert made == steps
    assert result_path(tmp_path, "trace").exists() == left
    if left:
        assert read_traced(result_path(tmp_path, "trace")) == Traced(1, complete=False)


def test_stacks_and_a_gpu_change_what_the_profiler_records(tmp_path):
    asked = []

    def profiler(**arguments):
        asked.append(arguments)
        return torch_profile(**{**arguments, "activities": None, "experimental_config": None, "with_stack": False})

    tracer = Tracer(trace_plan(tmp_path, stacks=True), on_gpu=False, profiler=profiler)
    tracer.step()
    tracer.finish()
    assert asked[0]["with_stack"]
    assert asked[0]["record_shapes"]
    assert asked[0]["activities"] == [torch.profiler.ProfilerActivity.CPU]


def test_the_others_of_a_group_stop_after_the_same_step():
    for plan in (time_plan(skip=None), trace_plan(skip=3)):
        watched = recorder_for(plan, on_gpu=False, rank=0, world=2)
        follower = recorder_for(plan, on_gpu=False, rank=1, world=2)
        assert isinstance(follower, Follower)
        if isinstance(watched, Timer):
            count = sum(1 for _ in iter(watched.step, True)) + 1
            assert sum(1 for _ in iter(follower.step, True)) + 1 == count == LONGEST_SETTLING + 4
        else:
            assert sum(1 for _ in iter(follower.step, True)) + 1 == 3 + 1 + 2


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (facts(first=7), (7, 2, 3)),
        (facts(complete=False, seen=20, first=10), (10, 2, 3)),
        (facts(complete=False, seen=12, first=10), (7, 2, 3)),
        (facts(complete=False, seen=4, first=2), (1, 0, 3)),
        (facts(complete=False, seen=2, first=1), (1, 0, 1)),
    ],
    ids=str,
)
def test_the_traced_run_fits_the_loop(known, expected):
    plan = fitted(Plan("trace", "", steps=3), known)
    assert (plan.skip, plan.warmup, plan.steps) == expected
    assert known.complete or plan.skip + plan.warmup + plan.steps <= known.seen


# --- commands --------------------------------------------------------------------------------------------------------


def test_a_script_is_timed_unmodified(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = time_steps([sys.executable, str(script), "500"], time_plan(steps=5), say=quiet)
    assert (found.seen, found.complete, found.wall.n) == (7, True, 5)
    assert found.parameters == (((16, 16), "float"), ((16,), "float"))
    # the seventh step was not whole: what came after its optimizer was left out, and the clean-up was not
    assert capfd.readouterr().out == "cleaned up after 6 whole steps\n"


def test_a_loop_with_marks_is_timed_and_traced(tmp_path, monkeypatch):
    choices = profiling.Choices(steps=5, active=2, skip=2)
    known = facts(first=2, gpu="")
    # its times would cost another start of torch
    monkeypatch.setattr(profiling, "time_steps", lambda *_, **__: known)
    assert profiling.record_command(python(MARKED), tmp_path, choices, say=quiet, need_gpu=False) == known
    assert read_facts(facts_beside(tmp_path / TRACE)) == known
    assert len(step_names(tmp_path / TRACE)) == 2


def test_the_exit_code_and_output_of_a_failing_command_pass_through(capfd):
    failing = python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    with pytest.raises(CommandFailed, match="exit code 7 in its timed run") as failed:
        time_steps(failing, time_plan(), say=quiet)
    assert failed.value.code == 7
    captured = capfd.readouterr()
    assert captured.out == "out\n"
    assert "err" in captured.err
    killed = python("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    with pytest.raises(CommandFailed, match="traced run") as failed:
        trace_steps(killed, trace_plan(), Path("unused"), say=quiet)
    assert failed.value.code == 128 + 15


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (python("pass"), r"ended before two of its steps were seen: .*mark_step"),
        ([sys.executable, "-E", "-c", "pass"], "started no Python that imports ridgeline"),
        (["true"], "started no Python"),
        (["./no-such-command"], r"cannot run \./no-such-command \(No such file"),
    ],
)
def test_commands_without_steps_are_refused(command, message):
    with pytest.raises(UsageError, match=message):
        time_steps(command, time_plan(), say=quiet)


def test_the_sitecustomize_of_the_environment_still_runs(tmp_path, monkeypatch, capfd):
    (tmp_path / "sitecustomize.py").write_text("print('own', __name__, flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UsageError, match="before two of its steps"):
        time_steps(python("print('script')"), time_plan(), say=quiet)
    assert capfd.readouterr().out == "own sitecustomize\nscript\n"


def test_a_process_that_does_not_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("ridgeline.profile_run._GRACE_S", 0.2)
    code = "import pathlib, time; pathlib.Path({!r}).touch(); time.sleep(60)".format(str(tmp_path / "timed.json"))
    process = subprocess.Popen(python(code))
    watch = importlib.import_module("ridgeline.profile_run")._watch
    assert watch(process, tmp_path / "timed.json", to_end=False) == -15


# --- targets and the library call ------------------------------------------------------------------------------------

BUILDERS = """\
import torch
def step(): return lambda: None
def module(): return torch.nn.Linear(2, 2), torch.ones(1, 2)
def trained(): return torch.nn.Linear(2, 2), torch.ones(1, 2), lambda m, x: m(x).sum()
class Captured:
    def __call__(self, x): return "graph", x
    def launch_operators(self, x): return "operators", x
def captured(): return Captured(), (3,)
def wrong(): return 3
"""


@pytest.fixture
def builders(tmp_path, monkeypatch):
    (tmp_path / "builders.py").write_text(BUILDERS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return str(tmp_path / "builders.py")


def test_targets_become_steps(builders):
    assert profile_loop.step_for(f"{builders}:step", device="cpu")() is None
    forward = profile_loop.step_for(f"{builders}:module", device="cpu")
    forward()
    assert forward.args[0].weight.grad is None
    trained = profile_loop.step_for(f"{builders}:trained", device="cpu")
    trained()
    assert trained.args[0].weight.grad is None  # used, and cleared for the next step
    assert profile_loop.step_for(f"{builders}:captured", device="cpu")() == ("graph", 3)
    assert profile_loop.step_for(f"{builders}:captured", device="cpu", operators=True)() == ("operators", 3)


@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        ("{}:wrong", UsageError, "must return a step, .* got int"),
        ("{}:absent", UsageError, "has no callable named 'absent'"),
        ("nowhere.py:build", UsageError, "cannot import nowhere.py"),
        ("no_such_package:build", UsageError, "cannot import no_such_package"),
        ("yolo99", UsageError, "unknown target 'yolo99'"),
    ],
)
def test_what_is_no_target_is_refused(builders, target, kind, message):
    with pytest.raises(kind, match=message):
        profile_loop.step_for(target.format(builders), device="cpu")


def test_a_target_without_operators_says_so(builders, capsys):
    with pytest.raises(NotEngaged, match="has no launch_operators"):
        profile_loop.step_for(f"{builders}:step", device="cpu", operators=True)
    assert profile_loop.main([f"{builders}:step", "3", "--operators"]) == NotEngaged.exit_code
    assert "launch_operators" in capsys.readouterr().err


def test_the_loop_marks_its_steps(builders, monkeypatch):
    heard = []
    monkeypatch.setattr(step_marks, "_listeners", [lambda: heard.append(1)])
    assert profile_loop.main([f"{builders}:step", "3"]) == 0
    assert len(heard) == 3


def test_a_trace_and_its_facts_become_a_saved_profile(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copy(TRACES / "loader-bound.json.gz", tmp_path / TRACE)
    shutil.copy(TRACES / "loader-bound.json.gz", tmp_path / "stacks.json.gz")
    known = facts(wall=WallTime(0.0528, 0.0527, 0.0529, 30), gpu_s=0.0526, environment={"driver": "580"})
    subject = profiling.Subject("loop", "again", known)
    found = profiling.finish(tmp_path, subject, profiling.read_trace(tmp_path / TRACE))
    assert (found.subject, found.command, found.gpu) == ("loop", "again", "NVIDIA H200")
    assert found.findings[0].rule == "H1"
    assert found.environment["driver"] == "580"
    assert ridgeline.explain(tmp_path / profiling.PROFILE) == found
    assert read_facts(tmp_path / "trace.facts.json") == replace(known, kernels=71)


def test_a_command_without_a_gpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "time_steps", lambda *_, **__: facts(gpu=""))
    with pytest.raises(EnvironmentUnusable, match=r"^python train\.py saw no GPU, so there are no kernels"):
        profiling.record_command(["python", "train.py"], tmp_path, profiling.Choices(), say=quiet)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")
def test_without_a_gpu_the_call_says_what_works():
    with pytest.raises(EnvironmentUnusable, match=r"needs a GPU .*ridgeline roofline MODEL.*ridgeline explain TRACE"):
        ridgeline.profile(lambda: None)


def test_runs_are_numbered_and_none_is_overwritten(tmp_path):
    first = profiling.next_folder("a/b c", within=tmp_path)
    assert first == tmp_path / "a-b-c-1"
    assert profiling.next_folder("a/b c", within=tmp_path) == tmp_path / "a-b-c-2"
    (first / profiling.PROFILE).touch()
    with pytest.raises(UsageError, match="holds a profile already"):
        profiling.made(first)
    with pytest.raises(UsageError, match="cannot make"):
        profiling.made(first / profiling.PROFILE / "below")


def test_commands_are_named_as_people_would():
    assert profiling.name_of(["python", "-u", "tools/train.py", "--lr", "3"]) == "train"
    assert profiling.name_of(["python", "-m", "pkg.main", "x"]) == "pkg.main"
    assert profiling.name_of(["./run.sh"]) == "run.sh"


def test_choices_that_give_no_number_are_refused():
    for choice in ({"steps": 0}, {"active": 0}, {"skip": 0}):
        with pytest.raises(UsageError, match=rf"{next(iter(choice))} must be at least 1, got 0"):
            profiling.Choices(**choice)


def test_facts_are_read_back_and_damage_is_named(tmp_path):
    path = tmp_path / "x.facts.json"
    write_record(path, facts(parameters=(((2, 3), "c10::Half"),), settings={"a": "b"}))
    assert read_facts(path) == facts(parameters=(((2, 3), "c10::Half"),), settings={"a": "b"})
    path.write_text('{"wall": 3}')
    with pytest.raises(UsageError, match="holds no facts of a profile"):
        read_facts(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_facts(tmp_path / "absent.json")
    assert facts_beside(Path("a/b.json.gz")) == Path("a/b.facts.json")
    assert facts_beside(Path("b.sqlite")) == Path("b.facts.json")


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_step_is_profiled_in_this_process(tmp_path):
    net = torch.nn.Sequential(*[torch.nn.Conv2d(32, 32, 3, padding=1) for _ in range(8)]).cuda()
    x = torch.rand(16, 32, 64, 64, device="cuda")
    with alone_on_gpu():
        found = ridgeline.profile(net, (x,), steps=10, folder=tmp_path)
    assert found.gpu == torch.cuda.get_device_name()
    assert found.wall is not None and found.wall.n == 10
    assert found.coverage is not None and 0.95 <= found.coverage <= 1.02
    assert math.isclose(sum(bar.seconds for bar in found.waterfall), found.step_s, rel_tol=0.05)
    assert {"run.json", "trace.json.gz", "trace.facts.json"} == {path.name for path in tmp_path.iterdir()}


@pytest.mark.gpu
def test_kernels_of_a_captured_step_get_their_operators(tmp_path):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(10))
    batch = torch.rand(32, 3, 32, 32, device="cuda")
    net.cuda()(batch)
    optimizer = torch.optim.AdamW(net.parameters(), capturable=True, fused=True)
    step = ridgeline.compile_step(net, lambda model, x: model(x).square().mean(), optimizer, batch)
    with alone_on_gpu():
        found = ridgeline.profile(step, (batch,), steps=10)
    assert step.report.replays >= 10
    assert found.attributed_share > 0.9


@pytest.mark.gpu
def test_trap_1_a_session_before_the_capture_leaves_a_whole_trace_or_none():
    with torch_profile():
        pass
    net = torch.nn.Sequential(*[torch.nn.Conv2d(32, 32, 3, padding=1) for _ in range(8)]).cuda()
    x = torch.rand(16, 32, 64, 64, device="cuda")
    with torch.no_grad():
        replay = capture(net, [x]).replay
    with alone_on_gpu():
        try:
            found = ridgeline.profile(replay, steps=10)
        except EnvironmentUnusable as refusal:
            assert "CUDA graph" in str(refusal)
        else:
            assert found.coverage is not None and 0.95 <= found.coverage <= 1.02
            assert sum(row.count for row in found.kernels) >= 8


@pytest.mark.gpu
def test_a_script_on_the_gpu_is_profiled_by_the_command(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("Linear(16, 16)", "Linear(16, 16).cuda()").replace("(4, 16)", "(4, 16).cuda()"))
    command = [sys.executable, "-m", "ridgeline", "profile", "--out", str(tmp_path / "run"), "--", sys.executable]
    with alone_on_gpu():
        done = subprocess.run([*command, str(script), "500"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = ridgeline.explain(tmp_path / "run" / "run.json")
        assert found.subject == "train"
        assert found.wall is not None and found.wall.n == 30
        assert found.coverage == 1.0  # its pauses are the host's, however long they were


@pytest.mark.gpu
def test_clocks_are_read_while_steps_run(tmp_path):
    net = torch.nn.Conv2d(256, 256, 3, padding=1).cuda()
    x = torch.rand(64, 256, 128, 128, device="cuda")
    with alone_on_gpu():
        ridgeline.profile(net, (x,), steps=60, folder=tmp_path)
    found = read_facts(tmp_path / "trace.facts.json").settings
    if "sm_clock_mhz" not in found:
        pytest.skip("nvidia-smi shows no SM clock here")
    assert 0.2 * float(found["sm_clock_max_mhz"]) < float(found["sm_clock_mhz"]) <= float(found["sm_clock_max_mhz"])
    assert "gpu_idle" not in found.get("throttle_reasons", "")
