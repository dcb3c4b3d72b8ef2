"""Compiling in child processes: what is in the cache afterwards, and what becomes of compilers that die."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from contextlib import closing

import pytest
import torch

from ridgeline import precompile as module
from ridgeline.errors import EnvironmentUnusable
from ridgeline.precompile import _Compiler, precompile, request

TOY = """
import triton
import triton.language as tl


@triton.jit
def toy_kernel(x_ptr, y_ptr, bias_ptr, n, one, BLOCK: tl.constexpr, ACT: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n * one)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + i)
    tl.store(y_ptr + i, x, mask=i < n)
"""
NOISY = "import os; os.write(1, b'a note on stdout\\n'); print('another'); from toy import toy_kernel"

# What the launch in the parent process does on a GPU, with the driver replaced: is the cache entry found?
LAUNCH = """
import json, sys
import torch, triton
from ridgeline.precompile import _Driver
from toy import toy_kernel
hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
triton.runtime.driver.set_active(_Driver(90))
for line in sys.stdin:
    case = json.loads(line)
    x = torch.zeros(64, dtype=torch.float16)[case.pop("skip"):]
    toy_kernel.warmup(x, x, None, one=1, grid=(1,), **case)
print(json.dumps(hits))
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The kernel of TOY, with the interpreter off in children and a disk cache of its own."""
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "noisy.py").write_text(NOISY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return importlib.import_module("toy").toy_kernel


def ask(kernel, *, module="toy", block=32, n=48, skip=0, shared_limit_bytes=2**16):
    x = torch.zeros(64, dtype=torch.float16)[skip:]
    arguments = {"x_ptr": x, "y_ptr": x, "bias_ptr": None, "n": n, "one": 1}
    constants = {"BLOCK": block, "ACT": "SiLUD"}
    options = {"num_warps": 1, "launch_pdl": True}
    text = request(kernel, arguments, constants, options, arch="sm_90", shared_limit_bytes=shared_limit_bytes)
    return json.dumps({**json.loads(text), "module": module})


def test_a_launch_finds_what_was_compiled(toy, tmp_path):
    """String constants, integers that 16 divides or not, misaligned pointers, None and 1: all are part of the key."""
    cases = [{"n": 48, "skip": 0}, {"n": 47, "skip": 0}, {"n": 48, "skip": 1}]
    requests = [ask(toy, **case) for case in cases]
    requests.append(ask(toy, block=48))  # an error that the compiler survives
    requests.append(ask(toy, module="noisy", shared_limit_bytes=-1))
    *compiled, failed, too_large = precompile(requests, 1)
    assert compiled == [None] * 3
    assert failed is not None and "power of 2" in failed
    assert too_large == "needs 0 B of shared memory, sm_90 has -1 B"
    lines = [{**case, "BLOCK": 32, "ACT": "SiLUD", "num_warps": 1, "launch_pdl": True} for case in cases]
    lines.append({**lines[0], "BLOCK": 64})  # was not compiled: the listener can tell
    child = subprocess.run(
        [sys.executable, "-c", LAUNCH],
        input="\n".join(map(json.dumps, lines)),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert json.loads(child.stdout) == [True, True, True, False]


@pytest.fixture
def impostor(tmp_path, monkeypatch):
    """Real child processes that are quick to start: a shell that obeys its requests, in place of Python."""
    path = tmp_path / "compiler"
    path.write_text('#!/bin/sh\nread path\necho \'"ready"\'\nwhile read request; do eval "$request"; done\n')
    path.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(path))


FINE = "echo null"
ABORTS = "echo 'UNREACHABLE executed at Lower.cpp:7!' >&2; echo '#0 0x1234 stack' >&2; kill -ABRT $$"


def test_a_dying_compiler_costs_its_own_request_alone(impostor):
    requests = [FINE, "exit 11", ABORTS, FINE, "echo 'a note' >&2; kill -KILL $$", FINE]
    for jobs in (1, 3):
        assert list(precompile(requests, jobs)) == [
            None,
            "the compiler died: exit code 11, no message",
            "the compiler died: SIGABRT, UNREACHABLE executed at Lower.cpp:7!",
            None,
            "the compiler died: SIGKILL, a note",
            None,
        ]


def test_a_hanging_compiler_is_stopped(impostor):
    compiler = _Compiler()
    assert compiler.ask("exec sleep 60", timeout_s=0.2) == ("the compiler took longer than 0.2 s", False)
    assert compiler.ask(FINE) == ("the compiler took longer than 180 s", False)  # it stays dead


def test_compilers_work_at_the_same_time(impostor):
    """Each waits for the other's file; one after the other they would wait for ever."""
    here = "$(dirname $0)"
    wait = f"touch {here}/%s; while [ ! -e {here}/%s ]; do sleep 0.05; done; echo null"
    assert list(precompile([wait % ("a", "b"), wait % ("b", "a")], 2)) == [None, None]


def test_closing_early_stops_the_compilers(impostor, monkeypatch):
    started = []
    start = _Compiler.__init__

    def remember(self):
        start(self)
        started.append(self)

    monkeypatch.setattr(_Compiler, "__init__", remember)
    with closing(precompile([FINE, "exec sleep 60", "exec sleep 60"], 1)) as outcomes:
        assert next(outcomes) is None
    assert [compiler._process.poll() is None for compiler in started] == [False]


def test_a_compiler_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with pytest.raises(EnvironmentUnusable, match=r"does not start \(exit code 1"):
        list(precompile([FINE], 1))


def test_nothing_to_compile_starts_nothing(monkeypatch):
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    assert list(precompile([], 4)) == []
