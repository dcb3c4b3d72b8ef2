"""Format seconds, bytes, FLOPs and rates; the only file where powers of ten stand for units."""

import math

_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def si(value: float, unit: str, digits: int = 3) -> str:
    """`si(5.36e9, "FLOP") == "5.36 GFLOP"`; decimal prefixes from unit to peta."""
    if not math.isfinite(value):
        return f"{value} {unit}"
    for scale, prefix in _STEPS:
        # the half-digit keeps 999.9995 from printing as "1000"
        if abs(value) >= scale * (1 - 0.5 * 10**-digits):
            return f"{_significant(value / scale, digits)} {prefix}{unit}"
    return f"{_significant(value, digits)} {unit}"


def seconds(value_s: float, digits: int = 3) -> str:
    """`seconds(2.2e-5) == "22.0 µs"`; from ns to s."""
    if not math.isfinite(value_s):
        return f"{value_s} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value_s) >= scale * (1 - 0.5 * 10**-digits):
            return f"{_significant(value_s / scale, digits)} {unit}"
    return f"{_significant(value_s / 1e-9, digits)} ns"


def nbytes(value: float, digits: int = 3) -> str:
    return si(value, "B", digits)


def flops(value: float, digits: int = 3) -> str:
    return si(value, "FLOP", digits)


def rate(value: float, digits: int = 3) -> str:
    return si(value, "FLOP/s", digits)


def bandwidth(value: float, digits: int = 3) -> str:
    return si(value, "B/s", digits)


def percent(fraction: float, digits: int = 1) -> str:
    return f"{fraction * 100:.{digits}f} %"


def milliseconds(value_s: float) -> float:
    """Seconds as a number of milliseconds, for tables whose column names the unit."""
    return value_s * 1e3


def microseconds(value_s: float) -> float:
    """Seconds as a number of microseconds, for tables whose column names the unit."""
    return value_s * 1e6


def _significant(value: float, digits: int) -> str:
    """Rounded to `digits` significant digits, but never inside the integer part: `_significant(1234.5, 3) == "1234"`.

    Below 1 the decimals stay those of 1.00, so a column of small values lines up.
    """
    # round first, count after: 9.996 must become 10.0, not 10.00
    rounded = float(f"{value:.{digits - 1}e}")
    whole = len(str(int(abs(rounded))))
    return f"{value:z.{max(digits - whole, 0)}f}"  # z: no "-0.00"
