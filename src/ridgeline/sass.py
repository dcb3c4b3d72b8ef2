"""Compile a Triton kernel for an architecture without a GPU and count the machine instructions it became.

Triton degrades in silence: a wrong operand order, an unaligned pointer or a tile too large still runs, without
matrix instructions from shared memory, without async copies, or with registers spilled. The counts show it.

Offline compilation needs the compiled form of a kernel. Where the interpreter is on (tests on a machine without a
GPU), the kernels are compiled in one child process with the interpreter off: `python -m ridgeline.sass` reads a JSON
request on stdin and answers on stdout.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridgeline.errors import EnvironmentUnusable, UsageError
from ridgeline.pending_products import overwrites

try:
    import triton
    import triton.backends.compiler
    from triton.experimental.gluon._runtime import GluonASTSource
except ImportError:  # the command line answers questions that need no kernel where Triton is not installed
    triton = None  # type: ignore[assignment]

# Shared memory one block may use, in bytes: CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability". The compiler does not check it offline; a kernel beyond it fails when it is loaded.
SHARED_LIMIT_BYTES = {"sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_90": 232_448, "sm_120": 101_376}

# wgmma, mma.sync and their fp8 and integer forms as the disassembler prints them
MATRIX_INSTRUCTIONS = ("HGMMA", "QGMMA", "IGMMA", "HMMA", "QMMA", "IMMA", "OMMA")
# the bulk tensor copy engine and cp.async
ASYNC_COPIES = ("UTMALDG", "UBLKCP", "LDGSTS")

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)", re.M)
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


def shared_limit_bytes(arch: str) -> int:
    """Shared memory one block may use. Raises UsageError for an architecture not listed here."""
    if arch not in SHARED_LIMIT_BYTES:
        raise UsageError(f"architecture must be one of {', '.join(SHARED_LIMIT_BYTES)}, got {arch!r}")
    return SHARED_LIMIT_BYTES[arch]


@dataclass(frozen=True)
class KernelSource:
    """One kernel with everything that decides its machine code.

    `signature` maps run-time parameters to Triton's type names ("*fp16", "i32"); `constants` maps the tl.constexpr
    parameters (and pointers that are None) to values; `aligned` names the run-time parameters that 16 divides.
    """

    kernel: Any  # what @triton.jit returned
    signature: Mapping[str, str]
    constants: Mapping[str, int | float | bool | str | None]
    arch: str
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        shared_limit_bytes(self.arch)


@dataclass(frozen=True)
class Binary:
    """Machine code of one kernel for one architecture."""

    kernel: str
    arch: str
    cubin: bytes
    ptx: str
    shared_bytes: int
    num_warps: int


@dataclass(frozen=True)
class SassReport:
    """What one kernel became. `instructions` counts full mnemonics, modifiers included ("LDGSTS.E.BYPASS.128")."""

    kernel: str
    arch: str
    instructions: dict[str, int]
    registers: int  # per thread
    spill_bytes: int  # stack frame per thread
    shared_bytes: int  # per block
    shared_limit_bytes: int
    num_warps: int
    overwrites: tuple[str, ...] = ()  # instructions that write what a product may not have read yet

    def count(self, *names: str) -> int:
        """Instructions whose mnemonic, without modifiers, is one of `names`."""
        return sum(n for mnemonic, n in self.instructions.items() if mnemonic.split(".")[0] in names)

    @property
    def matrix_instructions(self) -> dict[str, int]:
        return {m: n for m, n in self.instructions.items() if m.split(".")[0] in MATRIX_INSTRUCTIONS}

    @property
    def async_copies(self) -> int:
        return self.count(*ASYNC_COPIES)

    @property
    def local_loads(self) -> int:
        return self.count("LDL")

    @property
    def local_stores(self) -> int:
        return self.count("STL")

    @property
    def permutes(self) -> int:
        """Byte permutes (PRMT): many of them mean operands are transposed or repacked in registers."""
        return self.count("PRMT")

    @property
    def problems(self) -> tuple[str, ...]:
        """What would keep the kernel from running, or from running well, on any input."""
        found = []
        if self.shared_bytes > self.shared_limit_bytes:
            found.append(f"needs {self.shared_bytes} B of shared memory, {self.arch} has {self.shared_limit_bytes} B")
        if self.spill_bytes or self.local_loads or self.local_stores:
            found.append(f"spills: {self.spill_bytes} B of stack, {self.local_loads} LDL, {self.local_stores} STL")
        if self.overwrites:
            found.append(f"overwrites operands of products that are not done: {', '.join(self.overwrites)}")
        return tuple(found)

    def rows(self) -> list[tuple[str, str]]:
        """(what, value) pairs for a table."""
        matrix = ", ".join(f"{n} {m}" for m, n in self.matrix_instructions.items()) or "none"
        return [
            ("kernel", self.kernel),
            ("architecture", self.arch),
            ("matrix instructions", matrix),
            ("async copies", str(self.async_copies)),
            ("global loads", str(self.count("LDG"))),
            ("global stores", str(self.count("STG", "UTMASTG"))),
            ("shared loads", str(self.count("LDS", "LDSM"))),
            ("byte permutes", str(self.permutes)),
            ("instructions", str(sum(self.instructions.values()))),
            ("registers a thread", str(self.registers)),
            ("warps a block", str(self.num_warps)),
            ("stack, B a thread", str(self.spill_bytes)),
            ("local loads, stores", f"{self.local_loads}, {self.local_stores}"),
            ("shared memory, B", f"{self.shared_bytes} of {self.shared_limit_bytes}"),
            ("problems", "; ".join(self.problems) or "none"),
        ]

    def lines(self) -> list[str]:
        width = max(len(what) for what, _ in self.rows())
        return [f"{what:<{width}}  {value}" for what, value in self.rows()]

    def to_json(self) -> str:
        derived = {"matrix_instructions": self.matrix_instructions, "async_copies": self.async_copies}
        return json.dumps({**asdict(self), **derived, "problems": self.problems}, indent=2)


def inspect_op(op: Any, *, arch: str, dtype: str = "fp16", sample: str | None = None, config: Any = None) -> SassReport:
    """Compile the kernel that `op` launches for one of its samples, and count.

    `dtype` is "fp32", "fp16" or "bf16"; `sample` is part of a sample's `why`, None the first of real size;
    `config` is the op's own config record, None its default for the architecture.
    """
    return inspect(compile_many([op.source(arch=arch, dtype=dtype, sample=sample, config=config)])[0])


def compile_offline(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, int | float | bool | str | None],
    *,
    arch: str = "sm_90",
    num_warps: int = 4,
    num_stages: int = 3,
    divisible_by_16: Sequence[str] = (),
) -> Binary:
    """Compile one kernel; the parameters are those of KernelSource."""
    source = KernelSource(kernel, signature, constants, arch, num_warps, num_stages, tuple(divisible_by_16))
    return compile_many([source])[0]


def compile_many(sources: Sequence[KernelSource]) -> tuple[Binary, ...]:
    """Compile several kernels, with at most one child process for all of them."""
    if triton is None:
        raise EnvironmentUnusable("compiling a kernel needs Triton, which is not installed: pip install triton")
    # Gluon's kernels are compiled ones even where the interpreter is on, which changes the language that they are in
    interpreting = vars(triton)["knobs"].runtime.interpret
    if not interpreting and all(isinstance(source.kernel, triton.runtime.JITFunction) for source in sources):
        return tuple(_compile(source) for source in sources)
    return _compile_in_child(sources)


def inspect(binary: Binary) -> SassReport:
    """Disassemble and count."""
    listing = disassemble(binary.cubin)
    resources = _RESOURCES.search(listing)
    if resources is None:
        raise EnvironmentUnusable(
            f"cuobjdump printed no resource usage for {binary.kernel}: this Triton is too new for it"
        )
    return SassReport(
        kernel=binary.kernel,
        arch=binary.arch,
        instructions=dict(Counter(_INSTRUCTION.findall(listing)).most_common()),
        registers=int(resources[1]),
        spill_bytes=int(resources[2]),
        shared_bytes=binary.shared_bytes,
        shared_limit_bytes=shared_limit_bytes(binary.arch),
        num_warps=binary.num_warps,
        overwrites=overwrites(listing),
    )


def disassemble(cubin: bytes) -> str:
    """What cuobjdump says of a kernel: its resources and its instructions."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return _cuobjdump(path)


