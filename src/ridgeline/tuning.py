"""Search an op's configs on given problems, once, so that no call ever has to: winners go into the tables of `tuned`.

For each distinct problem: the candidates are compiled in child processes, because a compiler that aborts takes its
process along; each one's output is judged against float64 before it is timed, because a tile can compile, run and be
wrong; the survivors are timed interleaved, as replays of a CUDA graph that holds a chain of launches, because that is
how a network runs them. The default keeps its place unless the fastest is faster beyond the spread of both.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import chain
from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from ridgeline import tuned
from ridgeline.cudagraph import capture
from ridgeline.errors import EnvironmentUnusable
from ridgeline.kernels._op import MATMUL, RIVAL, Launch, Op, Target, computed_in, dtype_name, target_of
from ridgeline.numerics import TF32_EPS, compare, to_float64
from ridgeline.precompile import precompile, request
from ridgeline.timing import Timing, differs, gpu_state, time_many
from ridgeline.tuned import Row

_log = logging.getLogger(__name__)

WIDTH = 12  # of YOLO26n's 84 problems on an H200, the best of these took 0.3 % longer in total than the best of all

_CHAIN = 20  # launches a graph: its own launch cost no longer shows
_CHAIN_BYTES, _CHAIN_FLOPS = 2**29, 2**36  # some 100 µs: shorter chains of large kernels, which need no help
_SCREEN_REPEATS, _FINAL_REPEATS = 7, 31
_FINALISTS = 4

Call = Callable[[], object]
Problem = tuple[Op, Mapping[str, Any]]
Progress = Callable[[int, int, Row], None]


@dataclass(frozen=True)
class Backend:
    """The steps that need a GPU, so that a test can bring its own."""

    compile: Callable[[Sequence[str], int], Generator[str | None, None, None]]  # see `precompile`
    measure: Callable[[Mapping[str, Call], int], Mapping[str, Timing]]  # (calls, repeats)
    device: Callable[[Tensor], str]  # the name of the GPU that holds a tensor


def tune(op: Op, problems: Iterable[Mapping[str, Any]], **choices: Any) -> tuple[Row, ...]:
    """The best config of one op for each distinct problem; `choices` are those of `tune_all`."""
    return tune_all(((op, arguments) for arguments in problems), **choices)


def tune_all(
    *stages: Iterable[Problem],
    width: int | None = WIDTH,
    budget_s: float | None = None,
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
    backend: Backend | None = None,
) -> tuple[Row, ...]:
    """The best config for each distinct problem of each op; new ones are in the user's table when this returns.

    stages      of problems, an op and its arguments each, on a GPU; an `out` among them is overwritten. The problems of
                a stage are asked for when the tables have those of the stages before
    width       candidates to try beside the default, the likeliest; None: all that an op proposes
    budget_s    wall time after which no further problem is begun; what was tuned by then stays
    jobs        compilers at a time; None: one less than the processor's cores
    force       time every candidate again; otherwise only those that the table has no time for, beside its winner
    progress    called as progress(done, total, row); the total is that of the stages so far

    One stage for many ops is faster than one an op: the compilers start once, and compile for the next problems while
    the GPU times the present one. Raises EnvironmentUnusable for problems that are on no GPU, or when the GPU or the
    compilers stop working.
    """
    backend = backend or Backend(precompile, _measure, _device_name)
    jobs = jobs or max(1, len(os.sched_getaffinity(0)) - 1)
    alarm = threading.Timer(budget_s or 0, lambda: None)
    alarm.daemon = True
    rows: list[Row] = []
    total = 0
    if budget_s is not None:
        alarm.start()
    for problems in stages:
        before = total
        with closing(_in_turn(problems, jobs, backend, width, force=force)) as turns:
            for works, work, answers in turns:
                total = before + works
                if alarm.finished.is_set():
                    _log.warning("the budget of %g s ended after %d of %d problems", budget_s, len(rows), total)
                    return tuple(rows)
                row = _tune_one(work, answers, backend) if work.configs else work.known
                if row is None:
                    continue
                if row is not work.known:
                    tuned.merge([row])
                rows.append(row)
                if progress is not None:
                    progress(len(rows), total, row)
    alarm.cancel()
    return tuple(rows)


# --- one problem -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    """What is left to do for one problem: nothing, or `configs`, of which the first is the one to beat."""

    op: Op
    arguments: Mapping[str, Any]
    place: tuple[str, str, str]  # device, dtype, key
    target: Target
    known: Row | None
    configs: tuple[Any, ...]
    requests: Mapping[Any, tuple[str, ...]]  # to the compiler, by config
    refused: Mapping[str, str]  # why the op itself will not launch a config

    @property
    def texts(self) -> Iterator[str]:
        """All requests, in the order of configs."""
        return chain.from_iterable(self.requests.values())


def _in_turn(
    problems: Iterable[Problem], jobs: int, backend: Backend, width: int | None, *, force: bool
) -> Generator[tuple[int, _Work, Mapping[str, str | None]], None, None]:
    """How many distinct problems there are, one of them when its requests are answered, and all answers so far.

    The costliest comes first: a budget is spent where it counts.
    """
    works: dict[tuple[str, ...], _Work] = {}
    for op, arguments in problems:
        place = _place(op, arguments, backend.device)
        if (op.name, *place) not in works:
            works[op.name, *place] = _work(op, arguments, place, width, force=force)
    in_turn = sorted(works.values(), key=_bytes, reverse=True)
    # what several candidates launch is compiled once
    requests = tuple(dict.fromkeys(text for work in in_turn for text in work.texts))
    answers: dict[str, str | None] = {}
    with closing(backend.compile(requests, jobs)) as outcomes:
        for work in in_turn:
            while not answers.keys() >= set(work.texts):
                answers[requests[len(answers)]] = next(outcomes)
            yield len(works), work, answers


def _bytes(work: _Work) -> int:
    """What its call moves."""
    cost = work.op.cost(**_without_out(work.arguments))
    return cost.read_bytes + cost.write_bytes


def _place(op: Op, arguments: Mapping[str, Any], device: Callable[[Tensor], str]) -> tuple[str, str, str]:
    x = computed_in(arguments)
    return device(x), dtype_name(x.dtype), op.key(**arguments)


def _work(
    op: Op,
    arguments: Mapping[str, Any],
    place: tuple[str, str, str],
    width: int | None,
    *,
    force: bool,
) -> _Work:
    x = computed_in(arguments)
    target = target_of(x)
    if x.is_cuda and int(target.arch.removeprefix("sm_")) >= 90 and "pdl" in inspect.signature(op.reference).parameters:
        arguments = {"pdl": True, **arguments}  # how a captured network launches it there
    configs = op.launcher.candidates(target=target, **arguments)[: None if width is None else 1 + width]
    device, dtype, key = place
    known = None if force else tuned.load(op.name, device, op.source_hash).row(dtype, key)
    winner = None if known is None else tuned.build(_kind(configs, known), known.config)
    if known is not None and winner is not None:
        new = tuple(config for config in configs if _tag(config) not in known.tried)
        # rows of older versions have no time of the product of matrices
        complete = MATMUL in known.tried or _matmul(op, arguments) is None
        configs = () if complete and not new else (winner, *new)
    else:
        known = None
    requests, refused = {}, {}
    for config in configs:
        try:
            requests[config] = _requests(op, arguments, config, target)
        except ValueError as error:  # a config may suit some of the problems only
            refused[_tag(config)] = str(error)
    return _Work(op, arguments, place, target, known, configs, requests, refused)


def _kind(configs: Sequence[Any], row: Row) -> type:
    """Of several kinds of configs the one that a row has, by its fields."""
    alike = (type(config) for config in configs if _values(config).keys() == row.config.keys())
    return next(alike, type(configs[0]))


def _tune_one(work: _Work, answers: Mapping[str, str | None], backend: Backend) -> Row | None:
    """`answers` are the compiler's, by request: None, or why it failed."""
    op, failed = work.op, dict(work.refused)
    for config, texts in work.requests.items():
        reasons = [reason for text in texts if (reason := answers[text])]
        failed |= {_tag(config): reasons[0]} if reasons else {}
    launches = _correct(work, failed)
    device, dtype, key = work.place
    first = _tag(work.configs[0])
    if first not in launches:
        _log.warning("%s %s: not tuned, the config to beat failed: %s", op.name, key, failed[first])
        return None
    cost = op.cost(**_without_out(work.arguments))
    enough = _CHAIN_BYTES // max(1, cost.read_bytes + cost.write_bytes), _CHAIN_FLOPS // max(1, cost.flops)
    length = max(2, min(_CHAIN, *enough))
    calls = {tag: _chain(launch.run, length, work.arguments) for tag, launch in launches.items()}
    timings = dict(backend.measure(calls, _SCREEN_REPEATS))
    best = sorted(timings, key=lambda tag: timings[tag].median_s)[:_FINALISTS]
    # the screening picked the luckiest of many, so the finals are timed anew
    rivals = _rival(work, length)
    again = {tag: calls[tag] for tag in dict.fromkeys((first, *best))}
    finals = dict(backend.measure({**again, **rivals}, _FINAL_REPEATS))
    beside = {tag: finals.pop(tag) for tag in rivals}
    ranked = sorted(finals, key=lambda tag: finals[tag].median_s)
    winner = ranked[0] if differs(finals[ranked[0]], finals[first]) else first
    others = [_rounded(finals[tag].median_s / length) for tag in ranked if tag != winner]
    tried = {tag: _rounded(timing.median_s / length) for tag, timing in {**timings, **finals, **beside}.items()}
    return Row(
        op=op.name,
        source_hash=op.source_hash,
        device=device,
        dtype=dtype,
        key=key,
        config=next(_values(config) for config in work.configs if _tag(config) == winner),
        seconds=tried[winner],
        runner_up_seconds=next(iter(others), work.known.runner_up_seconds if work.known else None),
        torch=torch.__version__,
        triton=triton.__version__,
        driver=_driver(),
        tried={**(work.known.tried if work.known else {}), **failed, **tried},
    )


