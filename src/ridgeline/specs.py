"""GPU specifications: one TOML a GPU in `gpus/`, found by exact name; an unknown GPU is an error, never a guess.

All rates are dense (no sparsity) and in SI units: FLOP/s (a multiply-accumulate is two), B/s, Hz, bytes.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from ridgeline import units
from ridgeline.errors import EnvironmentUnusable, UsageError

# What a tensor core adds up in decides its rate (GeForce: half rate for fp32), so the pipe's name fixes it.
ACCUMULATE = {
    "cuda_fp32": "fp32",
    "tensor_tf32": "fp32",
    "tensor_fp16": "fp32",
    "tensor_bf16": "fp32",
    "tensor_fp16_acc16": "fp16",
    "tensor_fp8": "fp32",
    "tensor_int8": "int32",
}

# The --dtype to advise, best first, where a GPU lacks the pipe asked for.
_INSTEAD = {
    "tensor_tf32": (("cuda_fp32", "fp32"),),
    "tensor_fp16": (("cuda_fp32", "fp32"),),
    "tensor_bf16": (("tensor_fp16", "fp16"), ("cuda_fp32", "fp32")),
    "tensor_fp16_acc16": (("tensor_fp16", "fp16"), ("cuda_fp32", "fp32")),
    "tensor_fp8": (("tensor_bf16", "bf16"), ("tensor_fp16", "fp16"), ("cuda_fp32", "fp32")),
    "tensor_int8": (("tensor_bf16", "bf16"), ("tensor_fp16", "fp16"), ("cuda_fp32", "fp32")),
}


@dataclass(frozen=True, slots=True)
class Peak:
    """The dense rate of one pipe in FLOP/s (OP/s for int8), and what it accumulates in."""

    rate: float
    accumulate: str  # "fp32", "fp16" or "int32"


@dataclass(frozen=True)
class DeviceSpec:
    """One GPU by its data sheet (or, after `with_measured`, by its measured ceilings)."""

    name: str
    names: tuple[str, ...]  # exactly as the driver prints them
    aliases: tuple[str, ...]  # what people type
    architecture: str  # "sm_90"
    sm_count: int
    boost_hz: float
    tensor_hz: float  # differs from boost_hz where it was back-solved from the sheet's tensor rates
    peaks: Mapping[str, Peak] = field(hash=False)  # by pipe
    bandwidth: float  # B/s
    l2_bytes: int
    memory_bytes: int
    shared_bytes_per_block: int  # largest a kernel may opt in to
    source: str

    def rate(self, pipe: str) -> float:
        """FLOP/s of `pipe`. Raises EnvironmentUnusable where this GPU lacks it, ValueError for an unknown pipe."""
        if pipe in self.peaks:
            return self.peaks[pipe].rate
        if pipe not in ACCUMULATE:
            raise ValueError(f"rate: pipe must be one of {', '.join(ACCUMULATE)}, got {pipe!r}")
        instead = next(dtype for other, dtype in _INSTEAD[pipe] if other in self.peaks)
        raise EnvironmentUnusable(f"{self.name} ({self.architecture}) has no {pipe} unit: use --dtype {instead}")

    def with_measured(self, measured: Mapping[str, float]) -> DeviceSpec:
        """This GPU with measured ceilings (pipes in FLOP/s, "bandwidth" in B/s) in place of the data sheet's."""
        peaks = dict(self.peaks)
        for pipe in measured.keys() - {"bandwidth"}:
            if pipe not in ACCUMULATE:
                raise ValueError(f"with_measured: unknown pipe {pipe!r}, known are {', '.join(ACCUMULATE)}")
            peaks[pipe] = Peak(measured[pipe], ACCUMULATE[pipe])
        source = f"measured on this machine; the rest from {self.source}"
        return replace(self, peaks=peaks, bandwidth=measured.get("bandwidth", self.bandwidth), source=source)


def choose_spec(gpu: str | None, *, default: str | None = None) -> DeviceSpec:
    """The spec of `gpu` (a name or a TOML file), else of this machine's GPU, else of `default`."""
    if gpu is not None:
        return spec_from_toml(Path(gpu)) if gpu.lower().endswith(".toml") else find_spec(gpu)
    # torch costs seconds to import, and looking a GPU up by name does not need it
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return find_spec(properties.name, sm_count=properties.multi_processor_count)
    if default is not None:
        return find_spec(default)
    raise UsageError('this machine has no usable GPU: name one with --gpu, for example --gpu "NVIDIA L4"')


