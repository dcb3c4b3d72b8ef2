"""What PyTorch does on CUDA but not on the CPU, where a trace's fake tensors live: autocast, attention, dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ridgeline.cost._formula import words

# Functions that CUDA autocast runs in fp32 (ATen/autocast_mode.h) and CPU autocast leaves alone.
AUTOCAST_FP32 = words(
    """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus
    layer_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss kl_div
    l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss soft_margin_loss triplet_margin_loss
    binary_cross_entropy_with_logits cross_entropy cdist dist renorm logsumexp interpolate upsample prod softmax
    log_softmax cumprod cumsum vector_norm matrix_norm norm sum"""
)


_CPU = torch.device("cpu")


class CudaBehaviour(TorchFunctionMode):
    """Under autocast, casts what CUDA's policy runs in fp32; attention and dropout become the kernels CUDA has.

    Devices named in the code ("cuda", 0) become the CPU, where all tensors of a trace are.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        if name == "to":
            args = tuple(_CPU if _is_device(arg) else arg for arg in args)
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": _CPU}
        if name == "scaled_dot_product_attention":
            return _attention(func, *args, **kwargs)
        if name == "dropout":
            return _dropout(func, *args, **kwargs)
        if name in AUTOCAST_FP32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_to_fp32, args), tree_map(_to_fp32, kwargs)
        return func(*args, **kwargs)


def _is_device(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) or (isinstance(value, int) and not isinstance(value, bool))


def _dropout(func: Any, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or inplace or not 0 < p < 1:
        return func(x, p, training, inplace)
    return torch.native_dropout(x, p, True)[0]


def _to_fp32(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if low else value


def _attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Fake CPU tensors would take the unfused path. The operator named "for_cpu" has the shapes of CUDA's flash kernel.

    What no fused CUDA kernel takes either (a mask that needs a gradient, unequal head sizes) stays unfused.
    """
    mask_grad = attn_mask is not None and attn_mask.requires_grad
    if mask_grad or enable_gqa or query.dim() not in (3, 4) or query.shape[-1] != value.shape[-1]:
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    heads = [x if x.dim() == 4 else x.unsqueeze(1) for x in (query, key, value)]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out = flash(*heads, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return out if query.dim() == 4 else out.squeeze(1)