def _correct(work: _Work, failed: dict[str, str]) -> dict[str, Launch]:
    """The launches whose output is right, all with one output tensor; adds the others' reasons to `failed`."""
    op, arguments = work.op, _without_out(work.arguments)
    with torch.no_grad():
        reference64, eager = op.reference(**to_float64(arguments)), op.reference(**arguments)
    # TF32 rounds operands to ten bits, which the fp32 of the tensors does not tell
    bound = inspect.signature(op.reference).bind(**arguments)
    bound.apply_defaults()
    eps = TF32_EPS if eager.dtype == torch.float32 and bound.arguments.get("precision") == "tf32" else None
    eps = op.eps(**arguments) if op.eps is not None else eps
    launches: dict[str, Launch] = {}
    output = before = None
    for config in work.configs:
        tag = _tag(config)
        if tag in failed:
            continue
        launch = op.launcher.plan(config=config, target=work.target, **work.arguments)
        if output is None or before is None:
            output = launch.output
            in_place = any(t.data_ptr() == output.data_ptr() for t in arguments.values() if isinstance(t, Tensor))
            # what a launch leaves unwritten must not be the right answer of the one before
            before = output.clone() if in_place else torch.full_like(output, math.nan)
        launch = _writing(launch, output)
        output.copy_(before)
        try:
            launch.run()
            verdict = compare(output, reference64, eager, error_factor=op.error_factor, eps=eps)
        except (TritonError, RuntimeError) as error:
            failed[tag] = _first_line(error)
            _check_alive(output, op, config, error)
            continue
        if verdict.passed:
            launches[tag] = launch
        else:
            failed[tag] = f"wrong: {verdict.reason}"
    return launches


