"""Rules of passes that belong elsewhere (K1, K4-K7, K17, K18) on steps made by hand: each fires, or not."""

from __future__ import annotations

import pytest

from ridgeline.finding import Abstention, Finding
from ridgeline.rules import fusion, movement
from rules.steps_made import US, fill, idle, op, step, work

BIG = (64, 128, 128, 128)  # 512 MiB in fp32: no cache holds it
SMALL = (1, 64, 40, 40)
BIG_BYTES = 4 * 64 * 128 * 128 * 128


def pointwise(us: float, name: str = "aten::mul", shape=BIG, tensors: int = 3, **more):
    """A pass that moves `tensors` tensors of that shape."""
    size_bytes = 4 * shape[0] * shape[1] * shape[2] * shape[3]
    return work(us, call=op(name, shape, shape), op=name.replace("::", "."), bytes=tensors * size_bytes, **more)


def conv(us: float, **more):
    return work(us, "sm90_xmma_fprop", category="conv", call=op("aten::cudnn_convolution", BIG), **more)


def only(rule, made):
    return [found for found in rule(made) if isinstance(found, Finding)]


def test_a_pointwise_chain_moves_its_intermediate_results_no_more():
    chain = (pointwise(300), pointwise(200, "aten::silu_", tensors=2), pointwise(300, "aten::add"))
    (finding,) = only(fusion.pointwise_chains, step(*chain, conv(200)))
    # 8 tensors pass in three kernels, 4 of them the two intermediate results written and read
    assert finding.saving.mid_s == pytest.approx(800 * 4 / 8 * US)
    assert finding.saving.high_s == pytest.approx(500 * US)  # all but the longest
    assert finding.saving.low_s == pytest.approx(200 * US)
    assert "mul → silu_ → add" in finding.note


def test_small_chains_promise_less_and_free_their_launches():
    chain = [pointwise(3, shape=SMALL, tensors=2), idle(6), pointwise(3, "aten::silu_", SMALL, 2), idle(6)]
    (finding,) = only(fusion.pointwise_chains, step(*chain, conv(500)))
    # one kernel of 3 µs and one pause stay
    assert finding.saving.mid_s == pytest.approx(9 * US)
    assert finding.saving.low_s == pytest.approx(9 / 4 * US)
    assert "fit L2" in finding.note


@pytest.mark.parametrize(
    "pieces",
    [
        (pointwise(300), conv(200), pointwise(300)),
        (pointwise(300), pointwise(300, shape=SMALL)),
        (pointwise(300), pointwise(300, beside=True)),
        (pointwise(300, phase="optimizer"), pointwise(300, phase="optimizer")),
        (pointwise(300, phase="forward"), pointwise(300, phase="backward")),
    ],
    ids=["a convolution between", "other sizes", "another stream", "the optimizer is K8's", "forward and backward"],
)
def test_what_is_no_chain(pieces):
    assert not only(fusion.pointwise_chains, step(*pieces, conv(100)))


def test_bias_and_residual_additions():
    def adds(us: float, *shapes, **more):
        return work(us, call=op("aten::add_", *shapes), op="aten.add_", **more)

    made = step(conv(500), adds(60, BIG, (1, 128, 1, 1)), conv(300), adds(90, BIG, BIG))
    (finding,) = only(fusion.separate_additions, made)
    # the bias rides along; of a residual the other tensor is still read
    assert finding.saving.mid_s == pytest.approx((60 + 90 * 2 / 3) * US)
    assert finding.title.startswith("1 bias addition and 1 residual addition")

    counter = step(conv(500), adds(60, (), ()), conv(300))  # num_batches_tracked += 1
    assert not only(fusion.separate_additions, counter)
    gradients = step(conv(500), adds(60, BIG, BIG, phase="backward"), conv(300))
    assert not only(fusion.separate_additions, gradients)


def scores(us: float, name: str, category: str, shape=(8, 1600, 1600)):
    return work(us, name, category=category, call=op(name, shape, shape), op=name.replace("::", "."))


def test_attention_through_memory():
    made = step(
        scores(100, "aten::bmm", "gemm"),
        scores(40, "aten::mul", "pointwise"),
        scores(80, "aten::_softmax", "softmax"),
        scores(100, "aten::bmm", "gemm"),
        conv(300),
    )
    (finding,) = only(fusion.naive_attention, made)
    assert finding.saving.mid_s == pytest.approx(120 * US)
    assert "1 attention" in finding.title and "2 kernels" in finding.title


@pytest.mark.parametrize(
    "pieces",
    [
        (work(200, "flash_fwd_kernel", category="attention"), conv(300)),
        (scores(80, "aten::mm", "gemm"), scores(80, "aten::_softmax", "softmax"), conv(300)),  # a classifier's head
        (
            scores(80, "aten::bmm", "gemm"),
            conv(10),
            scores(80, "aten::_softmax", "softmax"),
            scores(80, "aten::bmm", "gemm"),
        ),
    ],
    ids=["flash", "classifier", "something between"],
)
def test_what_is_no_naive_attention(pieces):
    assert not only(fusion.naive_attention, step(*pieces))


# --- data movement ----------------------------------------------------------------------------------------------------


def concat(us: float):
    return work(us, "CatArrayBatchedCopy_vectorized", category="concat")