def _compile(source: KernelSource) -> Binary:
    assert triton is not None
    names = source.kernel.arg_names
    gluon = source.kernel.is_gluon()
    kind = GluonASTSource if gluon else triton.compiler.ASTSource  # pyright: ignore[reportPossiblyUnboundVariable]
    compiled = triton.compile(
        kind(
            fn=source.kernel,
            signature={name: source.signature.get(name, "constexpr") for name in names},
            constexprs=dict(source.constants),
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in source.aligned},
        ),
        target=triton.backends.compiler.GPUTarget("cuda", int(source.arch.removeprefix("sm_")), 32),
        # fused multiply-add is said outright: its default changes between Triton's releases
        options={"num_warps": source.num_warps, "num_stages": source.num_stages, "enable_fp_fusion": True},
    )
    return Binary(
        kernel=source.kernel.__name__,
        arch=source.arch,
        cubin=compiled.asm["cubin"],
        ptx=compiled.asm["ptx"],
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
    )


def _cuobjdump(path: Path) -> str:
    if triton is None:
        raise EnvironmentUnusable("disassembling needs the cuobjdump in Triton's wheel: pip install triton")
    program = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not program.exists():
        raise EnvironmentUnusable(f"{program} is missing: install Triton from its wheel, which carries it")
    return subprocess.run(
        [program, "--dump-resource-usage", "--dump-sass", path], check=True, capture_output=True, text=True
    ).stdout


def _compile_in_child(sources: Sequence[KernelSource]) -> tuple[Binary, ...]:
    request = {
        "path": sys.path,
        "sources": [
            {**_plain(source), "module": source.kernel.fn.__module__, "name": source.kernel.__name__}
            for source in sources
        ],
    }
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-m", "ridgeline.sass"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        names = ", ".join(sorted({source.kernel.__name__ for source in sources}))
        raise EnvironmentUnusable(f"compiling {names} offline failed with exit code {child.returncode}: {last}")
    # Triton may print notes of its own, so the answer is the last line
    answers = json.loads(child.stdout.splitlines()[-1])
    return tuple(Binary(**{**answer, "cubin": base64.b64decode(answer["cubin"])}) for answer in answers)


def _plain(source: KernelSource) -> dict[str, Any]:
    return {
        "signature": dict(source.signature),
        "constants": dict(source.constants),
        "arch": source.arch,
        "num_warps": source.num_warps,
        "num_stages": source.num_stages,
        "aligned": list(source.aligned),
    }


def _answer(request: dict[str, Any]) -> str:
    """The child's side: compile what the request names."""
    sys.path[:] = request["path"]
    answers = []
    for plain in request["sources"]:
        kernel = getattr(importlib.import_module(plain.pop("module")), plain.pop("name"))
        binary = _compile(KernelSource(kernel, **{**plain, "aligned": tuple(plain["aligned"])}))
        answers.append({**asdict(binary), "cubin": base64.b64encode(binary.cubin).decode("ascii")})
    return json.dumps(answers)


if __name__ == "__main__":
    sys.stdout.write(_answer(json.load(sys.stdin)) + "\n")
