"""Whole steps whose linear layers run in FP8: they learn as bf16 steps do, scales follow, state comes back."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8_steps import CLASSES, RECIPE, Training, batches, steps_by_reference, training
from ridgeline.fp8_scaling import ScalingRule
from ridgeline.kernels.conv2d_fp8 import for_dgrad
from ridgeline.step_recipe import NAMED
from ridgeline.train_rewrites.fp8_passes import PASSES

IN_FP8 = ("qkv.weight", "proj.weight")
# the interpreter is slow at attention, which FP8 leaves alone
REWRITES = tuple(name for name in RECIPE.rewrites if name != "fuse_attention")


class Attentive(nn.Module):
    """Attention among the pixels of a norm's map, as a diffusion network has it, and two other linear layers.

    `embed` is of one row an image; `tail` of 36 tokens, which no map with quads has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16, bias=False)
        self.tail, self.embed = nn.Linear(16, 32), nn.Linear(16, 32)
        self.head = nn.Linear(16 * 8 * 8 + 32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(self.stem(x), 2)
        q, k, v = self.qkv(self.norm(x).flatten(2).transpose(1, 2)).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        rows = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.proj(rows).transpose(1, 2).unflatten(2, x.shape[2:])
        tail = self.tail(x[:, :, :6, :6].permute(0, 2, 3, 1)).mean((1, 2))
        return self.head(torch.cat((x.flatten(1), tail + self.embed(x.mean((2, 3)))), 1))


def net(seed: int = 0) -> Attentive:
    torch.manual_seed(seed)
    return Attentive()


@pytest.fixture(scope="module", autouse=True)
def references() -> Iterator[None]:
    with steps_by_reference():
        yield


@pytest.fixture(scope="module")
def trained(references: None) -> Training:
    """After three steps; tests may go on with it."""
    each = training(model=net(), rewrites=REWRITES)
    each.run(batches(3))
    return each


def test_twenty_steps_learn_as_in_bf16():
    """Losses within 0.05 of the bf16 step's; the report has linear layers by their kind, and why some stay."""
    data = batches(20)
    fp8 = training(model=net(), rewrites=REWRITES, fp8="always")
    losses = fp8.run(data)
    expected = training(NAMED["bf16"], model=net(), rewrites=REWRITES).run(data)
    assert losses[0] > 1.3 and losses[-1] < 0.9
    assert all(abs(a - b) < 0.05 for a, b in zip(losses, expected, strict=True)) and losses != expected
    assert fp8.step.report.rewrites["use_fp8"] == 3
    assert fp8.step.report.fp8 == (
        "FP8 runs fprop of 3, dgrad of 3, wgrad of 2 of 1 convolutions and 3 linear layers; maps are quantised: "
        "1 by norms, 5 by passes of their own",
        "stem.weight: bf16: it has 16 filters of 3 channels, and FP8 takes multiples of 16",
        "tail.weight: wgrad stays bf16: quads need a multiple of 16 tokens, got 36",
    )


def test_scales_follow_what_was_seen(trained: Training):
    layers = {layer.layer: layer for layer in trained.step.fp8_layers()}
    assert layers.keys() == {"stem.weight", "tail.weight", *IN_FP8}
    for name in IN_FP8:
        assert (layers[name].passes, layers[name].reason) == (PASSES, "")
        for part, one in layers[name].tensors.items():
            largest = 57344 if part == "dy" else 448
            assert (one.updates, one.nonfinite) == (3, 0) and one.scale == pytest.approx(largest / one.amax)
        weight = trained.model.get_parameter(name)
        assert layers[name].tensors["w"].elements == 3 * weight.numel()
        assert layers[name].tensors["x"].elements == 3 * 8 * 64 * 16


def test_weights_written_between_steps_are_quantised_as_they_are(trained: Training):
    fp8, weight = trained.program.fp8, trained.model.get_parameter("qkv.weight")
    with torch.no_grad():
        weight.mul_(0.5)
    written = weight.detach().clone()
    scale = fp8.state.scale[fp8._rows["qkv.weight"][1]].item()
    trained.run(batches(1, seed=5))
    asked = fp8._asked["qkv.weight"]
    assert torch.equal(asked.copy[:, :, 0, 0].float(), (written * scale).to(torch.float8_e4m3fn).float())
    assert torch.equal(asked.turned.view(torch.uint8), for_dgrad(asked.copy).view(torch.uint8))


def test_bf16_copies_are_what_is_quantised_and_get_the_gradients():
    """No graph reads the weight's value, fp32 or bf16, and none widens its gradient."""
    each = training(model=net(), rewrites=REWRITES, optimizer_kernel="always", weight_copies="always")
    (plan,) = each.program.fp8.plans()
    weights = [each.model.get_parameter(name) for name in IN_FP8]
    copies = [each.program.copies.of(weight) for weight in weights]
    addresses = {weight.data_ptr() for weight in plan.weights}
    assert all(copy is not None and copy.data_ptr() in addresses for copy in copies)
    forward, _ = each.compiler.graphs
    unread = [node.meta["val"] for node in forward.graph.find_nodes(op="placeholder") if not node.users]
    # that of `tail` too, whose gradient alone is in bf16
    assert [(value.shape, value.dtype) for value in unread] == [
        (each.model.get_parameter(name).shape, torch.bfloat16) for name in (*IN_FP8, "tail.weight")
    ]
    losses = each.run(batches(2))
    assert losses == pytest.approx(training(model=net(), rewrites=REWRITES, captured=False).run(batches(2)), rel=0.02)


def test_a_run_goes_on_from_its_state():
    data = batches(4)
    whole = training(model=net(), rewrites=REWRITES)
    whole.run(data[:2])
    file = io.BytesIO()
    torch.save(whole.step.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert {"qkv.weight.x", "proj.weight.dy", "tail.weight.w"} <= state["fp8"]["scaling"]["formats"].keys()
    expected = whole.run(data[2:])
    other = training(model=net(seed=7), rewrites=REWRITES)
    other.run(batches(1, seed=8))
    other.step.load_state_dict(state)
    assert other.run(data[2:]) == expected
    assert all(torch.equal(a, b) for a, b in zip(other.program.fp8.tensors(), whole.program.fp8.tensors(), strict=True))


def test_a_layer_that_does_not_bear_it_returns_to_bf16():
    rule = ScalingRule(window=4, margin=0)
    each = training(model=net(), rewrites=REWRITES, fp8_scaling=rule)
    each.run(batches(1))
    fp8 = each.program.fp8
    fp8.load_state_dict({"scaling": fp8.state_dict()["scaling"], "excluded": {"qkv.weight": "of its dy, a test"}})
    each.run(batches(2, seed=2))
    assert each.step.report.fp8[0].startswith(
        "FP8 runs fprop of 2, dgrad of 2, wgrad of 1 of 1 convolutions and 3 linear"
    )
    assert "qkv.weight: bf16: of its dy, a test" in each.step.report.fp8
