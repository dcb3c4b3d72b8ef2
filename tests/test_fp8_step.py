"""Whole steps in FP8: they learn as bf16 steps do, scales follow, state comes back, layers return to bf16."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8_steps import IN_FP8, RECIPE, Training, batches, loss, net, steps_by_reference, training
from ridgeline.errors import NotEngaged, UsageError, VerificationFailed
from ridgeline.fp8_scaling import ScalingRule
from ridgeline.fp8_step import Fp8Step, paying_passes
from ridgeline.kernels import conv2d_wgrad_fp8, group_norm_silu_backward_fp8
from ridgeline.kernels.conv2d_fp8 import for_dgrad
from ridgeline.step_recipe import NAMED, StepRecipe
from ridgeline.train_rewrites.convolution_calls import Convolution
from ridgeline.train_rewrites.fp8_passes import PASSES, chosen_passes
from ridgeline.train_step import compile_step


@pytest.fixture(scope="module", autouse=True)
def references() -> Iterator[None]:
    with steps_by_reference():
        yield


@pytest.fixture(scope="module")
def trained(references: None) -> Training:
    """After three steps; tests may go on with it."""
    each = training()
    each.run(batches(3))
    return each


def scales(each: Training) -> dict[str, float]:
    return {one.name: one.scale for layer in each.step.fp8_layers() for one in layer.tensors.values()}


def kept(each: Training) -> dict[str, Tensor]:
    """All that the step writes: the program's tensors, and those of FP8."""
    fp8 = dict(enumerate(each.program.fp8.tensors()))
    return {**dict(each.program.named_tensors()), **{f"fp8 {n}": tensor for n, tensor in fp8.items()}}


def assert_equal(a: Training, b: Training) -> None:
    ours, theirs = kept(a), kept(b)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


# --- what it computes ----------------------------------------------------------------------------------------------


def test_thirty_steps_learn_as_in_bf16():
    """Losses within 0.05 of the bf16 step's, 3 % of the first: one rounding to e4m3 is 6 %, of the largest values 0."""
    data = batches(30)
    fp8 = training()
    losses = fp8.run(data)
    expected = training(NAMED["bf16"]).run(data)
    assert losses[0] > 1.3 and losses[-1] < 0.4
    assert all(abs(a - b) < 0.05 for a, b in zip(losses, expected, strict=True))
    assert losses != expected
    report = fp8.step.report
    assert (report.replays, report.rewrites["use_fp8"]) == (30, 3)
    assert report.fp8 == (
        "FP8 runs fprop of 3, dgrad of 3, wgrad of 3 of 6 convolutions; maps are quantised: 1 by gradients of norms, "
        "2 by norms, 3 by passes of their own",
        "stem.weight: bf16: it has 16 filters of 3 channels, and FP8 takes multiples of 16",
        "frozen.weight: bf16: its weight is frozen",
        "down.weight: bf16: its stride is (2, 2)",
    )
    assert set(report.fp8) <= set(report.lines())


def test_scales_follow_what_was_seen(trained: Training):
    each, before = trained, scales(training())
    for layer in each.step.fp8_layers():
        if not layer.passes:
            assert not layer.tensors or all(one.elements == 0 for one in layer.tensors.values())
            continue
        assert (layer.layer in IN_FP8, layer.passes, layer.reason) == (True, ("fprop", "dgrad", "wgrad"), "")
        for part, one in layer.tensors.items():
            assert (one.updates, one.nonfinite) == (3, 0) and one.amax == one.peak > 0, one.name
            largest = 57344 if part == "dy" else 448
            assert one.scale == pytest.approx(largest / one.amax) and one.scale != before[one.name]
            assert one.overflow_share < 0.01 and one.underflow_share < 0.05
        weight = each.model.get_parameter(layer.layer)
        assert layer.tensors["w"].elements == 3 * weight.numel()
        assert layer.tensors["w"].amax == pytest.approx(weight.abs().max().item(), rel=0.1)


