"""What a profile's reports say in words: the headline, each finding's worth, what was not looked at. No markup."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline import units
from ridgeline.finding import Finding, Saving
from ridgeline.profile_record import Calibration, KernelRow, Profile, WallTime
from ridgeline.report import ABSENT

MOSTLY = 0.5  # of the kernel time: with more of it unknown, nothing is said of the whole
WEIGHTY = 0.005  # of a step: less is no headline, for repeated timings differ by about as much
NOTHING = 0.0005  # of a step: findings that save less at most, after those before them, are named together
WAITS = ("H5", "H6", "H7", "H8")  # told in full however little they save: they forbid a graph
ABOVE_ROOF = 1.05  # of its roofline time a kernel cannot take less by measurement error alone
_SAME = 1.001  # of a sum of times
NO_FIX = "no finding names a saving worth a word"
EFFORT_WORDS = {"S": "a flag or a line", "M": "an edit", "L": "a kernel or a restructuring"}


def step_s(profile: Profile) -> float:
    """Time of a step, of which every share is told."""
    return profile.step_s


def basis(profile: Profile) -> str:
    """What shares of the step are shares of, in a sentence or two; "" where there is no step."""
    if not step_s(profile):
        return ""
    if profile.wall is None:
        return f"Shares are of the step as traced, {units.seconds(profile.traced_step_s)}, profiler included."
    said = f"Shares are of the unprofiled step, {units.seconds(step_s(profile))}."
    pieces_s = sum(bar.seconds for bar in profile.waterfall)
    if profile.traced_step_s > pieces_s * _SAME:
        said += f" Idle time is without the {units.seconds(profile.traced_step_s - pieces_s)} that the profiler adds."
    if pieces_s > step_s(profile) * _SAME:
        said += f" The kernels of the trace alone take longer, so the parts add up to {units.seconds(pieces_s)}."
    return said


def roof_share(profile: Profile) -> float | None:
    """Sum of the kernels' roofline times over the step; None where most of the kernel time has no roof."""
    step = step_s(profile)
    if profile.floor_s is None or not step or unroofed_share(profile) > MOSTLY:
        return None
    return profile.floor_s / step


def unroofed_share(profile: Profile) -> float:
    """Part of the kernel time for which no formula knows the work."""
    total_s = sum(row.total_s for row in profile.kernels)
    return sum(row.total_s for row in profile.kernels if row.of_roof is None) / total_s if total_s else 0.0


def busy_share(profile: Profile) -> float | None:
    """GPU work over the step. Above 1 where the profiler slowed the GPU itself."""
    return _part(profile.busy_s, profile)


def priced(profile: Profile) -> tuple[Finding, ...]:
    """The findings that name a saving, in their rank."""
    return tuple(finding for finding in profile.findings if finding.saving)


def spent(profile: Profile) -> tuple[Finding, ...]:
    """The priced findings of which those before them leave nothing worth a word."""
    floor_s = NOTHING * step_s(profile)
    return tuple(f for f in priced(profile) if f.saving and f.saving.high_s < floor_s and f.rule not in WAITS)


def best(profile: Profile) -> tuple[Finding, ...]:
    """The fixes to make first, three at most: those worth a headline and, where there are none, those worth a word."""
    gone = spent(profile)
    left = [finding for finding in priced(profile) if finding not in gone]
    weighty = [f for f in left if f.saving and f.saving.mid_s >= WEIGHTY * step_s(profile)]
    return tuple((weighty or left)[:3])


def headline(profile: Profile) -> tuple[tuple[str, str], ...]:
    """(label, text) pairs: the step, how busy the GPU is, how far its roof is, and the three fixes worth most."""
    facts = [("subject", profile.subject), ("step", step_text(profile)), ("GPU busy", busy_text(profile))]
    if profile.idle:
        idle_s = sum(profile.idle.values())
        share = share_text(_part(idle_s, profile))
        facts.append(("GPU idle", f"{share} of the step: {units.seconds(idle_s)}, {_largest(profile.idle)}"))
    facts.append(("of the roof", roof_text(profile)))
    if caution := profile.extra.get("caution"):
        facts.append(("caution", caution))
    for number, finding in enumerate(best(profile), 1):
        worth = f"{worth_text(finding)}, {effort(finding)}"
        facts.append((f"fix {number}", f"{finding.rule} {finding.title}: {worth}"))
    if not best(profile):
        facts.append(("fixes", NO_FIX))
    return tuple(facts)


