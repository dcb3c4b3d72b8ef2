"""What a GPU kernel's name tells: its category, tensor cores or not, dtype, layout, pass of a convolution.

Names are compared in lower case, mangled ones as they stand. The first rule that fits decides, so a convolution by
matrix product is a "conv" and a fused optimizer is no "pointwise". What no rule knows is "unknown": a category of its
own, whose share of the time the tables print.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from ridgeline.step_view import KernelClass

CATEGORIES = (
    "conv",
    "gemm",
    "attention",
    "norm",
    "softmax",
    "pool",
    "upsample",
    "pointwise",
    "reduction",
    "layout",  # NCHW <-> NHWC and other transposes
    "copy",  # copies and casts done by kernels
    "concat",
    "index",  # gather, scatter, embedding, masks
    "sort",  # sort, top-k, non-maximum suppression
    "fill",
    "random",
    "optimizer",  # parameter, moment, average and gradient-norm updates over many tensors
    "communication",
    "memcpy",
    "memset",
    "unknown",
)

# kernels of this project -> category, and the operator that launches them
_OWN = {
    "conv2d_act_kernel": ("conv", "conv2d_act"),
    "conv2d_act_tma_kernel": ("conv", "conv2d_act"),
    "conv2d_act_gluon_kernel": ("conv", "conv2d_act"),
    "conv_chain_kernel": ("conv", "conv_chain"),
    "conv_pair_chain_kernel": ("conv", "conv_pair_chain"),
    "depthwise_conv2d_act_kernel": ("conv", "depthwise_conv2d_act"),
    "letterbox_conv_act_kernel": ("conv", "letterbox_conv_act"),
    "upsample_concat_conv_act_kernel": ("conv", "upsample_concat_conv_act"),
    # of conv2d_dgrad, conv2d_fp8, and of the same after upsampling too
    "conv2d_gluon_kernel": ("conv", "conv2d_fprop"),
    # of conv2d_dgrad too
    "narrow_expand_kernel": ("conv", "conv2d_fprop"),
    "narrow_contract_kernel": ("conv", "conv2d_fprop"),
    "narrow_reduce_kernel": ("conv", "conv2d_wgrad"),
    "conv2d_fp8_tl_kernel": ("conv", "conv2d_fp8"),
    "conv2d_wgrad_gluon_kernel": ("conv", "conv2d_wgrad"),
    "wgrad_parts_kernel": ("conv", "conv2d_wgrad"),
    "concat_conv2d_kernel": ("conv", "concat_conv2d"),
    "concat_conv2d_wgrad_kernel": ("conv", "concat_conv2d_wgrad"),
    "phase_weights_kernel": ("pointwise", "upsample_conv2d"),
    "phase_gradients_kernel": ("conv", "upsample_conv2d_wgrad"),
    "conv2d_wgrad_fp8_kernel": ("conv", "conv2d_wgrad_fp8"),
    "conv2d_wgrad_fp8_tl_kernel": ("conv", "conv2d_wgrad_fp8"),
    "wgrad_fp8_sums_kernel": ("conv", "conv2d_wgrad_fp8"),
    "attention_packed_kernel": ("attention", "attention_packed"),
    "attention_packed_backward_kernel": ("attention", "attention_packed_backward"),
    "attention_position_kernel": ("attention", "attention_position"),
    "forward_fp8_kernel": ("norm", "group_norm_silu_fp8"),
    "backward_fp8_kernel": ("norm", "group_norm_silu_backward_fp8"),
    "quantize_quads_kernel": ("pointwise", "quantize_fp8"),
    "quantize_fp8_kernel": ("pointwise", "quantize_fp8"),
    "quantize_weights_fp8_kernel": ("pointwise", "quantize_weights_fp8"),
    "amax_fp8_kernel": ("reduction", "quantize_fp8"),
    "update_scales_kernel": ("pointwise", "scale_fp8"),
    "refresh_scale_kernel": ("pointwise", "scale_fp8"),
    "max_pool_chain_kernel": ("pool", "max_pool_chain"),
    "anchor_maxima_kernel": ("sort", "detect_topk"),
}
# Triton's kernels are named by their function alone, and anybody may have called one of theirs by these names: they
# count as this project's where something else says so
_COMMON = {
    "collect_kernel": ("sort", "detect_topk"),
    "rank_kernel": ("sort", "detect_topk"),
    "sum_parts_kernel": ("reduction", "conv2d_act"),
    "forward_kernel": ("norm", "group_norm_silu"),
    "forward_again_kernel": ("norm", "group_norm_silu"),
    "statistics_kernel": ("norm", "group_norm_silu"),
    "apply_kernel": ("norm", "group_norm_silu"),
    "backward_kernel": ("norm", "group_norm_silu_backward"),
    "backward_again_kernel": ("norm", "group_norm_silu_backward"),
    "backward_sums_kernel": ("norm", "group_norm_silu_backward"),
    "backward_apply_kernel": ("norm", "group_norm_silu_backward"),
    "parameters_kernel": ("norm", "group_norm_silu_backward"),
    "grad_norm_kernel": ("optimizer", "grad_norm"),
    "scalars_kernel": ("optimizer", "adamw_ema"),
    "update_kernel": ("optimizer", "adamw_ema"),
}
# launched by one call, in this order: nobody else's code does both by chance
_PAIRS = {("scalars_kernel", "update_kernel"), ("backward_sums_kernel", "backward_apply_kernel")}

# Category by fragment. Order matters: the specific before the general.
_RULES = tuple(
    (category, re.compile(pattern))
    for category, pattern in (
        ("memset", r"^memset\d*(_|$)"),
        ("memcpy", r"^memcpy\d*(_|$)"),
        ("communication", r"nccl|allreduce|all_reduce|allgather|reduce_?scatter|sendrecv|nvshmem"),
        ("attention", r"flash_|flashattn|fmha|sdpa|attention|mha_fwd|mha_bwd|compute_dot_do_o|convert_dq"),
        ("layout", r"nchwtonhwc|nhwctonchw|nchw_?to_?nhwc|nhwc_?to_?nchw|n\w*addpadding|converttensor_kernel"),
        ("layout", r"generictranspose|transpose|swapdimension|permute_kernel|tensorpermute|scaletensor_kernel"),
        ("conv", r"triton_tem_fused\w*convolution"),
        ("gemm", r"triton_tem_fused|triton_mm|triton_bmm"),
        ("optimizer", r"multi_tensor_apply|multitensorapply|fused_?adam|fused_?sgd|adamfunctor|adam_kernel|sgd_kernel"),
        ("optimizer", r"amp_non_finite|amp_update_scale|lpnorm"),
        ("norm", r"bn_fw|bn_bw|batch_?norm|batchnorm|group_?norm|layer_?norm|instance_?norm|rms_?norm"),
        ("norm", r"rowwisemoments|welford|computefusedparams|computeinternalgradients|computebackwardfusedparams"),
        ("norm", r"gammabetabackward|cudnn_ln|var_mean"),
        # the backward kernels of a convolution carry these tokens whatever library they come from
        ("conv", r"fprop|dgrad|wgrad|dwgrad|implicit_convolve|implicit_?gemm|implicit_con|convolve_"),
        ("conv", r"convolution|conv2d|conv3d|conv1d|conv_depthwise|depthwise_?conv|depthwiseconv|conv_grouped"),
        ("conv", r"winograd|fft2d|fft1d_|gcgemm|scudnn|s\d+cudnn|_cudnn_\d+x\d+|im2col|col2im|first_layer_fwd"),
        ("conv", r"computeoffsetskernel|computewgradoffsets|computebooffsets|flip_filter|kern_precompute_indices"),
        ("gemm", r"nvjet|gemm|gemv|cublas|splitkreduce|dot_kernel|cutlass.*tensorop|matmul|dotc?_?kernel"),
        ("softmax", r"softmax"),
        ("pool", r"pool|pooling"),
        ("upsample", r"upsample|interpolate|grid_?sampl"),
        ("sort", r"sort|topk|top_k|nms_kernel|radix|bitonic|findkthvalue|unique_by|fill_reverse_indices"),
        ("concat", r"catarraybatched|concat|cat_kernel"),
        ("random", r"distribution|philox|curand|random|bernoulli|dropout_kernel|fused_dropout|randperm"),
        ("fill", r"fillfunctor|fill_kernel|memset_kernel|zero_kernel|arange"),
        ("copy", r"copy_kernel|copykernel|copy_device_to_device|copyfunctor"),
        (
            "index",
            r"index|scatter|gather|embedding|nonzero|masked_?select|masked_?scatter|flag_kernel|devicecompact",
        ),
        ("reduction", r"reduce_kernel|reduce_1block|nll_loss|devicereduce|reducekernel|reduction|devicescan|cumsum"),
        ("reduction", r"sum_functor|cunn_lossnll|tensor_kernel_scan|scan_"),
        ("pointwise", r"elementwise|pointwise|prelu|glu_kernel|addcmul|addcdiv|silu|gelu|sigmoid|lerp"),
    )
)

_NO_TENSOR_CORE = frozenset(CATEGORIES) - {"conv", "gemm", "attention", "unknown"}

_TENSOR_CORE = re.compile(
    r"tensorop|_xmma_|xmma_new|hmma|imma|wgmma|wmma|nvjet|884|1688|16816|161616|s\d+x\d+x\d+gemm|tf32f32|bf16bf16|"
    r"f16f16_f16|tfloat32|e4m3|e5m2|flash_fwd|flash_bwd|flash_fprop|flash_bprop|device_kernel.*sm(90|100|120)"
)
_CUDA_CORE = re.compile(
    r"simt|sgemm|dgemm|implicit_convolve_sgemm|scudnn|conv2d_grouped_direct|dgrad2d_grouped|wgrad2d_grouped|"
    r"conv_depthwise|depthwise|gemv|gemmsn|gemmk1|gemm_k1|dot_kernel|fft2d|fft1d|gcgemm|winograd|wgrad_alg0|"
    r"dgrad_engine|wgrad_alg1|conv2d_c1_k1|dwconv|splitkreduce|im2col|col2im|offsets|f32f32_f32f32"
)

_DTYPES = tuple(
    (dtype, re.compile(pattern))
    for dtype, pattern in (
        ("fp8", r"e4m3|e5m2|float8|fp8"),
        ("tf32", r"tf32|tfloat32"),
        ("bf16", r"bf16|bfloat16"),
        ("fp16", r"fp16|f16|half|h16816|h1688|h884|_s884cudnn|hgemm"),
        ("int8", r"int8|_s8_s8|_i8i8|imma"),
        ("fp32", r"float|fp32|f32|sgemm|scudnn|_if[li]"),
    )
)
# nvjet_[sm90_]ABC: operands, accumulator, result, one letter each
_NVJET = re.compile(r"nvjet_(?:sm\d+_)?([a-z])")
_NVJET_DTYPES = {"h": "fp16", "t": "bf16", "q": "fp8", "o": "fp8", "r": "fp8", "s": "tf32", "d": "fp64", "b": "int8"}

_PASSES = (
    ("wgrad", re.compile(r"wgrad|grad_weight|backward_filter|backwardfilter|weightgrad|computewgrad")),
    ("dgrad", re.compile(r"dgrad|conv_depthwise\dd_backward|backward_data|backwarddata|computebooffsets")),
    ("fprop", re.compile(r"fprop|implicit_convolve|conv_depthwise\dd_forward|conv2d_grouped_direct|forward_?data|")),
)

_INDUCTOR = re.compile(r"triton_(poi|red|per|for)_fused_(\w+)")
_INDUCTOR_COPIES = {"clone", "copy", "to", "view", "permute", "convert", "element", "type", "contiguous", "transpose"}


@lru_cache(maxsize=65536)
def classify(name: str, kind: str = "kernel", *, ours: bool = False) -> KernelClass:
    """The class of a kernel by its name; `kind` is the activity's: copies and fills need no name.

    ours   something beside the name says that this project launched it, which decides where the name is a common one
    """
    if kind != "kernel":
        return KernelClass(kind, False)
    text = name.lower()
    if own := _own(name, ours=ours):
        # one Triton kernel serves every dtype: only its operands tell whether tl.dot met a tensor core
        matrix = own[0] in ("conv", "attention") and "depthwise" not in name
        layout = "" if own[0] in ("optimizer", "sort") else "nhwc"
        return KernelClass(own[0], None if matrix else False, layout=layout, pass_="fprop" if own[0] == "conv" else "")
    category = _inductor_category(text) or next((c for c, rule in _RULES if rule.search(text)), "unknown")
    pass_ = next(p for p, rule in _PASSES if rule.search(text)) if category == "conv" else ""
    return KernelClass(category, _tensor_core(text, category), _dtype(text), _layout(text, category), pass_)


def own_operator(name: str, *, ours: bool = False) -> str:
    """`own_operator("conv2d_act_kernel") == "ridgeline.conv2d_act"`; "" for others. `ours` as in `classify`."""
    own = _own(name, ours=ours)
    return f"ridgeline.{own[1]}" if own else ""


def some_are_ours(names: Iterable[str]) -> bool:
    """Whether kernels, named in the order in which they ran, include some that only this project launches.

    Tells whose the common names among them are where no operator is recorded, as inside a CUDA graph.
    """
    before = ""
    for name in names:
        if name in _OWN or (before, name) in _PAIRS:
            return True
        before = name
    return False


def _own(name: str, *, ours: bool) -> tuple[str, str] | None:
    return _OWN.get(name) or (_COMMON.get(name) if ours else None)


def short_name(name: str, length: int = 60) -> str:
    """A C++ signature without its return type, template and call arguments, at most `length` characters."""
    head = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    head = re.split(r"[<(]", head, maxsplit=1)[0] or name
    functor = re.search(r"(\w*(?:[Ff]unctor|_kernel_cuda|_kernel_impl)\w*)", name[len(head) :])
    text = f"{head} {functor[1]}" if functor and functor[1] not in head else head
    return text if len(text) <= length else text[: length - 1] + "…"


def _inductor_category(text: str) -> str:
    """Inductor names its kernels after the operators it fused: "triton_poi_fused_add_silu_3"."""
    found = _INDUCTOR.search(text)
    if not found:
        return ""
    shape, words = found[1], found[2]
    if "norm" in words or "var_mean" in words:
        return "norm"
    if "softmax" in words:
        return "softmax"
    if shape in ("red", "per"):
        return "reduction"
    parts = {word for word in words.split("_") if word and not word.isdigit()}
    if parts == {"cat"}:
        return "concat"
    return "copy" if parts and parts <= _INDUCTOR_COPIES else "pointwise"


def _tensor_core(text: str, category: str) -> bool | None:
    if category in _NO_TENSOR_CORE:
        return False
    if _CUDA_CORE.search(text):
        return False
    return True if _TENSOR_CORE.search(text) else None


def _dtype(text: str) -> str:
    if jet := _NVJET.search(text):
        return _NVJET_DTYPES.get(jet[1], "")
    return next((dtype for dtype, rule in _DTYPES if rule.search(text)), "")


def _layout(text: str, category: str) -> str:
    """One NCHW operand makes the kernel NCHW; a conversion has no layout of its own."""
    if category == "layout":
        return ""
    if "nchw" in text:
        return "nchw"
    return "nhwc" if re.search(r"nhwc|channels_?last", text) else ""
