"""What the GPU's clocks were while steps ran, by an nvidia-smi that this file writes: no GPU is needed."""

import sys
import time
from pathlib import Path

import pytest
import torch

import gpu_company
from ridgeline import profile_steps, timing
from ridgeline.errors import EnvironmentUnusable
from ridgeline.gpu_watch import GpuWatch, under_load
from ridgeline.profile_plan import Plan, read_facts, result_path
from ridgeline.profile_steps import Timer
from ridgeline.timing import GpuState, clock_reasons, gpu_state, parse_gpu_state

LINE = "NVIDIA H200, 580.1, {clock}, 3201, 60, 650, 700, 100, 1980, {mask}"
CAPPED, FREE, IDLE = "0x0000000000000004", "0x0000000000000000", "0x0000000000000001"
# answers as nvidia-smi does: once, or again and again until it is ended; `knows` are fields of this driver
FAKE = """\
#!{python}
import sys, time
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
query = sys.argv[1]
if "reasons" in query and {knows!r} not in query:
    sys.exit("Field is not a valid field to query.")
lines = {lines!r}
print(lines[0], flush=True)
if any(word.startswith("--loop-ms=") for word in sys.argv):
    for line in lines[1:]:
        print(line, flush=True)
    time.sleep(60)
"""


def line(clock: int, mask: str = FREE) -> str:
    return LINE.format(clock=clock, mask=mask)


def reading(clock: int, mask: str = FREE) -> GpuState:
    state = parse_gpu_state(line(clock, mask))
    assert state is not None
    return state


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Puts an nvidia-smi first in PATH; `fake.log()` are the arguments of its runs."""

    def install(*lines: str, knows: str = "clocks_event_reasons.active") -> None:
        program = tmp_path / "nvidia-smi"
        log = str(tmp_path / "log")
        program.write_text(FAKE.format(python=sys.executable, log=log, knows=knows, lines=list(lines)))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    install.log = lambda: (tmp_path / "log").read_text().splitlines()
    return install


def taken(watch: GpuWatch, count: int) -> None:
    """Take until the watch has as many lines."""
    deadline_s = time.monotonic() + 5
    while watch._text.count(b"\n") < count:
        watch.take()
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ("0x0000000000000000", ()),
        ("0x0000000000000001", ("gpu_idle",)),
        ("0x0000000000000006", ("applications_clocks_setting", "sw_power_cap")),
        ("0x00000000000000F8", ("hw_slowdown", "sync_boost", *timing._REASON_WORDS[5:8])),
        ("0x0000000000001100", ("display_clock_setting", "0x1000")),
        ("[N/A]", None),
    ],
)
def test_a_mask_becomes_the_words_of_nvidia(mask, words):
    assert clock_reasons(mask) == words
    assert reading(1980, mask).clock_reasons == words


@pytest.mark.parametrize(
    ("knows", "runs", "reasons"),
    [
        ("clocks_event_reasons.active", 1, ("sw_power_cap",)),
        ("clocks_throttle_reasons.active", 2, ("sw_power_cap",)),
        ("neither", 3, None),
    ],
)
def test_older_drivers_are_asked_by_the_older_name(fake, knows, runs, reasons):
    fake(line(1500, CAPPED) if reasons else line(1500).rpartition(",")[0], knows=knows)
    state = gpu_state()
    assert state is not None
    assert (state.sm_clock_mhz, state.sm_clock_max_mhz, state.clock_reasons) == (1500, 1980, reasons)
    assert len(fake.log()) == runs


def test_readings_count_from_the_first_timed_step_on(fake):
    fake(line(300), line(1500, CAPPED), line(1600, CAPPED))
    watch = GpuWatch()
    taken(watch, 3)
    watch._from = len(line(300)) + 1  # as if `begin` had come after the first
    process = watch._process
    assert process is not None
    assert [state.sm_clock_mhz for state in watch.stop()] == [1500, 1600]
    assert process.poll() is not None  # nobody is left behind
    assert watch.stop() != ()
    assert fake.log()[1] == fake.log()[0] + " --loop-ms=100"


def test_without_a_reading_of_timed_steps_those_before_count(fake):
    fake(line(1900), line(1950))
    watch = GpuWatch()
    taken(watch, 2)
    watch.begin()
    assert [state.sm_clock_mhz for state in watch.stop()] == [1900, 1950]


def test_a_line_that_was_cut_off_is_no_reading(fake):
    fake(line(1900), line(1950))
    watch = GpuWatch()
    taken(watch, 2)
    watch._text += b"NVIDIA H200, 580.1, 19"
    assert len(watch.stop()) == 2


def test_without_a_driver_nothing_is_watched(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    watch = GpuWatch()
    watch.begin()
    watch.take()
    assert watch.stop() == ()


def test_the_gpu_of_the_step_is_asked_for(fake, monkeypatch):
    fake(line(1500))
    uuids = {0: "aaaa", 1: "bbbb"}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda index: type("Properties", (), {"uuid": uuids[index]})
    )
    watch = GpuWatch(1)
    taken(watch, 1)
    watch.stop()
    GpuWatch().stop()
    asked = [word.rpartition("--id=")[2].split()[0] for word in fake.log()]
    assert asked[:3] == ["GPU-bbbb", "GPU-bbbb", "GPU-aaaa"]


def test_idle_readings_say_nothing_of_the_load():
    load = under_load([reading(345, IDLE), reading(1500), reading(1600), reading(1700)])
    assert load is not None
    assert (load.state.sm_clock_mhz, load.state.sm_clock_max_mhz, load.throttled) == (1600, 1980, "")
    assert under_load([reading(345, IDLE)]) is None
    assert under_load([]) is None


def test_reasons_are_told_by_how_often_they_held():
    readings = [reading(1500, CAPPED)] * 3 + [reading(1500, "0x0000000000000042")]
    load = under_load(readings)
    assert load is not None
    # 0x2 is a clock that somebody chose
    assert load.throttled == "sw_power_cap in 75.0 % of the readings, hw_thermal_slowdown in 25.0 % of the readings"
    load = under_load([reading(1980, CAPPED)] + [reading(1980)] * 19)
    assert load is not None and load.throttled == ""
    load = under_load([reading(1980, "[N/A]")])
    assert load is not None and load.throttled is None


def test_a_clock_that_nobody_shows_stays_unknown():
    state = parse_gpu_state("Orin, 540.4.0, [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A]")
    assert state is not None
    load = under_load([state])
    assert load is not None
    assert load.state.sm_clock_mhz is None
    assert "sm_clock_mhz" not in profile_steps.settings(on_gpu=False, load=load)


class HostClock:
    """In place of events of a GPU."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.marks = 0

    def mark(self) -> None:
        self.marks += 1

    def host_seconds(self) -> list[float]:
        return [1.0] * (self.marks - 1)

    seconds = host_seconds


