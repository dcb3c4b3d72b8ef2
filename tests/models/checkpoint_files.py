"""Checkpoint files for tests: written by torch, or by hand so that they hold what torch would never write."""

import zipfile

import pytest
import torch

from ridgeline.errors import UsageError
from ridgeline.models.weights import load_state


def saved(path, value):
    torch.save(value, path)
    return path


def archive(path, pickled: bytes, entries: dict[str, bytes] | None = None, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("w/data.pkl", pickled)
        for name, data in (entries or {}).items():
            file.writestr(f"w/{name}", data)
    return path


def refusal(path) -> str:
    with pytest.raises(UsageError) as caught:
        load_state(path)
    text = str(caught.value)
    assert "\n" not in text and path.name in text and len(text) < 400
    return text
