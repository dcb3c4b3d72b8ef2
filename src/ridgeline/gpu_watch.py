"""Watch the GPU's clocks while a loop runs on it: one nvidia-smi that repeats its reading, beside the process.

The process that is timed neither starts nor waits for anything meanwhile: between two steps it empties a pipe. The
readings say what clocks the steps had, and why no higher ones; a reading after them may find the GPU idle already.
"""

from __future__ import annotations

import os
import statistics
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ridgeline import units
from ridgeline.timing import GpuState, gpu_query, parse_gpu_state

_EVERY_MS = 100  # NVML renews clocks and power about as often
_IDLE = "gpu_idle"
# clocks that somebody chose
_CHOSEN = ("applications_clocks_setting", "display_clock_setting")
_OFTEN = 0.1  # part of the readings from which on a reason is told: GPUs cap their power for moments, at full clocks
_MEDIANS = ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w", "utilization_percent")


@dataclass(frozen=True)
class Load:
    """The GPU at work."""

    state: GpuState  # medians
    throttled: str | None  # why its clocks were held down, and how often; "" where they were not, None where unknown


class GpuWatch:
    """Readings of the GPU from now on until `stop`; none without an NVIDIA driver. `device` is torch's number."""

    def __init__(self, device: int | None = None) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._text = b""
        self._from = 0  # where in the text the readings begin that count
        answered = gpu_query(device)
        if answered is None or not hasattr(os, "set_blocking"):  # Windows has it from Python 3.12 on
            return
        command = [*answered[0], f"--loop-ms={_EVERY_MS}"]
        # a pipe, not a file: where this process is killed, the next reading ends nvidia-smi too
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._process = process

    def begin(self) -> None:
        """What is read from here on counts; what was read before only if that is nothing."""
        self.take()
        self._from = len(self._text)

    def take(self) -> None:
        """Take over what nvidia-smi has said so far, without a wait; a full pipe would stop it."""
        if self._process is not None and self._process.stdout is not None:
            while some := self._process.stdout.read(2**16):  # None where there is nothing yet, b"" at the end
                self._text += some

    def stop(self) -> tuple[GpuState, ...]:
        """End the watch; the readings that count, in order."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.take()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None
        return _readings(self._text[self._from :]) or _readings(self._text)


def under_load(readings: Sequence[GpuState]) -> Load | None:
    """What readings say of the GPU at work; None where it idled in all of them."""
    busy = [each for each in readings if _IDLE not in (each.clock_reasons or ())]
    if not busy:
        return None
    medians = {name: _median([getattr(each, name) for each in busy]) for name in _MEDIANS}
    return Load(replace(busy[-1], **medians), _throttled(busy))


def _throttled(readings: Sequence[GpuState]) -> str | None:
    known = [each.clock_reasons for each in readings if each.clock_reasons is not None]
    if not known:
        return None
    counts = Counter(word for reasons in known for word in reasons if word not in _CHOSEN)
    shares = {word: count / len(known) for word, count in counts.most_common()}
    told = [f"{word} in {units.percent(share)} of the readings" for word, share in shares.items() if share >= _OFTEN]
    return ", ".join(told)


def _readings(text: bytes) -> tuple[GpuState, ...]:
    """Of whole lines: the last one may have been cut off, the first one begun before."""
    lines = text.decode(errors="replace").split("\n")[:-1]
    return tuple(state for state in map(parse_gpu_state, lines) if state is not None)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
