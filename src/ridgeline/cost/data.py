"""Moving data: copies, casts, concatenation, padding, resampling, gathers, sorts; and the calls that move nothing.

No FLOPs except where values are mixed (bilinear) or summed (backward of a gather). A gather reads from its table no
more than it writes; a sort is charged one read and one write, log2(n) comparisons an element.
"""

from __future__ import annotations

from math import log2
from typing import Any

from torch import Tensor

from ridgeline.cost._formula import (
    VIEW,
    Formula,
    Touch,
    Work,
    bytes_of,
    extent_bytes,
    per_input,
    per_output,
    table,
    tensors_in,
    without_out,
    words,
    work,
)

# Operators whose result aliases an argument though the schema does not say so, allocations, and questions about
# metadata. Operators marked as views by their schema need no entry.
FREE = """_unsafe_view lift_fresh empty empty_like empty_strided new_empty new_empty_strided resize set record_stream
as_strided squeeze unsqueeze t transpose detach size stride numel dim storage_offset sym_size sym_stride sym_numel
sym_storage_offset is_same_size is_contiguous sym_is_contiguous is_strides_like_format is_pinned
is_non_overlapping_and_dense result_type can_cast _assert_async _assert_scalar _assert_tensor_metadata
_has_compatible_shallow_copy_type"""

# Copies that only rename indices: a consumer can read the source instead.
INDEX_RULES = frozenset(
    f"aten.{name}"
    for name in words("""cat stack clone _to_copy lift_fresh_copy repeat roll flip constant_pad_nd reflection_pad1d
    reflection_pad2d replication_pad1d replication_pad2d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d pixel_shuffle pixel_unshuffle channel_shuffle slice_backward
    select_backward""")
)


def _gather(source: Tensor, *args: Any, result: Tensor, **kwargs: Any) -> Work:
    taken = min(extent_bytes(source), bytes_of(result))
    return work(0, (Touch(source, taken), args, without_out(kwargs)), result)


def _copy_into(target: Tensor, source: Any, *_args: Any, result: Any, **_kwargs: Any) -> Work:
    del result
    return work(0, source, target)


def _from_grad(flops: float, kind: str) -> Formula:
    """Backward of an index rule: every incoming gradient is read once and added into its place."""

    def formula(grad: Tensor, *args: Any, result: Tensor, **kwargs: Any) -> Work:
        indices = [tensor for tensor in tensors_in(args, kwargs) if not tensor.is_floating_point()]
        return work(flops * grad.numel(), (grad, indices), result)

    return Formula(kind, formula)


def _add_into(target: Tensor, *args: Any, result: Any, **kwargs: Any) -> Work:
    """index_put, scatter, scatter_add: touches the addressed elements; a result of its own is a copy of the target."""
    values = max((tensor.numel() for tensor in tensors_in(args, kwargs)), default=0)
    if any(tensor is target for tensor in tensors_in(result)):
        touched = Touch(target, min(extent_bytes(target), values * target.element_size()))
        return work(values, (args, kwargs, touched), touched)
    return work(values, (args, kwargs, target), result)


def _sort(x: Tensor, *args: Any, result: Any, **_kwargs: Any) -> Work:
    axis = next((arg for arg in args[1:] if isinstance(arg, int) and not isinstance(arg, bool)), -1)
    length = x.shape[axis] if x.dim() else 1
    return work(x.numel() * log2(max(length, 2)), x, result)


_copy = per_output("copy", 0)

FORMULAS = {
    **table(
        (Formula(VIEW, lambda *_args, **_kwargs: ()), FREE),
        (_copy, "clone _to_copy lift_fresh_copy repeat roll flip tril triu diag_embed one_hot"),
        (_copy, "constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d"),
        (_copy, "pixel_shuffle pixel_unshuffle channel_shuffle slice_scatter select_scatter split_with_sizes_copy"),
        (_copy, "slice_backward select_backward im2col unfold_copy as_strided_scatter view_copy permute_copy"),
        (Formula("copy", _copy_into), "copy_ copy _copy_from"),
        (per_output("concat", 0), "cat stack"),
        (per_output("upsample", 0), "upsample_nearest1d upsample_nearest2d upsample_nearest3d"),
        (per_output("upsample", 0), "_upsample_nearest_exact1d _upsample_nearest_exact2d"),
        # Per output: two taps an axis, one multiply-add each.
        (per_output("upsample", 4), "upsample_linear1d"),
        (per_output("upsample", 8), "upsample_bilinear2d _upsample_bilinear2d_aa grid_sampler_2d"),
        (per_output("upsample", 16), "upsample_trilinear3d"),
        (per_output("upsample", 32), "upsample_bicubic2d _upsample_bicubic2d_aa"),
        (_from_grad(1, "upsample"), "upsample_nearest1d_backward upsample_nearest2d_backward"),
        (_from_grad(1, "upsample"), "upsample_nearest3d_backward _upsample_nearest_exact2d_backward"),
        (_from_grad(8, "upsample"), "upsample_bilinear2d_backward _upsample_bilinear2d_aa_backward"),
        (_from_grad(32, "upsample"), "upsample_bicubic2d_backward _upsample_bicubic2d_aa_backward"),
        (_from_grad(1, "copy"), "reflection_pad2d_backward replication_pad2d_backward col2im unfold_backward"),
        (_from_grad(1, "other"), "embedding_dense_backward"),
        (Formula("other", _gather), "embedding index _unsafe_index index_select gather take masked_select"),
        (Formula("other", _add_into), "index_put _index_put_impl scatter scatter_add scatter_reduce index_add"),
        (Formula("other", _add_into), "index_copy index_fill masked_scatter _unsafe_index_put"),
        (per_input("other", 1), "nonzero searchsorted bucketize bincount histc _unique2 unique_dim isin"),
        (Formula("topk", _sort), "topk sort argsort"),
        # One number leaves the device; the wait for it costs more than the bytes, and no static model knows it.
        (per_output("other", 0), "_local_scalar_dense"),
    ),
}
