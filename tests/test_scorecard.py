"""The scorecard: what is recorded comes back as hit rates, and no damage to the file is fatal or silent."""

import json
import threading
from dataclasses import replace

import pytest

import profiles_made
from ridgeline.errors import EnvironmentUnusable, UsageError
from ridgeline.profile_record import WallTime
from ridgeline.scorecard import calibrate, record, scorecard, scored

BEFORE, AFTER = profiles_made.made(), profiles_made.after_fixes()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def taking(median_s):
    return replace(AFTER, wall=WallTime(median_s, median_s, median_s, 50))


def test_a_fix_is_scored_by_the_unprofiled_step():
    made = calibrate(BEFORE, "L1", AFTER)
    assert made.realised_s == pytest.approx(0.0441 - 0.0362)
    assert (made.low_s, made.mid_s, made.high_s) == (4.1e-3, 4.92e-3, 11e-3)
    assert made.hit
    assert not calibrate(BEFORE, "H5", AFTER).hit
    assert calibrate(BEFORE, "L1", taking(0.05)).realised_s < 0  # a fix may make it worse


def test_hit_rates_by_rule_and_overall(folder):
    assert scorecard().overall is None
    assert "no fix has been scored yet" in scorecard().lines()[0]
    for rule, median_s in (("L1", 0.0391), ("L1", 0.0436), ("H9", 0.0413), ("H9", 0.0420)):
        record(BEFORE, rule, taking(median_s))
    card = scorecard()
    assert [(score.rule, score.hits, score.count) for score in card.rules] == [("H9", 2, 2), ("L1", 1, 2)]
    assert (card.overall.hits, card.overall.count, card.overall.hit_rate) == (3, 4, 0.75)
    assert card.rules[0].ratio == pytest.approx((2.8 / 2.8 + 2.1 / 2.8) / 2)
    assert card.lines()[0].startswith("all rules: 3 of 4 inside the interval (75 %), brought 0.87 times")
    assert card.damaged == ()
    assert [path.name for path in folder.iterdir()] == ["scorecard.jsonl"]


def test_a_profile_shows_the_fixes_of_its_subject(folder):
    assert scored(AFTER) == AFTER
    made = record(BEFORE, "L1", AFTER)
    record(BEFORE, "L1", AFTER)  # the same two runs compared again
    other = record(BEFORE, "H9", taking(0.0413))
    record(replace(BEFORE, subject="another"), "L1", replace(AFTER, subject="another"))
    record(replace(BEFORE, gpu="another"), "L1", replace(AFTER, gpu="another"))
    assert scored(AFTER).calibrations == (made, other)
    assert scored(scored(AFTER)) == scored(AFTER)


def test_a_record_that_cannot_be_read_is_a_warning(folder, caplog):
    (folder / "scorecard.jsonl").mkdir(parents=True)
    assert scored(AFTER) == AFTER
    assert "scorecard.jsonl (Is a directory)" in caplog.text


def test_rules_are_listed_by_number():
    findings = tuple(replace(profiles_made.FINDINGS[0], rule=rule) for rule in ("H10", "H2", "custom", "H9"))
    before = replace(BEFORE, findings=findings)
    for finding in findings:
        record(before, finding.rule, AFTER)
    assert [score.rule for score in scorecard().rules] == ["H2", "H9", "H10", "custom"]


def test_damaged_lines_are_named_and_left_out(folder):
    record(BEFORE, "L1", AFTER)
    path = folder / "scorecard.jsonl"
    good = path.read_text()
    hostile = json.loads(good)
    hostile["calibration"]["realised_s"] = "nan"
    path.write_text(f"{good}not json\n{{}}\n\n{json.dumps(hostile)}\n{good[:40]}")
    card = scorecard()
    assert card.overall.count == 1
    assert [line.split(":")[0] for line in card.damaged] == [f"scorecard.jsonl line {n}" for n in (2, 3, 5, 6)]
    assert any(line.startswith("left out: scorecard.jsonl line 2") for line in card.lines())
    # half a line of a killed writer does not swallow the next
    record(BEFORE, "H9", AFTER)
    assert scorecard().overall.count == 2
    path.write_bytes(path.read_bytes() + b"\xff\xfe\n")
    assert len(scorecard().damaged) == 5


def test_writers_do_not_lose_each_other_s_lines():
    threads = [threading.Thread(target=record, args=(BEFORE, "L1", AFTER)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    card = scorecard()
    assert (card.overall.count, card.damaged) == (12, ())


@pytest.mark.parametrize(
    ("before", "rule", "after", "complaint"),
    [
        (BEFORE, "L2", AFTER, "no finding L2 in 'ddpm-cifar10': it has L1, H9, H5, K20"),
        (BEFORE, "K20", AFTER, "K20 names no saving"),
        (replace(BEFORE, wall=None), "L1", AFTER, "not timed without the profiler"),
        (BEFORE, "L1", replace(AFTER, wall=None), "not timed without the profiler"),
        (BEFORE, "L1", replace(AFTER, gpu="NVIDIA L4"), "one subject and GPU"),
        (BEFORE, "L1", replace(AFTER, subject="another"), "one subject and GPU"),
    ],
)
def test_what_cannot_be_scored_is_refused_and_not_recorded(before, rule, after, complaint):
    with pytest.raises(UsageError, match=complaint):
        record(before, rule, after)
    assert scorecard().overall is None


def test_one_of_several_findings_is_picked_by_its_source():
    first = replace(profiles_made.FINDINGS[0], source="a.py:1")
    before = replace(BEFORE, findings=(first, replace(first, source="b.py:2", saving=None)))
    with pytest.raises(UsageError, match=r"found 2 times .* one of a\.py:1, b\.py:2"):
        calibrate(before, "L1", AFTER)
    assert calibrate(before, "L1", AFTER, source="a.py:1").mid_s == 4.92e-3
    with pytest.raises(UsageError, match=r"no finding L1 c\.py:3"):
        calibrate(before, "L1", AFTER, source="c.py:3")


def test_a_folder_that_takes_no_file_is_said(folder):
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file where the folder should be")
    with pytest.raises(EnvironmentUnusable, match="RIDGELINE_CACHE_DIR"):
        record(BEFORE, "L1", AFTER)
    with pytest.raises(EnvironmentUnusable, match="cannot read"):
        scorecard()
