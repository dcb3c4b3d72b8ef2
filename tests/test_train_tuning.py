"""What of a training step is tuned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fp8_steps import fp8_by_reference
from ridgeline import compiler, train_tuning, tuning
from ridgeline.errors import EnvironmentUnusable
from ridgeline.kernels import (
    NORMS,
    PASSES,
    TUNED_AS,
    Op,
    conv2d_fprop,
    group_norm_silu,
    group_norm_silu_backward,
    group_norm_silu_backward_concat,
    group_norm_silu_backward_fp8,
    group_norm_silu_fp8,
)
from ridgeline.kernels._op import typical_target
from ridgeline.launches import kernel_calls, planned, problems_of
from ridgeline.models.ddpm_unet import TINY, UNet
from ridgeline.step_recipe import NAMED
from ridgeline.timing import Timing
from ridgeline.train_rewrites import fp8_passes
from ridgeline.train_rewrites.fuse_attention import Attention
from ridgeline.train_tuning import convolutions, norm_problems, tunable, tune_step
from ridgeline.workloads.diffusion import linear_schedule, noise_loss
from shared_kernels import plant_rows

SMALL = replace(TINY, channels=(16,), blocks=1, attention_resolutions=())
# a residual's gradient, scale and shift that are halves of one tensor, dropout, maps with quads
NORMED = replace(TINY, channels=(16, 32), blocks=1, attention_resolutions=(), dropout=0.1)
OF_NORMS = (group_norm_silu, group_norm_silu_backward, group_norm_silu_fp8, group_norm_silu_backward_fp8)
FORMS = {form: op for form, op in TUNED_AS.items() if op in NORMS}


@pytest.fixture(autouse=True)
def tables(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
def test_a_networks_attentions_are_tuned_beside_its_convolutions(recipe: str):
    step = UNet(SMALL), noise_loss(linear_schedule()), torch.zeros(2, 3, 8, 8), NAMED[recipe]
    found = tunable(*step)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[recipe]
    attentions = [one for one in found if isinstance(one, Attention)]
    assert attentions == [Attention((2, 64, 48), 2, None, dtype, torch.device("cpu"))]
    assert [op.name for op, _ in attentions[0].problems()] == ["attention_packed", "attention_packed_backward"]
    torch.compiler.reset()
    assert convolutions(*step) == tuple(one for one in found if not isinstance(one, Attention))


def test_a_gpu_without_fp8_is_told_at_once(monkeypatch):
    monkeypatch.setattr(fp8_passes, "architecture_of", lambda _device: "sm_80")
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))]))
    words = "^FP8 kernels are for sm_89, sm_90 and sm_120, and the GPU is sm_80: tune in bf16"
    with pytest.raises(EnvironmentUnusable, match=words):
        tune_step(model, None, None, NAMED["fp8"])  # pyright: ignore[reportArgumentType]


def stand_in() -> tuning.Backend:
    """Compiles nothing, and finds all equally fast."""

    def compiled(requests: Sequence[str], _jobs: int) -> Iterator[None]:
        yield from (None for _ in requests)

    def measured(calls: Mapping[str, Any], _repeats: int) -> dict[str, Timing]:
        return dict.fromkeys(calls, Timing(1.0, 1.0, 1.0, 1.0, 9, "cuda-event", "warm"))

    return tuning.Backend(compiled, measured, lambda _: "NVIDIA Test")


def test_the_backward_of_two_maps_has_rows_of_its_own():
    """Under the name of the backward of one, which times it with both."""
    form = group_norm_silu_backward_concat.OP
    op, arguments = TUNED_AS[form], form.samples[0].arguments(torch.float32, "cpu")
    assert op.key(**arguments).endswith("x 2x12x4x5, x2 2x12x4x5")
    assert op.reference(**arguments).shape == arguments["x"].shape
    assert op.cost(**arguments) == form.cost(**arguments)
    (config, *_) = op.launcher.candidates(target=typical_target("sm_90"), **arguments)
    launch = op.launcher.plan(target=typical_target("sm_90"), config=config, **arguments)
    assert launch.output.shape == arguments["x"].shape


def test_norms_of_two_maps_are_tuned_as_such(monkeypatch):
    plant_rows(monkeypatch, {op.name: (1e-5, 2e-5) for op in PASSES}, conv2d_fprop)
    joined = replace(NORMED, channels=(32, 32))
    with fp8_by_reference():
        problems = list(norm_problems(UNet(joined), noise_loss(linear_schedule()), image(), NAMED["bf16"]))
    of_two = {(op.name, op.key(**arguments)) for op, arguments in problems if arguments.get("x2") is not None}
    assert {name for name, _ in of_two} == {"group_norm_silu", "group_norm_silu_backward"}
    assert of_two.isdisjoint((op.name, op.key(**arguments)) for op, arguments in problems if "x2" not in arguments)
    asked: list[tuple[str, str]] = []
    watch_lookups(monkeypatch, lambda *found: asked.append(found))
    for op, arguments in problems:
        op.launcher.plan(**arguments)
    assert of_two <= set(asked) == {(op.name, op.key(**arguments)) for op, arguments in problems}


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_a_step_looks_up_the_rows_that_its_norms_are_tuned_into(recipe: str, monkeypatch):
    graphs: list[fx.GraphModule] = []

    def seen(graph_module: fx.GraphModule, ops: Any) -> Any:
        graphs.append(graph_module)
        return problems_of(graph_module, ops)

    monkeypatch.setattr(train_tuning, "problems_of", seen)
    with fp8_by_reference():
        problems = list(norm_problems(UNet(NORMED), noise_loss(linear_schedule()), image(), NAMED[recipe]))
    rows = tuning.tune_all(problems, width=0, backend=stand_in())

    asked: dict[tuple[str, str, str], None] = {}

    watch_lookups(monkeypatch, lambda op, key: asked.update({(op, "bf16", key): None}))
    calls = [node for graph in graphs for node in kernel_calls(graph) if of_a_norm(node)]
    for node in calls:
        planned(node, "meta")
    assert sorted((row.op, row.dtype, row.key) for row in rows) == sorted(asked)
    assert len(calls) == len(problems) > len(rows)

    keys = {op.name: " / ".join(key for name, _, key in asked if name == op.name) for op in NORMS}
    state = ("fp8_scale 1,", "amax 1,", "counts 1x3", "quads True", "p 0.1")
    said = {
        "bf16": {"group_norm_silu": ("scale 2x32", "p 0.1"), "group_norm_silu_backward": ("residual", "p 0.1")},
        "fp8": {
            "group_norm_silu_fp8": (*state, "seed 1", "shift 2x16"),
            "group_norm_silu_backward_fp8": (*state, "keep True", "keep False", "residual"),
        },
    }[recipe]
    for name, words in said.items():
        assert [word for word in words if word not in keys[name]] == []
    forms = {form.overload for form in FORMS}
    assert any(node.target in forms for node in calls)
    slices = [args["scale"] for _, args in problems if args.get("scale") is not None]
    assert slices and all(scale.stride(0) > scale.shape[1] for scale in slices)


@pytest.mark.parametrize(("form", "op"), FORMS.items(), ids=lambda op: op.name)
def test_a_form_of_a_norm_looks_up_the_row_of_the_norm(form: Op, op: Op, monkeypatch):
    arguments = next(sample for sample in op.samples if "residual" in sample.why).arguments(torch.bfloat16, "meta")
    asked: list[tuple[str, str]] = []
    watch_lookups(monkeypatch, lambda *found: asked.append(found))
    form.launcher.plan(**arguments)
    assert asked == [(op.name, op.key(**arguments))]


@pytest.mark.parametrize(("form", "op"), FORMS.items(), ids=lambda op: op.name)
def test_a_form_of_a_norm_is_called_as_itself_and_belongs_to_the_same_kernels(form: Op, op: Op):
    results = (one(**one.samples[0].arguments(torch.float32, "meta")) for one in (form, op))
    more = form.name.endswith("_summed") + ("_concat" in form.name)
    assert len(next(results)) == len(next(results)) + more, "the sum of dx, and the gradient of a second map"
    assert form.source_hash == op.source_hash


@pytest.mark.parametrize("form", [op for op in (*NORMS, *FORMS) if op.launcher.typical], ids=lambda op: op.name)
def test_a_norm_in_fp8_is_tuned_on_a_state_of_its_own_and_looked_up_by_any_row(form: Op, monkeypatch):
    given = form.samples[0].arguments(torch.bfloat16, "cpu")
    state = {"fp8_scale": torch.full((3,), 7.0), "amax": torch.ones(3), "counts": torch.ones((3, 3), dtype=torch.int64)}
    given |= {**state, "row": 2}
    assert form.launcher.typical is not None
    made = form.launcher.typical(**given)
    assert made["fp8_scale"].tolist() == [1.0] and made["row"] == 0
    assert not made["amax"].any() and not made["counts"].any()
    assert all(made[name] is given[name] for name in given.keys() - {*state, "row"})
    asked: list[tuple[str, str]] = []
    watch_lookups(monkeypatch, lambda *found: asked.append(found))
    form.launcher.plan(**given)
    op = FORMS.get(form, form)
    assert asked == [(op.name, op.key(**made))]


def watch_lookups(monkeypatch: Any, seen: Any) -> None:
    def look_up(op: Op, *_: Any, **arguments: Any) -> None:
        seen(op.name, op.key(**arguments))

    for module in OF_NORMS:
        monkeypatch.setattr(module, "tuned_config", look_up)


def of_a_norm(node: fx.Node) -> bool:
    return node.target in {op.overload for op in (*NORMS, *FORMS)}


def image() -> Tensor:
    return torch.zeros(2, 3, 8, 8)


class Counting(nn.Module):
    """A norm after a batch norm, whose statistics a forward pass writes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch, self.norm = nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.batch(self.conv(x)))


