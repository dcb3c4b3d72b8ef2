"""Which batches a loop gets, of loops that say nothing of it: shapes and workers, validation left out."""

import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ridgeline.profile_batches import BatchWatch, shapes_of
from ridgeline.profile_plan import Plan
from ridgeline.profile_run import time_steps

SCRIPT = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
train = DataLoader(TensorDataset(torch.rand(22, 4)), batch_size=4)  # five whole batches and a short one
held_out = DataLoader(TensorDataset(torch.rand(9, 4)), batch_size=3)
for epoch in range(2):
    for (x,) in train:
        net(x).sum().backward()
        optimizer.step()
    for (x,) in held_out:
        net(x)
"""


@pytest.fixture
def watched(monkeypatch):
    """A watch of all loaders, that of the class put back afterwards."""
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", _BaseDataLoaderIter.__next__)
    watch = BatchWatch()
    watch.watch_(_BaseDataLoaderIter)
    return watch


def loader(rows: int, batch: int, **choices) -> DataLoader:
    return DataLoader(TensorDataset(torch.rand(rows, 3, 8, 8), torch.arange(rows)), batch_size=batch, **choices)


def test_a_short_last_batch_is_another_shape(watched):
    batches = list(loader(10, 4))
    assert [len(labels) for _, labels in batches] == [4, 4, 2]  # the loader gives what it gave
    for _ in loader(10, 4):
        watched.stepped()
    assert watched.settings() == {
        "distinct_shapes": "2",
        "usual_shape_share": str(2 / 3),
        "loader_workers": "0",
    }


def test_batches_that_no_step_follows_do_not_count(watched):
    for _ in range(2):
        for _ in loader(8, 4):
            watched.stepped()
        for _ in loader(8, 2):
            """Validation."""
    assert watched.settings()["distinct_shapes"] == "1"


def test_workers_are_those_of_the_loader(watched):
    for _ in loader(8, 4, num_workers=2):
        watched.stepped()
    assert watched.settings()["loader_workers"] == "2"


def test_a_loop_without_a_loader_says_nothing(watched):
    watched.stepped()
    assert watched.settings() == {}
    watched.given(["names alone"], 0)
    watched.stepped()
    assert watched.settings() == {}


def test_tensors_are_found_wherever_a_batch_keeps_them():
    batch = {"image": torch.zeros(2, 3), "targets": [{"boxes": torch.zeros(5, 4)}, None], "name": "x"}
    assert sorted(shapes_of(batch)) == [(2, 3), (5, 4)]
    assert len(shapes_of([torch.zeros(1)] * 10_000)) == 64


def test_a_script_that_runs_to_its_end_tells_its_shapes(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    plan = Plan("time", "", steps=4, skip=2, to_end=True)
    found = time_steps([sys.executable, str(script)], plan, say=lambda _: None).settings
    assert (found["distinct_shapes"], found["loader_workers"]) == ("2", "0")
    # of twelve steps the first came before the loop was seen, and two were short
    assert float(found["usual_shape_share"]) == pytest.approx(9 / 11)
