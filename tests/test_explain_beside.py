"""What `ridgeline explain` is told beside a trace must be of that trace; its figures are of one step and one GPU."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.cli import main
from ridgeline.errors import UsageError
from ridgeline.explaining import explain, kernels_of_step
from ridgeline.profile_plan import Facts, write_record
from ridgeline.profile_record import WallTime
from ridgeline.profile_text import render
from ridgeline.trace_reader import read_trace

TRACES = Path(__file__).parent / "fixtures" / "traces"
LOADER = TRACES / "loader-bound.json.gz"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Ceilings that were measured on this machine, and its scorecard, stay out of the tests."""
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "cache"))


def ridgeline_(capsys, *argv: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    code = main([str(word) for word in argv])
    return code, *capsys.readouterr()


def test_facts_of_another_step_are_refused(capsys, tmp_path):
    code, out, err = ridgeline_(
        capsys, "explain", TRACES / "syncing.json.gz", "--facts", TRACES / "yolo26n-eager.facts.json"
    )
    assert (code, out) == (2, "")
    assert "has the facts of 'yolo26n-eager' and the trace is 'syncing'" in err and err.count("\n") == 1
    # what `ridgeline profile` wrote: named by place, told by GPU and kernels
    known = Facts(WallTime(0.0528, 0.0527, 0.0529, 30), 30, 0, complete=True, gpu="NVIDIA H200", kernels=71)
    path = tmp_path / "trace.facts.json"
    write_record(path, replace(known, kernels=66))  # as traced outside its graph
    assert explain(LOADER, facts=path).wall == known.wall
    write_record(path, replace(known, kernels=527))
    with pytest.raises(UsageError, match=r"facts of a step of 527 kernels and that of .* has 71: name its own"):
        explain(LOADER, facts=path)
    write_record(path, replace(known, gpu="NVIDIA L4"))
    with pytest.raises(UsageError, match=r"facts of a step on NVIDIA L4 and .* is from NVIDIA H200"):
        explain(LOADER, facts=path)
    assert kernels_of_step(read_trace(LOADER)) == 71


def test_operators_of_another_step_are_refused(capsys):
    for trace, operators, message in (
        ("ddpm-graph", "yolo26n-eager", r"0.1 % of the graph's kernel time, and 70 % is the least"),
        ("ddpm-graph", "ddpm-baseline", r"42.5 % of the graph's kernel time"),
        ("syncing", "yolo26n-eager", "holds no CUDA graph, whose kernels --operators would name: leave it out"),
    ):
        words = TRACES / f"{trace}.json.gz", "--operators", TRACES / f"{operators}.json.gz"
        code, out, err = ridgeline_(capsys, "explain", *words)
        assert (code, out) == (2, "")
        assert message in err and err.count("\n") == 1


def test_a_trace_that_names_no_gpu_is_of_the_one_that_is_named(tmp_path):
    data = json.loads(gzip.decompress(LOADER.read_bytes()))
    del data["deviceProperties"]
    (tmp_path / "theirs.json").write_text(json.dumps(data))
    found = explain(tmp_path / "theirs.json", gpu="L4")
    assert (found.gpu, found.ceilings_gpu, found.extra.get("caution")) == ("NVIDIA L4", "", None)
    assert explain(tmp_path / "theirs.json").gpu == "unknown GPU"


@pytest.mark.parametrize("name", ["ddpm-baseline", "syncing", "yolo26n-graph"])
def test_all_shares_are_of_the_unprofiled_step(name):
    found = explain(TRACES / f"{name}.json.gz")
    assert sum(bar.seconds for bar in found.waterfall) == pytest.approx(found.wall.median_s)
    assert found.busy_s + sum(found.idle.values()) == pytest.approx(found.wall.median_s)
    assert found.wall.median_s < found.traced_step_s
    if name == "ddpm-baseline":
        said = render(found, "md")
        assert "| layout | 4.30 ms | 13.2 % |" in said
        assert "385 layout conversions around convolutions take 13.2 % of the step" in said
        assert "Shares are of the unprofiled step, 32.5 ms. Idle time is without the 41.9 ms that" in said
