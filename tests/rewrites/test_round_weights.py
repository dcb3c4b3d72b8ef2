"""Weights of products in TF32 are rounded once, to nearest; every other tensor stays as it was."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from graphs import BY_NAME, by_reference, image, net
from ridgeline.graph import export
from ridgeline.kernels._nhwc import round_to_tf32
from ridgeline.models.blocks import Attention
from ridgeline.rewrites import round_weights
from ridgeline.rewrites._match import constant

X = image(2, 8, 6, 6)
LOW_BITS = 0x1FFF


def fused(module: nn.Module, *inputs: Tensor, rewrites=("fuse_conv_act",), precision: str = "tf32") -> fx.GraphModule:
    """Rewritten as `compile` does; `precision` is then written into every call that has one."""
    graph_module = export(module, inputs)
    for name in rewrites:
        BY_NAME[name](graph_module)
    for node in graph_module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and any(argument.name == "precision" for argument in schema.arguments):
            node.kwargs = {**node.kwargs, "precision": precision}
    graph_module.recompile()
    return graph_module


def weights(graph_module: fx.GraphModule, op: str, argument: int = 1) -> list[Tensor]:
    return [
        constant(graph_module, node.args[argument])
        for node in graph_module.graph.nodes
        if node.op == "call_function" and op in str(node.target)
    ]


def is_rounded(weight: Tensor) -> bool:
    return not bool((weight.view(torch.int32) & LOW_BITS).any())


def run(graph_module: fx.GraphModule, *inputs: Tensor) -> list[Tensor]:
    with torch.no_grad(), by_reference():
        out = graph_module(*inputs)
    return list(out) if isinstance(out, (list, tuple)) else [out]


def test_rounds_dense_weights_and_nothing_else():
    module = net(
        lambda m, x: m.depth(F.silu(m.a(x))) + m.b(x),
        a=nn.Conv2d(8, 16, 3, padding=1), b=nn.Conv2d(8, 16, 1), depth=nn.Conv2d(16, 16, 3, padding=1, groups=16),
    )  # fmt: skip
    graph_module = fused(module, X)
    before = {name: tensor.clone() for name, tensor in graph_module.named_buffers()}
    assert round_weights.apply(graph_module) == 2
    for weight, layer in zip(weights(graph_module, "ridgeline.conv2d_act"), (module.a, module.b), strict=True):
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(weight, round_to_tf32(layer.weight)) and is_rounded(weight)
    (depth,) = weights(graph_module, "depthwise_conv2d_act")
    assert torch.equal(depth, module.depth.weight) and not is_rounded(depth)
    after = dict(graph_module.named_buffers())
    kept = [name for name in before if name in after]
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert sorted(set(before) - set(after)) == ["a_weight_packed", "b_weight_packed"], "the originals are dropped"
    assert sorted(set(after) - set(before)) == ["a_weight_packed_tf32", "b_weight_packed_tf32"]


def test_results_are_those_of_rounded_weights():
    module = net(lambda m, x: F.silu(m.a(x)), a=nn.Conv2d(8, 16, 3, padding=1))
    graph_module = fused(module, X)
    (before,) = run(graph_module, X)
    round_weights.apply(graph_module)
    (after,) = run(graph_module, X)
    assert not torch.equal(before, after)
    module.a.weight.copy_(round_to_tf32(module.a.weight))
    torch.testing.assert_close(after, module(X), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("precision", "dtype"), [("ieee", torch.float32), ("tf32", torch.float16)])
def test_does_not_fire_on(precision: str, dtype: torch.dtype):
    module = net(lambda m, x: m.a(x), a=nn.Conv2d(8, 16, 3)).to(dtype)
    graph_module = fused(module, X.to(dtype), precision=precision)
    before = [weight.clone() for weight in weights(graph_module, "conv2d_act")]
    assert round_weights.apply(graph_module) == 0
    assert all(torch.equal(a, b) for a, b in zip(before, weights(graph_module, "conv2d_act"), strict=True))


def test_a_weight_read_twice_is_rounded_once_and_stays_for_others():
    module = net(lambda m, x: (m.a(x), m.a(x * 2), x * 3), a=nn.Conv2d(8, 16, 1))
    graph_module = fused(module, X)
    # one packed constant for both calls, and a reader that is no kernel
    first, second = (n for n in graph_module.graph.nodes if "conv2d_act" in str(n.target))
    second.replace_input_with(second.args[1], first.args[1])
    with graph_module.graph.inserting_after(first):
        other = graph_module.graph.call_function(torch.ops.aten.abs.default, (first.args[1],))
    other.meta["val"] = first.args[1].meta["val"]
    graph_module.graph.output_node().args = ((first, second, other),)
    graph_module.recompile()
    assert round_weights.apply(graph_module) == 1
    first_weight, second_weight = weights(graph_module, "conv2d_act")
    assert first_weight is second_weight and is_rounded(first_weight)
    *_, seen = run(graph_module, X)
    assert torch.equal(seen, module.a.weight.abs())


def test_upsampled_concat_and_writes_into_a_buffer():
    def forward(m, x):
        joined = torch.cat([F.interpolate(m.small(x), scale_factor=2.0), m.large(x)], dim=1)
        return torch.cat([F.silu(m.point(joined)), m.beside(x)], dim=1)

    layers = {
        "small": nn.Conv2d(8, 16, 3, stride=2, padding=1), "large": nn.Conv2d(8, 16, 1),
        "point": nn.Conv2d(32, 16, 1), "beside": nn.Conv2d(8, 16, 1),
    }  # fmt: skip
    names = ("fuse_conv_act", "fuse_upsample_concat", "write_into_concat")
    graph_module = fused(net(forward, **layers), X, rewrites=names)
    targets = {str(node.target) for node in graph_module.graph.nodes if "ridgeline" in str(node.target)}
    assert "ridgeline.upsample_concat_conv_act_into.default" in targets, targets
    assert round_weights.apply(graph_module) == 4
    (joined,) = weights(graph_module, "upsample_concat_conv_act_into", argument=3)
    assert is_rounded(joined)
    (out,) = run(graph_module, X)
    assert bool(out.isfinite().all())


def test_position_weights_of_attention_stay():
    block = Attention(128).eval().requires_grad_(False)
    for conv in (block.qkv, block.proj, block.pe):
        conv.fold_()
    x = image(1, 128, 4, 5)
    graph_module = fused(block, x, rewrites=("functionalize", "fuse_attention", "fuse_conv_act"))
    (before,) = weights(graph_module, "attention_position")
    assert round_weights.apply(graph_module) == 2
    (after,) = weights(graph_module, "attention_position")
    assert after is before and not is_rounded(after)


def test_one_channel_is_not_mistaken_for_depthwise():
    graph_module = fused(net(lambda m, x: m.a(x), a=nn.Conv2d(1, 4, 3)), image(1, 1, 6, 6))
    assert round_weights.apply(graph_module) == 1


def test_rounding_is_to_nearest_even_and_keeps_what_is_no_number():
    step = 2.0**-10
    x = torch.tensor(
        [0.0, -0.0, 1.0, 1 + step / 4, 1 + step / 2, 1 + step * 1.5, 1 + step * 0.75, -1 - step * 0.75, 2.0**-126 * 1.5]
    )
    expected = torch.tensor([0.0, -0.0, 1.0, 1.0, 1.0, 1 + 2 * step, 1 + step, -1 - step, 2.0**-126 * 1.5])
    assert torch.equal(round_to_tf32(x).view(torch.int32), expected.view(torch.int32))
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000, 0x7F800000, -0x800000, 0x7F7FFFFF], dtype=torch.int32)
    special = round_to_tf32(bits.view(torch.float32))
    assert special.isnan().tolist() == [True] * 4 + [False] * 3
    assert special[4:].tolist() == [math.inf, -math.inf, math.inf], "the largest number rounds up"
    random = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    once = round_to_tf32(random)
    assert torch.equal(once, round_to_tf32(once))
    relative = ((once - random) / random).abs()
    assert 2.0**-12 < relative.max() <= 2.0**-11
    assert abs(((once - random) * random.sign()).mean()) < 2.0**-16, "no bias, which cutting has"


def test_both_weights_of_a_pair_are_rounded():
    module = net(lambda m, x: m.b(F.silu(m.a(x))), a=nn.Conv2d(8, 16, 3, padding=1), b=nn.Conv2d(16, 8, 3, padding=1))
    graph_module = export(module, (X,))
    graph_module.meta["explore"] = "pairs"
    for name in ("fuse_conv_act", "fuse_conv_chain"):
        BY_NAME[name](graph_module)
    (node,) = [n for n in graph_module.graph.nodes if "conv_pair_chain" in str(n.target)]
    node.kwargs = {**node.kwargs, "precision": "tf32"}
    assert round_weights.apply(graph_module) == 2
    assert all(is_rounded(weight) for at in (1, 3) for weight in weights(graph_module, "conv_pair_chain", at))