def test_construction_leaves_everything_as_it_was():
    """Two compiled steps have run, to warm up and to capture: none of it is left, scales and totals neither."""
    each = training()
    untouched = Fp8Step(torch.device("cpu"))
    model = net().to(memory_format=torch.channels_last)
    untouched.open_(model.named_parameters())
    for ours, fresh in zip(each.program.fp8.tensors(), untouched.tensors(), strict=True):
        assert torch.equal(ours, fresh)
    for ours, theirs in zip(each.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    # a weight's own scale, and room for gradients of any usual size
    fresh = scales(each)
    assert fresh["conv1.weight.w"] == pytest.approx(448 / each.model.conv1.weight.abs().max().item())
    assert (fresh["conv1.weight.x"], fresh["conv1.weight.dy"]) == (1.0, 2.0**16)


def test_several_micro_batches_make_one_update(trained: Training):
    """Each records in the same rows: as many elements, and the largest of both."""
    halves = training(accumulate=2)
    halves.run(batches(3))
    for one, two in zip(trained.step.fp8_layers(), halves.step.fp8_layers(), strict=True):
        for part in one.tensors:
            a, b = one.tensors[part], two.tensors[part]
            assert a.updates == b.updates and a.elements == b.elements
        if one.passes:
            assert two.tensors["x"].amax == pytest.approx(one.tensors["x"].amax, rel=0.05)


def test_weights_written_between_steps_are_quantised_as_they_are(trained: Training):
    each, fp8 = trained, trained.program.fp8
    with torch.no_grad():
        each.model.conv1.weight.mul_(0.5)
    weight = each.model.conv1.weight.detach().clone()
    scale = fp8.state.scale[fp8._rows["conv1.weight"][1]].item()
    each.run(batches(1, seed=5))
    asked = fp8._asked["conv1.weight"]
    assert torch.equal(asked.copy.float(), (weight * scale).to(torch.float8_e4m3fn).float())
    assert torch.equal(asked.turned.view(torch.uint8), for_dgrad(asked.copy).view(torch.uint8))


def test_replaced_weights_are_followed():
    """To the bit as a step that was given such weights from the beginning."""
    each, twin = training(), training(model=net(seed=3))
    for name, parameter in each.model.named_parameters():
        parameter.data = twin.model.get_parameter(name).detach().clone()
    data = batches(3)
    each.step(data[0])  # replaced weights make a new graph when the batch comes again: this step is eager, in bf16
    twin.step._graphs.clear()
    twin.step(data[0])
    fp8 = each.program.fp8
    fp8.fresh_()
    twin.program.fp8.fresh_()
    each.run(data[1:])
    twin.run(data[1:])
    assert each.step.report.replays == 2
    assert_equal(each, twin)


def test_bf16_copies_are_what_is_quantised_and_get_the_gradients():
    """Of a layer in FP8 no graph reads a weight's value, fp32 or bf16, and none widens its gradient."""
    each = training(optimizer_kernel="always", weight_copies="always")
    (plan,) = each.program.fp8.plans()
    weights = [each.model.get_parameter(name) for name in IN_FP8]
    copies = [each.program.copies.of(weight) for weight in weights]
    assert all(a is not None and a.data_ptr() == b.data_ptr() for a, b in zip(copies, plan.weights, strict=True))
    forward, backward = each.compiler.graphs
    unread = [node.meta["val"] for node in forward.graph.find_nodes(op="placeholder") if not node.users]
    assert [(tuple(value.shape), value.dtype) for value in unread] == [(w.shape, torch.bfloat16) for w in weights]
    returned = [node for node in backward.graph.output_node().args[0] if node is not None]
    products = [node for node in returned if "wgrad_fp8" in str(getattr(node.args[0], "target", ""))]
    assert [node.meta["val"].dtype for node in products if node.meta["val"].dim() == 4] == [torch.bfloat16] * 3
    before = [weight.detach().clone() for weight in weights]
    losses = each.run(batches(1))
    assert losses == pytest.approx(training(captured=False).run(batches(1)), rel=0.02)
    assert not any(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))


