"""The search: who is timed, who wins, what is remembered. Kernels run; compilers and clocks are mostly stand-ins."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline import tuned
from ridgeline.cost import Cost
from ridgeline.errors import EnvironmentUnusable
from ridgeline.kernels import conv_chain
from ridgeline.kernels._op import MATMUL, RIVAL, LastLaunch, Launch, nearest_first
from ridgeline.precompile import precompile
from ridgeline.timing import Timing
from ridgeline.tuning import WIDTH, Backend, tune, tune_all

GPU = "NVIDIA Test"


@triton.jit
def scale_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, FACTOR: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * FACTOR, mask=i < n)


@dataclass(frozen=True)
class Config:
    block: int
    fault: str = "none"


class Broken:
    """A kernel that cannot be launched, or whose compiler dies: importing its module ends the process."""

    fn = SimpleNamespace(__module__="dies")
    __name__ = "broken_kernel"

    def __getitem__(self, grid: object) -> Any:
        raise RuntimeError("Triton Error [CUDA]: invalid argument\nmore")


def plan(*, x: Tensor, config: Config | None = None, target: object = None, out: Tensor | None = None) -> Launch:
    config = config or Config(16)
    if config.fault == "refused":
        raise ValueError("toy: block 7 is not valid")
    y = torch.empty_like(x) if out is None else out
    return Launch(
        kernel=Broken() if config.fault == "broken" else scale_kernel,
        grid=(triton.cdiv(x.numel(), config.block) - (config.fault == "partial"),),
        arguments={"x_ptr": x, "y_ptr": y, "n": x.numel()},
        constants={"BLOCK": config.block, "FACTOR": 3 if config.fault == "wrong" else 2},
        num_warps=1,
        num_stages=1,
        output=y,
    )


def toy(*proposed: Config, name: str = "toy", rival: Any = None, matmul: Any = None) -> Any:
    """y = 2 x, with `proposed` after its default."""
    return SimpleNamespace(
        name=name,
        source_hash=tuned.source_hash(Path(__file__)),
        reference=lambda x: x * 2,
        cost=lambda x: Cost(flops=x.numel(), read_bytes=x.nbytes, write_bytes=x.nbytes, pipe="cuda_fp32"),
        error_factor=2.0,
        eps=None,
        launcher=SimpleNamespace(
            plan=plan,
            candidates=lambda target=None, **_: (Config(16), *proposed),
            rival=rival,
            matmul=matmul,
        ),
        key=lambda x, out=None: f"{x.numel()}",
    )


def timing(median_s: float, spread_s: float = 0.0) -> Timing:
    return Timing(median_s, median_s - spread_s, median_s + spread_s, median_s, 9, "cuda-event", "warm")


@dataclass
class Lab:
    """A backend that remembers what it was asked, and measures what it was told.

    `seconds` maps a tag to the time of one launch; a pair gives first the screening's, then the final's.
    """

    seconds: dict[str, float | tuple[float, float]] = field(default_factory=dict)
    spread_s: float = 0.0
    run: bool = False
    compiled: list[int] = field(default_factory=list)
    measured: list[list[str]] = field(default_factory=list)

    @property
    def backend(self) -> Backend:
        return Backend(self.compile, self.measure, lambda x: GPU)

    def compile(self, requests: Sequence[str], jobs: int) -> Iterator[str | None]:
        self.compiled.append(len(requests))
        yield from (None for _ in requests)

    def measure(self, calls: Mapping[str, Any], repeats: int) -> dict[str, Timing]:
        final = len(self.measured) % 2
        self.measured.append(list(calls))
        if self.run:
            for call in calls.values():
                call()
        wanted = {tag: self.seconds.get(tag, 9.0) for tag in calls}
        return {tag: timing(20 * (s[final] if isinstance(s, tuple) else s), self.spread_s) for tag, s in wanted.items()}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "_SHIPPED", tmp_path / "shipped")
    tuned.load.cache_clear()
    yield
    tuned.load.cache_clear()


def problem(n: int = 40, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"x": torch.randn(n, generator=torch.Generator().manual_seed(0)).to(dtype)}


def looked_up(row: tuned.Row) -> dict[str, Any] | None:
    return tuned.lookup(row.op, row.device, row.dtype, row.key, source_hash=row.source_hash)


def test_pytorchs_kernel_is_timed_beside_the_candidates():
    called = []

    def rival(x):
        return lambda: called.append(x.numel()) or x * 2

    lab = Lab({"16 none": 4.0, "32 none": 2.0, RIVAL: 1.0}, run=True)
    (row,) = tune(toy(Config(32), rival=rival), [problem()], backend=lab.backend)
    # in the finals alone, and never the winner
    assert [RIVAL in tags for tags in lab.measured] == [False, True]
    assert called == [40] * 20
    assert (row.config["block"], row.seconds, row.runner_up_seconds) == (32, 2.0, 4.0)
    assert row.tried[RIVAL] == 1.0


def test_pytorchs_product_of_matrices_is_timed_where_the_call_is_one():
    lab = Lab({"16 none": 4.0, RIVAL: 3.0, MATMUL: 1.0}, run=True)
    op = toy(rival=lambda x: lambda: x * 2, matmul=lambda x: (lambda: x * 2) if len(x) == 40 else None)
    rows = tune(op, [problem(), problem(41)], backend=lab.backend)
    assert {row.key: row.tried for row in rows} == {
        "40": {"16 none": 4.0, RIVAL: 3.0, MATMUL: 1.0},
        "41": {"16 none": 4.0, RIVAL: 3.0},
    }
    lab = Lab()
    assert tune(op, [problem(), problem(41)], backend=lab.backend) == rows and lab.measured == []


def test_a_row_without_the_time_of_the_product_of_matrices_gets_it_beside_its_winner():
    """As rows of older versions are; the other candidates keep their times."""
    lab = Lab({"16 none": 4.0, "32 none": 2.0, RIVAL: 3.0})
    choices: dict[str, Any] = {"rival": lambda x: lambda: x * 2}
    (old,) = tune(toy(Config(32), **choices), [problem()], backend=lab.backend)
    choices["matmul"] = choices["rival"]
    lab = Lab({"32 none": 2.0, RIVAL: 3.0, MATMUL: 1.0})
    (row,) = tune(toy(Config(32), **choices), [problem()], backend=lab.backend)
    assert lab.measured == [["32 none"], ["32 none", RIVAL, MATMUL]]
    assert row == replace(old, tried={**old.tried, MATMUL: 1.0})
    assert tune(toy(Config(32), **choices), [problem()], backend=Lab().backend) == (row,)


def test_the_fastest_is_remembered():
    lab = Lab({"16 none": 4.0, "32 none": 2.0, "64 none": 3.0}, run=True)
    seen = []
    (row,) = tune(toy(Config(32), Config(64)), [problem()], backend=lab.backend, progress=lambda *a: seen.append(a))
    assert row == tuned.Row(
        op="toy",
        source_hash=tuned.source_hash(Path(__file__)),
        device=GPU,
        dtype="fp32",
        key="40",
        config={"block": 32, "fault": "none"},
        seconds=2.0,
        runner_up_seconds=3.0,
        torch=torch.__version__,
        triton=triton.__version__,
        driver=row.driver,
        tried={"16 none": 4.0, "32 none": 2.0, "64 none": 3.0},
    )
    assert looked_up(row) == row.config
    assert seen == [(1, 1, row)]
    assert lab.compiled == [3]


def test_wrong_candidates_are_never_timed():
    faults = ("wrong", "partial", "broken", "refused")
    lab = Lab({f"32 {fault}": 0.1 for fault in faults} | {"32 none": 2.0, "16 none": 4.0})
    (row,) = tune(toy(*(Config(32, fault) for fault in faults), Config(32)), [problem()], backend=lab.backend)
    assert row.config == {"block": 32, "fault": "none"}
    assert {tag for tags in lab.measured for tag in tags} == {"16 none", "32 none"}
    assert str(row.tried["32 wrong"]).startswith("wrong: RMS error")
    assert "NaN" in str(row.tried["32 partial"])  # the block it leaves out is not the last candidate's right answer
    assert row.tried["32 broken"] == "RuntimeError: Triton Error [CUDA]: invalid argument"
    assert row.tried["32 refused"] == "toy: block 7 is not valid"
    assert lab.compiled == [4]  # what is launched on one program less is the same kernel


def test_a_compiler_that_dies_costs_its_candidate_alone(tmp_path, monkeypatch):
    """With real child processes: the one that meets `Broken` ends itself."""
    (tmp_path / "dies.py").write_text("import os\nos._exit(11)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))

    def compile_outside_the_interpreter(requests: Sequence[str], jobs: int) -> Iterator[str | None]:
        with monkeypatch.context() as changed:
            changed.delenv("TRITON_INTERPRET", raising=False)
            outcomes = list(precompile(requests, jobs))
        yield from outcomes

    backend = replace(Lab({"16 none": 4.0, "32 none": 2.0}).backend, compile=compile_outside_the_interpreter)
    (row,) = tune(toy(Config(32, "broken"), Config(32)), [problem()], backend=backend, jobs=1)
    died = "the compiler died: exit code 11, no message"
    assert row.tried == {"16 none": 4.0, "32 broken": died, "32 none": 2.0}
    assert row.config == {"block": 32, "fault": "none"}
    assert list((tmp_path / "triton").rglob("scale_kernel.cubin"))


@pytest.mark.parametrize(("spread_s", "block"), [(0.0, 32), (9.0, 32), (11.0, 16)])
def test_the_default_stays_unless_the_intervals_are_apart(spread_s, block):
    """20 launches of 3 s against 20 of 2 s: 60 and 40 s."""
    (row,) = tune(
        toy(Config(32)), [problem()], backend=Lab({"16 none": 3.0, "32 none": 2.0}, spread_s=spread_s).backend
    )
    assert row.config["block"] == block
    assert (row.seconds, row.runner_up_seconds) == ((2.0, 3.0) if block == 32 else (3.0, 2.0))


def test_luck_in_the_screening_does_not_win():
    lab = Lab({"16 none": 4.0, "32 none": (1.0, 5.0), "64 none": (2.0, 2.0)})
    (row,) = tune(toy(Config(32), Config(64)), [problem()], backend=lab.backend)
    assert row.config["block"] == 64
    assert row.tried["32 none"] == 5.0


def test_few_reach_the_finals_and_the_default_always_does():
    blocks = (32, 64, 128, 256, 512, 1024)
    lab = Lab({f"{block} none": 1.0 + i for i, block in enumerate(blocks)} | {"16 none": 100.0})
    (row,) = tune(toy(*map(Config, blocks)), [problem()], backend=lab.backend)
    assert lab.measured[1] == ["16 none", "32 none", "64 none", "128 none", "256 none"]
    assert len(row.tried) == 7


def test_a_warm_start_tunes_nothing():
    (row,) = tune(toy(Config(32)), [problem()], backend=Lab().backend)
    lab = Lab()
    assert tune(toy(Config(32)), [problem()], backend=lab.backend) == (row,)
    assert lab.compiled == []
    assert lab.measured == []


def test_a_new_candidate_is_timed_beside_the_winner_alone():
    (old,) = tune(toy(Config(32), Config(64)), [problem()], backend=Lab({"16 none": 4.0, "32 none": 2.0}).backend)
    lab = Lab({"32 none": 2.1, "128 none": 1.0})
    (row,) = tune(toy(Config(32), Config(64), Config(128)), [problem()], backend=lab.backend)
    assert lab.compiled == [2]
    assert lab.measured == [["32 none", "128 none"]] * 2
    assert row.config["block"] == 128
    assert row.tried == {**old.tried, "32 none": 2.1, "128 none": 1.0}


def test_force_times_everything_again():
    tune(toy(Config(32)), [problem()], backend=Lab({"16 none": 1.0}).backend)
    lab = Lab({"32 none": 1.0})
    (row,) = tune(toy(Config(32)), [problem()], backend=lab.backend, force=True)
    assert lab.compiled == [2]
    assert row.config["block"] == 32


@pytest.mark.parametrize(("width", "tried"), [(0, 1), (1, 2), (WIDTH, 1 + WIDTH), (None, 17)])
def test_the_likeliest_candidates_stand_beside_the_default(width, tried):
    lab = Lab()
    tune(toy(*(Config(2**i) for i in range(5, 21))), [problem()], backend=lab.backend, width=width)
    assert lab.measured[0] == ["16 none", *(f"{2**i} none" for i in range(5, 21))][:tried]


def test_a_wider_search_adds_to_what_was_tried():
    op = toy(Config(32), Config(64), Config(128))
    tune(op, [problem()], backend=Lab({"32 none": 1.0}).backend, width=1)
    lab = Lab({"32 none": 1.0})
    (row,) = tune(op, [problem()], backend=lab.backend, width=None)
    assert lab.measured[0] == ["32 none", "64 none", "128 none"]
    assert len(row.tried) == 4


def test_many_ops_share_the_compilers_and_each_kernel_is_compiled_once():
    """Two ops that launch the same kernels ask for them once."""
    lab, seen = Lab({"32 none": 1.0, "64 none": 2.0}), []
    ops = toy(Config(32)), toy(Config(32), Config(64), name="other")
    rows = tune_all([(op, problem()) for op in ops], backend=lab.backend, progress=lambda *a: seen.append(a[:2]))
    assert [(row.op, row.config["block"]) for row in rows] == [("toy", 32), ("other", 32)]
    assert lab.compiled == [3]
    assert seen == [(1, 2), (2, 2)]


def test_a_stage_begins_when_the_tables_have_the_one_before():
    """Its problems may depend on them; the total then grows, and the budget is one for all."""
    lab, seen = Lab(), []

    def second() -> Iterator[tuple[Any, dict[str, Any]]]:
        known = tuned.load("toy", GPU, tuned.source_hash(Path(__file__))).rows
        yield from ((toy(), problem(50 + n)) for n in range(len(known)))

    rows = tune_all([(toy(), problem())], second(), backend=lab.backend, progress=lambda *a: seen.append(a))
    assert [row.key for row in rows] == ["40", "50"]
    assert seen == [(1, 1, rows[0]), (2, 2, rows[1])]
    assert lab.compiled == [1, 1]
    slow = replace(lab.backend, measure=lambda calls, repeats: time.sleep(0.3) or lab.measure(calls, repeats))
    rows = tune_all([(toy(), problem(60))], [(toy(), problem(70))], backend=slow, budget_s=0.25)
    assert [row.key for row in rows] == ["60"]


def test_every_kernel_of_a_launch_is_compiled():
    """Three last launches; before them one that two configs share, and one that does not compile."""

    def both(*, x: Tensor, config: Config | None = None, target: object = None) -> LastLaunch:
        first = plan(x=x, config=Config(8, "broken" if config == Config(32) else "none"), target=target)
        return LastLaunch(**vars(plan(x=x, config=config, target=target)), before=(first,))

    lab = Lab()
    op = toy(Config(32), Config(64))
    op.launcher.plan = both

    def compile_all_but_one(requests: Sequence[str], jobs: int) -> Iterator[str | None]:
        list(lab.compile(requests, jobs))
        yield from ("the compiler died" if "broken_kernel" in text else None for text in requests)

    (row,) = tune(op, [problem()], backend=replace(lab.backend, compile=compile_all_but_one))
    assert lab.compiled == [5]
    assert row.tried["32 none"] == "the compiler died"
    assert lab.measured[0] == ["16 none", "64 none"]


def test_the_nearest_config_is_the_one_with_fewest_doublings_between():
    """Equals keep their order, each is there once, and another choice counts as one doubling."""
    default = conv_chain.Config(16, 64, 64, 4, 3, early=True)
    near = [replace(default, num_warps=8), replace(default, early=False), replace(default, block_n=32)]
    far = replace(default, block_m=64), replace(default, block_m=64, early=False)
    assert nearest_first(default, [*far[::-1], *near, default, near[0]]) == (default, *near, *far)


@pytest.mark.parametrize(("flops", "length"), [(1, 20), (2**34, 4), (2**40, 2)])
def test_chains_of_large_kernels_are_short(monkeypatch, flops, length):
    op, runs, run = toy(), [], Launch.run
    op.cost = lambda x: Cost(flops=flops, read_bytes=0, write_bytes=0, pipe="cuda_fp32")
    monkeypatch.setattr(Launch, "run", lambda launch: runs.append(run(launch)))
    tune(op, [problem()], backend=Lab(run=True).backend)
    assert len(runs) == 1 + 2 * length  # the check, the screening and the finals


def test_each_distinct_problem_is_tuned_once():
    lab = Lab()
    problems = [problem(), problem(), problem(50), problem(dtype=torch.float16), problem()]
    rows = tune(toy(), problems, backend=lab.backend)
    # the costliest first
    assert [(row.dtype, row.key) for row in rows] == [("fp32", "50"), ("fp32", "40"), ("fp16", "40")]
    assert lab.compiled == [3]


def test_a_problem_whose_default_fails_is_left_out(monkeypatch, caplog):
    op = toy(Config(32))
    op.launcher.candidates = lambda target=None, x=None: (
        Config(16, "wrong" if x.numel() == 40 else "none"),
        Config(32),
    )
    (row,) = tune(op, [problem(), problem(50)], backend=Lab().backend)
    assert row.key == "50"
    (record,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert "toy 40: not tuned, the config to beat failed: wrong" in record.getMessage()


def test_a_row_that_does_not_fit_the_config_is_tuned_anew():
    (row,) = tune(toy(Config(32)), [problem()], backend=Lab().backend)
    tuned.merge([replace(row, config={"tile": 3})])
    lab = Lab({"32 none": 1.0})
    (row,) = tune(toy(Config(32)), [problem()], backend=lab.backend)
    assert row.config == {"block": 32, "fault": "none"}
    assert lab.compiled == [2]


def test_the_budget_ends_between_two_problems(caplog):
    lab = Lab()
    slow = replace(lab.backend, measure=lambda calls, repeats: time.sleep(0.3) or lab.measure(calls, repeats))
    rows = tune(toy(), [problem(), problem(50)], backend=slow, budget_s=0.25)
    assert [row.key for row in rows] == ["50"]
    assert looked_up(rows[0]) is not None
    assert "ended after 1 of 2 problems" in caplog.text
    assert len(tune(toy(), [problem(), problem(50)], backend=lab.backend, budget_s=60)) == 2


def test_an_output_that_is_also_an_input_is_restored_for_each_candidate():
    x = problem()["x"]
    (row,) = tune(toy(Config(32), Config(64)), [{"x": x, "out": x}], backend=Lab({"64 none": 1.0}).backend)
    assert row.config["block"] == 64
    assert all(isinstance(seconds, float) for seconds in row.tried.values())


def test_problems_on_no_gpu_are_refused():
    with pytest.raises(EnvironmentUnusable, match="must be on a GPU, got cpu"):
        tune(toy(), [problem()])


@pytest.mark.gpu
def test_on_a_gpu_from_end_to_end():
    x = torch.randn(2**20, device="cuda")
    candidates = [Config(1024), Config(1024, "wrong"), Config(512)]
    (row,) = tune(toy(*candidates), [{"x": x}])
    assert row.device == torch.cuda.get_device_name()
    assert row.config["block"] in (512, 1024)  # the default's 65,536 programs of 16 elements cannot keep up
    assert 1e-7 < row.seconds < 1e-3
    assert str(row.tried["1024 wrong"]).startswith("wrong")
    lab = Lab()
    assert tune(toy(*candidates), [{"x": x}], backend=replace(lab.backend, device=lambda x: row.device)) == (row,)
    assert lab.compiled == []
