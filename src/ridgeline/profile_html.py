"""A profile as one offline HTML page: headline, waterfalls, timeline, findings, roofline, tables, and its limits.

Everything that comes from a trace is text here: names are escaped, cut where long, and never markup.
"""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline import units
from ridgeline.finding import Finding
from ridgeline.html_page import Section, page, text
from ridgeline.profile_html_tables import copy_table, kernel_tables, point_table, sync_table, top_points
from ridgeline.profile_record import Profile
from ridgeline.profile_summary import (
    NO_FIX,
    basis,
    best,
    busy_share,
    calibration_text,
    duration,
    effort,
    environment,
    evidence_text,
    limits,
    priced,
    roof_share,
    share_text,
    spent,
    step_s,
    worth_text,
)
from ridgeline.profile_svg import category_slots, dim_points, has_roofs, place, point_categories, roofline_plot
from ridgeline.profile_timeline import timeline
from ridgeline.report import ABSENT
from ridgeline.roofline_axes import LOWEST_INTENSITY
from ridgeline.text_cut import cut

MAX_FINDINGS = 40  # more are in the JSON; a page of 60 would be read by nobody
_MAX_TEXT = 600  # of one field of a finding


def profile_page(profile: Profile) -> str:
    """The whole document, under 500 KB also for the longest steps; it needs neither network nor script to be read."""
    sections = (
        _section("overview", "Overview", _overview(profile)),
        _section("waterfall", "Where the step goes", _waterfall(profile)),
        _section("timeline", "Timeline", _timeline(profile)),
        _section("findings", "Findings", _findings(profile)),
        _section("roofline", "Roofline", _roofline(profile)),
        _section("kernels", "Kernels", kernel_tables(profile) + copy_table(profile) + sync_table(profile)),
        _section("limits", "What was not looked at", _limits(profile)),
        _section("reproduce", "How to reproduce", _reproduce(profile)),
    )
    title = f"{profile.subject} on {profile.gpu}" if profile.gpu else profile.subject
    return page([section for section in sections if section.html], title=title, assets=("report", "profile"))


def _section(ident: str, title: str, body: str) -> Section:
    """One section; without a body it is left out of the page."""
    heading = "" if ident == "overview" else f"<h2>{text(title)}</h2>"
    return Section(ident, title, f'<section id="{ident}">{heading}{body}</section>' if body else "")


def _overview(profile: Profile) -> str:
    left_s = profile.remaining_s[-1] if profile.remaining_s else None
    idle_s = sum(profile.idle.values())
    cause = max(profile.idle, key=lambda name: profile.idle[name], default="")
    facts = (
        ("Step", units.seconds(step_s(profile)), _step_note(profile)),
        ("GPU busy", share_text(busy_share(profile)), f"{units.seconds(profile.busy_s)} of work"),
        (
            "GPU idle",
            units.seconds(idle_s) if idle_s else "none",
            "of the step" + (f", mostly {cause}" if idle_s else ""),
        ),
        ("Of the roof", share_text(roof_share(profile)), _roof_note(profile)),
        ("After the fixes", units.seconds(left_s) if left_s is not None else ABSENT, "is left of the step"),
    )
    items = "".join(
        f'<div><dt>{name}</dt><dd class="big">{text(value)}</dd><dd>{text(note)}</dd></div>'
        for name, value, note in facts
    )
    picks = "".join(_pick(index, finding) for index, finding in enumerate(profile.findings) if finding in best(profile))
    caution = profile.extra.get("caution", "")
    heading = "<h3>What to do first</h3>" if picks else f'<p class="lede">{NO_FIX.capitalize()}.</p>'
    return (
        f'<h2>{text(profile.subject)}</h2><p class="meta">{text(profile.gpu)}</p><dl class="strip">{items}</dl>'
        + (f'<p class="note">Caution: {text(caution)}.</p>' if caution else "")
        + heading
        + (f'<ol class="picks">{picks}</ol>' if picks else "")
    )


def _step_note(profile: Profile) -> str:
    traced = f"{units.seconds(profile.traced_step_s)} in the trace"
    if profile.wall is None:
        return "in the trace; nobody timed it unprofiled"
    low, high = units.seconds(profile.wall.low_s), units.seconds(profile.wall.high_s)
    return f"{low} to {high} in {profile.wall.n} unprofiled steps; {traced}"


def _pick(index: int, finding: Finding) -> str:
    low, mid, high = map(duration, _ends(finding))
    return (
        f'<li><a href="#finding-{index}">{text(cut(finding.title, _MAX_TEXT, "end"))}</a>'
        f'<span class="worth"><b>−{mid}</b><small>{low} to {high}, effort {finding.effort}</small></span>'  # noqa: RUF001
    )