def _check_alive(output: Tensor, op: Op, config: Any, cause: Exception) -> None:
    """After an illegal access no call of this process succeeds any more; every later candidate would seem to fail."""
    if output.is_cuda:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise EnvironmentUnusable(
                f"{op.name}: {config} broke the GPU's context ({_first_line(cause)}): leave it out of the candidates "
                f"and tune again, what was tuned before is kept"
            ) from cause


def _rival(work: _Work, length: int) -> dict[str, Call]:
    """PyTorch's own kernels as chains, where the op names some."""
    rival = work.op.launcher.rival
    calls = {
        RIVAL: None if rival is None else rival(**_without_out(work.arguments)),
        MATMUL: _matmul(work.op, work.arguments),
    }
    return {tag: _chain(call, length, work.arguments) for tag, call in calls.items() if call is not None}


def _matmul(op: Op, arguments: Mapping[str, Any]) -> Call | None:
    """PyTorch's product of matrices, where the call is one."""
    matmul = op.launcher.matmul
    return None if matmul is None else matmul(**_without_out(arguments))


def _chain(call: Call, length: int, arguments: Mapping[str, Any]) -> Call:
    def calls() -> None:
        for _ in range(length):
            call()

    return capture(calls, (), warmup=1).replay if computed_in(arguments).is_cuda else calls


def _measure(calls: Mapping[str, Call], repeats: int) -> Mapping[str, Timing]:
    return time_many(calls, warmup=1, repeats=repeats, l2="warm", log_clocks=False)


def _device_name(x: Tensor) -> str:
    if not x.is_cuda:
        raise EnvironmentUnusable(f"tune: the problems must be on a GPU, got {x.device}: move their tensors to cuda")
    return torch.cuda.get_device_name(x.device)


def _writing(launch: Launch, output: Tensor) -> Launch:
    def redirected(value: Any) -> Any:
        if isinstance(value, GluonDescriptor) and value.base is launch.output:
            return replace(value, base=output)
        return output if value is launch.output else value

    arguments = {name: redirected(value) for name, value in launch.arguments.items()}
    return replace(launch, arguments=arguments, output=output)


def _without_out(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the op itself takes; `out` belongs to its launch."""
    return {name: value for name, value in arguments.items() if name != "out"}


def _values(config: Any) -> dict[str, tuned.Value]:
    return {field.name: getattr(config, field.name) for field in fields(config)}


def _tag(config: Any) -> str:
    return " ".join(map(str, _values(config).values()))


def _rounded(value_s: float) -> float:
    return float(f"{value_s:.4g}")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _requests(op: Op, arguments: Mapping[str, Any], config: Any, target: Target) -> tuple[str, ...]:
    """What the compiler is asked for: one text a kernel launch."""
    where = {"arch": target.arch, "shared_limit_bytes": target.shared_bytes}
    launch = op.launcher.plan(config=config, target=target, **arguments)
    return tuple(request(part.kernel, part.arguments, part.constants, part.options, **where) for part in launch.parts)


@cache
def _driver() -> str:
    state = gpu_state()
    return state.driver if state else "none"
