"""The import contracts of .importlinter hold, and each is shown to fail on a planted import."""

import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "ridgeline"
MODELS_MAY_IMPORT = {"ridgeline.errors"}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """lint-imports of this environment on the package `folder` holds or, without one, on the installed package."""
    tool = Path(sys.executable).with_name("lint-imports")
    command = [tool, "--no-cache", "--config", ROOT / ".importlinter"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def strayed(graph: grimp.ImportGraph) -> set[tuple[str, str]]:
    """Imports of `ridgeline.models` into the rest of the package, other than the allowed ones."""
    models = {"ridgeline.models", *graph.find_descendants("ridgeline.models")}
    imports = {(importer, name) for importer in models for name in graph.find_modules_directly_imported_by(importer)}
    outside = models | MODELS_MAY_IMPORT
    return {(importer, name) for importer, name in imports if name.startswith("ridgeline") and name not in outside}


def test_contracts_hold():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout[result.stdout.find("Broken contracts") :] + result.stderr


def test_models_import_nothing_but_errors():
    assert strayed(grimp.build_graph("ridgeline", cache_dir=None)) == set()


def test_models_rule_can_fail():
    graph = grimp.ImportGraph()
    graph.add_import(importer="ridgeline.models.net", imported="ridgeline.errors")
    graph.add_import(importer="ridgeline.models.net", imported="ridgeline.models.blocks")
    graph.add_module("ridgeline.models")
    assert strayed(graph) == set()
    graph.add_import(importer="ridgeline.models.net", imported="ridgeline.cost")
    assert strayed(graph) == {("ridgeline.models.net", "ridgeline.cost")}


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("units.py", "from ridgeline import report", "ridgeline.units -> ridgeline.report"),
        ("kernels/planted.py", "import ridgeline.cli", "ridgeline.kernels.planted -> ridgeline.cli"),
        ("errors.py", "import ridgeline.units", "ridgeline.errors -> ridgeline.units"),
        ("report.py", "def f():\n    import torch", "ridgeline.report -> torch"),
        ("planted.py", "", "not listed as layers:\n\n- ridgeline.planted"),  # a module without a layer
    ],
)
def test_contracts_can_fail(tmp_path, file, line, complaint):
    shutil.copytree(PACKAGE, tmp_path / "ridgeline", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "ridgeline" / file).open("a", encoding="utf-8") as source:
        source.write(f"\n{line}\n")
    result = lint(tmp_path)
    assert result.returncode == 1
    assert complaint in result.stdout
