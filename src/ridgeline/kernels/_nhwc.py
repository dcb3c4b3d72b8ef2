"""Pieces shared by the NHWC kernels: layout predicates on the host, index and epilogue functions on the device.

NHWC means a tensor of shape [N, C, H, W] whose channels are adjacent in memory. Its *pitch* is the distance between
neighbouring pixels in elements: C for a whole tensor, more for a channel slice of a wider one.
"""

# In a kernel a constexpr stands for its value, which the type checker cannot know.
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, num_threads

from ridgeline.cost.conv import ConvProblem
from ridgeline.kernels._op import INTERPRETED, Sample, Target

ACTIVATIONS = ("none", "silu")
_IN_ASSEMBLY = tl.constexpr(not INTERPRETED)  # the interpreter knows no inline assembly, and multiplies fp32 exactly


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


def round_to_tf32(x: Tensor) -> Tensor:
    """fp32 values rounded to TF32's ten bits, to nearest and ties to even; NaN and infinities stay what they are.

    The matrix units cut the low 13 bits of fp32 operands. A kernel rounds what it gathers itself, but reads its weights
    as they are: whoever makes them rounds them once.
    """
    bits = x.view(torch.int32)
    rounded = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF
    # the carry turns the largest finite values into infinity, as rounding must, but would turn some NaN into -0
    return torch.where(x.isfinite(), rounded, bits).view(torch.float32)


def tf32_rounding(x: Tensor, precision: str, target: Target) -> str:
    """How a kernel rounds a gathered operand, for `round_operand`: "rn", "rna" (ties away from zero), "" for not."""
    if x.dtype != torch.float32 or precision != "tf32":
        return ""
    # one instruction from sm_90 on; before, only the other rounding exists, and takes three
    return "rn" if int(target.arch.removeprefix("sm_")) >= 90 else "rna"


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


def starts_early(target: Target) -> bool:
    """Whether a training kernel is launched while its predecessor runs, see `wait_for_predecessor`.

    Norms are not: a multiprocessor whose memory a convolution has given to its buffers keeps it so while the norm's
    first programs wait, and what is left to its L1 cache is too little for their loads.
    """
    return not INTERPRETED and int(target.arch.removeprefix("sm_")) >= 90


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
def wait_holding_dependent(PDL: tl.constexpr):
    """The same wait; the dependent stays out until `let_dependent_in`."""
    if PDL:
        gdc_wait()


@triton.jit
def let_dependent_in(PDL: tl.constexpr):
    """Called before the last store: let in at the wait, dependents pile up on the few multiprocessors then free."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def prefetch_weights(weight_ptr, ELEMENTS: tl.constexpr, PDL: tl.constexpr):
    """Bring a program's share of weights that are read after the wait from memory into the L2, before it."""
    if PDL and _IN_ASSEMBLY:
        LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
        LINES: tl.constexpr = (ELEMENTS + LINE - 1) // LINE
        share = tl.cdiv(LINES, tl.num_programs(0))
        for first in range(0, share, num_threads()):
            line = line_of_share(first, share, LINES, num_threads())
            address = (weight_ptr + line * LINE).to(tl.int64)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def line_of_share(first, share, LINES: tl.constexpr, THREADS: tl.constexpr):
    """A line for each thread, from a program's `first` on; threads with none left repeat the last."""
    line = tl.program_id(0) * share + tl.minimum(first + tl.arange(0, THREADS), share - 1)
    return tl.minimum(line, LINES - 1)


@triton.jit
def split_pixel(pixel, H: tl.constexpr, W: tl.constexpr):
    """(image, row, column) of a pixel counted through a batch of H x W maps."""
    return pixel // (H * W), pixel // W % H, pixel % W


@triton.jit
def activate(z, ACT: tl.constexpr):
    """The activation named by ACT on an fp32 block."""
    if ACT == "silu":
        if _IN_ASSEMBLY:
            # z / (1 + 2^(-z log2 e)); flushing to zero spares both units a rescue of their smallest results, and
            # makes 0 of what lies below z = -87, which is less than 1e-35
            z = tl.inline_asm_elementwise(
                """{
                .reg .f32 t;
                mul.f32 t, $1, 0fBFB8AA3B;
                ex2.approx.ftz.f32 t, t;
                add.f32 t, t, 0f3F800000;
                rcp.approx.ftz.f32 t, t;
                mul.f32 $0, $1, t;
                }""",
                "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            z = z * tl.sigmoid(z)
    return z


@triton.jit
def round_operand(x, ROUNDING: tl.constexpr):
    """A block that a matrix unit multiplies in TF32, rounded as `tf32_rounding` says instead of cut."""
    if ROUNDING != "" and _IN_ASSEMBLY:
        instruction: tl.constexpr = "cvt." + ROUNDING + ".tf32.f32 $0, $1;"
        x = tl.inline_asm_elementwise(instruction, "=r,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x


@triton.jit
def awaited(acc, IN_REGISTERS: tl.constexpr):
    """The sum of a pipelined loop. A product whose left operand is in registers ends in its step: this is a use of it.

    Left alone, Triton 3.6 waits for it some products later, and loads the registers anew before (see pending_products).
    """
    if IN_REGISTERS and _IN_ASSEMBLY:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=False, pack=1)
    return acc


@triton.jit
def after_loads(blocks, ROUNDING: tl.constexpr):
    """The tuple of loaded blocks, rounded as `round_operand` does, with no use of any above the last load.

    Left alone, Triton stores each block to shared memory as soon as it is loaded, and ptxas keeps registers few by
    waiting for it there: of nine loads three were in flight. To Triton these moves have side effects, so they keep
    their place below the loads; ptxas removes them, but moves no access across the barrier of the warp.
    """
    if _IN_ASSEMBLY:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        moved = ()
        for i in tl.static_range(len(blocks)):
            moved = moved + (_move(blocks[i], ROUNDING),)  # noqa: RUF005 - Triton cannot unpack
        blocks = moved
    return blocks


@triton.jit
def _move(x, ROUNDING: tl.constexpr):
    PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
    MOVE: tl.constexpr = "mov.b32" if ROUNDING == "" else "cvt." + ROUNDING + ".tf32.f32"
    return tl.inline_asm_elementwise(MOVE + " $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK)
