"""Cost: what one operator must do and move, before any hardware is named."""

from __future__ import annotations

from dataclasses import dataclass

PIPES = (
    "cuda_fp32",
    "tensor_tf32",
    "tensor_fp16",
    "tensor_bf16",
    "tensor_fp8",
    "tensor_int8",
)


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs (2 per multiply-accumulate) and compulsory bytes: every input read once, every output written once.

    `pipe` names the unit that does the FLOPs; a sum keeps the pipe of the larger share.
    """

    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    pipe: str = "cuda_fp32"

    def __post_init__(self) -> None:
        if self.pipe not in PIPES:
            raise ValueError(f"Cost: pipe must be one of {', '.join(PIPES)}, got {self.pipe!r}")

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def intensity(self) -> float:
        """FLOP per byte; 0 when nothing moves."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.read_bytes + other.read_bytes,
            self.write_bytes + other.write_bytes,
            self.pipe if self.flops >= other.flops else other.pipe,
        )
