"""Fill Triton's disk cache from child processes, so that a compiler that aborts takes no one along.

A request is one line of JSON that says what a launch would compile. A child (`python -m ridgeline.precompile`) needs no
GPU and no data: it calls Triton's own launcher with stand-ins for tensors and driver, so that the entry in the cache is
the very one that the launch looks for.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TextIO

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.errors import EnvironmentUnusable
from ridgeline.pending_products import overwrites
from ridgeline.sass import disassemble

TIMEOUT_S = 180.0


def request(
    kernel: Any,
    arguments: Mapping[str, Tensor | TensorDescriptor | GluonDescriptor | int | None],
    constants: Mapping[str, int | float | bool | str | None],
    options: Mapping[str, Any],
    *,
    arch: str,
    shared_limit_bytes: int,
) -> str:
    """What `kernel[grid](**arguments, **constants, **options)` would compile on a GPU of `arch`."""
    plain = {
        "module": kernel.fn.__module__,
        "kernel": kernel.__name__,
        "arguments": {name: _plain(value) for name, value in arguments.items()},
        "constants": dict(constants),
        "options": dict(options),
        "arch": arch,
        "shared_limit_bytes": shared_limit_bytes,
    }
    return json.dumps(plain)


def precompile(requests: Sequence[str], jobs: int) -> Generator[str | None, None, None]:
    """Compile `jobs` requests at a time; yields, in order, None for each that compiled and else the reason.

    A request whose compiler dies, hangs or needs more shared memory than there is costs that request alone. Closing
    the generator stops the compilers. Raises EnvironmentUnusable when a compiler process does not even start.
    """
    idle: queue.SimpleQueue[_Compiler] = queue.SimpleQueue()
    started: list[_Compiler] = []

    def answer(text: str) -> str | None:
        try:
            compiler = idle.get_nowait()
        except queue.Empty:
            compiler = _Compiler()
            started.append(compiler)
        reason, alive = compiler.ask(text)
        if alive:
            idle.put(compiler)
        return reason

    threads = ThreadPoolExecutor(jobs)
    try:
        yield from threads.map(answer, requests)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        # a thread that still waits for a compiler gets its end as the answer
        for compiler in started:
            compiler.stop()


class _Compiler:
    """A child process that compiles one request after another, until one of them kills it."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._expired = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ridgeline.precompile"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        if not self._exchange(json.dumps(sys.path)):
            raise EnvironmentUnusable(f"the compiler process does not start ({self._last_words()}): reinstall Triton")

    def ask(self, text: str, *, timeout_s: float = TIMEOUT_S) -> tuple[str | None, bool]:
        """Why the request failed, or None; and whether this process can take another one."""
        alarm = threading.Timer(timeout_s, self._expire)
        alarm.start()
        answer = self._exchange(text)
        alarm.cancel()
        if answer:
            return json.loads(answer), True
        if self._expired:
            return f"the compiler took longer than {timeout_s:g} s", False
        return f"the compiler died: {self._last_words()}", False

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _expire(self) -> None:
        self._expired = True
        self._process.kill()

    def _exchange(self, line: str) -> str:
        """The answering line; empty when the process has died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return ""
        return self._process.stdout.readline()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()] or ["no message"]
        # an abort prints its stack below the message
        telling = [line for line in lines if re.search(r"UNREACHABLE|Assertion|LLVM ERROR|[Ee]rror:", line)]
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"{how}, {(telling or lines)[-1][:200]}"


def _plain(value: Tensor | TensorDescriptor | GluonDescriptor | int | None) -> Any:
    if isinstance(value, TensorDescriptor | GluonDescriptor):
        lists = {name: list(getattr(value, name)) for name in ("shape", "strides", "block_shape")}
        layout = {"layout": repr(value.layout)} if isinstance(value, GluonDescriptor) else {}
        return {"base": _plain(value.base), **lists, **layout}
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "offset": value.data_ptr() % 16}
    return value


# --- the child's side --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pointer:
    """What the launcher asks of a tensor."""

    dtype: torch.dtype
    offset: int

    def data_ptr(self) -> int:
        return self.offset


@dataclass(frozen=True)
class _Driver:
    """What the launcher asks of a GPU while it only compiles. The device number keeps architectures apart."""

    capability: int

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def _serve(requests: TextIO, answers: TextIO) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an aborting compiler would leave gigabytes
    sys.path[:] = json.loads(requests.readline())
    _answer("ready", answers)
    for line in requests:
        try:
            reason = _compile(json.loads(line))
        except (TritonError, RuntimeError, ValueError) as error:  # any other ends the process, which says as much
            # Triton quotes the kernel first and says what is wrong last
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}"
        _answer(reason, answers)


def _answer(value: str | None, answers: TextIO) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def _compile(plain: Mapping[str, Any]) -> str | None:
    triton.runtime.driver.set_active(_Driver(int(plain["arch"].removeprefix("sm_"))))  # pyright: ignore
    kernel = getattr(importlib.import_module(plain["module"]), plain["kernel"])
    arguments = {name: _stand_in(value) for name, value in plain["arguments"].items()}
    compiled = kernel.warmup(**arguments, **plain["constants"], **plain["options"], grid=(1,))
    needed, limit = compiled.metadata.shared, plain["shared_limit_bytes"]
    if needed > limit:
        return f"needs {needed} B of shared memory, {plain['arch']} has {limit} B"
    # only wgmma reads registers late
    wrong = "wgmma.mma_async" in compiled.asm["ptx"] and overwrites(disassemble(compiled.asm["cubin"]))
    return f"overwrites operands of a product that is not done: {wrong[0]}" if wrong else None


def _stand_in(value: Any) -> Any:
    """What takes the place of an argument: its number, or something like its tensor or tensor map."""
    if not isinstance(value, dict):
        return value
    if "layout" in value:
        layout = eval(value["layout"], {"NVMMASharedLayout": NVMMASharedLayout})
        return GluonDescriptor(**{**value, "base": _stand_in(value["base"]), "layout": layout})
    if "base" in value:
        return TensorDescriptor(**{**value, "base": _stand_in(value["base"])})
    return _Pointer(getattr(torch, value["dtype"]), value["offset"])


if __name__ == "__main__":
    # the compiler prints notes on stdout: they go to stderr, so that stdout carries answers alone
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _serve(sys.stdin, protocol)
