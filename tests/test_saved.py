"""A compiled module in a file: the same results without the module, and no file that does anything else."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

import ridgeline
from graphs import by_reference, image, net
from ridgeline import compiler, saved, tuned
from ridgeline.compiler import load
from ridgeline.errors import EnvironmentUnusable, UsageError
from ridgeline.recipe import Recipe

FP32 = Recipe(dtype="fp32")
X = image(1, 3, 9, 8)


@pytest.fixture(autouse=True)
def _references():
    with by_reference():
        yield


def small() -> nn.Module:
    """A fused convolution, a concat in place, and what PyTorch does: constants, dtypes, infinities."""

    def forward(m, x):
        y = m.join(torch.cat([F.silu(m.a(x)), F.silu(m.b(x))], dim=1))
        return y.masked_fill(y > 100, -torch.inf).flatten(2).softmax(2) + torch.arange(72, dtype=torch.float32) / 72

    return net(forward, a=nn.Conv2d(3, 8, 3, padding=1), b=nn.Conv2d(3, 8, 1), join=nn.Conv2d(16, 4, 1))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[compiler.Compiled, bytes]:
    """One compiled module and the bytes of its file."""
    path = tmp_path_factory.mktemp("saved") / "net.ridgeline"
    with by_reference():
        compiled = compiler.compile(small(), X, FP32)
    compiled.save(path)
    return compiled, path.read_bytes()


# What comes back


def test_the_same_bits_and_facts(written, tmp_path):
    compiled, content = written
    loaded = load(_file(tmp_path, content))
    for seed in (1, 2):
        x = image(1, 3, 9, 8, seed=seed)
        assert torch.equal(loaded(x), compiled(x))
    assert loaded.recipe == FP32 and loaded.verdict == compiled.verdict and loaded.verdict.passed
    assert loaded.report == compiled.report and loaded.graph(X).launches >= 2
    assert loaded.report.to_json() == compiled.report.to_json()
    # and what was loaded can be saved again, to the same bytes
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == content


def test_without_the_class_in_another_process(written, tmp_path):
    compiled, content = written
    x = image(1, 3, 9, 8, seed=3)
    torch.save(x, tmp_path / "x.pt")
    program = (
        "import sys, torch, ridgeline\n"
        "fast, x = ridgeline.load(sys.argv[1], device='cpu'), torch.load(sys.argv[2])\n"
        "torch.save(fast(x), sys.argv[3])\n"
    )
    command = [sys.executable, "-c", program, _file(tmp_path, content), tmp_path / "x.pt", tmp_path / "y.pt"]
    subprocess.run(command, check=True, env={**os.environ, "TRITON_INTERPRET": "0"})
    torch.testing.assert_close(torch.load(tmp_path / "y.pt"), compiled(x), rtol=1e-5, atol=1e-6)


def test_every_signature_comes_back_and_no_other(tmp_path):
    compiled = compiler.compile(small(), X, FP32)
    wide, plain = image(2, 3, 3, 24), X.contiguous()
    results = [compiled(x).clone() for x in (X, wide, plain)]
    compiled.save(tmp_path / "three")
    loaded = load(tmp_path / "three")
    assert [torch.equal(loaded(x), y) for x, y in zip((X, wide, plain), results, strict=True)] == [True] * 3
    with pytest.raises(
        UsageError,
        match=r"no graph for float32 1x3x5x5 channels-last on cpu, but for float32 1x3x9x8 .*; float32 2x3x3",
    ):
        loaded(image(1, 3, 5, 5))


def test_weights_are_stored_once(tmp_path):
    module = small()
    compiled = compiler.compile(module, X, FP32)
    compiled(image(3, 3, 9, 8))
    compiled.save(tmp_path / "two")
    with safetensors.safe_open(tmp_path / "two", framework="pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - no dictionary
    assert stored == sum(p.numel() for p in module.parameters())


def test_half_precision_and_channels_last_weights(tmp_path):
    compiled = compiler.compile(small(), X, Recipe(dtype="bf16"))
    compiled.save(tmp_path / "half")
    loaded = load(tmp_path / "half", device="cpu")
    assert torch.equal(loaded(X), compiled(X))
    (runner,) = loaded._runners.values()
    weights = [t for t in runner.graph_module.buffers() if t.dim() == 4]
    assert weights and all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)
    assert {w.dtype for w in weights} == {torch.bfloat16}


def test_structures_of_results(tmp_path):
    module = net(lambda m, x: {"a": m.a(x), "rest": (x, [m.a(x) * 2, m.w])}, a=nn.Conv2d(3, 4, 1), w=torch.ones(2))
    compiled = compiler.compile(module, X, FP32)
    compiled.save(tmp_path / "tree")
    out, expected = load(tmp_path / "tree")(X), compiled(X)
    assert pytree.tree_structure(out) == pytree.tree_structure(expected)
    assert all(map(torch.equal, pytree.tree_leaves(out), pytree.tree_leaves(expected)))


def test_a_loaded_module_needs_no_weights_to_watch(written, tmp_path):
    loaded = load(_file(tmp_path, written[1]))
    loaded(X)
    with pytest.raises(UsageError, match="an input requires a gradient"):
        loaded(X.clone().requires_grad_(True))


def test_tuned_configs_come_along(tmp_path, monkeypatch):
    compiled = compiler.compile(small(), X, FP32)
    hashes = compiler.source_hashes()
    row = tuned.Row(
        "conv2d_act", hashes["conv2d_act"], "NVIDIA H200", "fp32", "some problem", {"block_m": 16}, 1e-6, None,
        torch="2", triton="3", driver="5", tried={"16": 1e-6},
    )  # fmt: skip
    monkeypatch.setattr(saved, "gpu_of", lambda _: "NVIDIA H200")
    monkeypatch.setattr(
        tuned.TunedTable, "row", lambda self, dtype, key: row if dtype == "fp32" and "x" in key else None
    )
    compiled.save(tmp_path / "net")
    monkeypatch.undo()
    rows = saved.read(tmp_path / "net", torch.device("cpu")).tuned
    assert rows == (row,)
    asked = ("conv2d_act", "NVIDIA H200", "fp32", "some problem")
    assert tuned.lookup(*asked, source_hash=row.source_hash) is None
    with tuned.using(rows):
        assert tuned.lookup(*asked, source_hash=row.source_hash) == {"block_m": 16}
        assert tuned.lookup(*asked, source_hash="0" * 12) is None
        table = tuned.TunedTable({("fp32", "some problem"): replace(row, config={"block_m": 32})})
        assert tuned.lookup(*asked, source_hash=row.source_hash, table=table) == {"block_m": 32}
    assert tuned.lookup(*asked, source_hash=row.source_hash) is None


# Writing


def test_a_failed_write_leaves_the_old_file(written, tmp_path, monkeypatch):
    path = _file(tmp_path, b"old")

    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(UsageError, match=r"cannot write .*net' \(No space left on device\): give another path"):
        written[0].save(path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_named(written, tmp_path):
    with pytest.raises(UsageError, match=r"absent/net' \(No such file or directory\)"):
        written[0].save(tmp_path / "absent" / "net")


@dataclass
class Output:
    y: Tensor


def test_results_of_other_types_are_refused(tmp_path):
    pytree.register_dataclass(Output)
    compiled = compiler.compile(net(lambda m, x: Output(m.a(x)), a=nn.Conv2d(3, 4, 1)), X, FP32, verify=False)
    with pytest.raises(UsageError, match="a Output, which a file cannot hold: keep the module"):
        compiled.save(tmp_path / "output")


def test_operators_of_other_packages_are_refused(tmp_path):
    twice = torch.library.custom_op(
        "ridgeline_test::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    twice.register_fake(torch.empty_like)
    compiled = compiler.compile(net(lambda m, x: twice(m.a(x)), a=nn.Conv2d(3, 4, 1)), X, FP32)
    with pytest.raises(UsageError, match=r"calls ridgeline_test\.twice\.default, which a file cannot hold"):
        compiled.save(tmp_path / "twice")


# Reading what is not trusted


def test_nothing_is_unpickled(written, tmp_path, monkeypatch):
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert torch.equal(load(_file(tmp_path, written[1]))(X), written[0](X))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 0.9, 0.9999])
def test_truncated(written, tmp_path, share):
    content = written[1]
    _refused(_file(tmp_path, content[: int(len(content) * share)]), r"cannot be read \(")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (pickle.dumps({"a": 1}), r"cannot be read \(SafetensorError"),
        (b"PK\x03\x04" + bytes(200), r"cannot be read"),
        (b"\xff" * 64, r"cannot be read"),
        (safetensors.torch.save({"w": torch.ones(2)}), r"is a safetensors file, but not one that Compiled\.save wrote"),
        (safetensors.torch.save({"w": torch.ones(2)}, {"format": "pt"}), r"not one that Compiled\.save wrote"),
    ],
    ids=["pickle", "zip", "noise", "weights", "weights of another kind"],
)
def test_other_files(tmp_path, content, complaint):
    _refused(_file(tmp_path, content), complaint)


def test_no_file(tmp_path):
    _refused(tmp_path / "absent", "does not exist: give a file that Compiled.save wrote")
    _refused(tmp_path, "cannot be read")


def test_another_schema(written, tmp_path):
    newer = _changed(written[1], tmp_path, entry("schema_version", value=2))
    _refused(newer, f"has schema 2, this version of ridgeline reads {saved.SCHEMA_VERSION}: upgrade ridgeline")
    for version in (0, "x"):
        older = _changed(written[1], tmp_path, entry("schema_version", value=version))
        _refused(older, f"has schema {version!r}, this version of ridgeline reads 1: save the compiled module again")


def first_call(contents: dict[str, Any], operator: str) -> list[Any]:
    calls = contents["graphs"][0]["graph"]["calls"]
    return next(call for call in calls if isinstance(call, list) and call[0].startswith(operator))


def call(operator: str, *args: Any, **kwargs: Any) -> Callable[[dict[str, Any]], None]:
    """Put another call in the place of the last one."""

    def change(contents: dict[str, Any]) -> None:
        contents["graphs"][0]["graph"]["calls"][-1] = [operator, {"tuple": list(args)}, {"dict": list(kwargs.items())}]

    return change


def argument(operator: str, position: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(contents: dict[str, Any]) -> None:
        first_call(contents, operator)[1]["tuple"][position] = value

    return change


def entry(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(contents: dict[str, Any]) -> None:
        place: Any = contents
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


SOME = {"node": 0}
CODE = "x'); import os; os.abort()  #"
HOSTILE = {
    "reads a file": (call("aten.from_file.default", "/etc/passwd", False, 10), "not allowed in a file"),
    "TorchScript's save": (call("aten.save.default", SOME, "/tmp/x"), "not allowed"),
    "other memory": (call("aten.set_.source_Tensor", SOME, SOME), "not allowed"),
    "resize": (call("aten.resize_.default", SOME, [2**40]), "not allowed"),
    "internal": (call("aten._unsafe_view.default", SOME, [1]), "not allowed"),
    "other package": (call("prim.device.default", SOME), "not allowed"),
    "python": (call("os.system.default", "true"), "not allowed"),
    "dunder": (call("aten.__class__.default", SOME), "not allowed"),
    "no operator": (call("aten.conv2d"), "is not known"),
    "a number as operator": (
        entry("graphs", 0, "graph", "calls", -1, value=[3, {"tuple": []}, {"dict": []}]),
        "is not known",
    ),
    "wrong arguments": (call("aten.relu.default", 3), "do not fit together"),
    "too many arguments": (call("aten.relu.default", SOME, SOME), "do not fit together"),
    "code as keyword": (call("aten.relu.default", SOME, **{CODE: 1}), "has no arguments"),
    "keyword that is none": (call("aten.relu.default", SOME, nonsense=1), "do not fit together"),
    "later node": (call("aten.relu.default", {"node": 10**6}), "is no argument"),
    "node before the first": (call("aten.relu.default", {"node": -1}), "is no argument"),
    "unknown kind": (call("aten.relu.default", {"code": CODE}), "is no argument"),
    "long text": (call("aten.einsum.default", "a" * 10**4, [SOME]), "is no argument"),
    "kernel with another map": (argument("ridgeline.conv2d_act", 0, None), "has null for a tensor"),
    "kernel with another weight": (argument("ridgeline.conv2d_act", 2, {"node": 3}), "cannot be read"),
    "weights missing": (entry("graphs", 0, "weights", value=[]), "cannot be read"),
    "weight of no name": (entry("graphs", 0, "weights", 0, "name", value="absent"), "cannot be read"),
    "axes out of order": (entry("graphs", 0, "weights", 0, "order", value=[0, 0, 1, 2]), "axes"),
    "other input": (
        entry("graphs", 0, "report", "inputs", 0, "shape", value=[1, 4, 9, 8]),
        r"\(ValueError: .*channels",
    ),
    "negative input": (entry("graphs", 0, "report", "inputs", 0, "shape", value=[-1, 3, 9, 8]), "cannot be read"),
    "no dtype": (entry("graphs", 0, "report", "inputs", 0, "dtype", value="Tensor"), "dtype 'Tensor' is not known"),
    "no inputs": (entry("graphs", 0, "report", "inputs", value=[]), "cannot be read"),
    "no graphs": (entry("graphs", value=3), "cannot be read"),
    "no report": (entry("graphs", 0, "report", value={}), "GraphReport must be an object"),
    "no recipe": (entry("recipe", value={}), "Recipe must be an object"),
    "unknown rewrite": (entry("recipe", "rewrites", value=["magic"]), "unknown rewrite 'magic'"),
    "no verdict": (entry("verdict", value={"dense": 1}), "cannot be read"),
    "no result": (entry("graphs", 0, "graph", "result", value={"node": "x"}), "is no argument"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(written, tmp_path, name):
    change, complaint = HOSTILE[name]
    _refused(_changed(written[1], tmp_path, change), complaint)


def test_the_hostile_files_differ_by_that_alone(written, tmp_path):
    assert torch.equal(load(_changed(written[1], tmp_path, lambda _: None))(X), written[0](X))


def test_deep_nesting(written, tmp_path):
    text = json.dumps(_contents(_file(tmp_path, written[1])))
    text = text.replace('"versions"', '"deep": ' + "[" * 10**5 + "]" * 10**5 + ', "versions"', 1)
    _refused(_with(written[1], tmp_path, text), "cannot be read")


def test_the_public_name():
    assert ridgeline.load is load


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(written, tmp_path):
    with pytest.raises(EnvironmentUnusable, match="sees no CUDA GPU: load with device='cpu'"):
        load(_file(tmp_path, written[1]), device="cuda")


def _file(folder: Path, content: bytes) -> Path:
    path = folder / "net"
    path.write_bytes(content)
    return path


def _contents(path: Path) -> dict[str, Any]:
    with safetensors.safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()[saved._KEY])


def _with(content: bytes, folder: Path, text: str) -> Path:
    """The same weights under another header."""
    return _file(folder, safetensors.torch.save(safetensors.torch.load(content), {saved._KEY: text}))


def _changed(content: bytes, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    contents = _contents(_file(folder, content))
    change(contents)
    return _with(content, folder, json.dumps(contents))


def _refused(path: Path, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as refusal:
        load(path)
    assert str(refusal.value).startswith(f"load: '{path}'") and "\n" not in str(refusal.value)
