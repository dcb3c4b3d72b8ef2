"""The shipped tables of tuned configs belong to the kernels as they are."""

from importlib.resources import files

import pytest

from ridgeline import tuned
from ridgeline.compiler import source_hashes
from ridgeline.kernels import ALL

SHIPPED = files("ridgeline") / "tables"
TABLES = [(folder.name, file) for folder in SHIPPED.iterdir() for file in folder.iterdir()]


def test_there_is_a_table_for_the_convolution_on_an_h200():
    assert ("nvidia-h200", "conv2d_act.json") in [(folder, file.name) for folder, file in TABLES]


@pytest.mark.parametrize(("folder", "file"), TABLES, ids=lambda part: getattr(part, "name", part))
def test_shipped_rows_fit_the_present_kernels(folder, file, tmp_path):
    (op,) = [op for op in ALL if f"{op.name}.json" == file.name]
    raw = file.read_text(encoding="utf-8")
    table = tuned.read_table(op.name, "NVIDIA H200", source_hashes()[op.name], shipped=SHIPPED, user=tmp_path)
    # a kernel edit changes the hash: tune again and export, or remove the rows
    assert len(table.rows) == raw.count('"op":') > 0
