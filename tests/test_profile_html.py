"""The profile's page: it loads nothing, escapes everything, reads without script, stays small, and adds up."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import replace
from importlib.resources import files

import pytest

import profiles_made
from ridgeline.finding import Saving
from ridgeline.html_page import page
from ridgeline.profile_html import profile_page
from ridgeline.profile_html_tables import top_points
from ridgeline.profile_record import Calibration, Lane, Point
from ridgeline.profile_svg import category_slots, of_roof, place, roofline_plot
from ridgeline.profile_timeline import MAX_LANES, timeline
from ridgeline.roofline_axes import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from test_report_html import _Page, circles, svg

PROFILE = profiles_made.made()
HTML = profile_page(PROFILE)
PARSED = _Page(HTML)


def style(attributes, name):
    return float(re.search(rf"--{name}:(-?[\d.e-]+)%", attributes["style"])[1])


def test_the_page_loads_nothing():
    assert "://" not in re.sub(r"<script>.*?</script>", "", HTML, flags=re.S)
    assert [attrs["href"] for attrs in PARSED.named("link")] == ["data:,"]
    assert not any("src" in attrs for _, attrs in PARSED.tags)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", HTML)
    policy = next(attrs["content"] for attrs in PARSED.named("meta") if "http-equiv" in attrs)
    script = re.search(r"<script>(.*?)</script>", HTML, flags=re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy


def test_names_from_a_trace_stay_text():
    assert "<script>alert('x')</script>" in PARSED.text
    assert [attrs.get("type") for attrs in PARSED.named("script")] == ["application/json", None]
    assert not any(attribute.startswith("on") for _, attrs in PARSED.tags for attribute in attrs)
    assert "\x1b" not in HTML
    hostile = "</script><!--<script><img src=x onerror=alert(1)>\ud800"
    lane = Lane(0.0, 1e-3, 7, hostile, hostile)
    rows = tuple(replace(row, name=hostile, category=hostile, dtype=hostile, grid=hostile) for row in PROFILE.kernels)
    point = Point(hostile, 1e9, 1e6, 1e-3, hostile)
    worst = replace(
        PROFILE, timeline=(lane,), kernels=rows, by_name=rows, points=(point,), subject=hostile, gpu=hostile,
        command=hostile, environment={hostile: hostile}, peaks={hostile: 1e12, "bandwidth": 1e12},
        idle={hostile: 1e-3}, findings=(replace(PROFILE.findings[0], rule=hostile, fix=hostile, verb=hostile),),
    )  # fmt: skip
    html = profile_page(worst)
    parsed = _Page(html)
    assert len(parsed.named("script")) == 2
    assert not parsed.named("img")
    html.encode()


def test_headline_findings_and_limits_are_said():
    for needed in (
        "44.1 ms", "98.4 %", "54.2 %", "23.9 ms on the measured ceilings", "What to do first", "4.92 ms",
        "4.10 ms to 11.0 ms, effort S", "saves 4.92 ms (4.10 ms to 11.0 ms), effort S (a flag or a line), measured",
        "a kernel between the convolutions is slower in NHWC", "events 4711, 4715, 4722", "ddpm/unet.py:88",
        "What was not looked at", "L4 did not look", "How to reproduce", "ridgeline profile -- python train.py",
        "SM clock", "Memcpy HtoD (Pageable -> Device)", "aten::item", "unprofiled steps",
    ):  # fmt: skip
        assert needed in PARSED.text, needed
    links = {attrs["href"].lstrip("#") for attrs in PARSED.named("a")}
    idents = {attrs["id"] for _, attrs in PARSED.tags if "id" in attrs}
    assert links <= idents
    assert {f"finding-{index}" for index in range(3)} <= links


def test_what_to_do_first_is_what_the_terminal_says():
    first, second, wait, _ = PROFILE.findings
    tiny = replace(wait, saving=Saving(0.0, 1e-6, 2e-6))
    html = profile_page(replace(PROFILE, findings=(tiny, first, second)))
    picked = [attrs["href"] for _, attrs in _Page(html).tags if "#finding-" in attrs.get("href", "")]
    assert picked == ["#finding-1", "#finding-2"]


def test_a_page_without_a_fix_worth_a_word_links_to_none():
    spent = tuple(replace(f, rule="K1", saving=Saving(0.0, 0.0, 1e-9)) for f in PROFILE.findings)
    parsed = _Page(profile_page(replace(PROFILE, findings=spent)))
    assert "No finding names a saving worth a word." in parsed.text
    assert not any("#finding-" in attrs.get("href", "") for _, attrs in parsed.tags)


def test_idle_time_is_the_steps_and_the_page_says_of_what_its_shares_are():
    assert re.search(r"GPU idle\s*<?.*?of the step, mostly", PARSED.text, flags=re.S)
    assert (
        "Shares are of the unprofiled step, 44.1 ms. Idle time is without the 4.99 ms that the profiler" in PARSED.text
    )
    assert "of one step as traced, profiler included" in PARSED.text


def test_ceilings_of_another_gpu_are_a_caution():
    other = replace(PROFILE, ceilings_gpu="NVIDIA T4", extra={"caution": "the ceilings are those of NVIDIA T4"})
    said = _Page(profile_page(other)).text
    assert "Caution: the ceilings are those of NVIDIA T4." in said
    assert "on the measured ceilings of NVIDIA T4" in said
    assert "Caution" not in PARSED.text


def test_long_names_of_kernels_do_not_widen_a_small_screen():
    title = "4 kernels at 9 % of the roof: triton_" + "fused_native_group_norm_backward_" * 40
    spent = replace(PROFILE.findings[1], rule="K20", title=title, saving=Saving(0.0, 0.0, 1e-9))
    html = profile_page(replace(PROFILE, findings=(PROFILE.findings[0], spent)))
    (told,) = re.findall(r'<p class="note">Nothing is left, after the fixes above, of (.*?)</p>', html)
    assert len(told) < 700
    assert re.search(r"\.note, \.limits \{ overflow-wrap: anywhere; \}", html)


def test_the_waterfalls_are_to_scale():
    bars = PARSED.named("i")
    pieces, total = bars[: len(PROFILE.waterfall)], bars[len(PROFILE.waterfall)]
    at = 0.0
    for piece, bar in zip(pieces, PROFILE.waterfall, strict=True):
        assert style(piece, "s") == pytest.approx(at, abs=0.3)
        assert style(piece, "w") == pytest.approx(bar.seconds / PROFILE.step_s * 100, abs=0.05)
        at += style(piece, "w")
    assert style(total, "w") == 100
    now, *steps, roof = bars[len(PROFILE.waterfall) + 1 :]
    assert style(now, "w") == 100  # the unprofiled step
    assert [style(step, "w") for step in steps] == [
        pytest.approx(left_s / PROFILE.wall.median_s * 100, abs=0.05) for left_s in PROFILE.remaining_s[:3]
    ]
    assert style(steps[0], "cut") == pytest.approx(4.92e-3 / 0.0441 * 100, abs=0.1)
    assert style(roof, "w") == pytest.approx(PROFILE.floor_s / PROFILE.wall.median_s * 100, abs=0.05)


def test_a_roof_beyond_the_step_stays_on_the_page():
    """As on the ceilings of a slower GPU."""
    bars = _Page(profile_page(replace(PROFILE, floor_s=2 * PROFILE.wall.median_s))).named("i")
    now, *_, roof = bars[len(PROFILE.waterfall) + 1 :]
    assert (style(now, "w"), style(roof, "w")) == (50, 100)


def unpacked(profile):
    """What the page's script makes of the timeline's numbers: (row, start in ns, duration in ns, name, category)."""
    data = json.loads(timeline(profile).json)
    for title, packed in data["rows"]:
        at = 0
        for start, duration, name in zip(*[iter(packed)] * 3, strict=True):
            at += start
            text, category = data["names"][name]
            yield title, at, duration, text, data["categories"][category][0]


def test_the_timeline_holds_every_lane_where_it_was():
    lanes = list(unpacked(PROFILE))
    assert len(lanes) == len(PROFILE.timeline) == timeline(PROFILE).lanes
    assert list(dict.fromkeys(row for row, *_ in lanes)) == ["stream 7", "stream 13", "idle"]
    wanted = sorted(
        (round(lane.start_s * 1e9), round(lane.duration_s * 1e9), lane.category) for lane in PROFILE.timeline
    )
    assert sorted((start, duration, category) for _, start, duration, _, category in lanes) == wanted
    assert json.loads(timeline(PROFILE).json)["end"] == round(PROFILE.traced_step_s * 1e9)


def test_a_long_timeline_keeps_the_longest_and_says_so():
    profile = profiles_made.huge()
    drawn = timeline(profile)
    assert drawn.lanes == MAX_LANES
    assert drawn.hidden == len(profile.timeline) - MAX_LANES
    kept = sum(duration for _, _, duration, _, _ in unpacked(profile)) * 1e-9
    assert kept + drawn.hidden_s == pytest.approx(sum(lane.duration_s for lane in profile.timeline), rel=1e-6)
    assert f"The {drawn.hidden} shortest of them (" in profile_page(profile)


def test_pages_stay_small():
    assert len(HTML.encode()) < 100_000
    page_of_all = profile_page(profiles_made.huge())
    assert len(page_of_all.encode()) < 500_000
    assert "20 more, of lower rank, are in the JSON" in page_of_all
    assert page_of_all.count("are in --format csv only") == 2


def test_every_point_is_where_it_was_measured_and_has_its_row():
    points = top_points(PROFILE)
    dots = circles(roofline_plot(PROFILE, points))
    table = next(table for table in PARSED.tables if table[0][0] == "kernel and shape")
    assert len(dots) == len(points) == len(table) - 1
    assert [row[2] for row in table[1:4]] == ["12.1 ms", "9.76 ms", "8.48 ms"]
    xs = {place(point).intensity: float(dot.get("cx")) for point, dot in zip(points, dots, strict=True)}
    ys = {place(point).rate: float(dot.get("cy")) for point, dot in zip(points, dots, strict=True)}
    assert [xs[key] for key in sorted(xs)] == sorted(xs.values())
    assert [ys[key] for key in sorted(ys)] == sorted(ys.values(), reverse=True)
    for dot in dots:
        assert LEFT <= float(dot.get("cx")) <= WIDTH - RIGHT
        assert TOP <= float(dot.get("cy")) <= HEIGHT - BOTTOM


def test_a_kernel_above_its_roof_is_flagged_and_not_clipped():
    fast = Point("winograd", 1e12, 1e9, 1e-3, "tensor_bf16")  # 1000 TFLOP/s where 791 were measured
    assert of_roof(fast, PROFILE.peaks) == pytest.approx(1e15 / 791e12)
    parsed = _Page(profile_page(replace(PROFILE, points=(fast,))))
    table = next(table for table in parsed.tables if table[0][0] == "kernel and shape")
    assert table[1][3] == "126.4 %"
    assert {"class": "over"} in parsed.named("td")


def test_points_without_flops_stand_in_the_strip():
    copy = Point("copy", 0.0, 1e9, 1e-3, "cuda_fp32")
    (dot,) = circles(roofline_plot(replace(PROFILE, points=(copy,)), (copy,)))
    assert float(dot.get("cx")) < LEFT + 36
    empty = Point("nothing", 0.0, 0.0, 0.0, "cuda_fp32")
    assert of_roof(empty, PROFILE.peaks) is None
    svg(roofline_plot(PROFILE, (empty,)))


def test_kernels_of_no_weight_do_not_stretch_the_axes():
    speck = Point("speck", 2.0, 16.0, 1e-6, "cuda_fp32")  # 2 MFLOP/s at 0.125 FLOP/B
    points = (*PROFILE.points, speck)
    plot, plain = (circles(roofline_plot(PROFILE, dots)) for dots in (points, PROFILE.points))
    assert [(dot.get("cx"), dot.get("cy")) for dot in plot[:-1]] == [(dot.get("cx"), dot.get("cy")) for dot in plain]
    assert (float(plot[-1].get("cx")), float(plot[-1].get("cy"))) == (LEFT, HEIGHT - BOTTOM)
    assert "1 points of no weight" in profile_page(replace(PROFILE, points=points))
    heavy = replace(speck, seconds=1.0)
    assert float(circles(roofline_plot(PROFILE, (*PROFILE.points, heavy)))[-1].get("cy")) < HEIGHT - BOTTOM


def test_an_unknown_gpu_gets_a_table_and_no_roof():
    parsed = _Page(profile_page(replace(PROFILE, peaks={}, floor_s=None)))
    assert not parsed.named("svg")
    assert "the ceilings of this GPU are unknown" in parsed.text
    assert any(table[0][0] == "kernel and shape" for table in parsed.tables)
    # the script would look for a dot for each row of this class
    assert not any("kernels" in attrs.get("class", "") for attrs in parsed.named("table"))


def test_categories_have_colours_of_their_own():
    slots = category_slots(PROFILE)
    used = [slot for slot in slots.values() if slot]
    assert len(used) == len(set(used))
    assert slots["conv"] == 1
    assert category_slots(profiles_made.after_fixes())["norm"] == slots["norm"]


def test_everything_is_named_for_a_reader_without_eyes():
    assert all(attrs.get("aria-label") for _, attrs in PARSED.tags if attrs.get("role") in ("region", "group"))
    assert all(attrs.get("scope") == "col" for attrs in PARSED.named("th"))
    assert len(PARSED.named("caption")) == len(PARSED.tables)
    assert all(attrs.get("aria-label") for attrs in PARSED.named("svg"))
    assert all(len({len(row) for row in table}) == 1 for table in PARSED.tables)
    assert "The timeline needs a script" in PARSED.text
    script = files("ridgeline").joinpath("assets", "profile.js").read_text(encoding="utf-8")
    for needed in ("tabIndex: 0", "aria-live", "aria-label", "ArrowRight", "ArrowUp", "Home", "End", "Escape", "wheel"):
        assert needed in script, needed


def test_both_themes_and_small_screens_have_rules():
    assert "prefers-color-scheme: dark" in HTML
    assert "prefers-reduced-motion" in HTML
    assert re.search(r"@media \(max-width: 700px\) \{\s*\.fall li", HTML)
    # every colour of the profile's own rules follows the theme
    own = files("ridgeline").joinpath("assets", "profile.css").read_text(encoding="utf-8")
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b|rgb|hsl", own)


@pytest.mark.parametrize("part", ["everything", "timeline", "points", "waterfall", "findings", "kernels"])
def test_a_page_of_less_is_still_a_page(part):
    fields = {"kernels": (), "by_name": ()} if part == "kernels" else {part: ()}
    profile = profiles_made.empty() if part == "everything" else replace(PROFILE, **fields)
    parsed = _Page(profile_page(profile))
    assert not re.search(r"\b(nan|inf|None)\b", parsed.text.replace("None.", "").replace("none", ""))


def test_applied_fixes_are_shown():
    parsed = _Page(profile_page(replace(PROFILE, calibrations=(Calibration("L1", 1e-3, 2e-3, 3e-3, 5e-3),))))
    assert "brought 5.00 ms, outside the interval" in parsed.text


def test_a_page_refuses_two_sections_of_one_name():
    section = type("Section", (), {"ident": "a", "title": "A", "html": ""})()
    with pytest.raises(ValueError, match="'a' twice"):
        page([section, section], title="x")


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to parse the page's script")
def test_the_script_parses(tmp_path):
    path = tmp_path / "page.js"
    path.write_text(re.search(r"<script>(.*?)</script>", HTML, flags=re.S)[1], encoding="utf-8")
    assert subprocess.run(["node", "--check", path], check=False).returncode == 0
