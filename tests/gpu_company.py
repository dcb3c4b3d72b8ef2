"""Whether other processes use the GPU that a test is to time: what is timed beside them holds of both together."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ridgeline.errors import EnvironmentUnusable
from ridgeline.timing import gpu_state

_SETTLED_S = 1.2  # nvidia-smi's utilization looks back a second at most
_LOOKS = 4
_APART_S = 0.2


@contextmanager
def alone_on_gpu() -> Iterator[None]:
    """Run the block on a GPU that nobody else uses: the test is skipped where somebody does, before or at a failure."""
    if reason := company():
        pytest.skip(reason)
    try:
        yield
    except (AssertionError, EnvironmentUnusable):
        if reason := company():
            pytest.skip(reason)
        raise


def company() -> str:
    """Who else is on the current GPU, in words; "" where nvidia-smi shows nobody. This process is idle meanwhile."""
    torch.zeros(1, device="cuda")  # so that this process is listed, by the same kind of number
    torch.cuda.synchronize()
    others = other_processes(_listed(), os.getpid())
    if others:
        return f"{others} other processes hold this GPU, so times and coverage are not this test's alone"
    time.sleep(_SETTLED_S)
    for _ in range(_LOOKS):
        state = gpu_state()
        if state is not None and state.utilization_percent:
            return f"another process keeps this GPU {state.utilization_percent:.0f} % busy"
        time.sleep(_APART_S)
    return ""


def other_processes(listed: str, own: int) -> int:
    """How many process numbers nvidia-smi lists beside `own`; 0 where it is not listed, as in a container."""
    numbers = {word.strip() for word in listed.splitlines()}
    return len(numbers - {str(own)}) if str(own) in numbers else 0


def _listed() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    uuid = f"GPU-{str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid).removeprefix('GPU-')}"
    command = [program, "--query-compute-apps=pid", "--format=csv,noheader", f"--id={uuid}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
