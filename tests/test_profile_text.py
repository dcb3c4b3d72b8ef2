"""The terminal, Markdown and CSV forms of a profile: they say what they must, add up, and show names harmlessly."""

import csv
import io
import json
from dataclasses import replace

import pytest

import profiles_made
from ridgeline.finding import Saving
from ridgeline.profile_record import Calibration
from ridgeline.profile_summary import limits, roof_share
from ridgeline.profile_text import FORMATS, render

PROFILE = profiles_made.made()


def test_the_headline_has_the_step_the_roof_and_three_fixes_with_interval_and_effort():
    lines = render(PROFILE).splitlines()[:9]
    said = "\n".join(lines)
    assert "44.1 ms (43.7 ms to 44.9 ms: quartiles of 50 unprofiled steps); 49.1 ms in the trace" in said
    assert "98.4 % of the step: 43.4 ms" in said  # 43.39 of 44.1
    assert "54.2 %: these kernels need 23.9 ms on the measured ceilings" in said
    assert "fix 1        L1 120 layout kernels" in said
    assert "saves 4.92 ms (4.10 ms to 11.0 ms), effort S" in said
    assert "fix 3        H5" in said
    assert "fix 4" not in said


def test_every_part_of_the_report_is_there_in_order():
    said = render(PROFILE)
    titles = (
        "Environment", "Where the step goes", "Findings (4)", "Kernels by name", "Kernels by name and shape",
        "Copies and fills", "Host waits for the GPU", "What was not looked at", "How to reproduce",
    )  # fmt: skip
    places = [said.index(f"\n{title}") for title in titles]
    assert places == sorted(places)
    assert said.count("wrong if  ") == 4
    assert "44.2 ms left" not in said  # 44.1 less 4.92
    assert "39.2 ms left with all fixes so far" in said
    assert "L4 did not look: needs the tensors' strides" in said
    assert "ridgeline profile -- python train.py" in said
    assert "SM clock" in said


def test_findings_with_nothing_left_are_named_together():
    first, second, *rest = profiles_made.FINDINGS
    spent = replace(second, saving=Saving(0.0, 0.0, 1e-6))
    said = " ".join(render(profiles_made.made(findings=(first, spent, *rest))).split())
    assert "Findings (4)" in said  # counted, but not told in full
    assert f"besides nothing is left, after the fixes above, of H9 {spent.title}" in said
    assert spent.wrong_if not in said and first.wrong_if in said


def test_a_wait_is_told_however_little_it_saves():
    first, _, wait, _ = profiles_made.FINDINGS
    said = render(profiles_made.made(findings=(first, replace(wait, saving=Saving(0.0, 0.0, 1e-9)))))
    assert wait.wrong_if in said and "nothing is left" not in said
    assert "fix 2" not in said  # but it is no headline


def test_a_saving_that_another_finding_counts_is_said_to_be_there():
    launches = replace(profiles_made.FINDINGS[1], saving=None, within="W1")
    assert "counted in W1's saving, effort M" in render(profiles_made.made(findings=(launches,)))


def test_the_roof_is_unknown_where_most_kernels_have_none():
    kernels = tuple(replace(row, of_roof=None) for row in PROFILE.kernels)
    assert "of the roof  unknown: no formula or shapes for kernels that hold 100.0 %" in render(
        replace(PROFILE, kernels=kernels)
    )
    assert roof_share(replace(PROFILE, kernels=kernels)) is None
    assert roof_share(PROFILE) == pytest.approx(0.542, abs=1e-3)


def test_the_waterfall_adds_up_to_the_step():
    lines = render(PROFILE).split("Where the step goes\n")[1].split("Shares are")[0].splitlines()[2:]
    shares = [float(line.split(" %")[0].split()[-1]) for line in lines]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert sum(bar.idle for bar in PROFILE.waterfall) == 3  # too short for a mark, each
    said = " ".join(render(PROFILE, width=400).split())
    assert (
        "Shares are of the unprofiled step, 44.1 ms. Idle time is without the 4.99 ms that the profiler adds." in said
    )
    assert f"GPU idle {(44.1 - 43.39) / 44.1:.1%}".replace("%", " %") in said


def test_every_share_of_the_step_is_of_one_step():
    first = PROFILE.by_name[0]
    share = f"{first.total_s / PROFILE.wall.median_s * 100:.1f} %"
    row = next(line for line in render(PROFILE, "md").split("Kernels by name,")[1].splitlines() if "| 40 |" in line)
    assert f"| {share} |" in row
    longer = replace(PROFILE, wall=replace(PROFILE.wall, median_s=0.9 * PROFILE.busy_s))
    assert "take longer, so the parts add up to 44.1 ms" in " ".join(render(longer, width=400).split())
    untimed = profiles_made.made(wall=None)
    assert "Shares are of the step as traced, 49.1 ms, profiler included." in render(untimed, width=400)
    assert json.loads(render(PROFILE, "json"))["step_s"] == PROFILE.wall.median_s


