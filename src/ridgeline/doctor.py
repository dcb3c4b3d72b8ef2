"""What this machine can do, and what stands in the way."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from ridgeline.cache import cache_dir, cache_path, write_json
from ridgeline.ceilings import Ceilings, load_ceilings, measure_ceilings, now
from ridgeline.errors import EnvironmentUnusable, UsageError
from ridgeline.specs import find_spec, load_specs
from ridgeline.timing import GpuState, gpu_state

try:
    import triton
except ImportError:  # not on every platform, and the static half works without it
    triton = None

_DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the diagnosis. `advice` on a good row is a remark, on a bad one the problem and its remedy."""

    name: str
    value: str
    ok: bool = True
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    rows: tuple[Check, ...]
    ceilings: Ceilings | None = None

    @property
    def problems(self) -> list[str]:
        return [row.advice for row in self.rows if not row.ok]

    @property
    def exit_code(self) -> int:
        return EnvironmentUnusable.exit_code if self.problems else 0

    def lines(self) -> Iterator[str]:
        """Plain text: a mark, the name, the value, and the advice below it."""
        width = max(len(row.name) for row in self.rows)
        for row in self.rows:
            yield f"{'ok ' if row.ok else 'BAD'}  {row.name:<{width}}  {row.value}"
            if row.advice:
                yield f"{'':{width + 7}}{row.advice}"
        if self.ceilings:
            yield from self.ceilings.lines()

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "problems": self.problems}, indent=1, ensure_ascii=False)


def diagnose(*, measure: bool = False) -> Diagnosis:
    """Look at every part ridgeline rests on; with `measure`, also measure the GPU's ceilings again and store them.

    A missing GPU is no problem by itself. Raises EnvironmentUnusable when asked to measure without one.
    """
    state = gpu_state()
    rows = [*_software(), *_gpu(state), _counters(), _cache_folder()]
    if measure:
        ceilings = measure_ceilings()
    else:
        ceilings = load_ceilings(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if torch.cuda.is_available() and ceilings is None:
        rows.append(Check("ceilings", "not measured", advice="`ridgeline doctor --measure` takes about a minute"))
    return Diagnosis(tuple(rows), ceilings)


def _software() -> Iterator[Check]:
    yield Check("Python", platform.python_version())
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield Check("torch", f"{torch.__version__} ({build})")
    if triton:
        yield Check("Triton", triton.__version__)
    elif sys.platform == "linux":
        yield Check(
            "Triton", "does not import", False, "Triton does not import, so no kernel can run: pip install triton"
        )
    else:
        yield Check(
            "Triton", "none", advice="no Triton for this platform: costs, rooflines and reports work, kernels do not"
        )
    yield Check("numpy", np.__version__)


def _gpu(state: GpuState | None) -> Iterator[Check]:
    yield Check("driver", state.driver if state else "none")
    if not torch.cuda.is_available():
        if state is None:
            remark = "works without a GPU: roofline with --gpu, reports, detection on the CPU, the tests"
            yield Check("GPU", "none", advice=remark)
        else:
            remedy = (
                f"torch cannot use the {state.name} that the driver sees: "
                f"install a CUDA build of torch that driver {state.driver} supports"
            )
            yield Check("GPU", f"{state.name}, unusable", False, remedy)
        return
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    yield Check(
        "GPU", f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} SMs"
    )
    yield _spec_row(properties.name, properties.multi_processor_count)


def _spec_row(name: str, sm_count: int) -> Check:
    try:
        spec = find_spec(name, sm_count=sm_count)
    except UsageError as error:
        return Check("data sheet", f"none of {len(load_specs())} matches", False, str(error))
    return Check("data sheet", f"{spec.name}: {spec.source}")


def _counters(parameters: Path = _DRIVER_PARAMETERS) -> Check:
    """May this user read hardware counters? Reports do without them, so the answer is never a problem."""
    try:
        text = parameters.read_text(encoding="utf-8")
    except OSError:
        return Check("hardware counters", "unknown", advice="no NVIDIA kernel module here says who may read them")
    admin_only = re.search(r"^RmProfilingAdminOnly:\s*(\d+)", text, re.MULTILINE)
    if admin_only is None or admin_only[1] == "0":
        return Check("hardware counters", "allowed to every user" if admin_only else "unknown")
    if sys.platform != "win32" and os.geteuid() == 0:
        return Check("hardware counters", "allowed to root")
    remedy = (
        "reports stand without them and call their traffic figures modelled; to allow them, the machine's owner sets "
        "NVreg_RestrictProfilingToAdminUsers=0 for the nvidia module and reboots"
    )
    return Check("hardware counters", "allowed to root only", advice=remedy)


def _cache_folder() -> Check:
    try:
        # the real write, because a folder's mode bits do not tell about quotas and read-only mounts
        write_json(cache_path("doctor"), {"checked": now()})
    except EnvironmentUnusable as error:
        return Check("cache folder", str(cache_dir()), False, str(error))
    return Check("cache folder", str(cache_dir()))
