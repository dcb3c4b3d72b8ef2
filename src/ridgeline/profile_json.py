"""A profile as one JSON file and back. What is read is checked field by field: a foreign file builds nothing else."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.atomic import write_file
from ridgeline.errors import UsageError
from ridgeline.finding import Edit, Finding
from ridgeline.plain import from_plain, to_plain
from ridgeline.profile_record import SCHEMA_VERSION, Profile

# A saved profile is some hundred kilobytes; a trace given by mistake may be gigabytes, and must not be read whole.
MAX_BYTES = 256 * 2**20
_AGAIN = "profile again to write a new one"


def to_json(profile: Profile) -> str:
    """One JSON object: `schema_version` first, `step_s`, of which shares are told, and the fields of `Profile` by name.

    Seconds, bytes, FLOPs throughout.

    Raises ValueError, naming the place, on a number that is not finite: what cannot be drawn is not kept.
    """
    stray = _not_finite(profile, "Profile")
    if stray:
        raise ValueError(f"to_json: {stray} is not finite: leave it out or make it None")
    data = {"schema_version": profile.schema_version, "step_s": profile.step_s, **to_plain(profile)}
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def write_profile(path: str | Path, profile: Profile) -> Path:
    """Write `to_json` whole or not at all, compressed where the name ends in ".gz". Raises UsageError if it cannot."""
    path = Path(path)
    data = to_json(profile).encode()
    data = gzip.compress(data, mtime=0) if path.suffix == ".gz" else data
    try:
        write_file(path, lambda file: file.write(data))
    except OSError as error:
        raise UsageError(f"cannot write {path} ({error.strerror}): name a file in a writable folder") from error
    return path


def read_profile(path: str | Path) -> Profile:
    """The profile that `write_profile` wrote. Raises UsageError for a file that holds anything else."""
    path = Path(path)
    data = _loaded(path)
    if not isinstance(data, dict) or "schema_version" not in data:
        kind = " (a trace: `ridgeline explain` reads it)" if isinstance(data, dict) and "traceEvents" in data else ""
        raise UsageError(f"{path} is no saved profile{kind}: {_AGAIN}")
    if data["schema_version"] != SCHEMA_VERSION:
        raise UsageError(
            f"{path} has schema_version {data['schema_version']!r:.20}, this ridgeline reads {SCHEMA_VERSION}: {_AGAIN}"
        )
    try:
        profile = from_plain(Profile, {name: value for name, value in data.items() if name != "step_s"})
        profile = replace(profile, findings=tuple(map(_with_numbered_edit, profile.findings)))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} is a damaged profile ({error}): {_AGAIN}") from error
    stray = _not_finite(profile, "Profile")
    if stray:
        raise UsageError(f"{path} is a damaged profile ({stray} is not finite): {_AGAIN}")
    return profile


def _loaded(path: Path) -> object:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} has {path.stat().st_size} bytes, more than any saved profile: {_AGAIN}")
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:  # a small file may unpack to a large one
            raise UsageError(f"{path} unpacks to more than {MAX_BYTES} bytes, no saved profile does: {_AGAIN}")
        return json.loads(data)
    except (OSError, EOFError, zlib.error) as error:  # the last two: a cut or damaged gzip stream
        raise UsageError(f"cannot read {path} ({getattr(error, 'strerror', None) or error}): {_AGAIN}") from error
    except (ValueError, RecursionError) as error:  # ValueError covers bad JSON and bad UTF-8
        raise UsageError(f"{path} is not JSON ({error}): {_AGAIN}") from error


def _with_numbered_edit(finding: Finding) -> Finding:
    """JSON spells the keys of an edit, event ids, as text."""
    seconds = {int(key): value for key, value in finding.edit.seconds.items()}
    return replace(finding, edit=Edit(seconds, {int(key): value for key, value in finding.edit.gaps.items()}))


def _not_finite(value: Any, where: str) -> str:
    """The place of the first float that is infinite or no number; "" where all are finite."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else where
    if is_dataclass(value):
        parts = ((f"{where}.{field.name}", getattr(value, field.name)) for field in fields(value))
    elif isinstance(value, dict):
        parts = ((f"{where}[{key!r:.40}]", part) for key, part in value.items())
    elif isinstance(value, tuple):
        parts = ((f"{where}[{index}]", part) for index, part in enumerate(value))
    else:
        return ""
    return next(filter(None, (_not_finite(part, place) for place, part in parts)), "")
