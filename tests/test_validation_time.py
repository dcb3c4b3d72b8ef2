"""The part of a run that validation takes, of loops that say nothing of it."""

import sys

import pytest
import torch
from torch import nn

from ridgeline import validation_time
from ridgeline.profile_child import Watch
from ridgeline.profile_plan import Plan
from ridgeline.profile_run import time_steps
from ridgeline.validation_time import ValidationTime

SCRIPT = """\
import time, torch
from torch import nn
net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(3):
    net.train()
    for _ in range(4):
        net(torch.rand(8, 4)).sum().backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        time.sleep(0.2)
"""


class Clock:
    """A clock that the test sets."""

    now_s = 0.0

    def __init__(self, *, on_gpu: bool) -> None:
        assert not on_gpu
        self.marks: list[float] = []

    def mark(self) -> None:
        self.marks.append(Clock.now_s)

    def host_seconds(self) -> list[float]:
        return [after - before for before, after in zip(self.marks, self.marks[1:], strict=False)]


@pytest.fixture
def run(monkeypatch):
    """A run that begins at 0 s; `run(at_s, what)` says what happens when."""
    monkeypatch.setattr(validation_time, "StepClock", Clock)
    monkeypatch.setattr(nn.Module, "train", nn.Module.train)  # put back at the end
    Clock.now_s = 0.0
    watched = ValidationTime()
    watched.watch_(nn.Module)

    def happens(at_s, what):
        Clock.now_s = at_s
        what()

    happens.step = watched.stepped
    happens.ends = lambda at_s, step_s=1.0: (setattr(Clock, "now_s", at_s), watched.settings(step_s=step_s))[1]
    return happens


def test_eval_until_train_is_validation(run):
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    run(1.0, run.step)
    run(2.0, net.eval)
    run(5.0, net.train)
    run(6.0, run.step)
    assert not net.train(False)[1].training  # the module still does as it is told
    run(8.0, net.train)
    assert run.ends(10.0) == {"validations": "2", "validation_share": "0.5"}


def test_a_stretch_that_a_step_ends_is_shorter_by_a_step(run):
    """As where averaged weights are validated: nothing goes back into train mode."""
    averaged = nn.Linear(2, 2)
    run(2.0, averaged.eval)
    run(7.0, run.step)
    run(8.0, run.step)
    assert run.ends(10.0) == {"validations": "1", "validation_share": "0.4"}


def test_norms_that_stay_in_eval_mode_are_no_validation(run):
    net, norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
    for step in range(10):
        run(float(step), net.train)
        run(float(step), norm.eval)
        run(step + 1.0, run.step)
    assert float(run.ends(10.0)["validation_share"]) == 0.0


def test_the_last_validation_lasts_to_the_end(run):
    run(6.0, nn.Linear(2, 2).eval)
    assert run.ends(8.0)["validation_share"] == "0.25"


def test_a_run_that_never_left_its_steps_has_no_share(run):
    run(1.0, run.step)
    run(2.0, nn.Linear(2, 2).train)
    assert run.ends(4.0) == {"validations": "0"}


class Freezing(nn.Module):
    """Puts a part of itself into eval mode whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm.eval()(x)


def test_code_under_torch_compile_stays_one_graph(run):
    net = Freezing()
    assert torch.compile(net, backend="eager", fullgraph=True)(torch.ones(1, 2)).shape == (1, 2)
    assert not net.norm.training
    assert run.ends(4.0) == {"validations": "0"}


class Recorder:
    def __init__(self) -> None:
        self.said = []

    def step(self) -> bool:
        return True

    def finish(self) -> None:
        self.said.append("finish")

    def saw_end(self, validation: object) -> None:
        self.said.append("saw end")


@pytest.mark.parametrize(("to_end", "said"), [(True, ["finish", "saw end"]), (False, ["finish"])])
def test_a_run_that_was_cut_short_is_not_judged(monkeypatch, to_end, said):
    watch, recorder = Watch(Plan("time", "", steps=1, skip=1, to_end=to_end)), Recorder()
    monkeypatch.setattr(watch, "_make", lambda _: recorder)
    if to_end:
        watch.marked()
    else:
        with pytest.raises(SystemExit):
            watch.marked()
    watch._validation = object()
    watch.at_exit()
    assert recorder.said == said


def test_a_script_that_runs_to_its_end_tells_its_share(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    plan = Plan("time", "", steps=4, skip=2, to_end=True)
    found = time_steps([sys.executable, str(script)], plan, say=lambda _: None)
    assert (found.complete, found.wall.n, found.settings["validations"]) == (True, 4, "3")
    # 0.6 s of sleep and some milliseconds of steps, of which the first came before the run was seen
    assert 0.5 < float(found.settings["validation_share"]) < 1.0