def _roof_note(profile: Profile) -> str:
    if profile.floor_s is None:
        return "no ceilings for this GPU"
    whose = f" of {profile.ceilings_gpu}" if profile.ceilings_gpu else ""
    source = "measured" if profile.peaks_measured else "data sheet"
    return f"{units.seconds(profile.floor_s)} on the {source} ceilings{whose}"


def _waterfall(profile: Profile) -> str:
    if not profile.waterfall:
        return ""
    slots, parts, at_s = category_slots(profile), [], 0.0
    total_s = sum(bar.seconds for bar in profile.waterfall) or 1.0
    whole_s = step_s(profile) or 1.0
    for bar in profile.waterfall:
        style = "idle" if bar.idle else f"k{slots.get(bar.name, 0)}"
        parts.append(_bar(bar.name, style, at_s, bar.seconds, total_s, share_text(bar.seconds / whole_s)))
        at_s += bar.seconds
    parts.append(_bar("step", "total", 0.0, total_s, total_s, ""))
    note = (
        "The step, piece by piece: each bar begins where the one above it ends. Hatched: the GPU idles. "
        f"{text(basis(profile))}"
    )
    return f'<p class="note">{note}</p><ul class="fall">{"".join(parts)}</ul>{_remaining(profile)}'


def _remaining(profile: Profile) -> str:
    """The staircase of the fixes, and below it the floor of the kernels as they are."""
    pairs = zip(profile.findings, profile.remaining_s, strict=False)
    steps = [(finding, left_s) for finding, left_s in pairs if finding.saving][:MAX_FINDINGS]
    if not steps:
        return ""
    now_s = before_s = step_s(profile)
    # a roof of another GPU's ceilings may be longer than the step
    longest_s = max([now_s, profile.floor_s or 0.0, *(left_s for _, left_s in steps)]) or 1.0
    parts = [_bar("now", "", 0.0, now_s, longest_s, "")]
    for finding, left_s in steps:
        name, cut_s = f"{finding.rule} {finding.title}", max(before_s - left_s, 0.0)
        share = f"−{share_text(cut_s / now_s)}" if cut_s and now_s else ""  # noqa: RUF001
        parts.append(_bar(name, "left", 0.0, left_s, longest_s, share, cut_s))
        before_s = left_s
    if profile.floor_s is not None:
        parts.append(_bar("roof of today's kernels", "roof", 0.0, profile.floor_s, longest_s, ""))
    return (
        "<h3>Before and after</h3>"
        '<p class="note">What is left of the step with the first fix, the first two, and so on: each computed on the '
        "trace as edited by those before it, so overlapping savings count once. Dashed: what a fix takes away, "
        f'at its likely value.</p><ul class="fall fixes">{"".join(parts)}</ul>'
    )


def _bar(name: str, style: str, start_s: float, seconds: float, total_s: float, note: str, cut_s: float = 0.0) -> str:
    start, width, removed = (max(part, 0.0) / total_s * 100 for part in (start_s, seconds, cut_s))
    where = f"--s:{start:.3g}%;--w:{width:.4g}%;--cut:{removed:.3g}%"
    return (
        f'<li class="{style}"><b title="{text(cut(name, 200, "end"))}">{text(cut(name, 60, "end"))}</b>'
        f'<i style="{where}"></i><span>{units.seconds(seconds)}</span><span>{text(note)}</span>'
    )


def _timeline(profile: Profile) -> str:
    if not profile.timeline:
        return ""
    drawn = timeline(profile)
    hidden = (
        f" The {drawn.hidden} shortest of them ({units.seconds(drawn.hidden_s)} together) are left out."
        if drawn.hidden
        else ""
    )
    slots = category_slots(profile)
    listed = dict.fromkeys(lane.category for lane in profile.timeline if lane.stream >= 0)
    swatches = "".join(f'<li class="k{slots[name]}">{text(name)}' for name in listed)
    return (
        f'<p class="note">{drawn.lanes} kernels, copies and gaps of one step as traced, profiler included.'
        f"{hidden} Drag to move; pinch, or click "
        "and turn the wheel, to zoom. Keys: + and − zoom, ← and → go from one to the next, ↑ and ↓ change the row, "  # noqa: RUF001
        "Home and End go to the ends, 0 shows all.</p>"
        f'<figure class="timeline" data-rows="{drawn.rows}"><noscript>The timeline needs a script to draw; the tables '
        "below hold the same kernels.</noscript>"
        f'<script type="application/json">{drawn.json}</script></figure>'
        f'<ul class="swatches" aria-label="Classes in the timeline">{swatches}</ul>'
    )