def environment(profile: Profile) -> tuple[tuple[str, str], ...]:
    """(label, text) pairs: the GPU, its ceilings, and what the profiler wrote down."""
    ceilings = ", ".join(
        f"{name.replace('_', ' ')} {units.bandwidth(value) if name == 'bandwidth' else units.rate(value)}"
        for name, value in profile.peaks.items()
    )
    whose = f"{profile.ceilings_gpu}: " if profile.ceilings_gpu else ""
    source = (
        f"measured on {'that' if whose else 'this'} GPU"
        if profile.peaks_measured
        else "data sheet; `ridgeline doctor --measure` measures"
    )
    return (
        ("GPU", profile.gpu),
        ("ceilings", f"{whose}{ceilings} ({source})" if ceilings else "unknown for this GPU"),
        *profile.environment.items(),
    )


def step_text(profile: Profile) -> str:
    traced = f"{units.seconds(profile.traced_step_s)} in the trace"
    return f"{wall_text(profile.wall)}; {traced}" if profile.wall else f"{traced}; nobody timed it unprofiled"


def wall_text(wall: WallTime) -> str:
    low, high = units.seconds(wall.low_s), units.seconds(wall.high_s)
    return f"{units.seconds(wall.median_s)} ({low} to {high}: quartiles of {wall.n} unprofiled steps)"


def busy_text(profile: Profile) -> str:
    return f"{share_text(busy_share(profile))} of the step: {units.seconds(profile.busy_s)}"


def roof_text(profile: Profile) -> str:
    if profile.floor_s is None:
        return "unknown: no ceilings for this GPU"
    if (unknown := unroofed_share(profile)) > MOSTLY:
        return f"unknown: no formula or shapes for kernels that hold {units.percent(unknown)} of the kernel time"
    ceilings = "measured ceilings" if profile.peaks_measured else "data sheet's ceilings"
    ceilings += f" of {profile.ceilings_gpu}" if profile.ceilings_gpu else ""
    return f"{share_text(roof_share(profile))}: these kernels need {units.seconds(profile.floor_s)} on the {ceilings}"


def saving_text(saving: Saving | None) -> str:
    """`"saves 4.92 ms (4.10 ms to 11.0 ms)"`."""
    if saving is None:
        return "saving unknown"
    return f"saves {duration(saving.mid_s)} ({duration(saving.low_s)} to {duration(saving.high_s)})"


def worth_text(finding: Finding) -> str:
    """A finding's saving, or which finding counts it."""
    return f"counted in {finding.within}'s saving" if finding.within else saving_text(finding.saving)


def effort(finding: Finding) -> str:
    return f"effort {finding.effort} ({EFFORT_WORDS[finding.effort]})"


def evidence_text(finding: Finding) -> str:
    """Where to look: the source line, the events of the trace, how the number came about."""
    events = f"events {', '.join(map(str, finding.evidence))}" if finding.evidence else ""
    return "; ".join(filter(None, (finding.source, events, finding.note))) or ABSENT


def calibration_text(calibration: Calibration) -> str:
    """What a fix promised and what it brought, in one line."""
    promised = saving_text(Saving(calibration.low_s, calibration.mid_s, calibration.high_s))
    verdict = "inside the interval" if calibration.hit else "outside the interval"
    return f"promised: {promised}; brought {units.seconds(calibration.realised_s)}, {verdict}"


def limits(profile: Profile) -> tuple[str, ...]:
    """What was not looked at, a sentence an item: shares without operator, roof or timing, then each abstention."""
    lines = [
        f"{units.percent(profile.attributed_share)} of the kernel time has an operator and "
        f"{units.percent(profile.module_share)} a module; of the rest nobody knows where it came from."
    ]
    if unroofed := unroofed_share(profile):
        lines.append(
            f"Kernels that hold {units.percent(unroofed)} of the kernel time have no roofline: "
            "they count in the roof at their own time."
        )
    lines += [f"{name.replace('_', ' ').capitalize()}: {value}." for name, value in profile.extra.items()]
    if profile.coverage is None:
        lines.append("Nobody timed the GPU beside the trace, so kernels missing from the trace would go unnoticed.")
    else:
        lines.append(f"The trace accounts for {units.percent(profile.coverage)} of the GPU time that events measured.")
    if profile.wall is None:
        lines.append("No step was timed without the profiler, which slows the host: idle time is an upper bound.")
    lines += [f"{abstention.rule} did not look: {abstention.reason}." for abstention in profile.abstentions]
    return tuple(lines)


def spread(row: KernelRow) -> float | None:
    """Standard deviation over the mean; None for kernels that took no time."""
    return row.sigma_s / row.mean_s if row.mean_s else None


def duration(value_s: float) -> str:
    """Seconds with their unit; a plain "0 s" for none at all."""
    return units.seconds(value_s) if value_s else "0 s"


def share_text(share: float | None) -> str:
    return ABSENT if share is None else units.percent(share)


def _part(seconds: float, profile: Profile) -> float | None:
    return seconds / step_s(profile) if step_s(profile) else None


def _largest(seconds: Mapping[str, float]) -> str:
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {units.seconds(value_s)}" for name, value_s in ordered)
