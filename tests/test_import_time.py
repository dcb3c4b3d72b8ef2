"""`import ridgeline` and `ridgeline --help` are quick, because they load nothing heavy.

What is judged is the CPU time of a fresh interpreter (user + system, best of several). Starting Python waits for
nothing, so on an idle machine that is the wall time; on a busy one it stays what it is while the wall time grows.
"""

import os
import subprocess
import sys

import pytest

HEAVY = {"torch", "triton", "numpy", "cv2", "rich", "safetensors"}
IMPORT = ("-c", "import ridgeline")
HELP = ("-m", "ridgeline", "--help")
LISTED = "import sys; print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"


def cpu_seconds(arguments: tuple[str, ...], *, enough: float, runs: int = 7) -> float:
    """Least CPU time of `python ARGUMENTS` over up to `runs` runs; stops at the first that took at most `enough`."""
    best = float("inf")
    for _ in range(runs):
        child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0, f"python {' '.join(arguments)} exits with {child.returncode}"
        best = min(best, usage.ru_utime + usage.ru_stime)
        if best <= enough:
            break
    return best


def loaded(statement: str) -> set[str]:
    """Top-level modules in memory after `statement` ran in a fresh interpreter."""
    command = [sys.executable, "-c", f"{statement}\n{LISTED}"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stderr.split())


def slowest_imports(arguments: tuple[str, ...], shown: int = 15) -> str:
    """The modules that cost most, as `-X importtime` lists them (self, cumulative, in microseconds)."""
    command = [sys.executable, "-X", "importtime", *arguments]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()[1:]
    lines.sort(key=lambda line: int(line.split(":")[1].split("|")[0]), reverse=True)
    return "\n".join(lines[:shown])


@pytest.mark.parametrize(
    "statement",
    [
        "import ridgeline",
        "from ridgeline.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass",
        "import ridgeline.errors, ridgeline.units, ridgeline.report",
    ],
    ids=["import", "help", "report"],
)
def test_nothing_heavy_is_loaded(statement):
    names = loaded(statement)
    assert "ridgeline" in names
    assert names & HEAVY == set()


def test_heavy_modules_would_be_seen():
    assert loaded("import numpy") & HEAVY == {"numpy"}


@pytest.mark.parametrize(("arguments", "budget_s"), [(IMPORT, 0.3), (HELP, 0.15)], ids=["import", "help"])
def test_start_is_quick(arguments, budget_s):
    best_s = cpu_seconds(arguments, enough=budget_s)
    assert best_s <= budget_s, slowest_imports(arguments)


def test_a_slow_start_would_be_seen():
    busy = ("-c", "import time\nwhile time.process_time() < 0.2: pass")
    assert cpu_seconds(busy, enough=0.15, runs=2) > 0.15
    assert "json" in slowest_imports(("-c", "import json"))