def test_a_bias_before_a_norm_gets_the_norms_sum(trained: Training):
    """That of conv1; conv2 has none, and the gradient of last's result is quantised by a pass of its own."""
    _, backward = trained.compiler.graphs
    (norm,) = backward.graph.find_nodes(op="call_function", target=group_norm_silu_backward_fp8.SUMMED)
    wgrads = backward.graph.find_nodes(op="call_function", target=conv2d_wgrad_fp8.OP.overload)
    by_norm = {node.args[0].args[0] is norm: node.kwargs.get("bias", True) for node in wgrads}
    assert sorted(node.kwargs.get("bias", True) for node in wgrads) == [False, False, True] and not by_norm[True]


def test_a_step_is_verified_by_the_rounding_of_fp8(trained: Training, monkeypatch: pytest.MonkeyPatch):
    """Beside a plain loop in bf16; a layer whose gradients go nowhere is caught, and all is left as it was."""
    before = {name: tensor.clone() for name, tensor in kept(trained).items()}
    agreement = trained.step.verify(batches(2, seed=5))
    assert agreement.replayed == 2 and agreement.used < 1 and agreement.loss_allowed < 0.05
    fp8, begin = trained.program.fp8, trained.program.fp8.begin_

    def broken() -> None:
        begin()
        fp8._asked["conv2.weight"].turned.zero_()

    monkeypatch.setattr(fp8, "begin_", broken)
    with pytest.raises(VerificationFailed, match="is not a plain loop's"):
        trained.step.verify(batches(2, seed=5))
    assert all(torch.equal(tensor, before[name]) for name, tensor in kept(trained).items())


