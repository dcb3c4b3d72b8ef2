"""The front page: its order, no number without a source, and a picture that is what the code draws."""

import importlib.util
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ridgeline import targets
from ridgeline.profiler import estimate_target
from ridgeline.specs import find_spec

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
PICTURE = ROOT / "docs" / "roofline.svg"
TABLE = re.compile(r"<!-- table:([\w-]+) -->\n(.*?)<!-- /table -->", re.DOTALL)
# a figure with the unit of a measurement, or a factor: "1.3 ms", "989 TFLOP/s", "40 %", "2x", "3 times faster"
UNIT = r"[nµm]s|s|[kMGT]?B/s|[kMGT]?FLOP/s|%|x|\N{MULTIPLICATION SIGN}"
MEASUREMENT = re.compile(rf"\d[\d.,]* ?(?:{UNIT})(?!\w)|\d+ times ")
FIGURES = ("1.3 ms", "22 µs", "4.8 TB/s", "989 TFLOP/s", "40 %", "2x", "1.5\N{MULTIPLICATION SIGN}", "3 times faster")


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measurements(text: str) -> list[str]:
    """Measured figures in the prose; tables written from rows may have them."""
    return MEASUREMENT.findall(TABLE.sub("", text))


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


def test_sections_in_order():
    headings = re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    headings = [heading for heading in headings if not heading.endswith(".py")]
    assert headings == [
        "ridgeline",
        "Two commands",
        "On your own model",
        "Measured",
        "Where to change one thing",
        "Licence",
    ]
    parts = ("docs/roofline.svg", "make demo", "ridgeline profile", "ridgeline.compile(", "ridgeline.compile_step(")
    places = [TEXT.index(part) for part in parts]
    assert places == sorted(places)


def test_no_measured_number_outside_the_tables():
    assert measurements(TEXT) == []
    assert measurements(INDEX) == []


@pytest.mark.parametrize("figure", FIGURES)
def test_a_number_would_be_seen(figure):
    assert measurements(f"It is {figure}.") != []
    assert measurements(f"<!-- table:a -->\n| {figure} |\n<!-- /table -->\n") == []


def test_every_table_has_its_place():
    script = load(ROOT / "benchmarks" / "readme.py")
    pages = "".join(page.read_text(encoding="utf-8") for page in script.PAGES)
    assert [name for name, _ in TABLE.findall(pages)] == list(script.TABLES)


def test_paths_of_the_table_exist():
    rows = TEXT.partition("## Where to change one thing")[2].partition("\nThe [documentation]")[0]
    paths = re.findall(r"`(src/[\w/.]+)`", rows)
    assert len(paths) >= 6
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_picture_is_what_the_code_draws():
    script = load(ROOT / "docs" / "make_picture.py")
    report = estimate_target(targets.resolve(script.MODEL), find_spec(script.GPU))
    fresh = [script.headline(report), *script.explanation(report)]
    svg = "{http://www.w3.org/2000/svg}"
    drawn = ET.fromstring(PICTURE.read_text(encoding="utf-8"))
    shown = ["".join(text.itertext()) for text in drawn.findall(f"{svg}text")][: len(fresh)]
    # words must agree, and figures nearly: another PyTorch may call another operator here and there
    assert [re.sub(r"\d", "", line) for line in shown] == [re.sub(r"\d", "", line) for line in fresh]
    for mine, theirs in zip(shown, fresh, strict=True):
        assert numbers(mine) == pytest.approx(numbers(theirs), rel=0.02), "run docs/make_picture.py"
    dots = drawn.findall(f".//{svg}g[@class='points']/{svg}circle")
    assert len(dots) == pytest.approx(len(report.fused_rows), rel=0.02)


def test_the_picture_stands_alone():
    text = PICTURE.read_text(encoding="utf-8")
    assert len(text.encode()) < 60_000
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
    assert "<script" not in text
    assert "@import" not in text
