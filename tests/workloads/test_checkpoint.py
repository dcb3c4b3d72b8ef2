"""Checkpoints: whole at any moment, the last two kept, hostile ones refused, states restored exactly."""

import os
import random
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from ridgeline import atomic
from ridgeline.errors import EnvironmentUnusable, UsageError
from ridgeline.workloads.checkpoint import (
    checkpoints,
    load_checkpoint,
    load_latest,
    load_optimizer_,
    random_state,
    save_checkpoint,
    set_random_state_,
)

CPU = torch.device("cpu")


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_comes_back(tmp_path):
    path = save_checkpoint(tmp_path, 12, {"model": {"w": torch.arange(3)}, "position": (1, 2)})
    state = load_checkpoint(path)
    assert path.name == "step-00000012.pt"
    assert state["step"] == 12 and state["position"] == (1, 2)
    assert torch.equal(state["model"]["w"], torch.arange(3))


def test_the_last_two_are_kept(tmp_path):
    for step in (5, 100, 20):
        save_checkpoint(tmp_path, step, {})
    assert [step for step, _ in checkpoints(tmp_path)] == [100, 20]
    found = load_latest(tmp_path)
    assert found is not None and found[1]["step"] == 100


def test_no_checkpoint_is_none(tmp_path):
    assert load_latest(tmp_path) is None


@pytest.mark.parametrize("stage", ["write", "flush", "rename"])
def test_a_failure_at_any_stage_leaves_the_last_good_one(tmp_path, monkeypatch, stage):
    save_checkpoint(tmp_path, 1, {"a": 1})

    def fail(*arguments, **keywords):
        raise OSError(28, "No space left on device")

    where, name = {"write": (torch, "save"), "flush": (atomic.os, "fsync"), "rename": (atomic.os, "replace")}[stage]
    monkeypatch.setattr(where, name, fail)
    with pytest.raises(EnvironmentUnusable, match=r"cannot write checkpoint .*No space left.*--resume"):
        save_checkpoint(tmp_path, 2, {"a": 2})
    assert names(tmp_path) == ["step-00000001.pt"]
    assert load_checkpoint(tmp_path / "step-00000001.pt")["a"] == 1


def test_what_a_killed_writer_left_is_cleared_away(tmp_path):
    save_checkpoint(tmp_path, 1, {})
    (tmp_path / f".step-00000002.pt.77{atomic.PARTIAL}").write_bytes(b"half")
    assert load_latest(tmp_path) is not None
    assert names(tmp_path) == ["step-00000001.pt"]


def test_a_damaged_newest_one_is_passed_over_with_a_warning(tmp_path, caplog):
    save_checkpoint(tmp_path, 1, {})
    newest = save_checkpoint(tmp_path, 2, {})
    newest.write_bytes(newest.read_bytes()[:-30])
    found = load_latest(tmp_path)
    assert found is not None and found[1]["step"] == 1
    assert "step-00000002.pt' is damaged" in caplog.text
    (tmp_path / "step-00000001.pt").write_bytes(b"")
    with pytest.raises(UsageError, match="none of the 2 checkpoints"):
        load_latest(tmp_path)


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("HOSTILE",)


@pytest.mark.parametrize("content", [Hostile(), {"format": "ridgeline-ddpm-1", "step": Hostile()}])
def test_a_hostile_checkpoint_runs_nothing(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    torch.save(content, "x.pt")
    with pytest.raises(UsageError, match="damaged or no checkpoint"):
        load_checkpoint(tmp_path / "x.pt")
    assert not (tmp_path / "HOSTILE").exists()


def test_foreign_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        load_checkpoint(tmp_path / "absent.pt")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(UsageError, match="damaged or no checkpoint"):
        load_checkpoint(tmp_path / "text.pt")
    torch.save({"model": {}}, tmp_path / "other.pt")
    with pytest.raises(UsageError, match="not written by `ridgeline train ddpm`"):
        load_checkpoint(tmp_path / "other.pt")
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 100_000)
    with pytest.raises(UsageError, match="compressed entries"):
        load_checkpoint(tmp_path / "bomb.pt")


# --- random generators and optimizers --------------------------------------------------------------------------------


def draws() -> list[float]:
    return [torch.rand(1).item(), torch.randn(1).item(), random.random(), random.gauss(0, 1), np.random.rand()]


def test_random_state_survives_a_file(tmp_path):
    draws()  # an odd number of normals: the second of the pair is part of the state
    state = random_state(CPU)
    path = save_checkpoint(tmp_path, 1, {"random": state})
    expected = [draws(), draws()]
    set_random_state_(load_checkpoint(path)["random"], CPU)
    assert [draws(), draws()] == expected


def trained() -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    net(torch.ones(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    return net, optimizer


def test_optimizer_state_is_restored_and_its_choices_stay():
    net, optimizer = trained()
    saved = optimizer.state_dict()["state"]
    fresh = torch.optim.AdamW(net.parameters(), lr=0.3, fused=True)
    load_optimizer_(fresh, saved)
    assert fresh.param_groups[0]["lr"] == 0.3
    for parameter in net.parameters():
        for name, value in optimizer.state[parameter].items():
            assert torch.equal(fresh.state[parameter][name], value)
            assert fresh.state[parameter][name].data_ptr() != value.data_ptr()


@pytest.mark.parametrize(
    ("index", "moment"),
    [(0, torch.zeros(2)), (0, torch.zeros(3, 4, 3, 3)), (0, torch.zeros(5, 4, 3, 3)), (1, torch.zeros(3))],
)
def test_moments_of_another_shape_are_refused(index, moment):
    _, optimizer = trained()
    saved = optimizer.state_dict()["state"]
    saved[index] = {**saved[index], "exp_avg": moment}
    with pytest.raises(ValueError, match=f"exp_avg of parameter {index} has shape"):
        load_optimizer_(optimizer, saved)


def test_moments_get_memory_of_their_own_in_the_layout_of_the_weights():
    net, optimizer = trained()
    saved = optimizer.state_dict()["state"]
    saved[0] = {**saved[0], "exp_avg": torch.tensor(2.0).expand(4, 3, 3, 3)}  # one float that claims to be 108
    load_optimizer_(optimizer, saved)
    moment = optimizer.state[net.weight]["exp_avg"]
    assert moment.is_contiguous(memory_format=torch.channels_last)
    assert moment.untyped_storage().nbytes() == 108 * 4
    assert (moment == 2).all()
