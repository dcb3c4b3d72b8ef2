"""The verb `cache` of the command line: tables of tuned configs."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from ridgeline.errors import UsageError
from ridgeline.late_import import late_import


def add_commands(verbs: argparse._SubParsersAction) -> None:
    """Register `cache`."""
    p = verbs.add_parser(
        "cache", help="tuned tables: list, clear, export", description="List, clear or export tuned tables."
    )
    actions = p.add_subparsers(dest="action", metavar="ACTION", required=True)
    _verb(actions, "ls", ls, "the tables, shipped and the user's, their rows and how many are outdated")
    clearing = _verb(actions, "clear", clear, "remove the user's tables; the shipped ones stay")
    clearing.add_argument("--op", type=_name, help="only this kernel's")
    text = "write the rows that fit the present kernels, shipped and the user's, as tables to share"
    exporting = _verb(actions, "export", export, text)
    exporting.add_argument("folder", type=Path, metavar="DIR", help="where to, a folder a GPU; made if missing")
    for action in (clearing, exporting):
        action.add_argument("--gpu", type=_name, help="only those of this GPU, as the driver prints its name")


def ls(a: argparse.Namespace) -> int:  # noqa: ARG001
    hashes = _module("compiler").source_hashes()
    for file in _module("tuned").ls():
        print(file.line(hashes))
    return 0


def clear(a: argparse.Namespace) -> int:
    removed = _module("tuned").clear(op=a.op, device=a.gpu)
    for path in _matched(removed, "table of the user's", op=a.op, gpu=a.gpu):
        print(f"removed {path}")
    return 0


def export(a: argparse.Namespace) -> int:
    written = _module("tuned").export(a.folder, _module("compiler").source_hashes(), device=a.gpu)
    for path in _matched(written, "table of the present kernels", gpu=a.gpu):
        print(path)
    return 0


def _matched(found: tuple[Path, ...], what: str, **choices: str | None) -> tuple[Path, ...]:
    """`found`; refused where nothing is and choices were made."""
    made = " ".join(f"--{name} {shlex.quote(value)}" for name, value in choices.items() if value is not None)
    if made and not found:
        raise UsageError(f"no {what} fits {made}: `ridgeline cache ls` lists them by kernel and GPU")
    return found


def _verb(actions: argparse._SubParsersAction, name: str, run: object, text: str) -> argparse.ArgumentParser:
    p = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    p.set_defaults(run=run)
    return p


def _name(text: str) -> str:
    # file names are made of its letters and digits
    if not any(letter.isascii() and letter.isalnum() for letter in text):
        raise argparse.ArgumentTypeError(f"must have a letter or digit, got {text!r}")
    return text


def _module(name: str) -> Any:
    """A module of ridgeline, at the call: the compiler loads torch, and `ridgeline --help` must not."""
    return late_import(f"ridgeline.{name}")
