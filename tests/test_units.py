"""Formatting of quantities: prefixes, rounding across prefixes and digits, signs, non-finite values."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline import units

PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
SECONDS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00 B"),
        (-0.0, "0.00 B"),
        (1, "1.00 B"),
        (12, "12.0 B"),
        (123, "123 B"),
        (1234, "1.23 kB"),
        (5.36e9, "5.36 GB"),
        (-5.36e9, "-5.36 GB"),
        # rounding up across a prefix: never "1000 B"
        (999.4, "999 B"),
        (999.5, "1.00 kB"),
        (999.9996, "1.00 kB"),
        (-999.9996, "-1.00 kB"),
        (999_999_999, "1.00 GB"),
        # rounding up across a digit: never "10.00" or "100.0"
        (9.994, "9.99 B"),
        (9.996, "10.0 B"),
        (99.96, "100 B"),
        (9.996e12, "10.0 TB"),
        # below one unit there is no prefix to take
        (0.5, "0.50 B"),
        (0.004, "0.00 B"),
        (-0.004, "0.00 B"),
        # above the largest prefix digits grow instead
        (5e18, "5000 PB"),
        (math.inf, "inf B"),
        (-math.inf, "-inf B"),
        (math.nan, "nan B"),
    ],
)
def test_nbytes(value, text):
    assert units.nbytes(value) == text


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (0, "0.00 ns"),
        (2.2e-5, "22.0 µs"),
        (1.5e-9, "1.50 ns"),
        (999.9996e-9, "1.00 µs"),
        (999.4e-9, "999 ns"),
        (999.9996e-6, "1.00 ms"),
        (999.9996e-3, "1.00 s"),
        (9.996e-3, "10.0 ms"),
        (-1e-3, "-1.00 ms"),
        (60, "60.0 s"),
        (86_400, "86400 s"),
        (math.inf, "inf s"),
        (math.nan, "nan s"),
    ],
)
def test_seconds(value_s, text):
    assert units.seconds(value_s) == text


@pytest.mark.parametrize(
    ("digits", "text"),
    [(1, "1 GFLOP"), (2, "1.2 GFLOP"), (3, "1.23 GFLOP"), (5, "1.2346 GFLOP"), (10, "1.234567890 GFLOP")],
)
def test_digits(digits, text):
    assert units.flops(1.23456789e9, digits) == text


def test_digits_govern_the_step_to_the_next_prefix():
    assert units.nbytes(950, 1) == "1 kB"
    assert units.nbytes(999.6, 3) == "1.00 kB"
    assert units.nbytes(999.6, 4) == "999.6 B"


def test_unit_names():
    assert units.flops(2e12) == "2.00 TFLOP"
    assert units.rate(989.5e12) == "990 TFLOP/s"
    assert units.bandwidth(4.8e12) == "4.80 TB/s"
    assert units.si(1.5e3, "Hz") == "1.50 kHz"


@pytest.mark.parametrize(
    ("fraction", "text"), [(0, "0.0 %"), (0.5, "50.0 %"), (0.99996, "100.0 %"), (1.5, "150.0 %"), (-0.021, "-2.1 %")]
)
def test_percent(fraction, text):
    assert units.percent(fraction) == text
    assert units.percent(0.12345, digits=2) == "12.35 %"


def test_plain_numbers_for_tables():
    assert units.milliseconds(0.10328) == pytest.approx(103.28)
    assert units.microseconds(2.2e-5) == pytest.approx(22.0)


@given(st.floats(1, 0.999e18), st.integers(1, 6), st.sampled_from([1, -1]))
def test_si_reads_back_and_shows_the_digits_asked_for(size, digits, sign):
    number, prefix = re.fullmatch(r"(-?\d+(?:\.\d+)?) (k|M|G|T|P|)B", units.si(sign * size, "B", digits)).groups()
    # half a unit in the last place, and float slack at the exact half
    assert float(number) * PREFIXES[prefix] == pytest.approx(sign * size, rel=0.5001 * 10.0 ** (1 - digits))
    shown = len(number.strip("-").replace(".", ""))
    assert shown == max(digits, len(number.strip("-").split(".")[0]))
    assert abs(float(number)) < 1000 or prefix == "P"


@given(st.floats(1e-9, 1e3))
def test_seconds_reads_back(value_s):
    number, unit = units.seconds(value_s).split()
    assert float(number) * SECONDS[unit] == pytest.approx(value_s, rel=0.00501)
    assert float(number) < 1000 or unit == "s"
