"""Loads the scripts of benchmarks/ as modules, with those that they share."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from ridgeline.errors import RidgelineError

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name: str) -> Any:
    """The folder is on the path only meanwhile: it has modules with the names of packages here."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


def in_process(work, *, budget_s: float):
    """Stands in for `call_apart`, whose process would take seconds to import torch."""
    assert budget_s > 0
    return work()


def one_by_one(works, *, budget_s: float, at_once: int):
    """Stands in for `in_turn` likewise."""
    assert budget_s > 0 and at_once > 0
    for work in works:
        try:
            yield work(lambda: None)
        except RidgelineError as error:
            yield error
