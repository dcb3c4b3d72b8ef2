"""RunLog: every step one line, the device read only now and then, nothing past a checkpoint survives a resume."""

import sys
import types
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.errors import EnvironmentUnusable, VerificationFailed
from ridgeline.workloads import run_log
from ridgeline.workloads.run_log import RunLog, read_log

CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.jsonl"


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances one second a look."""
    now = iter(range(1000))
    monkeypatch.setattr(run_log, "time", types.SimpleNamespace(time=lambda: next(now)))


def record(log: RunLog, *steps: int, loss: float = 0.5) -> None:
    for step in steps:
        log.record(step, torch.tensor(loss), 0.1, images=8, grad_norm=torch.tensor(2.0))


def test_each_step_is_a_line(path, clock):
    log = RunLog(path, device=CPU, every=3)
    record(log, 1, 2, 3)
    line = log.flush()
    assert line == run_log.Line(3, 0.5, 0.1, 2.0, 24.0)
    log.write(3, val_loss=0.25)
    log.close()
    assert read_log(path) == [
        *({"step": step, "loss": 0.5, "lr": 0.1, "grad_norm": 2.0, "images_per_s": 24.0} for step in (1, 2, 3)),
        {"step": 3, "val_loss": 0.25},
    ]


def test_a_loss_that_is_overwritten_later_was_copied(path):
    log = RunLog(path, device=CPU, every=2)
    static = torch.zeros(())
    for step, value in ((1, 0.5), (2, 0.25)):
        static.fill_(value)
        log.record(step, static, 0.1, images=8)
    log.flush()
    assert [(line["loss"], line["grad_norm"]) for line in read_log(path)] == [(0.5, None), (0.25, None)]


def test_what_happens_between_steps_counts_in_no_rate(path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(run_log, "time", types.SimpleNamespace(time=lambda: now[0]))
    log = RunLog(path, device=CPU, every=1)
    rates = []
    for step, between_s in ((1, 50.0), (2, 0.0), (3, -10.0), (4, 0.0)):
        now[0] += 2.0
        record(log, step)
        rates.append(log.flush().images_per_s)
        now[0] += between_s
        if step == 1:
            log.restart_clock()
    assert rates == [4.0, 4.0, 4.0, None]  # the last after the clock was set back


def test_nothing_recorded_is_nothing_flushed(path):
    assert RunLog(path, device=CPU, every=3).flush() is None


def test_recording_reads_nothing_from_the_device(path):
    names: list[str] = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    log = RunLog(path, device=CPU, every=5)
    with Reads():
        record(log, 1, 2, 3)
        assert "aten::copy_" in names
        assert "aten::_local_scalar_dense" not in names
        float(torch.ones(()))
        assert "aten::_local_scalar_dense" in names


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_after_writing_those_before(path, bad):
    log = RunLog(path, device=CPU, every=4)
    record(log, 1, 2)
    record(log, 3, loss=bad)
    record(log, 4)
    with pytest.raises(VerificationFailed, match=f"became {bad} at step 3: .*--lr"):
        log.flush()
    assert [line["step"] for line in read_log(path)] == [1, 2]


def test_opening_drops_what_came_after_the_checkpoint(path):
    log = RunLog(path, device=CPU, every=4)
    record(log, 1, 2, 3, 4)
    log.flush()
    log.write(2, val_loss=1.0)  # beyond step 3's line: dropped with it
    log.close()
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # cut short by a kill
    assert [line["step"] for line in read_log(path)] == [1, 2, 3, 4, 2]
    log = RunLog(path, device=CPU, every=4, keep=2)
    record(log, 3)
    log.flush()
    log.close()
    assert [line["step"] for line in read_log(path)] == [1, 2, 3]
    RunLog(path, device=CPU, every=4).close()
    assert path.read_text() == ""


@pytest.mark.parametrize("damage", ["{}\n", "[1]\n", '{"step": "x"}\n', "\xff\n", '{"step": 2}'])
def test_damaged_lines_end_the_log(path, damage):
    path.write_text('{"step": 1}\n' + damage + '{"step": 3}\n', encoding="latin-1")
    assert read_log(path) == [{"step": 1}]
    RunLog(path, device=CPU, every=1, keep=9).close()
    assert path.read_text() == '{"step": 1}\n'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full: run on Linux")
def test_a_full_disk_is_one_sentence(path):
    path.symlink_to("/dev/full")
    log = object.__new__(RunLog)  # a device cannot be truncated, as opening a log does
    log._path, log._file, log._board = path, path.open("a"), None
    log.write(1, val_loss=1.0)
    with pytest.raises(EnvironmentUnusable, match=r"log\.jsonl' cannot be written \(No space left on device\)"):
        log.sync()
    with pytest.raises(EnvironmentUnusable):
        log.close()


def test_a_log_that_cannot_be_opened_is_one_sentence(path):
    path.mkdir()
    with pytest.raises(EnvironmentUnusable, match=r"log\.jsonl' cannot be written \(Is a directory\)"):
        RunLog(path, device=CPU, every=1)


# --- TensorBoard -----------------------------------------------------------------------------------------------------


def test_tensorboard_gets_the_same_numbers(path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log = RunLog(path, device=CPU, every=1, keep=4, tensorboard=path.parent)
    log.record(5, torch.tensor(0.5), 0.25, images=8)
    log.restart_clock()
    log.flush()
    log.close()
    assert calls[:3] == [(str(path.parent), 5), ("loss", 0.5, 5), ("lr", 0.25, 5)]
    assert calls[-1] == "closed"
    assert all(value is not None for _, value, *_ in calls[1:-1])


def test_tensorboard_that_is_absent_is_one_sentence(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        EnvironmentUnusable, match=r"--tensorboard needs its package: `pip install tensorboard`, or pass --no-tens"
    ):
        RunLog(path, device=CPU, every=1, tensorboard=path.parent)
