"""Diffs of profiles: what differs lies apart, unlike profiles are refused, limits are parsed strictly."""

import json
from dataclasses import replace

import pytest

import profiles_made
from ridgeline.errors import UsageError
from ridgeline.profile_diff import QUARTILE_SIGMAS, Change, diff_profiles, verdict
from ridgeline.profile_diff_text import FORMATS, render_diff
from ridgeline.profile_gate import exceeds, parse_limit
from ridgeline.profile_record import WallTime

BEFORE, AFTER = profiles_made.made(), profiles_made.after_fixes()
DIFF, BACK = diff_profiles(BEFORE, AFTER), diff_profiles(AFTER, BEFORE)


def named(changes, name):
    return next(change for change in changes if change.name == name)


@pytest.mark.parametrize(
    ("before", "after", "differs"),
    [
        ((1.0, 2.0), (2.1, 3.0), True),
        ((2.1, 3.0), (1.0, 2.0), True),
        ((1.0, 2.0), (2.0, 3.0), False),
        ((1.0, 4.0), (2.0, 3.0), False),
        ((1.0, 1.0), (1.0, 1.0), False),
        (None, (2.0, 3.0), None),
    ],
)
def test_what_differs_is_what_lies_apart(before, after, differs):
    assert Change("x", 1.0, 2.0, before, after).differs is differs


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (Change("x", 1.0, 2.0, (0.9, 1.1), (1.9, 2.1)), "slower"),
        (Change("x", 2.0, 1.0, (1.9, 2.1), (0.9, 1.1)), "faster"),
        (Change("x", 2.0, 1.0, (0.5, 2.5), (0.9, 1.1)), "same"),
        (Change("x", 2.0, 1.0), "?"),
        (Change("x", None, 1.0, after_count=3), "new"),
        (Change("x", 1.0, None, before_count=3), "gone"),
    ],
)
def test_verdicts(change, word):
    assert verdict(change) == word


def test_the_wall_differs_by_its_quartiles():
    wall = named(DIFF.totals, "wall")
    assert (wall.before_s, wall.after_s, wall.before_range) == (0.0441, 0.0362, (0.0437, 0.0449))
    assert verdict(wall) == "faster"
    near = replace(BEFORE, wall=WallTime(0.0452, 0.0448, 0.0460, 50))
    assert verdict(named(diff_profiles(BEFORE, near).totals, "wall")) == "same"
    assert verdict(named(diff_profiles(BEFORE, replace(BEFORE, wall=None)).totals, "wall")) == "gone"


def test_kernels_categories_and_names_are_compared():
    layout = named(DIFF.categories, "layout")
    assert (layout.before_count, layout.after_count, verdict(layout)) == (120, 0, "gone")
    assert DIFF.categories[0] == layout  # the one that moved most
    norm = named(DIFF.names, "triton_red_fused__to_copy_native_group_norm_silu_6")
    row = next(row for row in BEFORE.kernels if row.category == "norm")
    assert norm.before_s == row.total_s
    half_s = QUARTILE_SIGMAS * row.sigma_s * row.count
    assert norm.before_range == pytest.approx((row.total_s - half_s, row.total_s + half_s))
    assert verdict(norm) == "faster"  # 3 % with a spread of 1.4 %
    assert verdict(named(DIFF.categories, "pointwise")) == "same"  # 3 % with a spread of 42 %
    assert sum(change.delta_s for change in DIFF.names) == pytest.approx(sum(c.delta_s for c in DIFF.categories))
    assert any("256x256x3x3" in change.name for change in DIFF.kernels)


def test_one_launch_has_no_spread():
    kinds = [replace(kind, count=1) for kind in profiles_made.BASELINE[:2]]
    slower = [replace(kind, us=kind.us * 2) for kind in kinds]
    diff = diff_profiles(profiles_made.made(kinds), profiles_made.made(slower))
    assert {verdict(change) for change in diff.names} == {"?"}


def test_a_profile_does_not_differ_from_itself():
    diff = diff_profiles(BEFORE, BEFORE)
    assert diff.settings == ()
    changes = (*diff.totals, *diff.categories, *diff.names, *diff.kernels)
    assert {verdict(change) for change in changes} == {"same", "?"}
    assert all(change.delta_s == 0 for change in changes)


def test_settings_that_differ_are_listed():
    assert [(s.name, s.before, s.after) for s in DIFF.settings] == [("SM clock", "1980 MHz", "1965 MHz")]
    assert "1980 MHz → 1965 MHz" in render_diff(DIFF)


@pytest.mark.parametrize("field", ["gpu", "subject"])
def test_unlike_profiles_are_refused_unless_told(field):
    other = replace(AFTER, **{field: "another"})
    with pytest.raises(UsageError, match="'another'"):
        diff_profiles(BEFORE, other)
    diff = diff_profiles(BEFORE, other, allow_unlike=True)
    assert any(setting.after == "another" for setting in diff.settings)


