"""The shipped tables of tuned configs belong to the kernels as they are."""

import json
from dataclasses import astuple
from importlib.resources import files
from typing import Any

import pytest
import torch

from ridgeline import tuned
from ridgeline.compiler import source_hashes
from ridgeline.kernels import conv2d_act, depthwise_conv2d_act
from ridgeline.kernels._op import typical_target
from ridgeline.tuning import WIDTH

SHIPPED = files("ridgeline") / "tables"
TABLES = [(folder.name, file) for folder in SHIPPED.iterdir() for file in folder.iterdir()]


def test_there_is_a_table_for_the_convolution_on_an_h200():
    assert ("nvidia-h200", "conv2d_act.json") in [(folder, file.name) for folder, file in TABLES]


@pytest.mark.parametrize(("folder", "file"), TABLES, ids=lambda part: getattr(part, "name", part))
def test_shipped_rows_fit_the_present_kernels(folder, file, tmp_path):
    op = file.name.removesuffix(".json")
    raw = file.read_text(encoding="utf-8")
    table = tuned.read_table(op, "NVIDIA H200", source_hashes()[op], shipped=SHIPPED, user=tmp_path)
    # a kernel edit changes the hash: tune again and export, or remove the rows
    assert len(table.rows) == raw.count('"op":') > 0


def called(key: str) -> dict[str, Any]:
    """The arguments that a key spells; tensors on the meta device."""
    given: dict[str, Any] = {}
    for part in key.split(", "):
        name, _, value = part.partition(" ")
        if name in ("x", "weight", "residual"):
            shape = tuple(map(int, value.split("x")))
            tensor = torch.empty(shape, dtype=torch.float16, device="meta", memory_format=torch.channels_last)
            given[name] = depthwise_conv2d_act.pack(tensor) if shape[1] == 1 else tensor
        elif name in ("stride", "padding"):
            given[name] = tuple(map(int, value.split()))
        else:
            given[name] = value
    return given


@pytest.mark.parametrize(
    ("op", "most"), [(conv2d_act.OP, 1.005), (depthwise_conv2d_act.OP, 1.01)], ids=["conv", "depthwise"]
)
def test_a_narrow_search_loses_little(op, most):
    """The tables hold the time of nearly every config: what is found among the likeliest, against the best of all."""
    kept_s = best_s = 0.0
    for row in json.loads((SHIPPED / "nvidia-h200" / f"{op.name}.json").read_text(encoding="utf-8"))["rows"]:
        arguments = called(row["key"])
        assert op.key(**arguments) == row["key"]
        tried = {tag: seconds for tag, seconds in row["tried"].items() if not isinstance(seconds, str)}
        likeliest = op.launcher.candidates(target=typical_target("sm_90"), **arguments, pdl=True)[: 1 + WIDTH]
        tags = (" ".join(map(str, astuple(config))) for config in likeliest)
        kept_s += min(tried[tag] for tag in tags if tag in tried)
        best_s += min(tried.values())
    assert best_s <= kept_s <= most * best_s
