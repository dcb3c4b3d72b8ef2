"""The log of a training run: one JSON object a line, read off the device only every so many steps."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import EnvironmentUnusable, VerificationFailed


@dataclass(frozen=True)
class Line:
    """One training step. `images_per_s` is the rate over the steps that were read together."""

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    images_per_s: float | None  # None should the wall clock have been set back


class RunLog:
    """Appends to a JSONL file; `record` a step without waiting for the device, `flush` to read and write what is due.

    Steps are kept in a device buffer of `every` rows, to be flushed at least as often; only that waits for the device.
    With `tensorboard`, a folder, the same numbers go there. Opening a log drops every line past step `keep`: those are
    the steps that a killed run had taken after its last checkpoint.
    """

    def __init__(
        self, path: Path, *, device: torch.device, every: int, keep: int = 0, tensorboard: Path | None = None
    ) -> None:
        self._path = path
        with self._writing():
            _drop_after(path, keep)
            self._file = path.open("a", encoding="utf-8")
        self._board = None if tensorboard is None else _open_board(tensorboard, keep)
        self._scalars = torch.zeros(every, 2, device=device)  # loss, gradient norm
        self._pending: list[tuple[int, float, bool]] = []  # step, learning rate, whether there is a gradient norm
        self._images = 0
        self._since_s = time.time()

    def record(self, step: int, loss: Tensor, lr: float, *, images: int, grad_norm: Tensor | None = None) -> None:
        """Note a step. `loss` and `grad_norm` are copied at once: a captured step overwrites them."""
        row = self._scalars[len(self._pending)]
        row[0].copy_(loss.detach(), non_blocking=True)
        if grad_norm is not None:
            row[1].copy_(grad_norm.detach(), non_blocking=True)
        self._pending.append((step, lr, grad_norm is not None))
        self._images += images

    def flush(self) -> Line | None:
        """Read the recorded steps from the device, write them, and return the last one.

        Raises VerificationFailed at a loss that is not finite, after writing the steps before it.
        """
        if not self._pending:
            return None
        values = self._scalars[: len(self._pending)].tolist()  # waits for the device
        rate = self._rate()
        line = None
        for (step, lr, has_norm), (loss, norm) in zip(self._pending, values, strict=True):
            if not math.isfinite(loss):
                self._flush_file()
                raise VerificationFailed(
                    f"the loss became {loss} at step {step}: begin anew with a lower --lr, a longer --warmup or "
                    "--dtype fp32"
                )
            finite_norm = norm if has_norm and math.isfinite(norm) else None
            line = Line(step, loss, lr, finite_norm, rate)
            self.write(step, **{name: value for name, value in vars(line).items() if name != "step"})
        self._pending.clear()
        self._flush_file()
        return line

    def write(self, step: int, **values: float | None) -> None:
        """Append one line of any numbers."""
        with self._writing():
            self._file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
        if self._board is not None:
            for name, value in values.items():
                if value is not None:
                    self._board.add_scalar(name, value, step)

    def restart_clock(self) -> None:
        """Leave what happened since the last `flush` (validation, samples, a checkpoint) out of the rate."""
        self._since_s = time.time()

    def sync(self) -> None:
        """Put every written line on the disk, so that a checkpoint never knows more steps than its log."""
        self._flush_file()
        with self._writing():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with self._writing():
            self._file.close()
        if self._board is not None:
            self._board.close()

    def _flush_file(self) -> None:
        with self._writing():
            self._file.flush()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EnvironmentUnusable(
                f"log '{self._path}' cannot be written ({error.strerror}): free some space or check its permissions, "
                "then go on with --resume"
            ) from error

    def _rate(self) -> float | None:
        # the wall clock for the user's information; a claim of speed is measured by ridgeline.timing
        now_s = time.time()
        elapsed_s = now_s - self._since_s
        images, self._images, self._since_s = self._images, 0, now_s
        return round(images / elapsed_s, 1) if elapsed_s > 0 else None


def read_log(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a run's log; a line that was cut short is the last one, and left out."""
    return [line for line, _ in _lines(path)]


def _lines(path: Path) -> list[tuple[dict[str, Any], int]]:
    """Each line with the number of bytes up to its end; stops at the first that is not whole."""
    found: list[tuple[dict[str, Any], int]] = []
    end = 0
    with path.open("rb") as file:
        for raw in file:
            end += len(raw)
            try:
                line = json.loads(raw)
            except ValueError:
                break
            if not raw.endswith(b"\n") or not isinstance(line, Mapping) or not isinstance(line.get("step"), int):
                break
            found.append((dict(line), end))
    return found


def _drop_after(path: Path, keep: int) -> None:
    if not path.exists():
        return
    kept_bytes = 0
    for line, end in _lines(path):
        if line["step"] > keep:
            break
        kept_bytes = end
    os.truncate(path, kept_bytes)


def require_tensorboard() -> None:
    """Raise EnvironmentUnusable where TensorBoard's package is absent."""
    _summary_writer()


def _open_board(folder: Path, keep: int) -> Any:
    return _summary_writer()(str(folder), purge_step=keep + 1)


def _summary_writer() -> Any:
    try:
        # not at the top of the file: TensorBoard is optional and only for those who ask
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise EnvironmentUnusable(
            "--tensorboard needs its package: `pip install tensorboard`, or pass --no-tensorboard (the JSONL log stays)"
        ) from error
    return SummaryWriter
