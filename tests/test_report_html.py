"""The page: self-contained, escaped, small, accessible; the SVG: well-formed, on its roofs, no larger than promised."""

import base64
import hashlib
import itertools
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pytest

from ridgeline import report_svg, roofline_axes
from ridgeline.errors import UsageError
from ridgeline.report import top
from ridgeline.report_html import detection_section, page, report_section, write_html
from test_report import PEAKS, detector_report, step_report

# the smallest header that says JPEG; no decoder runs here
JPEG = b"\xff\xd8\xff\xe0" + bytes(range(64)) + b"\xff\xd9"
FOUND = [
    {"label": "person", "score": 0.92, "box": (47.3, 402.2, 237.4, 901.0)},
    {"label": "bus", "score": 0.93, "box": (2.9, 230.9, 801.1, 752.5)},
    {"label": "person", "score": 0.51, "box": (0.0, 552.5, 64.8, 877.5)},
]
VOID = {"meta", "link", "img", "input", "br"}
MAY_STAY_OPEN = {"td", "th", "tr", "li", "dt", "dd", "p"}  # HTML's optional end tags, as far as the page uses them


class _Page(HTMLParser):
    """Collects tags, attributes, text and table rows; fails on a tag that does not nest."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts, self.open, self.tables = [], [], [], []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID | MAY_STAY_OPEN:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in MAY_STAY_OPEN:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        in_table = self.open[-1:] in (["tbody"], ["thead"])
        if in_table and self.tables[-1] and self.tables[-1][-1]:
            self.tables[-1][-1][-1] += data.strip("\n")

    @property
    def text(self):
        return "".join(self.texts)

    def named(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def build(report, **options):
    return page([report_section(report, **options)], title="roofline")


def svg(text):
    return ElementTree.fromstring(text)


def circles(text):
    return [node for node in svg(text).iter("circle") if node.get("tabindex") == "0"]


@pytest.fixture(scope="module")
def detector_page():
    return build(detector_report(), command='ridgeline roofline yolo26n --gpu "NVIDIA H200"')


def test_the_page_loads_nothing(detector_page):
    parsed = _Page(detector_page)
    assert "://" not in re.sub(r"<script>.*?</script>", "", detector_page, flags=re.S)
    assert [attrs["href"] for attrs in parsed.named("link")] == ["data:,"]
    assert not any("src" in attrs for tag, attrs in parsed.tags if tag != "img")
    assert "@import" not in detector_page
    assert "url(" not in detector_page


def test_the_content_policy_allows_exactly_this_script(detector_page):
    script = re.search(r"<script>(.*?)</script>", detector_page, flags=re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(attrs["content"] for attrs in _Page(detector_page).named("meta") if "http-equiv" in attrs)
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_the_page_says_what_it_must(detector_page):
    text = _Page(detector_page).text
    report = detector_report()
    for needed in (
        "Fused floor",
        "Nothing was timed for this plot",
        "aten.topk (2 calls)",
        "There is no cache model",
        'ridgeline roofline yolo26n --gpu "NVIDIA H200"',
        f"{report.chain_length} in the longest chain",
        f"{report.unfused_chain_length} in the longest chain",
        "data sheet; sparse figures halved",
    ):
        assert needed in text
    assert "without a cost formula: none" in _Page(build(step_report())).text
    assert "How to reproduce" not in _Page(build(step_report())).text


def test_tables_are_rectangular_and_twin_the_plot(detector_page):
    report = detector_report()
    tables = _Page(detector_page).tables
    for table in tables:
        assert len({len(row) for row in table}) == 1
    kernels = next(table for table in tables if "waves" in table[0])
    rows = top(report.fused_rows, len(report.fused_rows))
    assert [row[0] for row in kernels[1:]] == [row.layer for row in rows]
    titles = [circle.find("title").text for circle in circles(report_svg.roofline_plot(report))]
    assert len(titles) == len(rows)
    assert all(title.startswith(row.layer) for title, row in zip(titles, rows, strict=True))
    operators = next(table for table in tables if "operator" in table[0])
    assert len(operators) == 1 + len(report.rows)


def test_training_steps_get_a_phase_table_and_column():
    tables = _Page(build(step_report())).tables
    phases = next(table for table in tables if table[0][0] == "phase")
    assert [row[0] for row in phases[1:]] == ["forward", "backward", "optimizer"]
    assert sum("phase" in table[0] for table in tables) == 3
    assert not any("phase" in table[0] for table in _Page(build(detector_report())).tables)


def test_names_from_users_stay_text():
    report = detector_report(hostile=True)
    html = build(report, command="ridgeline roofline '<script>'")
    parsed = _Page(html)
    assert len(parsed.named("script")) == 1
    assert not parsed.named("img")
    assert not parsed.named("b")
    assert not any(attribute.startswith("on") for _, attrs in parsed.tags for attribute in attrs)
    assert "<script>alert('x')</script>" in parsed.text
    assert "\x1b" not in html
    svg(report_svg.roofline_plot(report))


def test_a_lone_surrogate_in_a_name_can_still_be_written(tmp_path):
    report = replace(detector_report(), subject="net\ud800")
    written = write_html(tmp_path / "page.html", build(report))
    assert "net\N{REPLACEMENT CHARACTER}" in written.read_text(encoding="utf-8")


def test_a_page_of_a_large_model_stays_small():
    report = detector_report(repeats=4)
    assert len(report.rows) > 700
    assert len(report.fused_rows) > 240
    assert len(build(report).encode()) < 300_000


def test_a_page_of_a_huge_step_is_cut_and_says_so():
    report = detector_report(repeats=14)
    assert len(report.fused_rows) > 800
    html = build(report)
    assert len(html.encode()) < 500_000
    parsed = _Page(html)
    kernels = next(table for table in parsed.tables if "waves" in table[0])
    operators = next(table for table in parsed.tables if "operator" in table[0])
    assert len(kernels) - 1 == html.count('<circle class="k')
    hidden = len(report.fused_rows) - (len(kernels) - 1)
    assert f"The {hidden} shortest (" in parsed.text
    assert f"The {len(report.rows) - (len(operators) - 1)} shortest (" in parsed.text
    order = [row.layer for row in report.rows]
    positions = [order.index(row[0]) for row in operators[1:]]
    assert positions == sorted(positions), "the longest operators keep the order they run in"


def test_four_hundred_points_stay_small():
    report = detector_report(repeats=7)
    report = replace(report, fused_rows=report.fused_rows[:400])
    assert len(report.fused_rows) == 400
    assert len(report_svg.roofline_plot(report).encode()) < 80_000


def test_every_point_sits_on_its_roof_and_inside_the_frame():
    report = detector_report()
    roof = {row.layer + row.kind: min(PEAKS[row.pipe], PEAKS["bandwidth"] * row.intensity) for row in report.fused_rows}
    rows = top(report.fused_rows, len(report.fused_rows))
    drawn = circles(report_svg.roofline_plot(report))
    # two points fix the logarithmic axis; every other point must agree with it
    working = [
        (float(c.get("cy")), math.log(roof[r.layer + r.kind])) for c, r in zip(drawn, rows, strict=True) if r.flops
    ]
    (y0, rate0), (y1, rate1) = min(working), max(working)
    for y, rate in working:
        assert y == pytest.approx(y0 + (rate - rate0) / (rate1 - rate0) * (y1 - y0), abs=0.2)
    for circle in drawn:
        assert roofline_axes.LEFT <= float(circle.get("cx")) <= roofline_axes.WIDTH - roofline_axes.RIGHT
        assert roofline_axes.TOP <= float(circle.get("cy")) <= roofline_axes.HEIGHT - roofline_axes.BOTTOM


def test_point_area_follows_seconds():
    rows = top(detector_report().fused_rows, 2)
    first, second = (float(c.get("r")) for c in circles(report_svg.roofline_plot(detector_report()))[:2])
    assert (first / second) ** 2 == pytest.approx(rows[0].seconds / rows[1].seconds, rel=0.03)


def test_measured_roofs_are_drawn_only_when_there_are_any():
    def roofs(report):
        return [
            n.get("class") for n in svg(report_svg.roofline_plot(report)).iter("path") if "roof" in n.get("class", "")
        ]

    assert roofs(detector_report()) == ["roof sheet", "roof measured"]
    assert roofs(detector_report(measured=False)) == ["roof sheet"]
    assert "measured on this GPU" not in build(detector_report(measured=False))


def test_bars_share_one_scale():
    report = detector_report()
    widths, bar_y = {}, []
    for rect in svg(report_svg.time_bars(report)).iter("rect"):
        widths[rect.get("y")] = widths.get(rect.get("y"), 0.0) + float(rect.get("width")) + 1
        bar_y.append(rect.get("y"))
    unfused, fused = (widths[y] for y in dict.fromkeys(bar_y))
    assert fused / unfused == pytest.approx(report.floor_s / report.unfused_s, abs=0.02)


def test_known_kinds_keep_their_colour_from_report_to_report():
    detector, step = report_svg.kind_slots(detector_report()), report_svg.kind_slots(step_report())
    assert all(detector[kind] == step[kind] for kind in ("conv3x3", "norm", "pointwise"))
    used = [slot for slot in detector.values() if slot]
    assert len(used) == len(set(used)), "two kinds share a colour"


@pytest.mark.parametrize("part", ["rows", "fused_rows", "both"])
def test_an_empty_report_still_makes_a_page(part):
    names = ("rows", "fused_rows") if part == "both" else (part,)
    parsed = _Page(build(replace(step_report(), **dict.fromkeys(names, ()))))
    assert not re.search(r"\b(nan|inf|None)\b", parsed.text)


def test_detections_embed_the_picture_and_list_what_was_found():
    section = detection_section([("<bus>.jpg", JPEG, FOUND)], command="ridgeline detect bus.jpg")
    parsed = _Page(page([section], title="detections"))
    (image,) = parsed.named("img")
    assert base64.b64decode(image["src"].removeprefix("data:image/jpeg;base64,")) == JPEG
    assert image["alt"] == "<bus>.jpg: 2 person, 1 bus"
    assert parsed.tables[0][1] == ["person", "0.920", "47 402 237 901"]
    assert "no weights &amp; no picture" in detection_section([], note="no weights & no picture").html
    assert "nothing found" in detection_section([("a.jpg", JPEG, [])]).html


def test_detections_refuse_what_is_no_jpeg():
    with pytest.raises(ValueError, match=r"a\.png must be JPEG bytes"):
        detection_section([("a.png", b"\x89PNG", [])])


def test_a_page_of_several_sections_links_to_each():
    sections = [
        report_section(detector_report()),
        report_section(step_report()),
        detection_section([("a.jpg", JPEG, FOUND)]),
    ]
    parsed = _Page(page(sections, title="demo"))
    idents = [attrs["id"] for attrs in parsed.named("section")]
    assert [attrs["href"] for attrs in parsed.named("a")] == [f"#{ident}" for ident in idents]
    assert len(set(idents)) == 3
    with pytest.raises(ValueError, match="twice"):
        page([sections[0], sections[0]], title="demo")


def test_scrolling_boxes_and_headings_are_named(detector_page):
    parsed = _Page(detector_page)
    assert all(attrs.get("aria-label") for _, attrs in parsed.tags if attrs.get("role") == "region")
    assert all(attrs.get("scope") == "col" for attrs in parsed.named("th"))
    assert len(parsed.named("caption")) == len(parsed.tables)
    assert all(attrs.get("aria-label") for attrs in parsed.named("svg"))
    assert parsed.named("html") == [{"lang": "en"}]


def test_the_same_report_makes_the_same_page(detector_page):
    assert build(detector_report(), command='ridgeline roofline yolo26n --gpu "NVIDIA H200"') == detector_page


def test_writing_is_whole_or_not_at_all(tmp_path):
    target = tmp_path / "page.html"
    assert write_html(target, "old µ") == target
    write_html(target, "new µ")
    assert target.read_text(encoding="utf-8") == "new µ"
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(UsageError, match=r"cannot write .*missing.*No such file"):
        write_html(tmp_path / "missing" / "page.html", "x")
    with pytest.raises(UsageError, match="Not a directory"):
        write_html(target / "page.html", "x")
    target.unlink()
    target.mkdir()
    with pytest.raises(UsageError, match="Is a directory"):
        write_html(target, "x")
    assert list(tmp_path.iterdir()) == [target]


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
SIGHTS = {
    "normal": np.eye(3),
    "deuteranopia": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "protanopia": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
}


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_kind_colours_can_be_told_apart(scheme, sight):
    style = files("ridgeline").joinpath("assets", "report.css").read_text(encoding="utf-8")
    block = style.split("prefers-color-scheme: dark")[scheme == "dark"]
    colours = dict(re.findall(r"--(k\d|surface): (#[0-9a-f]{6})", block.split("}")[0]))
    linear = {name: _linear(colour) for name, colour in colours.items()}
    luminance = {name: value @ (0.2126, 0.7152, 0.0722) for name, value in linear.items()}
    surface = luminance.pop("surface")
    assert len(luminance) == 10
    for name, value in luminance.items():
        contrast = (max(value, surface) + 0.05) / (min(value, surface) + 0.05)
        assert contrast >= 3, f"{name} on the surface"
    seen = {name: _lab(np.clip(SIGHTS[sight] @ linear[name], 0, 1)) for name in luminance}
    for first, second in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[first] - seen[second]) >= 15, f"{first} and {second}"


def _linear(colour):
    value = np.array([int(colour[index : index + 2], 16) for index in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def _lab(linear):
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    relative = to_xyz @ linear / to_xyz.sum(axis=1)
    x, y, z = np.where(relative > 0.008856, np.cbrt(relative), 7.787 * relative + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
