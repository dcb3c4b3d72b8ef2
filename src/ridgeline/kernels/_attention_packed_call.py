"""Calls of attention_packed and its backward: what may be given, how it is tiled, and samples."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.cost.attention import AttentionProblem
from ridgeline.kernels._conv import FLOATS, INT32_ELEMENTS
from ridgeline.kernels._nhwc import cdiv, next_power_of_2, random_nhwc
from ridgeline.kernels._op import Sample, Target, nearest_first

MOST_TOKENS = 1024  # beyond, PyTorch's kernels have enough work to be as good
MOST_CHANNELS = 128  # of a head
_MOST_CANDIDATES = 12
# fp32 numbers a thread in sums and scores, by what a program does: on sm_90, and elsewhere, where the left operands of
# products are in registers too. More spill.
_MOST_HELD = {"out": (160, 128), "dq, dk, dv": (208, 128), "dq or dk, dv": (128, 112)}


@dataclass(frozen=True)
class Call:
    """One forward call, checked. Fields are the op's arguments."""

    name: ClassVar[str] = "attention_packed"

    qkv: Tensor
    heads: int = 1
    scale: float | None = None

    def __post_init__(self) -> None:
        qkv = self.qkv
        if qkv.dim() != 3 or not 1 <= qkv.shape[1] <= MOST_TOKENS:
            self.refuse(f"qkv must be [N, T, 3 heads D] with T from 1 to {MOST_TOKENS}, got shape {tuple(qkv.shape)}")
        if qkv.dtype not in FLOATS:
            self.refuse(f"qkv must be one of fp32, fp16, bf16, got {qkv.dtype}", TypeError)
        if self.heads < 1 or qkv.shape[2] % (3 * self.heads) or not 1 <= self.channels <= MOST_CHANNELS:
            self.refuse(
                f"heads must split the {qkv.shape[2]} channels of qkv into 3 times heads of 1 to {MOST_CHANNELS}, "
                f"got {self.heads}"
            )
        if self.scale is not None and not 0.0 < self.scale < float("inf"):
            self.refuse(f"scale must be positive, got {self.scale}")
        if MOST_TOKENS * qkv.shape[2] >= INT32_ELEMENTS:
            self.refuse(f"qkv may have some 2 million channels, got {qkv.shape[2]}")
        self.check("qkv", qkv, tuple(qkv.shape), qkv.dtype)

    @property
    def tokens(self) -> int:
        return self.qkv.shape[1]

    @property
    def channels(self) -> int:
        """Of one head."""
        return self.qkv.shape[2] // (3 * self.heads)

    @property
    def factor(self) -> float:
        """What scores are multiplied by."""
        return self.channels**-0.5 if self.scale is None else self.scale

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return self.qkv.shape[0], self.tokens, self.heads * self.channels

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return self.qkv.shape[0], self.heads, self.tokens

    @property
    def problem(self) -> AttentionProblem:
        n, t, d = self.qkv.shape[0], self.tokens, self.channels
        return AttentionProblem(n, self.heads, t, t, d, d)

    def check(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Refuse a tensor that a kernel would read in the wrong place."""
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            self.refuse(f"{name} must be {dtype} of shape {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
        if not tensor.is_contiguous():
            self.refuse(
                f"{name} must be contiguous, got strides {tensor.stride()} for shape {shape}: use .contiguous()"
            )
        if tensor.device != self.qkv.device:
            self.refuse(f"{name} must be on {self.qkv.device} like qkv, got {tensor.device}")

    def refuse(self, text: str, kind: type[Exception] = ValueError) -> NoReturn:
        raise kind(f"{self.name}: {text}")


@dataclass(frozen=True)
class BackwardCall(Call):
    """One backward call, checked: the forward's arguments, its results, and the gradient of out."""

    name: ClassVar[str] = "attention_packed_backward"

    dout: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dout", "out"):
            self._check_given(name, getattr(self, name), self.out_shape, self.qkv.dtype)
        self._check_given("lse", self.lse, self.lse_shape, torch.float32)

    def _check_given(self, name: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if tensor is None:
            self.refuse(f"{name} must be given")
        self.check(name, tensor, shape, dtype)


@dataclass(frozen=True)
class Config:
    """Blocks of queries and keys. Blocks that both have room for several images take them, whole."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int

    def is_valid(self, call: Call, target: Target) -> bool:
        """Whether it compiles, fits the target's shared memory and keeps its sums in registers."""
        on_sm_90, elsewhere = _MOST_HELD[self.role(call)]
        limit = on_sm_90 if target.arch == "sm_90" else elsewhere
        if call.qkv.dtype == torch.float32:
            # products of fp32 are sums of single products: their operands wait in registers, so their blocks are small
            limit = 24
        return (
            all(block in (16, 32, 64, 128, 256) for block in (self.block_q, self.block_k))
            and max(self.block_q, self.block_k) <= max(16, next_power_of_2(self.group(call) * call.tokens))
            and self.num_warps in (1, 2, 4, 8)
            and self.num_stages in (1, 2, 3)
            and self.held(call) <= limit
            and self.shared_bytes(call) <= target.shared_bytes
        )

    def group(self, call: Call) -> int:
        """Images of one program."""
        return max(1, min(self.block_q // call.tokens, self.block_k // call.tokens, call.qkv.shape[0]))

    def q_blocks(self, call: Call) -> int:
        return cdiv(self.group(call) * call.tokens, self.block_q)

    def role(self, call: Call) -> str:
        """What one program makes: dk and dv have programs of their own where queries do not fit one block."""
        if not isinstance(call, BackwardCall):
            return "out"
        return "dq, dk, dv" if self.q_blocks(call) == 1 else "dq or dk, dv"

    def programs(self, call: Call) -> int:
        k_blocks = cdiv(call.tokens, self.block_k) if self.role(call) == "dq or dk, dv" else 0
        return cdiv(call.qkv.shape[0], self.group(call)) * call.heads * (self.q_blocks(call) + k_blocks)

    def held(self, call: Call) -> int:
        """fp32 numbers of a thread at the fullest point."""
        d, q, k = _padded(call.channels), self.block_q, self.block_k
        numbers = {
            "out": q * (k + d),
            "dq, dk, dv": q * (2 * k + d) + k * d,
            "dq or dk, dv": 2 * q * k + max(q, 2 * k) * d,
        }
        return numbers[self.role(call)] // (32 * self.num_warps)

    def shared_bytes(self, call: Call) -> int:
        """At most: operands that stay, those of every stage, and scores on their way between products."""
        d, q, k, stages = _padded(call.channels), self.block_q, self.block_k, self.num_stages
        queries, keys = 2 * (q + stages * k) * d + q * k, (2 * k + 3 * stages * q) * d
        elements = {"out": (q + 2 * stages * k) * d, "dq, dk, dv": queries, "dq or dk, dv": max(queries, keys)}
        return elements[self.role(call)] * call.qkv.element_size()

    def constants(self, call: Call) -> dict[str, int | float | bool]:
        """All of the kernels' constants."""
        group = self.group(call)
        whole = all(group * call.tokens % block == 0 for block in (self.block_q, self.block_k))
        return {
            "T": call.tokens, "HEADS": call.heads, "D": call.channels, "GROUP": group, "SCALE": call.factor,
            "TAIL": not whole or call.qkv.shape[0] % group != 0,
            "BLOCK_Q": self.block_q, "BLOCK_K": self.block_k, "BLOCK_D": _padded(call.channels),
        }  # fmt: skip


def default_config(call: Call, target: Target) -> Config:
    """The likeliest to be fastest of those that are valid."""
    return next(config for config in (*_likely(call), *_SMALL) if config.is_valid(call, target))


def proposals(call: Call, target: Target) -> tuple[Config, ...]:
    """The default, then the other likely ones that are valid, then valid blocks near the default."""
    default, blocks = default_config(call, target), (16, 32, 64, 128, 256)
    near = nearest_first(default, (Config(*fields) for fields in product(blocks, blocks, (4, 8), (1, 2, 3))))
    valid = (config for config in (*_likely(call), *near) if config.is_valid(call, target))
    return tuple(dict.fromkeys((default, *valid)))[:_MOST_CANDIDATES]


def _likely(call: Call) -> tuple[Config, ...]:
    rows = min(256, max(16, next_power_of_2(call.tokens)))
    if call.tokens <= 64:
        found = ((64, 64, 4, 1), (rows, rows, rows // 16, 1), (128, 128, 8, 1), (32, 32, 2, 1), (64, 32, 4, 1))
    elif isinstance(call, BackwardCall):
        # where one program has all queries, every byte moves once and 5 products do; elsewhere it takes 7
        whole = ((rows, 64, 8, 2), (rows, 64, 8, 1), (rows, 64, 8, 3))
        found = (*whole, (64, 64, 4, 2), (64, 128, 8, 2), (64, 64, 8, 2), (128, 64, 8, 2))
    else:
        one_tile = ((128, rows, 8, 1), (64, rows, 4, 1))
        found = ((128, 64, 4, 2), (128, 128, 8, 2), *one_tile, (64, 64, 4, 2), (128, 64, 8, 2))
    return tuple(Config(*fields) for fields in found)


# some is valid for any call
_SMALL = tuple(
    Config(*fields) for fields in ((64, 32, 4, 2), (32, 32, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1), (16, 16, 8, 1))
)


def _padded(channels: int) -> int:
    return max(16, next_power_of_2(channels))


# --- samples ---------------------------------------------------------------------------------------------------------

# (tokens, heads, channels of a head) at batch 128: the three sizes of the DDPM network, then a vision transformer's
REAL_SIZES = ((256, 4, 64), (64, 4, 64), (16, 4, 64), (197, 6, 64))


def attention_sample(
    why: str, n: int, tokens: int, heads: int, channels: int, *, backward: bool = False, **choices: Any
) -> Sample:
    """Data of unit variance. `backward=True` adds a gradient and what the forward returned."""
    real_size = choices.pop("real_size", False)

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        def rows(width: int, seed: int) -> Tensor:
            return random_nhwc((n, width, tokens, 1), dtype, device, seed=seed).flatten(2).transpose(1, 2)

        qkv = rows(3 * heads * channels, 0)
        forward = {"qkv": qkv, "heads": heads, **choices}
        if not backward:
            return forward
        out, lse = attention(**forward)
        return {"dout": rows(heads * channels, 1), **forward, "out": out, "lse": lse}

    return Sample(why, arguments, real_size)


def parts_of(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """q, k and v as views [N, heads, T, D]."""
    return qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def attended(qkv: Tensor, *, heads: int, scale: float | None = None) -> Tensor:
    """out, by PyTorch's attention: the meaning of the forward."""
    q, k, v = parts_of(qkv, heads)
    out = F.scaled_dot_product_attention(q, k, v, scale=scale)
    return out.transpose(1, 2).flatten(2).contiguous()


def scores_of(qkv: Tensor, heads: int, scale: float | None) -> Tensor:
    """What the softmax is taken of, [N, heads, T, T] in fp32 or wider."""
    q, k, _ = parts_of(qkv.to(torch.promote_types(qkv.dtype, torch.float32)), heads)
    return q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)


def attention(qkv: Tensor, *, heads: int, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) in plain PyTorch."""
    return attended(qkv, heads=heads, scale=scale), scores_of(qkv, heads, scale).logsumexp(-1)