SIGMA = "\N{GREEK SMALL LETTER SIGMA}"
COLUMNS = (
    "count", "total", "%", "avg", "median", "min", "max", SIGMA, f"{SIGMA}/avg", "grid", "class", "dtype", "layout",
    "tensor core", "FLOP/B", "bound", "of roof",
)  # fmt: skip


def test_the_kernel_table_has_every_column_where_there_is_room():
    said = render(PROFILE, width=400)
    head = said.split("Kernels by name, most time first\n")[1].splitlines()[0]
    assert all(f" {title} " in f" {head} " for title in COLUMNS)
    markdown = render(PROFILE, "md")
    head = next(line for line in markdown.splitlines() if line.startswith("| kernel | count"))
    assert all(f"| {title} |" in head for title in COLUMNS)


@pytest.mark.parametrize("width", [40, 60, 80, 120, 160, 300])
def test_names_and_totals_stay_on_a_narrow_terminal(width):
    said = render(PROFILE, width=width, color=False)
    table = said.split("Kernels by name, most time first\n")[1].split("\n\n")[0]
    assert "12.1 ms" in table
    assert "total" in table.splitlines()[0]
    if width >= 60:
        assert max(map(len, table.splitlines())) <= width


def test_long_tables_are_cut_and_say_so():
    said = render(PROFILE, max_rows=3)
    assert said.count("… 8 more rows (") == 2
    assert "--format csv shows all" in said
    with pytest.raises(ValueError, match="not be negative, got -1"):
        render(PROFILE, max_rows=-1)
    with pytest.raises(ValueError, match="one of table, json, csv, md, got 'yaml'"):
        render(PROFILE, "yaml")


def test_without_shapes_there_is_one_kernel_table():
    rows = tuple(replace(row, shapes="") for row in PROFILE.kernels)
    assert "by name and shape" not in render(replace(PROFILE, kernels=rows))


@pytest.mark.parametrize("output_format", FORMATS)
def test_nothing_steers_the_terminal(output_format):
    assert "\x1b" not in render(PROFILE, output_format)


def test_colour_is_on_demand():
    assert "\x1b[36mmemory" in render(PROFILE, width=400, color=True)


def test_markdown_shows_names_as_they_are():
    said = render(PROFILE, "md")
    assert "<script>" not in said
    assert "\\<script\\>alert('x')\\</script\\>\\|\\`\\*\\_" in said
    tables = [block.splitlines() for block in said.split("\n\n") if block.startswith("|")]
    for table in tables:
        assert len({line.replace("\\|", "").count("|") for line in table}) == 1


def test_csv_rows_add_up_to_the_step():
    profile = PROFILE
    rows = list(csv.DictReader(io.StringIO(render(profile, "csv"))))
    assert [(row["count"], row["bytes"]) for row in rows if row["part"] == "copy"] == [("1", "1572864")]
    assert {row["part"] for row in rows} == {"kernel", "copy", "idle"}
    assert sum(float(row["total_seconds"]) for row in rows) == pytest.approx(profile.step_s)
    assert sum(float(row["of_step"]) for row in rows) == pytest.approx(1)
    first = rows[0]
    assert first["name"].startswith("cutlass__5x_cudnn")
    assert float(first["sigma_over_mean"]) == pytest.approx(
        float(first["sigma_seconds"]) / float(first["mean_seconds"])
    )
    layout = next(row for row in rows if row["category"] == "layout")
    assert layout["intensity_flop_per_byte"] == ""
    overlapped = list(csv.DictReader(io.StringIO(render(replace(PROFILE, overlap_s=1e-3), "csv"))))
    assert [float(row["total_seconds"]) for row in overlapped if row["part"] == "overlap"] == [-1e-3]


def test_json_is_the_saved_file():
    assert json.loads(render(PROFILE, "json"))["subject"] == "ddpm-cifar10"


@pytest.mark.parametrize("output_format", FORMATS)
def test_an_empty_profile_is_reported(output_format):
    said = render(profiles_made.empty(), output_format)
    assert "nan" not in said
    assert said


def test_what_was_not_looked_at_depends_on_what_was():
    said = "\n".join(limits(PROFILE))
    assert "98.7 % of the kernel time has an operator and 81.0 % a module" in said
    assert "99.2 % of the GPU time that events measured" in said
    assert "have no roofline" in said  # the fills
    assert "above roof" not in said.lower()
    extra = {"above_roof": "gemm at 1.30 of its roof; data still in L2"}
    bare = "\n".join(limits(replace(PROFILE, extra=extra, wall=None, coverage=None)))
    assert "Above roof: gemm at 1.30 of its roof; data still in L2." in bare
    assert "idle time is an upper bound" in bare
    assert "would go unnoticed" in bare


def test_applied_fixes_are_shown():
    profile = replace(PROFILE, calibrations=(Calibration("L1", 1e-3, 2e-3, 3e-3, 2.5e-3),))
    assert "promised: saves 2.00 ms (1.00 ms to 3.00 ms); brought 2.50 ms, inside the interval" in render(profile)
