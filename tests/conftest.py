"""Shared fixtures. Without a GPU the Triton interpreter runs the kernels, so it is switched on before Triton loads."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    assert "triton" not in sys.modules, "triton was imported before the interpreter could be switched on"
    os.environ["TRITON_INTERPRET"] = "1"
    import quick_interpreter

    quick_interpreter.install()

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU: run `pytest -m gpu` on one"))


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Folder with real inputs: weights, photos, reference detections."""
    folder = os.environ.get("RIDGELINE_TEST_DATA")
    if not folder:
        pytest.skip("RIDGELINE_TEST_DATA is not set: it names the folder with YOLO26 weights, photos and CIFAR-10")
    return Path(folder)
