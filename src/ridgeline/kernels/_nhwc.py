"""Pieces shared by the NHWC kernels: layout predicates on the host, index and epilogue functions on the device.

NHWC means a tensor of shape [N, C, H, W] whose channels are adjacent in memory. Its *pitch* is the distance between
neighbouring pixels in elements: C for a whole tensor, more for a channel slice of a wider one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.cost.conv import ConvProblem
from ridgeline.kernels._op import Sample

ACTIVATIONS = ("none", "silu")


def pixel_pitch(x: Tensor) -> int | None:
    """Elements between neighbouring pixels of an NHWC tensor or a channel slice of one; None for any other layout.

    Sizes of 1 leave their stride free: PyTorch reports arbitrary ones there.
    """
    n, c, h, w = x.shape
    stride_n, stride_c, stride_h, stride_w = x.stride()
    if w > 1:
        pitch = stride_w
    elif h > 1:
        pitch = stride_h
    elif n > 1:
        pitch = stride_n
    else:
        pitch = c
    fits = (
        pitch >= c
        and (c == 1 or stride_c == 1)
        and (h == 1 or stride_h == w * pitch)
        and (n == 1 or stride_n == h * w * pitch)
    )
    return pitch if fits else None


def share_elements(a: Tensor, b: Tensor) -> bool:
    """Whether two NHWC tensors have memory in common. Channel slices of one buffer that do not overlap have none."""
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    pitch = pixel_pitch(a)
    if pitch != pixel_pitch(b) or pitch is None or a.shape[2:] != b.shape[2:]:
        return True  # cannot be told from the channels alone
    distance = (b.storage_offset() - a.storage_offset()) % pitch
    return distance < a.shape[1] or distance + b.shape[1] > pitch


def partly_shared(a: Tensor, b: Tensor) -> bool:
    """Whether two NHWC tensors of one shape share memory without being the same view of it."""
    same_view = a.data_ptr() == b.data_ptr() and pixel_pitch(a) == pixel_pitch(b)
    return share_elements(a, b) and not same_view


def check_map(op: str, name: str, tensor: Tensor, *, like: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a feature map that a kernel would read or write in the wrong place."""
    if tuple(tensor.shape) != shape or tensor.dtype != like.dtype:
        raise ValueError(
            f"{op}: {name} must be {like.dtype} of shape {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
        )
    if pixel_pitch(tensor) is None:
        raise ValueError(
            f"{op}: {name} must be channels_last or a channel slice of it, got strides {tensor.stride()} "
            f"for shape {shape}: use .contiguous(memory_format=torch.channels_last)"
        )


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; `triton.cdiv` is for kernels, and makes a constexpr of its result."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def empty_nhwc(shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
    """Uninitialised channels-last tensor with the dtype and device of `like`."""
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def random_nhwc(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, *, seed: int) -> Tensor:
    """Channels-last normal data for samples; on the "meta" device only its shape."""
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device, memory_format=torch.channels_last)
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


def conv_sample(
    why: str, x: tuple[int, int, int, int], krs: tuple[int, int, int], *, real_size: bool = False, **choices: Any
) -> Sample:
    """A convolution of `x` with K filters of R x S.

    `stride` (1) and `padding` (R // 2) may be one number, `bias=False` drops the bias, `residual=True` adds a residual;
    all other choices are passed on to the op.
    """
    k, r, s = krs
    with_bias, with_residual = choices.pop("bias", True), choices.pop("residual", False)
    both = (choices.pop("stride", 1), choices.pop("padding", r // 2))
    stride, padding = ((v, v) if isinstance(v, int) else v for v in both)

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        conv = ConvProblem(x[0], x[1], k, x[2:], (r, s), stride, padding)
        # variance 1 in the output, as in a trained network: errors are then relative to a map that matters
        weight = random_nhwc((k, x[1], r, s), dtype, device, seed=1) * (x[1] * r * s) ** -0.5
        return {
            "x": random_nhwc(x, dtype, device, seed=0),
            "weight": weight,
            "bias": random_nhwc((1, k, 1, 1), torch.float32, device, seed=2).flatten() if with_bias else None,
            "residual": random_nhwc((x[0], k, conv.oh, conv.ow), dtype, device, seed=3) if with_residual else None,
            "stride": stride,
            "padding": padding,
            **choices,
        }

    return Sample(why, arguments, real_size)


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Everything that reads what another kernel wrote, and every write, stands below this call, on every path.

    With PDL the kernel was launched while its predecessor ran. Its own dependent is let in only now: one that lets it
    in before waiting starts a cascade, and kernels that cannot run yet take the multiprocessors' slots.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def split_pixel(pixel, H: tl.constexpr, W: tl.constexpr):
    """(image, row, column) of a pixel counted through a batch of H x W maps."""
    return pixel // (H * W), pixel // W % H, pixel % W


@triton.jit
def activate(z, ACT: tl.constexpr):
    """The activation named by ACT on an fp32 block."""
    if ACT == "silu":
        z = z * tl.sigmoid(z)
    return z
