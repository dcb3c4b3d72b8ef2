"""The verbs `profile`, `explain`, `diff` and `report` of the command line."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.errors import UsageError
from ridgeline.late_import import late_import

FORMATS = ("table", "json", "csv", "md")
DIFF_FORMATS = ("table", "json", "md")
_ROWS = 20  # of each table
OVER_LIMIT = 1  # exit code of a figure beyond --fail-on


def add_commands(verbs: argparse._SubParsersAction) -> None:
    """Register `profile`, `explain`, `diff` and `report`."""
    for add in (_add_profile, _add_explain, _add_diff, _add_report):
        add(verbs)


def profile(a: argparse.Namespace) -> int:
    # not from `words`: versions of argparse differ in what they do to a second --
    command = a.argv[a.argv.index("--") + 1 :] if "--" in a.argv else None
    if command == []:
        raise UsageError("no command stands after --: give one, as in `ridgeline profile -- python train.py`")
    if command is None and len(a.words) != 1:
        raise UsageError(
            f"{shlex.join(a.words) or 'nothing'} is no target: name one file.py:build, or put -- before a command, "
            f"as in `ridgeline profile -- python train.py`"
        )
    profiling, failed = _module("profiling"), _module("profile_run").CommandFailed
    profiling.require_gpu()
    choices = profiling.Choices(a.steps, a.active, a.skip, a.stacks, a.to_end)
    name = a.name or (profiling.name_of(command) if command else a.words[0])
    folder = profiling.made(a.out) if a.out else profiling.next_folder(name)
    shown = shlex.join(["ridgeline", *a.argv])
    try:
        if command:
            found = profiling.profile_command(command, folder, choices, name=name, shown=shown, say=_say("profile"))
        else:
            found = profiling.profile_target(a.words[0], folder, choices, name=name, shown=shown, say=_say("profile"))
    except failed as error:
        _say("profile")(str(error))
        return error.code
    finally:
        # what failed leaves no empty folder behind
        if not any(folder.iterdir()):
            folder.rmdir()
    _say("profile")(f"traces and profile are in {folder}")
    return _show(a, found)


def explain(a: argparse.Namespace) -> int:
    if a.scorecard:
        _require_alone(a)
        print("\n".join(_module("scorecard").scorecard().lines()))
        return 0
    if a.trace is None:
        raise UsageError("no trace is named: give a torch.profiler trace, an nsys .sqlite, or a run.json")
    found = _module("explaining").explain(
        a.trace,
        facts=a.facts,
        operators=a.operators,
        gpu=a.gpu,
        command=shlex.join(["ridgeline", *a.argv]),
        progress=_progress(),
    )
    return _show(a, found)


def diff(a: argparse.Namespace) -> int:
    read = _module("profile_json").read_profile
    gate = _module("profile_gate")
    for expression in a.fail_on:
        gate.parse_limit(expression)  # a typing error is told before anything is read
    before, after = read(a.before), read(a.after)
    found = _module("profile_diff").diff_profiles(before, after, allow_unlike=a.unlike)
    # what cannot be judged or scored is told before anything is printed
    grown = [text for text in (gate.exceeds(found, expression) for expression in a.fail_on) if text]
    rule, _, source = (a.fixed or "").partition("@")
    calibration = _module("scorecard").record(before, rule, after, source=source) if a.fixed else None
    print(_module("profile_diff_text").render_diff(found, a.format, max_rows=a.rows).rstrip("\n"))
    if calibration is not None:
        _say("diff")(f"{a.fixed} {_module('profile_summary').calibration_text(calibration)}")
    for text in grown:
        _say("diff")(text)
    return OVER_LIMIT if grown else 0


def report(a: argparse.Namespace) -> int:
    return _show(a, _module("scorecard").scored(_module("profile_json").read_profile(a.run_file)))


def _show(a: argparse.Namespace, profile: Any) -> int:
    """Print the profile, after its page was written where one is asked for."""
    if a.html:
        page = _module("profile_html").profile_page(profile)
        _say(a.verb)(f"wrote {_module('html_page').write_html(a.html, page)}")
    print(_module("profile_text").render(profile, a.format, max_rows=a.rows).rstrip("\n"))
    return 0


def _module(name: str) -> Any:
    """A module of ridgeline, at the call: some load torch or rich, and `ridgeline --help` must load neither."""
    return late_import(f"ridgeline.{name}")


def _say(verb: str) -> Callable[[str], None]:
    return lambda text: print(f"ridgeline {verb}: {text}", file=sys.stderr, flush=True)


def _progress() -> Callable[[int, int], None] | None:
    """Shows on a terminal how much of a trace is read."""
    if not sys.stderr.isatty():
        return None

    def show(done_bytes: int, total_bytes: int) -> None:
        share = done_bytes / total_bytes if total_bytes else 1.0
        end = "\r" if share < 1 else "\r\033[K"
        print(f"reading the trace: {share:4.0%}", end=end, file=sys.stderr, flush=True)

    return show


def _add_profile(verbs: argparse._SubParsersAction) -> None:
    p = _verb(verbs, "profile", profile, "time, trace and explain the steps of a script or a callable")
    p.usage = "ridgeline profile [options] TARGET | ridgeline profile [options] -- COMMAND …"
    p.add_argument(
        "words",
        nargs="*",
        metavar="TARGET",
        help="file.py:build, package.module:build, a built-in network, or -- COMMAND",
    )
    p.add_argument("--steps", type=int, default=30, help="steps timed without the profiler (default %(default)s)")
    p.add_argument("--active", type=int, default=3, metavar="STEPS", help="steps traced (default %(default)s)")
    p.add_argument("--skip", type=int, metavar="STEPS", help="steps before those; default: until their time settles")
    p.add_argument("--stacks", action="store_true", help="trace once more, for source lines")
    p.add_argument("--to-end", action="store_true", help="let the command run on after its steps were seen")
    p.add_argument("--name", help="what the profile is of; default: the script or target")
    p.add_argument("--out", type=Path, metavar="DIR", help="default: ridgeline-profile/NAME-1, or the next free number")
    _add_output(p)


def _add_explain(verbs: argparse._SubParsersAction) -> None:
    p = _verb(verbs, "explain", explain, "say what slows the step of a trace, without a GPU, and what each fix saves")
    p.add_argument("trace", nargs="?", metavar="TRACE", help="torch.profiler .json[.gz], nsys .sqlite, or a run.json")
    p.add_argument("--facts", type=Path, metavar="FILE", help="unprofiled times; default: NAME.facts.json beside it")
    p.add_argument("--operators", type=Path, metavar="FILE", help="a trace of the same step outside its CUDA graph")
    p.add_argument("--gpu", help="whose ceilings count; default: the one that the trace names")
    p.add_argument("--scorecard", action="store_true", help="how often earlier predictions held, instead of a trace")
    _add_output(p)


def _require_alone(a: argparse.Namespace) -> None:
    """Refuse what says how a trace is read or shown."""
    if a.trace is not None:
        raise UsageError(f"--scorecard looks at no trace: leave {a.trace} out")
    ignored = {"--facts": a.facts, "--operators": a.operators, "--gpu": a.gpu, "--html": a.html}
    ignored |= {"--format": a.format != "table", "--rows": a.rows != _ROWS}
    for name, given in ignored.items():
        if given:
            raise UsageError(f"--scorecard looks at no trace: leave {name} out")


def _add_diff(verbs: argparse._SubParsersAction) -> None:
    p = _verb(verbs, "diff", diff, "compare two saved profiles: what differs beyond the spread of the times")
    p.add_argument("before", type=Path, metavar="BEFORE", help="run.json")
    p.add_argument("after", type=Path, metavar="AFTER", help="run.json")
    p.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="EXPR",
        help="exit 1 if it grew so: wall>3%%, category:layout>0.5ms; may be repeated, a wrong figure lists them all",
    )
    p.add_argument("--unlike", action="store_true", help="compare also profiles of different GPUs or subjects")
    p.add_argument(
        "--fixed",
        metavar="RULE[@SOURCE]",
        help="AFTER has this finding of BEFORE fixed, of several that at file:line: score what it promised",
    )
    p.add_argument("--format", choices=DIFF_FORMATS, default="table", help="of stdout (default %(default)s)")
    _add_rows(p)


def _add_report(verbs: argparse._SubParsersAction) -> None:
    p = _verb(verbs, "report", report, "show a saved profile again")
    p.add_argument("run_file", type=Path, metavar="RUN", help="run.json")
    _add_output(p)


def _add_output(p: argparse.ArgumentParser) -> None:
    p.add_argument("--format", choices=FORMATS, default="table", help="of stdout (default %(default)s)")
    p.add_argument("--html", type=Path, metavar="FILE", help="also write one self-contained page")
    _add_rows(p)


def _add_rows(p: argparse.ArgumentParser) -> None:
    p.add_argument("--rows", type=_count, default=_ROWS, help="rows of each table (default %(default)s)")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, got {text!r}")
    return int(text)


def _verb(verbs: argparse._SubParsersAction, name: str, run: object, text: str) -> argparse.ArgumentParser:
    p = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    p.set_defaults(run=run)
    return p
