"""The two kernels of adamw_ema: numbers of the step for every tensor, then one pass over all elements.

Tensors are reached through tables of addresses (int64 made pointers), so that one launch serves any number of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels._nhwc import wait_for_predecessor

# Columns of the tables. One row of `settings` and `scalars` a tensor, one row of `chunks` a program: 64 bytes each.
SETTINGS = ("step", "lr", "weight_decay", "beta1", "beta2", "eps", "max_norm", "")  # addresses, then float64 bits
SCALARS = (
    "gradient_scale", "decay", "beta1", "1 - beta1", "beta2", "1 - beta2", "step_size", "denominator_scale",
    "eps", "average_blend", "applied", "", "", "", "", "",
)  # fmt: skip
CHUNKS = ("parameter", "exp_avg", "exp_avg_sq", "average", "copy", "tensor", "first", "count")

_SETTINGS = tl.constexpr(len(SETTINGS))
_SCALARS = tl.constexpr(len(SCALARS))
_CHUNKS = tl.constexpr(len(CHUNKS))


@triton.jit
def scalars_kernel(
    settings_ptr, scalars_ptr, norm_ptr, found_inf_ptr, inverse_scale_ptr, average_decay_ptr, updates_ptr, tensors,
    CLIP: tl.constexpr, WARMUP: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count the step and write each tensor's scalars; one program, because it also counts the average's updates.

    In float64: 1 - beta2^step loses four digits in fp32 at the first steps, and 1 - beta2 two digits at every step.
    """
    wait_for_predecessor(PDL)
    applied = 1.0
    if found_inf_ptr is not None:
        applied = tl.where(tl.load(found_inf_ptr) == 0.0, 1.0, 0.0)
    scale = 1.0
    if inverse_scale_ptr is not None:
        scale = tl.load(inverse_scale_ptr)
    average_blend = 0.0
    if updates_ptr is not None:
        updates = tl.load(updates_ptr)
        average_decay = tl.load(average_decay_ptr)
        if WARMUP:
            average_decay = tl.minimum(average_decay, (1.0 + updates) / (10.0 + updates))
        average_blend = 1.0 - average_decay
        tl.store(updates_ptr, updates + 1.0)
    for block in range(BLOCKS):
        tensor = block * BLOCK + tl.arange(0, BLOCK)
        inside = tensor < tensors
        setting = settings_ptr + tensor * _SETTINGS
        step_ptr = tl.load(setting, mask=inside, other=0).to(tl.pointer_type(tl.float32))
        lr_ptr = tl.load(setting + 1, mask=inside, other=0).to(tl.pointer_type(tl.float32))
        weight_decay_ptr = tl.load(setting + 2, mask=inside, other=0).to(tl.pointer_type(tl.float32))
        beta1 = tl.load(setting + 3, mask=inside, other=0).to(tl.float64, bitcast=True)
        beta2 = tl.load(setting + 4, mask=inside, other=0).to(tl.float64, bitcast=True)
        eps = tl.load(setting + 5, mask=inside, other=0).to(tl.float64, bitcast=True)
        lr = tl.load(lr_ptr, mask=inside, other=0.0).to(tl.float64)
        weight_decay = tl.load(weight_decay_ptr, mask=inside, other=0.0).to(tl.float64)
        step = tl.load(step_ptr, mask=inside, other=0.0) + applied
        tl.store(step_ptr, step, mask=inside)

        # a skipped first step would divide by zero; its numbers are not used
        counted = tl.maximum(step, 1.0).to(tl.float64)
        # beta may be 0: its power is then 1e-300, and 1 - 1e-300 is 1
        correction1 = 1.0 - tl.exp(counted * tl.log(tl.maximum(beta1, 1e-300)))
        correction2 = 1.0 - tl.exp(counted * tl.log(tl.maximum(beta2, 1e-300)))
        gradient_scale = tl.zeros((BLOCK,), tl.float64) + scale
        if CLIP:
            max_norm = tl.load(setting + 6, mask=inside, other=0).to(tl.float64, bitcast=True)
            norm = tl.load(norm_ptr).to(tl.float64) * gradient_scale
            clip = max_norm / (norm + 1e-6)  # torch.nn.utils.clip_grads_with_norm_'s
            # a comparison keeps NaN, which a minimum would hide
            gradient_scale *= tl.where(clip > 1.0, 1.0, clip)

        row = scalars_ptr + tensor * _SCALARS
        tl.store(row, gradient_scale.to(tl.float32), mask=inside)
        tl.store(row + 1, (lr * weight_decay).to(tl.float32), mask=inside)
        tl.store(row + 2, beta1.to(tl.float32), mask=inside)
        tl.store(row + 3, (1.0 - beta1).to(tl.float32), mask=inside)
        tl.store(row + 4, beta2.to(tl.float32), mask=inside)
        tl.store(row + 5, (1.0 - beta2).to(tl.float32), mask=inside)
        tl.store(row + 6, (lr / correction1).to(tl.float32), mask=inside)
        tl.store(row + 7, (1.0 / tl.sqrt(correction2)).to(tl.float32), mask=inside)
        tl.store(row + 8, eps.to(tl.float32), mask=inside)
        tl.store(row + 9, average_blend, mask=inside)
        tl.store(row + 10, applied, mask=inside)


