"""`ridgeline profile`, `explain`, `diff` and `report` on real traces of a GPU, which need none to be explained."""

import csv
import io
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ridgeline
from ridgeline.cli import main
from ridgeline.errors import UsageError
from ridgeline.explaining import ceilings_of, explain, with_sources
from ridgeline.finding import Saving
from ridgeline.profile_json import read_profile, write_profile
from ridgeline.profile_record import WallTime
from ridgeline.profile_run import CommandFailed

TRACES = Path(__file__).parent / "fixtures" / "traces"
LOADER = TRACES / "loader-bound.json.gz"
GRAPH = TRACES / "yolo26n-graph.json.gz"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Ceilings that were measured on this machine, and its scorecard, stay out of the tests."""
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A saved profile of the loop that waits for its loader, without its timeline, so that it is read quickly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        profile = replace(explain(LOADER), timeline=())
        return write_profile(tmp_path_factory.mktemp("run") / "run.json", profile)


def ridgeline_(capsys, *argv: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    code = main([str(word) for word in argv])
    return code, *capsys.readouterr()


# --- explain ---------------------------------------------------------------------------------------------------------


def test_a_trace_is_explained(capsys, tmp_path):
    page = tmp_path / "page.html"
    code, out, err = ridgeline_(capsys, "explain", LOADER, "--format", "json", "--html", page)
    assert code == 0
    found = json.loads(out)
    assert found["schema_version"] == 2
    assert found["findings"][0]["rule"] == "H1"
    assert found["wall"]["n"] == 30
    assert found["coverage"] == pytest.approx(1, abs=0.05)
    assert found["environment"]["SM clock"] == "1980 MHz"
    assert found["command"].startswith("ridgeline explain ")
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert err == f"ridgeline explain: wrote {page}\n"


def test_a_bare_trace_is_explained_and_says_what_is_missing(capsys, tmp_path):
    shutil.copy(LOADER, tmp_path / "theirs.json.gz")
    code, out, _ = ridgeline_(capsys, "explain", tmp_path / "theirs.json.gz", "--format", "md")
    assert code == 0
    assert "nobody timed it unprofiled" in out
    assert "No step was timed without the profiler" in out
    assert "Nobody timed the GPU beside the trace" in out


def test_facts_may_lie_elsewhere(tmp_path):
    shutil.copy(LOADER, tmp_path / LOADER.name)
    found = explain(tmp_path / LOADER.name, facts=TRACES / "loader-bound.facts.json")
    assert found.wall == WallTime(0.052772099999998545, 0.05267018924999434, 0.05294622674999516, 30)
    assert found.subject == "loader-bound"
    # beside a trace the name of the file says whose they are
    shutil.copy(LOADER, tmp_path / "theirs.json.gz")
    shutil.copy(TRACES / "loader-bound.facts.json", tmp_path / "theirs.facts.json")
    assert explain(tmp_path / "theirs.json.gz").wall == found.wall


def test_kernels_of_a_graph_get_the_names_of_an_eager_trace():
    found = explain(GRAPH, operators=TRACES / "yolo26n-eager.json.gz")
    assert found.attributed_share > 0.9
    assert found.module_share > 0.9


def test_ceilings_come_from_the_trace_the_sheet_or_the_doctor(tmp_path):
    assert ceilings_of((), None) is None
    sheet = ceilings_of((), "NVIDIA L4")
    assert sheet is not None
    assert (sheet.gpu, sheet.measured, sheet.bandwidth) == ("NVIDIA L4", False, 300e9)
    measured = tmp_path / "cache" / "ceilings" / "nvidia-l4.json"
    measured.parent.mkdir(parents=True)
    measured.write_text('{"peaks": {"bandwidth": 2.5e11, "tensor_fp16": 1e14, "warp_drive": 1, "tensor_bf16": -1}}')
    found = ceilings_of((), "NVIDIA L4")
    assert found is not None
    assert (found.measured, found.bandwidth, found.peaks["tensor_fp16"]) == (True, 2.5e11, 1e14)
    assert found.peaks["tensor_bf16"] == sheet.peaks["tensor_bf16"]
    with pytest.raises(UsageError, match="no spec for GPU 'NVIDIA L44'"):
        ceilings_of((), "NVIDIA L44")


def test_another_gpu_may_be_named(capsys):
    code, out, _ = ridgeline_(capsys, "explain", LOADER, "--gpu", "NVIDIA L4", "--format", "json")
    assert code == 0
    found = json.loads(out)
    assert (found["gpu"], found["ceilings_gpu"]) == ("NVIDIA H200", "NVIDIA L4")
    assert found["extra"]["caution"].startswith("the trace is from NVIDIA H200 and the ceilings are those of NVIDIA L4")
    assert found["peaks"]["bandwidth"] == 300e9
    for output_format in ("table", "md"):
        said = " ".join(ridgeline_(capsys, "explain", LOADER, "--gpu", "L4", "--format", output_format)[1].split())
        assert "ceilings are those of NVIDIA L4" in said
        assert "NVIDIA L4: cuda fp32" in said
    _, out, _ = ridgeline_(capsys, "explain", LOADER, "--gpu", "H200", "--format", "json")
    assert (json.loads(out)["ceilings_gpu"], "caution" in json.loads(out)["extra"]) == ("", False)


def test_a_trace_of_fewer_kernels_than_the_gpu_worked_is_not_diagnosed(capsys, tmp_path):
    shutil.copy(GRAPH, tmp_path / "g.json.gz")
    facts = json.loads((TRACES / "yolo26n-graph.facts.json").read_text())
    (tmp_path / "g.facts.json").write_text(json.dumps({**facts, "in_a_row_s": 0.005}))
    code, out, err = ridgeline_(capsys, "explain", tmp_path / "g.json.gz")
    assert (code, out) == (3, "")
    assert "kernels are missing" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no trace is named"),
        (["--scorecard", "x.json"], "--scorecard looks at no trace"),
        (["--scorecard", "--html", "x.html"], "--scorecard looks at no trace: leave --html out"),
        (["--scorecard", "--rows", "5"], "--scorecard looks at no trace: leave --rows out"),
        (["absent.json"], "cannot read absent.json"),
        ([LOADER, "--facts", "absent.json"], "cannot read absent.json"),
        ([LOADER, "--facts", LOADER], "holds no facts"),
        ([LOADER, "--gpu", "NVIDIA L44"], "no spec for GPU"),
    ],
    ids=str,
)
def test_wrong_explanations_are_refused(capsys, arguments, message):
    code, out, err = ridgeline_(capsys, "explain", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_saved_profile_takes_no_other_facts(run):
    assert explain(run) == read_profile(run)
    with pytest.raises(UsageError, match="is explained already"):
        explain(run, gpu="NVIDIA L4")


def test_facts_that_are_none_are_refused(tmp_path):
    path = tmp_path / "x.facts.json"
    for text in ('{"alone": 3}', '{"alone": {"n": "x"}}', "[]", '{"alone"'):
        path.write_text(text)
        with pytest.raises(UsageError, match="holds no facts"):
            explain(LOADER, facts=path)


def test_sources_come_from_a_trace_with_stacks(monkeypatch):
    steps = []
    monkeypatch.setattr("ridgeline.explainer.explain", lambda step: (steps.append(step), ((), (), ()))[1])
    explain(TRACES / "syncing.json.gz")
    known = steps[0]
    blank = replace(
        known,
        kernels=tuple(replace(kernel, source="", module="") for kernel in known.kernels),
        syncs=tuple(replace(sync, source="") for sync in known.syncs),
    )
    assert any(kernel.source for kernel in known.kernels)
    # a frame's line is the first one of its function
    assert {sync.source for sync in known.syncs} >= {"step (traces.py:115)"}
    assert known.settings["traced_steps"] == "2"
    assert with_sources(blank, known) == known
    assert with_sources(known, blank) == known


def test_laptops_need_no_torch_for_saved_runs(run, tmp_path):
    code = (
        "import sys; from ridgeline.cli import main; "
        f"trace, run, page = {str(LOADER)!r}, {str(run)!r}, {str(tmp_path / 'page.html')!r}; "
        "codes = [main(['explain', trace]), main(['report', run, '--html', page]), main(['diff', run, run]), "
        "main(['explain', '--scorecard'])]; "
        "print(codes, sorted({'torch', 'triton', 'numpy'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[0, 0, 0, 0] []"


# --- report and diff -------------------------------------------------------------------------------------------------


def test_a_run_is_shown_in_every_format(capsys, run, tmp_path):
    code, table, _ = ridgeline_(capsys, "report", run, "--rows", 2)
    assert code == 0
    assert "input-bound" in table
    _, comma, _ = ridgeline_(capsys, "report", run, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(comma)))
    profile = read_profile(run)
    assert sum(float(row["total_seconds"]) for row in rows) == pytest.approx(profile.step_s)
    _, data, _ = ridgeline_(capsys, "report", run, "--format", "json", "--html", tmp_path / "run.html")
    assert json.loads(data)["subject"] == "loader-bound"
    assert (tmp_path / "run.html").stat().st_size < 500_000


def test_a_trace_is_no_saved_run(capsys):
    code, _, err = ridgeline_(capsys, "report", GRAPH)
    assert code == 2
    assert "is no saved profile (a trace: `ridgeline explain` reads it)" in err


@pytest.fixture
def slower(run, tmp_path):
    """The same run with a step that takes ten percent longer."""
    profile = read_profile(run)
    wall = WallTime(
        *(1.1 * seconds for seconds in (profile.wall.median_s, profile.wall.low_s, profile.wall.high_s)), 30
    )
    return write_profile(tmp_path / "slower.json", replace(profile, wall=wall))


def test_a_regression_fails_in_continuous_integration(capsys, run, slower):
    code, out, _ = ridgeline_(capsys, "diff", run, slower)
    assert code == 0
    assert "slower" in out
    code, out, err = ridgeline_(capsys, "diff", run, slower, "--fail-on", "wall>3%", "--fail-on", "busy>3%")
    assert code == 1
    assert "wall grew from 52.8 ms to 58.0 ms" in err
    assert err.count("\n") == 1
    assert ridgeline_(capsys, "diff", run, slower, "--fail-on", "wall>20%")[0] == 0
    assert ridgeline_(capsys, "diff", slower, run, "--fail-on", "wall>3%")[0] == 0
    code, out, err = ridgeline_(capsys, "diff", "absent.json", run, "--fail-on", "wall>3")
    assert (code, out) == (2, "")
    assert "'wall>3' is no limit" in err
    for figure in ("wal>3%", "category:layuot>3%", "kernel:absent>1us"):
        code, out, err = ridgeline_(capsys, "diff", run, slower, "--fail-on", "wall>3%", "--fail-on", figure)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1


def test_profiles_of_two_things_are_not_compared_by_mistake(capsys, run, tmp_path):
    other = write_profile(tmp_path / "other.json", replace(read_profile(run), subject="another loop"))
    code, _, err = ridgeline_(capsys, "diff", run, other)
    assert code == 2
    assert "not of one subject" in err
    assert ridgeline_(capsys, "diff", run, other, "--unlike", "--format", "md")[0] == 0
    code, out, err = ridgeline_(capsys, "diff", run, other, "--unlike", "--fixed", "H1")
    assert (code, out) == (2, "")
    assert "a fix is scored on one subject and GPU" in err


def test_a_fix_is_scored(capsys, run, tmp_path):
    before = read_profile(run)
    promised = before.findings[0].saving
    assert isinstance(promised, Saving)
    left_s = before.wall.median_s - promised.mid_s
    after = write_profile(tmp_path / "after.json", replace(before, wall=WallTime(left_s, left_s, left_s, 30)))
    code, _, err = ridgeline_(capsys, "diff", run, after, "--fixed", "H1")
    assert code == 0
    assert "inside the interval" in err
    code, out, _ = ridgeline_(capsys, "explain", "--scorecard")
    assert code == 0
    assert out.startswith("all rules: 1 of 1 inside the interval (100 %)")
    code, out, _ = ridgeline_(capsys, "explain", after)
    assert "Promised and brought" in out and "inside the interval" in out
    assert "Promised and brought" in ridgeline_(capsys, "report", after)[1]
    code, out, err = ridgeline_(capsys, "diff", run, after, "--fixed", "K99")
    assert (code, out) == (2, "")
    assert "no finding K99" in err


def test_a_fix_of_one_of_several_findings_is_scored(capsys, run, tmp_path):
    found = read_profile(run)
    first, *others = found.findings
    twice = (replace(first, source="train.py:7"), replace(first, source="train.py:9"), *others)
    before = write_profile(tmp_path / "before.json", replace(found, findings=twice))
    code, _, err = ridgeline_(capsys, "diff", before, run, "--fixed", first.rule)
    assert code == 2
    assert "name the source, one of train.py:7, train.py:9" in err
    code, _, err = ridgeline_(capsys, "diff", before, run, "--fixed", f"{first.rule}@train.py:9")
    assert code == 0
    assert f"ridgeline diff: {first.rule}@train.py:9 " in err


# --- profile ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def profiling(monkeypatch, tmp_path):
    """The runner as on a machine with a GPU, and a folder of its own to run in."""
    monkeypatch.setattr(ridgeline.profiling, "require_gpu", lambda: None)
    monkeypatch.chdir(tmp_path)
    return ridgeline.profiling


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")
def test_without_a_gpu_the_verb_says_what_works(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = ridgeline_(capsys, "profile", "--", "python", "train.py")
    assert (code, out) == (3, "")
    assert err.count("\n") == 1
    assert "ridgeline roofline MODEL" in err
    assert list(tmp_path.iterdir()) == []


def test_a_command_is_profiled_saved_and_shown(capsys, profiling, monkeypatch, run, tmp_path):
    asked = []

    def profile_command(command, folder, choices, **rest):
        asked.append((command, folder, choices, rest["name"], rest["shown"]))
        (folder / "run.json").touch()
        return read_profile(run)

    monkeypatch.setattr(profiling, "profile_command", profile_command)
    argv = ["profile", "--steps", "7", "--stacks", "--format", "json", "--", "python", "tools/train.py", "--lr", "3"]
    code, out, err = ridgeline_(capsys, *argv)
    assert code == 0
    assert json.loads(out)["subject"] == "loader-bound"
    choices = profiling.Choices(steps=7, stacks=True)
    folder = Path("ridgeline-profile/train-1")
    assert asked == [
        (["python", "tools/train.py", "--lr", "3"], folder, choices, "train", f"ridgeline {' '.join(argv)}")
    ]
    assert f"traces and profile are in {folder}" in err
    assert ridgeline_(capsys, *argv)[0] == 0
    assert asked[1][1] == Path("ridgeline-profile/train-2")


def test_the_exit_code_of_a_command_passes_through(capsys, profiling, tmp_path):
    command = [sys.executable, "-c", "import sys; sys.exit(7)"]
    code, out, err = ridgeline_(capsys, "profile", "--out", tmp_path / "run", "--", *command)
    assert (code, out) == (7, "")
    assert "failed with exit code 7 in its timed run" in err
    assert not (tmp_path / "run").exists()


def test_targets_are_told_from_commands(capsys, profiling, monkeypatch, run):
    asked = []

    def profile_target(text, folder, choices, **rest):
        asked.append(text)
        return read_profile(run)

    monkeypatch.setattr(profiling, "profile_target", profile_target)
    assert ridgeline_(capsys, "profile", "net.py:build")[0] == 0
    assert asked == ["net.py:build"]
    for words in (["python", "train.py"], [], ["--"]):
        code, _, err = ridgeline_(capsys, "profile", *words)
        assert code == 2
        assert "ridgeline profile -- python train.py" in err
    assert ridgeline_(capsys, "profile", "--steps", 0, "net.py:build")[0] == 2


def test_a_captured_target_is_traced_outside_its_graph_too(profiling, monkeypatch, tmp_path):
    runs = []

    def trace_steps(command, plan, trace, *, say):
        runs.append(trace.name)
        if trace.name == "operators.json.gz":
            assert command[-1] == "--operators"
            raise CommandFailed(5, "trace")

    def record_command(command, folder, choices, *, say):
        shutil.copy(GRAPH, folder / "trace.json.gz")
        wall = WallTime(0.00143, 0.00143, 0.00144, 30)
        return profiling.Facts(wall, seen=40, first=5, complete=True, gpu="NVIDIA H200")

    monkeypatch.setattr(profiling, "trace_steps", trace_steps)
    monkeypatch.setattr(profiling, "record_command", record_command)
    choices = profiling.Choices()
    found = profiling.profile_target("n.py:build", tmp_path, choices, name="n", shown="again", say=lambda _: None)
    assert runs == ["operators.json.gz"]
    assert (found.subject, found.wall.n) == ("n", 30)
    assert read_profile(tmp_path / "run.json") == found