def test_the_report_says_what_changed():
    said = render_diff(DIFF, width=200)
    assert "faster: -7.90 ms (-17.9 %), the quartiles lie apart" in said
    assert "120 → 0" in said
    assert "43.7 ms to 44.9 ms" in said
    assert "… 8 more rows that changed less" in render_diff(DIFF, max_rows=3)
    same = render_diff(diff_profiles(BEFORE, BEFORE))
    assert "no difference can be told" in same
    assert "nothing that the profiles wrote down" in same
    assert "not timed in both profiles" in render_diff(diff_profiles(BEFORE, replace(AFTER, wall=None)))


def test_the_other_formats():
    data = json.loads(render_diff(DIFF, "json"))
    assert data["totals"][0] | {"before_range": 0, "after_range": 0} == {
        "name": "wall", "before_s": 0.0441, "after_s": 0.0362, "before_range": 0, "after_range": 0,
        "before_count": 0, "after_count": 0, "delta_s": pytest.approx(-0.0079), "verdict": "faster",
    }  # fmt: skip
    assert len(data["names"]) == len(DIFF.names)
    assert "\\<script\\>" in render_diff(DIFF, "md")
    for output_format in FORMATS:
        assert "\x1b" not in render_diff(DIFF, output_format, color=False)
        assert render_diff(diff_profiles(profiles_made.empty(), profiles_made.empty()), output_format)
    with pytest.raises(ValueError, match="one of table, json, md, got 'csv'"):
        render_diff(DIFF, "csv")
    with pytest.raises(ValueError, match="not be negative"):
        render_diff(DIFF, max_rows=-1)


@pytest.mark.parametrize(
    ("expression", "figure", "share", "seconds"),
    [
        ("wall>3%", "wall", 0.03, None),
        (" wall > 0.5 ms ", "wall", None, 0.5e-3),
        ("category:layout>100us", "category:layout", None, 100e-6),
        ("idle:sync>0s", "idle:sync", None, 0.0),
        ("kernel:foo<a > b>(x)>2%", "kernel:foo<a > b>(x)", 0.02, None),
    ],
)
def test_limits_are_parsed(expression, figure, share, seconds):
    limit = parse_limit(expression)
    assert (limit.figure, limit.share, limit.seconds) == (
        figure, share and pytest.approx(share), seconds and pytest.approx(seconds) if seconds else seconds
    )  # fmt: skip


@pytest.mark.parametrize(
    "expression",
    ["", "wall", "wall>", "wall>3", "wall<3%", "wall>=3%", "wall>-3%", "wall>3%%", "wall>3 %x", ">3%", "wall>1e3%",
     "wall>3% or busy>2%", "wall>nan%", "category:>3%"],
)  # fmt: skip
def test_anything_else_is_no_limit(expression):
    with pytest.raises(UsageError, match=r"is no limit: write FIGURE>NUMBER"):
        parse_limit(expression)


@pytest.mark.parametrize(
    ("diff", "expression", "beyond"),
    [
        (BACK, "wall>3%", True),
        (BACK, "wall>21%", True),
        (BACK, "wall>22%", False),  # 36.2 to 44.1 ms are 21.8 %
        (BACK, "wall>7.8ms", True),
        (BACK, "wall>8ms", False),
        (DIFF, "wall>0%", False),  # it became faster
        (BACK, "category:layout>1ms", True),  # new
        (BACK, "category:layout>1%", True),  # any share of nothing
        (DIFF, "category:layout>0s", False),
        (BACK, "category:pointwise>0%", False),  # within its spread
        (BACK, "category:softmax>0s", False),  # in neither
        (BACK, "idle:sync>0.2ms", True),
        (BACK, "idle:compile>0s", False),
        (BACK, "idle>0.4ms", True),
        (BACK, "kernel:triton_red_fused__to_copy_native_group_norm_silu_6>3%", True),
        (BACK, "kernel:triton_red_fused__to_copy_native_group_norm_silu_6>4%", False),
    ],
)
def test_limits_hold_or_do_not(diff, expression, beyond):
    said = exceeds(diff, expression)
    assert (said is not None) is beyond
    if said:
        assert expression in said
        assert "grew from" in said


def test_a_figure_without_a_spread_is_judged_by_its_number_and_says_so():
    assert exceeds(BACK, "busy>1%").endswith("beyond busy>1%, judged without a spread")
    assert not exceeds(BACK, "wall>3%").endswith("without a spread")


@pytest.mark.parametrize("figure", ["walls", "category:layouts", "idle:typo", "kernel:absent", "step:x"])
def test_a_figure_that_is_none_is_refused(figure):
    with pytest.raises(UsageError, match="use "):
        exceeds(BACK, f"{figure}>3%")


def test_a_wall_that_nobody_timed_cannot_pass():
    with pytest.raises(UsageError, match="not timed in both"):
        exceeds(diff_profiles(BEFORE, replace(AFTER, wall=None)), "wall>3%")
