"""What group_norm_silu drops: device code, and its meaning in plain PyTorch. Axes as in _group_norm_silu.py."""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels._nhwc import cdiv

RANDOM_STEPS = 2**16  # values of the random bits that one element gets
ROUNDS = 7  # of Philox

_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def random_stream(seed_ptr, offset_ptr):
    """(seed, offset) as `drop` takes them; zeros without pointers."""
    seed = tl.full((), 0, tl.int64)
    offset = tl.full((), 0, tl.int64)
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
        offset = tl.load(offset_ptr)
    return seed, offset


@triton.jit
def drop(z_pc, stream, n, slab, first, C: tl.constexpr, WIDTH: tl.constexpr, DROPPED: tl.constexpr):
    """`z` where its 16 random bits are at least DROPPED, else 0; to be multiplied by `keep_scale`.

    Random bits are a function of seed, offset, sample, pixel and channel, whatever the tiling: one Philox4x32-7 call
    (Salmon et al. 2011; seven rounds are the fewest that pass their tests) gives eight neighbouring channels 16 each.
    """
    if DROPPED > 0:
        BLOCK_P: tl.constexpr = z_pc.shape[0]
        BLOCK_C: tl.constexpr = z_pc.shape[1]
        EIGHTHS: tl.constexpr = (C + 7) // 8
        seed, offset = stream
        low, high = (offset & 0xFFFFFFFF).to(tl.uint32), (offset >> 32).to(tl.uint32)
        p = first + tl.arange(0, BLOCK_P)[:, None]
        if WIDTH % 8 == 0:
            eighth = p * EIGHTHS + slab * (WIDTH // 8) + tl.arange(0, BLOCK_C // 8)[None, :]
            a, b, c, d = tl.philox(seed, eighth.to(tl.uint32), n.to(tl.uint32), low, high, _ROUNDS)
            words = tl.join(tl.join(a, c), tl.join(b, d))  # [..., 2, 2] in the order a, b, c, d
            bits_pc = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BLOCK_P, BLOCK_C))
        else:
            # a slab that begins inside of an eighth: eight times the work
            channel = slab * WIDTH + tl.arange(0, BLOCK_C)[None, :]
            a, b, c, d = tl.philox(
                seed, (p * EIGHTHS + channel // 8).to(tl.uint32), n.to(tl.uint32), low, high, _ROUNDS
            )
            word = channel // 2 % 4
            words = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
            bits_pc = tl.where(channel % 2 == 0, words & 0xFFFF, words >> 16)
        z_pc = tl.where(bits_pc >= DROPPED, z_pc, 0.0)
    return z_pc


@triton.constexpr_function
def keep_scale(dropped):
    """What the kept elements are multiplied by, so that dropout keeps the mean."""
    return 65536 / (65536 - dropped)


# --- meaning -------------------------------------------------------------------------------------------------------


def values_dropped(p: float) -> int:
    """How many of the RANDOM_STEPS values of its random bits drop an element: p to the nearest, but never all."""
    return min(round(p * RANDOM_STEPS), RANDOM_STEPS - 1)


def scaled_mask(x: Tensor, seed: Tensor | None, offset: Tensor | None, p: float) -> Tensor:
    """What dropout multiplies by, in the shape and dtype of x: 0, or 1 / keep probability."""
    if seed is None or offset is None:
        raise ValueError(f"group_norm_silu: p of {p} needs seed and offset, one int64 each on the device of x")
    n, c, h, w = x.shape
    eighths = cdiv(c, 8)
    offset = offset.reshape(())
    counter = torch.broadcast_tensors(
        torch.arange(h * w * eighths, device=x.device),
        torch.arange(n, device=x.device)[:, None],
        offset & _MASK,
        offset >> 32 & _MASK,
    )
    words = torch.stack(_philox(counter, seed.reshape(())), dim=-1)  # [N, H W eighths, 4]
    bits = torch.stack((words & 0xFFFF, words >> 16), dim=-1).reshape(n, h, w, 8 * eighths)[..., :c]
    dropped = values_dropped(p)
    return ((bits >= dropped) * (RANDOM_STEPS / (RANDOM_STEPS - dropped))).to(x.dtype).permute(0, 3, 1, 2)


_MASK = 0xFFFFFFFF
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def _philox(counter: Sequence[Tensor], seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32 in int64: products wrap around, but their 64 bits are right."""
    a, b, c, d = counter
    keys = [seed & _MASK, seed >> 32 & _MASK]
    for _ in range(ROUNDS):
        first, third = a * _FACTORS[0], c * _FACTORS[1]
        a, b, c, d = (
            (third >> 32 & _MASK) ^ b ^ keys[0], third & _MASK, (first >> 32 & _MASK) ^ d ^ keys[1], first & _MASK
        )  # fmt: skip
        keys = [key + step & _MASK for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return a, b, c, d