def test_54_concats():
    # the third text's step: 54 concats of 1.3 µs in 8.4 ms, each with its launch in the graph
    pieces = [piece for _ in range(54) for piece in (work(150), concat(1.3), idle(1))]
    (finding,) = only(movement.concat_copies, step(*pieces))
    assert finding.saving.mid_s == pytest.approx(54 * 2.3 * US)
    assert finding.title.startswith("54 concat copy kernels")
    assert not only(movement.concat_copies, step(work(900), concat(90)))  # one is no pattern
    assert not only(movement.concat_copies, step(work(900), concat(1), concat(1)))


def test_upsampling_into_a_concat():
    larger = work(40, "upsample_nearest2d_out_frame", category="upsample")
    (finding,) = only(movement.upsampled_concats, step(conv(500), larger, concat(30), conv(300)))
    assert finding.saving.mid_s == pytest.approx(40 * US)
    assert finding.evidence == (4,)  # the upsampling, after the convolution, its operator and its launch
    assert not only(movement.upsampled_concats, step(conv(500), larger, conv(300)))


def test_80_memsets_of_scratch():
    pieces = [piece for _ in range(80) for piece in (fill(0.6, nbytes=512), idle(1), work(20, "conv2d_tiled"))]
    (finding,) = only(movement.fill_storm, step(*pieces))
    assert finding.saving.mid_s == pytest.approx(80 * 1.6 * US)
    assert "80 of them below 4.10 kB" in finding.title


def test_fills_that_the_next_kernel_needs_are_the_hopeful_end_only():
    fills = [piece for _ in range(10) for piece in (fill(1), work(20, "sm90_xmma_wgrad_splitK"))]
    (finding,) = only(movement.fill_storm, step(*fills, fill(2), work(20)))
    assert finding.saving.mid_s == pytest.approx(2 * US)
    assert finding.saving.high_s == pytest.approx(12 * US)
    assert finding.note.startswith("10 of them")
    assert not only(movement.fill_storm, step(*[fill(1) for _ in range(9)], work(20)))


def test_max_pooling_with_indices():
    concrete = ("", "[2, 2]", "[2, 2]", "[0, 0]", "[1, 1]", "False")
    call = op("aten::max_pool2d_with_indices", BIG, dtypes=("c10::Half",), concrete=concrete)
    pool = work(260, "max_pool_forward_nchw", category="pool", call=call, op="aten.max_pool2d_with_indices")
    (finding,) = only(movement.pooling_indices, step(pool, conv(500)))
    # x moves 2 bytes an element; a quarter as many outputs of 2 bytes, and 8 of index
    assert finding.saving.mid_s == pytest.approx(260 * (8 / 4) / (2 + 2 / 4 + 8 / 4) * US)
    (kept,) = only(movement.pooling_indices, step(pool, conv(500), trained=True))
    assert kept.saving.mid_s == pytest.approx(260 * (7 / 4) / (2 + 2 / 4 + 8 / 4) * US)
    plain = work(260, "avg_pool2d_out_cuda_frame", category="pool", call=op("aten::avg_pool2d", BIG))
    assert not only(movement.pooling_indices, step(plain, conv(500)))


def test_eager_noise_is_one_chain_with_its_lookups_and_the_gaps_between():
    noise, table = (128, 3, 32, 32), (1000,)
    names = (
        ("index", "index", table),
        ("mul", "pointwise", noise),
        ("index", "index", table),
        ("add", "pointwise", noise),
    )
    kernels = [work(2, category=kind, call=op(f"aten::{name}", dims), bytes=3e6) for name, kind, dims in names]
    pieces = [piece for kernel in kernels for piece in (kernel, idle(20))]
    (finding,) = only(fusion.pointwise_chains, step(*pieces, conv(500)))
    assert finding.title.startswith("4 small passes stand in 1 chain")
    # three gaps lie within the chain; the one behind it stays
    assert sum(20 * US - left_s for left_s in finding.edit.gaps.values()) == pytest.approx(60 * US)
    compiled = [work(2, "triton_poi_fused_mul_0", call=op("triton_poi_fused_mul_0", noise)) for _ in range(9)]
    assert not only(fusion.pointwise_chains, step(*compiled, conv(500)))  # a compiler has judged these


def test_biases_that_a_compiler_split_off_are_additions():
    whole, bias = (8, 64, 32, 32), (64,)
    added = work(30, call=op("triton_poi_fused__to_copy_convolution_8", whole, bias))
    residual = work(30, call=op("triton_poi_fused__to_copy_add_convolution_28", whole, bias, whole, bias))
    (finding,) = only(fusion.separate_additions, step(conv(400), added, conv(400), residual))
    assert finding.title.startswith("1 bias addition and 1 residual addition")
    assert finding.saving.mid_s == pytest.approx((30 + 30 * 2 / 3) * US)


@pytest.mark.parametrize("rule", [fusion.pointwise_chains, fusion.separate_additions, movement.pooling_indices])
def test_without_shapes_a_rule_says_what_it_needs(rule):
    pool = work(90, "max_pool_forward", category="pool", op="aten.max_pool2d_with_indices")
    (abstention,) = rule(step(work(300), work(300), pool))
    assert isinstance(abstention, Abstention) and "record_shapes" in abstention.reason