# --- state ---------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_from_its_state():
    data = batches(6)
    whole = training()
    whole.run(data[:3])
    file = io.BytesIO()
    torch.save(whole.step.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    expected = whole.run(data[3:])
    other = training(model=net(seed=7))
    other.run(batches(2, seed=8))
    other.step.load_state_dict(state)
    assert other.run(data[3:]) == expected
    assert_equal(other, whole)


def test_states_of_bf16_and_fp8_steps_interchange(trained: Training):
    bf16, fp8 = training(NAMED["bf16"], captured=False), trained
    bf16.run(batches(2))
    of_bf16, of_fp8 = bf16.step.state_dict(), fp8.step.state_dict()
    assert of_bf16["fp8"] is None and of_fp8["fp8"] is not None
    bf16.step.load_state_dict(of_fp8)
    assert bf16.step.state_dict()["fp8"] is None and bf16.step.report.fp8 == ()
    fp8.step.load_state_dict(of_bf16)
    fresh = scales(fp8)
    assert (fresh["conv1.weight.x"], fresh["conv1.weight.dy"]) == (1.0, 2.0**16)
    assert fresh["conv1.weight.w"] == pytest.approx(448 / fp8.model.conv1.weight.abs().max().item())
    fp8.run(batches(1))
    older = {name: value for name, value in of_bf16.items() if name != "fp8"}  # saved before there was FP8
    fp8.step.load_state_dict(older)
    assert scales(fp8)["conv1.weight.dy"] == 2.0**16


# --- where there is none -------------------------------------------------------------------------------------------


def test_a_step_that_is_not_compiled_says_so():
    each = training(captured=False)
    each.run(batches(1))
    (line,) = each.step.report.fp8
    assert line == "nothing runs in FP8: steps are not compiled"
    with pytest.raises(NotEngaged, match="fp8='always', but steps are not compiled"):
        training(captured=False, fp8="always")


@pytest.mark.parametrize(
    ("capability", "name", "choose", "reason"),
    [
        ((8, 6), "NVIDIA A10", chosen_passes, "FP8 convolutions are for sm_89, sm_90 and sm_120, and the GPU is sm_86"),
        ((8, 9), "NVIDIA L4", chosen_passes, "no weight has filters and channels in multiples of 16"),
        ((9, 0), "NVIDIA H900", paying_passes, "what FP8 gains here is not known, and fp8='always' would not ask: "),
        ((9, 0), "NVIDIA H900", chosen_passes, "no weight has filters and channels in multiples of 16"),
        ((9, 0), "NVIDIA H200", paying_passes, "no weight has filters and channels in multiples of 16"),
    ],
)
def test_gpus_that_have_no_kernels_or_no_prices_are_named(
    capability: tuple[int, int], name: str, choose: Any, reason: str, monkeypatch: pytest.MonkeyPatch
):
    found = SimpleNamespace(name=name, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    step = Fp8Step(torch.device("cuda"), choose=choose)
    assert step.in_words()[0].startswith(f"nothing runs in FP8: {reason}")
    with pytest.raises(NotEngaged, match=reason):
        step.check()


def test_on_a_gpu_only_passes_that_pay_are_chosen(monkeypatch: pytest.MonkeyPatch):
    """By the H200's rooflines: all of a wide filter; of 1x1 filters on a skip nothing, unless a norm quantises."""
    found = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: found.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def chosen(shape: tuple[int, ...], weight: tuple[int, ...], device: str, *, by_norm: bool) -> frozenset[str]:
        padding = (weight[2] // 2, weight[3] // 2)
        return paying_passes(Convolution(shape, weight, padding, torch.bfloat16, torch.device(device)), by_norm=by_norm)

    wide, skip = ((128, 512, 32, 32), (512, 512, 3, 3)), ((128, 384, 32, 32), (128, 384, 1, 1))
    assert chosen(*wide, "cuda", by_norm=False) == frozenset(PASSES)
    assert chosen(*skip, "cuda", by_norm=False) == frozenset()
    assert chosen(*skip, "cpu", by_norm=False) == frozenset(PASSES)
    uneven = ((128, 512, 14, 14), (512, 512, 3, 3))
    assert chosen(*uneven, "cuda", by_norm=False) == {"fprop", "dgrad"}


class Small(nn.Module):
    """No convolution that FP8 takes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).mean((2, 3)))


def test_a_model_without_such_layers_says_so():
    reason = "no weight has filters and channels in multiples of 16"
    each = training(model=Small())
    assert each.step.report.fp8 == (f"nothing runs in FP8: {reason}",)
    assert each.step.state_dict()["fp8"] is None
    with pytest.raises(NotEngaged, match=f"fp8='always', but {reason}"):
        training(model=Small(), fp8="always")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dtype": "fp16"}, "fp8='auto' needs dtype='bf16'"),
        ({"dtype": "fp32", "fp8": "always"}, "fp8='always' needs dtype='bf16'"),
        ({"channels_last": False}, "needs channels_last=True"),
        ({"compile": "none"}, "needs a compiled step, and the recipe has compile='none'"),
        ({"fp8_scaling": ScalingRule(current=True)}, "fp8_scaling must be delayed"),
        ({"fp8": "sometimes"}, "fp8 must be one of auto, always, never, got 'sometimes'"),
    ],
)
def test_recipes_that_contradict_themselves_are_refused(changed: dict[str, Any], words: str):
    with pytest.raises(UsageError, match=words):
        replace(RECIPE, **changed)


def test_chosen_by_the_recipe():
    assert StepRecipe().fp8 == NAMED["bf16"].fp8 == "never"
    assert NAMED["fp8"] == replace(NAMED["bf16"], fp8="auto")


# --- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_captured_step_learns_in_fp8():
    """By Inductor and the kernels: replayed, verified beside a plain loop in bf16, with a loss as low as in bf16."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("gradients of weights in FP8 are for sm_90")
    data = [(image.cuda(), label.cuda()) for image, label in batches(30)]
    losses = {}
    for name in ("bf16", "fp8"):
        torch._dynamo.reset()
        model = net().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        recipe = replace(NAMED[name], require=True, **({"fp8": "always"} if name == "fp8" else {}))
        step = compile_step(model, loss, optimizer, data[0], recipe=recipe)
        if name == "fp8":
            step.verify(data[:3])
        losses[name] = [step(batch).item() for batch in data]
        assert step.report.replays == 30
    assert all(abs(a - b) < 0.1 for a, b in zip(losses["fp8"], losses["bf16"], strict=True))
    assert step.report.fp8[0].startswith("FP8 runs fprop of 3, dgrad of 3, wgrad of 3 of 6 convolutions")
    for layer in step.fp8_layers():
        if layer.passes:
            assert all(one.updates == 30 and one.overflow_share < 0.01 for one in layer.tensors.values())
