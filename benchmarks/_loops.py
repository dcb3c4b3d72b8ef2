"""The training loops that pages change in a few lines: the program on each side of the change, and batches for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from _rows import ROOT

LOOP = re.compile(r"^<!-- loop -->\n```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Loop:
    """Where a library's loop stands, and what its loader yields: images, with labels where there are `classes`."""

    page: Path
    image: tuple[int, int, int]  # channels, height, width
    classes: int | None
    batch: int  # images a step, where nobody says otherwise


LOOPS = {
    "timm": Loop(ROOT / "README.md", (3, 224, 224), 10, 128),
    "diffusers": Loop(ROOT / "docs" / "howto-train-step.md", (3, 32, 32), None, 128),
}


def loop_of(library: str) -> str:
    """The change of a library's loop, as its page shows it."""
    (diff,) = LOOP.findall(LOOPS[library].page.read_text(encoding="utf-8"))
    return diff


def side(diff: str, sign: str) -> str:
    """The program before the change ("-") or behind it ("+")."""
    lines = [line for line in diff.splitlines() if line[:1] in ("", " ", sign)]
    return "\n".join(line[1:] for line in lines)


def batches(library: str, shape: tuple[int, int, int, int], count: int, *, pinned: bool = False) -> list[Any]:
    """Random batches of NCHW `shape` on the host, the same every time, as the library's loop takes them."""
    g = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        parts = [torch.randn(shape, generator=g)]
        if classes := LOOPS[library].classes:
            parts.append(torch.randint(classes, shape[:1], generator=g))
        if pinned:
            parts = [part.pin_memory() for part in parts]
        made.append(parts if classes else parts[0])
    return made