@triton.jit
def update_kernel(
    chunks_ptr, gradients_ptr, scalars_ptr,
    GRADIENTS: tl.constexpr, AVERAGE: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor."""
    wait_for_predecessor(PDL)
    row = chunks_ptr + tl.program_id(0) * _CHUNKS  # 2^28 programs fit int32: more elements than any GPU holds
    tensor = tl.load(row + 5)
    count = tl.load(row + 7).to(tl.int32)
    # Only where eight neighbours share one mask are accesses 16 bytes wide; the end of an odd tensor goes without.
    if count % 8 == 0:
        _update_chunk(row, gradients_ptr + tensor, scalars_ptr + tensor * _SCALARS, count,
                      8, GRADIENTS, AVERAGE, COPY, BLOCK)  # fmt: skip
    else:
        _update_chunk(row, gradients_ptr + tensor, scalars_ptr + tensor * _SCALARS, count,
                      1, GRADIENTS, AVERAGE, COPY, BLOCK)  # fmt: skip


@triton.jit
def _update_chunk(
    row, gradient_ptr, scalars, count,
    UNIT: tl.constexpr, GRADIENTS: tl.constexpr, AVERAGE: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    inside = i // UNIT < count // UNIT
    # The host refuses addresses that 16 does not divide, and chunks start at multiples of BLOCK. Of bf16 only 8 is
    # said: four elements a thread as in fp32, where eight would send all through shared memory between two layouts.
    parameter_ptr = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16) + i
    exp_avg_ptr = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), 16) + i
    exp_avg_sq_ptr = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16) + i
    average_ptr = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), 16) + i
    copy_address = tl.load(row + 4)
    copy_ptr = tl.multiple_of(copy_address.to(tl.pointer_type(tl.bfloat16)), 8) + i
    old_parameter = tl.load(parameter_ptr, mask=inside, other=0.0)
    old_exp_avg = tl.load(exp_avg_ptr, mask=inside, other=0.0)
    old_exp_avg_sq = tl.load(exp_avg_sq_ptr, mask=inside, other=0.0)
    gradient = _load_gradient(tl.load(gradient_ptr), tl.load(row + 6), i, inside, GRADIENTS)
    if AVERAGE:
        average = tl.load(average_ptr, mask=inside, other=0.0)

    gradient *= tl.load(scalars)
    exp_avg = _mix(old_exp_avg, gradient, tl.load(scalars + 2), tl.load(scalars + 3))
    exp_avg_sq = _mix(old_exp_avg_sq, gradient * gradient, tl.load(scalars + 4), tl.load(scalars + 5))
    # root and quotient may be approximate: they err by some 2^-22 of the step, not of the parameter
    denominator = tl.sqrt(exp_avg_sq) * tl.load(scalars + 7) + tl.load(scalars + 8)
    parameter = old_parameter - tl.load(scalars + 1) * old_parameter
    parameter -= tl.load(scalars + 6) * (exp_avg / denominator)

    # Selected, not branched on: stores inside a branch are not vectorised. A skipped step writes what it has read.
    applied = tl.load(scalars + 10) != 0.0
    parameter = tl.where(applied, parameter, old_parameter)
    tl.store(parameter_ptr, parameter, mask=inside)
    tl.store(exp_avg_ptr, tl.where(applied, exp_avg, old_exp_avg), mask=inside)
    tl.store(exp_avg_sq_ptr, tl.where(applied, exp_avg_sq, old_exp_avg_sq), mask=inside)
    if AVERAGE:
        tl.store(average_ptr, average + tl.load(scalars + 9) * (parameter - average), mask=inside)
    if COPY:
        # 0 is the address of no copy: some parameters have none
        tl.store(copy_ptr, parameter.to(tl.bfloat16), mask=inside & (copy_address != 0))


@triton.jit
def _load_gradient(tagged, first, i, inside, GRADIENTS: tl.constexpr):
    """In fp32. Where tensors of both dtypes are among them, bit 0 of an address says bf16; 16 divides the rest."""
    narrow = (tagged & 1) != 0
    wide_ptr = tl.multiple_of((tagged + 4 * first).to(tl.pointer_type(tl.float32)), 16) + i
    narrow_ptr = tl.multiple_of((tagged - 1 + 2 * first).to(tl.pointer_type(tl.bfloat16)), 8) + i
    if GRADIENTS == "fp32":
        gradient = tl.load(wide_ptr, mask=inside, other=0.0)
    elif GRADIENTS == "bf16":
        gradient = tl.load(narrow_ptr, mask=inside, other=0.0).to(tl.float32)
    else:
        # both without a branch, one of them masked off: no byte is read for it
        wide = tl.load(wide_ptr, mask=inside & (narrow == 0), other=0.0)
        gradient = tl.where(narrow, tl.load(narrow_ptr, mask=inside & narrow, other=0.0).to(tl.float32), wide)
    return gradient


@triton.jit
def _mix(old, new, keep, blend):
    """keep·old + blend·new of weights whose sum is 1, by the smaller: the rounding of 0.999 would add up over steps."""
    slow = keep >= 0.5
    base, other = tl.where(slow, old, new), tl.where(slow, new, old)
    return base + tl.where(slow, blend, keep) * (other - base)