@pytest.mark.parametrize("find", [tunable, lambda *step: tuple(norm_problems(*step))])
def test_looking_leaves_the_model_as_it_was(find: Any):
    model = Counting()
    model.conv.weight.grad = torch.ones_like(model.conv.weight)

    def loss(module: nn.Module, batch: tuple[Tensor, str]) -> Tensor:
        noise = torch.randn_like(batch[0])
        torch._dynamo.graph_break()
        return module(batch[0] + noise).sum()

    def state() -> list[Any]:
        tensors = [(t, t.data_ptr(), t.stride(), t.detach().tolist()) for t in (*model.parameters(), *model.buffers())]
        kept = [(id(t), *rest) for t, *rest in tensors]
        return [kept, model.conv.weight.grad, torch.get_rng_state().tolist()]

    before = state()
    found = find(model, loss, (torch.ones(2, 8, 6, 6), "a name"), NAMED["bf16"])
    assert state() == before
    assert found


def test_norms_are_asked_for_when_all_else_is_in_the_tables(monkeypatch):
    """Whose rows decide what runs in FP8; the choices are the same for both."""
    looked: list[tuple[Any, ...]] = []

    def norms(*step: Any) -> Iterator[str]:
        looked.append(step)
        yield "a norm"

    def tune_all(convolutions: Any, norms: Any, **choices: Any) -> list[Any]:
        return [*convolutions, len(looked), *norms, choices]

    monkeypatch.setattr(fp8_passes, "architecture_of", lambda _device: "sm_90")
    monkeypatch.setattr(train_tuning, "tunable", lambda *_: [SimpleNamespace(problems=lambda: ["a convolution"])])
    monkeypatch.setattr(train_tuning, "norm_problems", norms)
    monkeypatch.setattr(tuning, "tune_all", tune_all)
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))]))
    choices: dict[str, Any] = {"width": 3, "budget_s": 60.0, "force": True, "progress": print}
    found = tune_step(model, len, None, NAMED["fp8"], **choices)  # pyright: ignore[reportArgumentType]
    assert found == ["a convolution", 0, "a norm", choices]
    assert looked == [(model, len, None, NAMED["fp8"])]


def test_rows_of_norms_belong_to_present_kernels():
    """What `cache ls` counts as outdated and `cache export` leaves out."""
    hashes = compiler.source_hashes()
    assert all(hashes[op.name] == op.source_hash for op in NORMS)


@pytest.mark.gpu
def test_on_a_gpu_from_end_to_end():
    step = UNet(NORMED).cuda(), noise_loss(linear_schedule().to(torch.device("cuda"))), image().cuda(), NAMED["bf16"]
    rows = tune_step(*step, width=1)
    assert {"group_norm_silu", "group_norm_silu_backward"} <= {row.op for row in rows}
    torch.compiler.reset()
    assert tune_step(*step, width=1) == rows