def find_spec(name: str, *, sm_count: int | None = None) -> DeviceSpec:
    """The spec whose driver name or alias is `name`, up to case and white space.

    `sm_count`, as the driver reports it, catches cut-down parts that share a name. Raises UsageError without a match.
    """
    key = _normalise(name)
    spec = _by_name().get(key)
    if spec is None:
        raise UsageError(_unknown(name, key))
    if sm_count is not None and sm_count != spec.sm_count:
        raise UsageError(
            f"{name!r} reports {sm_count} SMs here, but {spec.name} has {spec.sm_count}: "
            f"it is another chip of that name, so describe it in a TOML file and pass --gpu FILE.toml"
        )
    return spec


@cache
def load_specs() -> tuple[DeviceSpec, ...]:
    """Every GPU of the table, in the order of its file names."""
    tables = sorted(
        (f for f in (files("ridgeline") / "gpus").iterdir() if f.name.endswith(".toml")), key=lambda f: f.name
    )
    return tuple(_spec(tomllib.loads(f.read_text(encoding="utf-8")), f.name) for f in tables)


def spec_from_toml(path: Path) -> DeviceSpec:
    """A spec written by the user, in the format of `gpus/*.toml`. Raises UsageError with the first thing wrong."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path}: cannot read the GPU file ({error.strerror}): give the path of a readable TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a TOML file ({error}): copy one of ridgeline/gpus/*.toml and edit it") from error
    return _spec(table, str(path))


@cache
def _by_name() -> dict[str, DeviceSpec]:
    return {_normalise(name): spec for spec in load_specs() for name in _spellings(spec)}


def _spellings(spec: DeviceSpec) -> tuple[str, ...]:
    return (spec.name, *spec.names, *spec.aliases)


def _normalise(name: str) -> str:
    return " ".join(name.split()).casefold()


def _unknown(name: str, key: str) -> str:
    """One sentence: why this name has no row, and the way out."""
    own_file = "describe it in a TOML file and pass --gpu FILE.toml"
    if re.search(r"\bmig\b", key):
        return f"{name!r} is a MIG slice, a share of a GPU, and slices have no table row: {own_file}"
    # "GRID T4-16Q", "NVIDIA L4-24Q", "NVIDIA A100-1-5C": frame buffer in GiB, then the licence's letter
    if re.match(r"grid\b", key) or re.search(r"-\d+[abcq]$", key):
        return f"{name!r} is a vGPU, which shares its chip with other guests and has no table row: {own_file}"
    if re.search(r"\b(laptop|mobile|max-q)\b", key):
        return f"{name!r} is a laptop part, another chip than the desktop card, and has no table row: {own_file}"
    close = _closest(key)
    hint = f"closest are {', '.join(map(repr, close))}; " if close else ""
    return f"no spec for GPU {name!r}: {hint}run `ridgeline doctor` to see what the driver reports, or {own_file}"


def _closest(key: str) -> list[str]:
    """Up to three GPUs spelled most like `key`, those of which it is the beginning first."""
    spelling = {_normalise(s): s for spec in load_specs() for s in reversed(_spellings(spec))}
    found: dict[str, str] = {}
    begun = [s for s in spelling if key and s.startswith(key)]
    for match in begun + difflib.get_close_matches(key, list(spelling), n=12, cutoff=0.5):
        found.setdefault(_by_name()[match].name, spelling[match])
    return list(found.values())[:3]


# --- reading one table -------------------------------------------------------------------------------------------

_TEXTS = ("name", "architecture", "source")
_LISTS = ("names", "aliases")
# (lowest, highest, unit): wide enough for any GPU since 2016, narrow enough to catch a figure in GB/s, MHz or MiB
_RANGES = {
    "sm_count": (1, 1024, "SM"),
    "boost_hz": (3e8, 5e9, "Hz"),
    "tensor_hz": (3e8, 5e9, "Hz"),
    "bandwidth": (2e10, 3e13, "B/s"),
    "l2_bytes": (2.5e5, 2e9, "B"),
    "memory_bytes": (1.5e9, 2e12, "B"),
    "shared_bytes_per_block": (32768, 1048576, "B"),
}
_WHOLE = ("sm_count", "l2_bytes", "memory_bytes", "shared_bytes_per_block")
_RATE_RANGE = (1e11, 5e16, "FLOP/s")
_RIDGE_RANGE = (50, 1000)  # FLOP per byte in fp16/bf16
_OPTIONAL = {"names", "aliases", "tensor_hz"}


def _spec(table: dict[str, object], origin: str) -> DeviceSpec:
    known = {*_TEXTS, *_LISTS, *_RANGES, "peaks"}
    for key in sorted(table.keys() - known):
        raise UsageError(f"{origin}: unknown key {key!r}, known are {', '.join(sorted(known))}")
    for key in sorted(known - _OPTIONAL - table.keys()):
        raise UsageError(f"{origin}: {key} is missing: add it (ridgeline/gpus/*.toml show every key)")
    name, architecture, source = (_text(table[key], key, origin) for key in _TEXTS)
    if not re.fullmatch(r"sm_\d{2,3}", architecture):
        raise UsageError(f"{origin}: architecture must look like 'sm_90', got {architecture!r}")
    number = {key: _number(table[key], key, limits, origin) for key, limits in _RANGES.items() if key in table}
    spec = DeviceSpec(
        name=name,
        names=_strings(table.get("names", []), "names", origin),
        aliases=_strings(table.get("aliases", []), "aliases", origin),
        architecture=architecture,
        sm_count=int(number["sm_count"]),
        boost_hz=number["boost_hz"],
        tensor_hz=number.get("tensor_hz", number["boost_hz"]),
        bandwidth=number["bandwidth"],
        peaks=_peaks(table["peaks"], origin),
        l2_bytes=int(number["l2_bytes"]),
        memory_bytes=int(number["memory_bytes"]),
        shared_bytes_per_block=int(number["shared_bytes_per_block"]),
        source=source,
    )
    _check_sense(spec, origin)
    return spec


def _peaks(table: object, origin: str) -> dict[str, Peak]:
    if not isinstance(table, dict) or "cuda_fp32" not in table:
        raise UsageError(f"{origin}: [peaks] must be a table with at least cuda_fp32, in FLOP/s")
    peaks = {}
    for pipe, rate in table.items():
        if pipe not in ACCUMULATE:
            raise UsageError(f"{origin}: unknown pipe peaks.{pipe}, known are {', '.join(ACCUMULATE)}")
        peaks[pipe] = Peak(_number(rate, f"peaks.{pipe}", _RATE_RANGE, origin), ACCUMULATE[pipe])
    return peaks


def _check_sense(spec: DeviceSpec, origin: str) -> None:
    """Relations between figures that hold for every GPU with dense, SI, fp32-accumulate numbers."""
    rate = {pipe: peak.rate for pipe, peak in spec.peaks.items()}
    half = [(pipe, rate[pipe]) for pipe in ("tensor_fp16", "tensor_bf16") if pipe in rate]
    low, high = _RIDGE_RANGE
    for pipe, value in half:
        if not low <= value / spec.bandwidth <= high:
            raise UsageError(
                f"{origin}: the ridge point of {pipe} is {value / spec.bandwidth:.3g} FLOP/B, outside {low}-{high}: "
                f"check that peaks are dense FLOP/s and bandwidth is B/s"
            )
        if rate.get("tensor_fp8", math.inf) < value:
            raise UsageError(
                f"{origin}: tensor_fp8 ({units.rate(rate['tensor_fp8'])}) is below {pipe} ({units.rate(value)}): "
                f"no GPU has that, so check which figure is sparse"
            )


def _number(value: object, key: str, limits: tuple[float, float, str], origin: str) -> float:
    low, high, unit = limits
    # bool is an int to Python, and nan passes no comparison
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UsageError(
            f"{origin}: {key} must lie between {units.si(low, unit)} and {units.si(high, unit)} "
            f"(plain SI units, no prefix), got {value!r}"
        )
    if key in _WHOLE and value != int(value):
        raise UsageError(f"{origin}: {key} must be a whole number, got {value!r}")
    return value


def _text(value: object, key: str, origin: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{origin}: {key} must be a non-empty string, got {value!r}")
    return value


def _strings(value: object, key: str, origin: str) -> tuple[str, ...]:
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping):
        raise UsageError(f"{origin}: {key} must be a list of strings, got {value!r}")
    return tuple(_text(item, key, origin) for item in value)
