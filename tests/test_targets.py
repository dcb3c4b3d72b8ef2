"""What MODEL may be: built-in names, callables in modules and files, and a sentence for everything else."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ridgeline import targets
from ridgeline.errors import UsageError
from ridgeline.models.yolo26 import YOLO26

NET = """
import torch
from torch import nn


def build(batch=2):
    return nn.Conv2d(3, 8, 3), torch.zeros(batch, 3, 16, 16)

def with_loss():
    return nn.Linear(4, 2), (torch.zeros(5, 4), torch.zeros(5)), lambda net, x, y: net(x).sum() - y.sum()

def no_loss(): return nn.Linear(4, 2), [torch.zeros(5, 4)], None
def batch_required(batch): return build(batch)
def any_keyword(**choices): return build(**choices)
def number(): return 3
def four(): return 1, 2, 3, 4
def no_module(): return "net", torch.zeros(1)
def no_inputs(): return nn.Linear(4, 2), ()
def text_inputs(): return nn.Linear(4, 2), (torch.zeros(1), "x")
def loss_is_text(): return nn.Linear(4, 2), torch.zeros(1, 4), "mse"
def asks_width(width): return build(width)
def asks_both(width, batch): return build(batch)
def broken(): raise ZeroDivisionError("in the callable")

value = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working directory with net.py; what a test imports is forgotten again."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    before = set(sys.modules), list(sys.path)
    yield tmp_path
    for name in set(sys.modules) - before[0]:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]
    assert sys.path == before[1]


@pytest.mark.parametrize("text", ["net.py:build", "./net.py:build", "net:build"])
def test_file_and_module(text):
    target = targets.resolve(text)
    assert target.name == text
    assert isinstance(target.module, nn.Conv2d)
    assert [tuple(x.shape) for x in target.inputs] == [(2, 3, 16, 16)]
    assert target.loss is None


@pytest.mark.parametrize("name", ["build", "batch_required", "any_keyword"])
def test_batch_reaches_the_callable(name):
    assert targets.resolve(f"net.py:{name}", batch=7).inputs[0].shape[0] == 7


def test_a_loss_comes_along():
    target = targets.resolve("net.py:with_loss")
    assert target.loss is not None
    assert len(target.inputs) == 2
    assert target.loss(target.module, *target.inputs).requires_grad
    assert targets.resolve("net.py:no_loss").loss is None


@pytest.mark.parametrize(
    ("text", "batch", "words"),
    [
        ("yolo99", None, "unknown model 'yolo99': built in are yolo26n, "),
        (":build", None, "unknown model ':build'"),
        ("net.py:", None, "unknown model 'net.py:'"),
        ("absent.py:build", None, "cannot import absent.py: "),
        ("absent:build", None, "cannot import absent: No module named 'absent'"),
        ("absent.deep:build", None, "cannot import absent.deep: "),
        (".net:build", None, ".net is relative to no package"),
        ("net.py:absent", None, "net.py has no callable named 'absent'"),
        ("net.py:value", None, "net.py has no callable named 'value'"),
        ("net.py:number", None, "must return (module, inputs) or (module, inputs, loss), got int"),
        ("net.py:four", None, "must return (module, inputs) or (module, inputs, loss), got tuple"),
        ("net.py:no_module", None, "must be a torch.nn.Module, got str"),
        ("net.py:no_inputs", None, "must be tensors, got none"),
        ("net.py:text_inputs", None, "must be tensors, got Tensor, str"),
        ("net.py:loss_is_text", None, "must be a callable loss, got str"),
        ("net.py:asks_width", None, "cannot be called without arguments: missing a required argument: 'width'"),
        ("net.py:batch_required", None, "missing a required argument: 'batch'"),
        ("net.py:asks_width", 4, "cannot be called with batch=4 (--batch): "),
        ("net.py:asks_both", 4, "missing a required argument: 'width'"),
        ("net.py:with_loss", 4, "got an unexpected keyword argument 'batch'"),
        ("net.py:build", 0, "--batch must be at least 1, got 0"),
        ("yolo26n", -1, "--batch must be at least 1, got -1"),
        ("torch:zeros", None, "cannot be called without arguments: no signature found"),
    ],
)
def test_refusals_are_one_sentence(text, batch, words):
    with pytest.raises(UsageError) as refusal:
        targets.resolve(text, batch=batch)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("source", ["def (", "import no_such_package", "from json import no_such_name"])
@pytest.mark.parametrize("text", ["faulty.py:build", "faulty:build"])
def test_files_that_cannot_be_imported(folder, source, text):
    (folder / "faulty.py").write_text(source)
    with pytest.raises(UsageError, match=r"cannot import faulty"):
        targets.resolve(text)


def test_an_exception_of_the_callable_is_not_hidden():
    with pytest.raises(ZeroDivisionError, match="in the callable"):
        targets.resolve("net.py:broken")


def test_a_file_finds_its_neighbours(folder):
    (folder / "nets").mkdir()
    (folder / "nets" / "part.py").write_text(NET)
    # imported late, when the callable runs
    (folder / "nets" / "whole.py").write_text("def build():\n    import part\n    return part.build(batch=3)\n")
    assert targets.resolve("nets/whole.py:build").inputs[0].shape[0] == 3


def test_a_package_is_found_in_the_working_directory(folder):
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").touch()
    (folder / "pack" / "inner.py").write_text("from net import build\n")
    assert targets.resolve("pack.inner:build", batch=4).inputs[0].shape[0] == 4


def test_a_file_does_not_take_the_place_of_a_module(folder):
    (folder / "json.py").write_text(
        "from dataclasses import dataclass\n\n@dataclass\nclass Size:\n    n: int\n\n" + NET
    )
    assert isinstance(targets.resolve("json.py:build").module, nn.Conv2d)
    assert sys.modules["json"] is json


def test_detector_as_deployed_and_in_training_form():
    deployed = targets.resolve("yolo26n")
    assert isinstance(deployed.module, YOLO26)
    assert deployed.module.fused
    assert deployed.loss is None
    assert tuple(deployed.inputs[0].shape) == (1, 3, 640, 640)
    trained = targets.resolve("yolo26n", batch=2, train=True)
    assert tuple(trained.inputs[0].shape) == (2, 3, 640, 640)
    assert isinstance(trained.module, YOLO26)
    assert not trained.module.fused
    assert trained.loss is not None
    trained.loss(trained.module.train(), torch.rand(1, 3, 64, 64)).backward()
    assert [name for name, weight in trained.module.named_parameters() if weight.grad is None] == []


def test_diffusion_network_brings_its_loss():
    target = targets.resolve("ddpm-cifar10", batch=2)
    assert [x.shape[0] for x in target.inputs] == [2, 2]
    assert target.loss is not None
    with torch.no_grad():
        assert target.loss(target.module.eval(), *target.inputs).item() > 0