def _findings(profile: Profile) -> str:
    if not profile.findings:
        return "<p>None.</p>" + _calibrations(profile)
    longest_s = max((_ends(finding)[-1] for finding in priced(profile)), default=0.0) or 1.0
    shown = profile.findings[:MAX_FINDINGS]
    gone = spent(profile)
    articles = "".join(
        _finding(index, finding, longest_s, profile.remaining_s)
        for index, finding in enumerate(shown)
        if finding not in gone
    )
    names = "; ".join(f"{text(finding.rule)} {_short(finding.title)}" for finding in gone)
    nothing = f'<p class="note">Nothing is left, after the fixes above, of {names}.</p>' if gone else ""
    hidden = len(profile.findings) - len(shown)
    more = f'<p class="note">{hidden} more, of lower rank, are in the JSON.</p>' if hidden else ""
    note = (
        "Ranked by what they save. A bar runs from the least to the most a fix may save; the mark is the likely value."
    )
    return f'<p class="note">{note}</p>{articles}{nothing}{more}{_calibrations(profile)}'


def _finding(index: int, finding: Finding, longest_s: float, remaining_s: tuple[float, ...]) -> str:
    scale = ""
    if finding.saving:
        ends = zip(("low", "mid", "high"), _ends(finding), strict=True)
        where = ";".join(f"--{name}:{end_s / longest_s * 100:.3g}%" for name, end_s in ends)
        scale = f'<div class="scale" style="{where}"></div>'
    left = f"; {units.seconds(remaining_s[index])} left with all fixes so far" if index < len(remaining_s) else ""
    worth = f"{worth_text(finding)}, {effort(finding)}, {finding.confidence}{left}"
    verb = f" <code>{_short(finding.verb)}</code>" if finding.verb else ""
    return (
        f'<article class="finding" id="finding-{index}"><h4><span class="rule">{text(finding.rule)}</span> '
        f'{_short(finding.title)}</h4>{scale}<p class="worth">{text(worth)}</p><dl>'
        f"<dt>fix</dt><dd>{_short(finding.fix)}{verb}</dd><dt>wrong if</dt><dd>{_short(finding.wrong_if)}</dd>"
        f"<dt>evidence</dt><dd>{_short(evidence_text(finding))}</dd></dl></article>"
    )


def _ends(finding: Finding) -> tuple[float, float, float]:
    assert finding.saving is not None
    return finding.saving.low_s, finding.saving.mid_s, finding.saving.high_s


def _calibrations(profile: Profile) -> str:
    if not profile.calibrations:
        return ""
    return "<h3>Promised and brought</h3>" + _facts((c.rule, calibration_text(c)) for c in profile.calibrations)


def _roofline(profile: Profile) -> str:
    points = top_points(profile)
    if not points:
        return ""
    if not has_roofs(profile):
        note = "No roof is drawn: the ceilings of this GPU are unknown."
        return f'<p class="note">{note}</p>{point_table(profile, points, plotted=False)}'
    slots, categories = category_slots(profile), point_categories(profile)
    legend = "".join(
        f'<li class="k{slots[name]}">{text(name)}</li>'
        for name in dict.fromkeys(categories.get(point.name, "unknown") for point in points)
    )
    low = sum(not place(point).inside for point in points)
    strip = f" Kernels below {LOWEST_INTENSITY} FLOP/B ({low}) stand left of the axis." if low else ""
    dim = len(dim_points(points))
    edge = f" {dim} points of no weight may stand on the edge of the plot." if dim else ""
    return (
        '<p class="note">Each point is the kernels of one name and shape; its area is its share of the time. '
        "The table below holds the same points.</p>"
        '<figure><div class="scroll" tabindex="0" role="region" aria-label="Roofline plot">'
        f'{roofline_plot(profile, points)}</div><ul class="legend" aria-label="Kernel classes">{legend}</ul>'
        "<figcaption>A point stands at the rate that was measured, from the bytes and FLOPs its operator must move and "
        f"do; the gap up to the roof is what a perfect kernel would gain.{strip}{edge}</figcaption></figure>"
        + point_table(profile, points)
    )


def _limits(profile: Profile) -> str:
    return f'<ul class="limits">{"".join(f"<li>{_short(line)}" for line in limits(profile))}</ul>'


def _reproduce(profile: Profile) -> str:
    return f"<pre><code>{text(profile.command)}</code></pre><h3>Environment</h3>{_facts(environment(profile))}"


def _facts(pairs: Iterable[tuple[str, str]]) -> str:
    return f'<dl class="facts">{"".join(f"<dt>{_short(label)}<dd>{_short(value)}" for label, value in pairs)}</dl>'


def _short(content: str) -> str:
    return text(cut(content, _MAX_TEXT, "end"))