@pytest.fixture
def timer(tmp_path, monkeypatch):
    """A timer of two steps, the second run of which it times, that takes this machine for one with a GPU."""
    monkeypatch.setattr(profile_steps, "StepClock", HostClock)
    for name, value in (("get_device_name", "NVIDIA H200"), ("max_memory_reserved", 1), ("max_memory_allocated", 1)):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda value=value: value)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: type("Properties", (), {"total_memory": 2}))
    return Timer(Plan("time", str(tmp_path), steps=2, skip=1), on_gpu=True)


def facts_of(timer: Timer):
    timer.finish()
    return read_facts(result_path(Path(timer._plan.folder), "time"))


def test_clocks_under_load_are_facts_of_the_timed_steps(timer, fake):
    fake(*[line(1700, CAPPED)] * 3)
    timer.step()
    assert timer._gpu is not None
    taken(timer._gpu, 3)
    assert not timer.step()
    assert timer.step()
    found = facts_of(timer)
    assert {name: found.settings[name] for name in ("sm_clock_mhz", "sm_clock_max_mhz", "throttle_reasons")} == {
        "sm_clock_mhz": "1700.0",
        "sm_clock_max_mhz": "1980.0",
        "throttle_reasons": "sw_power_cap in 100.0 % of the readings",
    }
    assert (found.environment["SM clock"], found.environment["power"]) == ("1700 MHz", "650 W of 700 W")


def test_a_gpu_that_idles_has_no_clock_under_load(timer, fake):
    fake(line(345, IDLE))
    for _ in range(3):
        timer.step()
    found = facts_of(timer)
    assert not {"sm_clock_mhz", "throttle_reasons"} & found.settings.keys()
    assert found.environment["SM clock"] == "345 MHz"


def test_without_a_gpu_nvidia_smi_is_not_run(tmp_path, fake):
    fake(line(1500))
    timer = Timer(Plan("time", str(tmp_path), steps=1, skip=1), on_gpu=False)
    for _ in range(2):
        torch.ones(1)
        timer.step()
    timer.finish()
    assert not (tmp_path / "log").exists()


# --- who else is on the GPU ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "others"),
    [("", 0), ("17\n", 0), ("17\n23\n", 1), ("23\n 17\n99\n", 2), ("4711\n", 0), ("[N/A]\n", 0)],
)
def test_other_processes_are_those_beside_ones_own(listed, others):
    """Where the own number is not in the list, the list is of numbers that mean nothing here."""
    assert gpu_company.other_processes(listed, 17) == others


@pytest.fixture
def shared(monkeypatch):
    """A GPU of which `shared.says` are the words on who else is on it, look by look."""
    looks = iter(())

    def says(*words: str) -> None:
        nonlocal looks
        looks = iter(words)

    monkeypatch.setattr(gpu_company, "company", lambda: next(looks))
    return says


def test_what_fails_beside_another_process_is_skipped(shared):
    shared("", "another process")
    with pytest.raises(pytest.skip.Exception, match="another process"), gpu_company.alone_on_gpu():
        raise EnvironmentUnusable("kernels are missing")


def test_what_fails_alone_fails(shared):
    shared("", "")
    with pytest.raises(EnvironmentUnusable, match="kernels are missing"), gpu_company.alone_on_gpu():
        raise EnvironmentUnusable("kernels are missing")


def test_nothing_is_timed_beside_another_process(shared):
    shared("2 other processes")
    with pytest.raises(pytest.skip.Exception, match="2 other"), gpu_company.alone_on_gpu():
        raise AssertionError("the block ran")
