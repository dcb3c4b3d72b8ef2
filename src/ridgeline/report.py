"""Report and Row: one joined table of what ran, what it costs and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Row:
    """One call (or, in `by_layer`/`by_kind` tables, the sum of several). SI units throughout.

    `seconds` is the roofline time: the larger of compute and memory time on the report's GPU, summed over `calls`.
    """

    layer: str  # dotted module path, "" outside any module
    phase: str  # "forward", "backward" or "optimizer"
    kind: str  # "conv3x3", "conv1x1", "depthwise", "matmul", "attention", "norm", "pool", "pointwise", "concat", …
    op: str  # "aten.convolution"
    shape: str  # the problem, in words: "1x64x80x80 * 64x64x3x3 s1 p1"
    calls: int
    flops: float
    read_bytes: float
    write_bytes: float
    pipe: str  # the unit that does the FLOPs: "tensor_bf16", "cuda_fp32", …
    compute_s: float
    memory_s: float
    seconds: float
    limiter: str  # "compute" or "memory"
    tiles: int = 0  # output tiles of a matrix-shaped op, 0 where the notion does not apply
    waves: float = 0.0  # tiles over streaming multiprocessors
    wave_efficiency: float = 0.0  # waves / ceil(waves)

    @property
    def bytes(self) -> float:
        return self.read_bytes + self.write_bytes

    @property
    def intensity(self) -> float:
        """FLOP per byte of compulsory traffic; 0 for an op that moves nothing."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class UnknownOp:
    """An operator without a cost formula: counted, never guessed."""

    op: str
    calls: int


@dataclass(frozen=True)
class Report:
    """The static report of one module or training step on one GPU.

    `rows` is one row a call, as PyTorch would run it (one kernel an op). `fused_rows` is one row a fused kernel:
    every pointwise op, copy and concat folded into the kernel that produces or consumes its data.
    """

    subject: str
    gpu: str
    dtype: str
    batch: int
    train: bool
    parameters: int
    rows: tuple[Row, ...]
    fused_rows: tuple[Row, ...]
    unknown: tuple[UnknownOp, ...]
    chain_length: int  # longest chain of fused kernels that wait for one another
    unfused_chain_length: int
    weight_bytes: float
    peaks: dict[str, float]  # FLOP/s by pipe, and "bandwidth" in B/s, of the GPU's data sheet
    gpu_source: str
    sm_count: int
    measured: dict[str, float] | None = None  # ceilings measured by `ridgeline doctor`, same keys as `peaks`

    @property
    def unfused_s(self) -> float:
        """Sum of roofline times, one kernel an op."""
        return sum(row.seconds for row in self.rows)

    @property
    def floor_s(self) -> float:
        """Sum of roofline times of the fused kernels: no schedule of these kernels runs faster."""
        return sum(row.seconds for row in self.fused_rows)

    @property
    def flops(self) -> float:
        return sum(row.flops for row in self.rows)
