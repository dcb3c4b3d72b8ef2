"""compile on the CPU: same results, honest refusals, and a wrong rewrite that cannot hide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nets
from graphs import by_reference, check, image, net, targets, tensors
from ridgeline import compiler, lowering
from ridgeline.compile_report import GraphReport
from ridgeline.compiler import lower
from ridgeline.errors import NotEngaged, UsageError, VerificationFailed
from ridgeline.models.blocks import SPPF, C3k, C3k2, Conv
from ridgeline.models.ddpm_unet import TINY, UNet
from ridgeline.models.postprocess import anchor_grid, decode_xyxy, top_detections
from ridgeline.models.yolo26 import YOLO26, fuse, randomise_
from ridgeline.recipe import Recipe
from ridgeline.rewrites import Rewrite
from ridgeline.rewrites._match import calls, finish
from ridgeline.rewrites._match import replace as replace_node

FP32 = Recipe(dtype="fp32")
# a kernel a convolution, so that they can be counted
SINGLE = replace(FP32, rewrites=tuple(name for name in FP32.rewrites if name != "fuse_conv_chain"))
X = image(1, 3, 9, 8)


@pytest.fixture(autouse=True)
def _references():
    with by_reference():
        yield


def small(**extra) -> nn.Module:
    return net(
        lambda m, x: m.head(F.silu(m.norm(m.conv(x))) + m.skip(x)),
        conv=nn.Conv2d(3, 8, 3, padding=1), norm=nn.BatchNorm2d(8), skip=nn.Conv2d(3, 8, 1), head=nn.Conv2d(8, 4, 1),
        **extra,
    )  # fmt: skip


def pyramid() -> nn.Module:
    """Pools, an upsampled branch and split-and-concat blocks in a few layers."""

    def forward(m, x):
        y = m.pools(m.down(x := m.stem(x)))
        return m.split(m.join(torch.cat([F.interpolate(y, scale_factor=2.0, mode="nearest"), x], dim=1)))

    return net(
        forward, stem=Conv(3, 16, 3), down=Conv(16, 16, 3, 2), pools=SPPF(16), join=Conv(32, 16),
        split=C3k2(16, 8, [C3k(8)], hidden=8),
    )  # fmt: skip


def detector() -> YOLO26:
    """With random weights class logits of ±100 would saturate every score, and ties hide errors: scale them down."""
    model = fuse(randomise_(YOLO26("n", heads=("one_to_one",))))
    for branch in model.detect.one2one_cv3:
        branch[-1].weight.mul_(0.05)
    return model


# Results


@pytest.mark.parametrize(
    ("build", "kernels", "foreign"),
    [
        (nets.resnet50, {"conv2d_act": 52}, {"aten.relu.default", "aten.linear.default"}),
        (nets.mobilenet_v3_like, {"conv2d_act": 16, "depthwise_conv2d_act": 5}, {"aten.hardswish.default"}),
        (nets.convnext_tiny, {"conv2d_act": 4, "depthwise_conv2d_act": 18}, {"aten.layer_norm.default"}),
        (nets.yolo_like, {"conv2d_act": 31, "upsample_concat_conv_act": 2, "max_pool_chain": 1}, {"aten.cat.default"}),
        (nets.resnext_block, {"conv2d_act": 2}, {"aten.conv2d.default"}),
        (nets.edm2_block_net, {}, {"aten.linalg_vector_norm.default"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_networks(build, kernels, foreign, tmp_path):
    module, inputs = build()
    compiled = compiler.compile(module.eval(), inputs, SINGLE)
    assert compiled.verdict is not None and compiled.verdict.passed
    graph = compiled.graph(*inputs)
    assert kernels.items() <= dict(graph.kernels).items()
    assert foreign <= {name for name, _ in graph.foreign}
    assert graph.launches >= sum(count for _, count in graph.kernels)
    # other data than the example's: nothing of that was baked in
    others = tuple(torch.randn(t.shape, generator=torch.Generator().manual_seed(7)) for t in inputs)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*others), module(*others), rtol=1e-4, atol=1e-5)
    check_file(compiled, others, tmp_path / "net")


def check_file(compiled: compiler.Compiled, inputs: tuple[Tensor, ...], path: Path) -> None:
    """What comes back from a file computes the same, and knows the same of itself."""
    compiled.save(path)
    loaded = compiler.load(path, device=inputs[0].device)
    path.unlink()  # some weigh 100 MB
    assert loaded.report == compiled.report and loaded.recipe == compiled.recipe
    for a, b in zip(tensors(loaded(*inputs)), tensors(compiled(*inputs)), strict=True):
        # weights from a file lie elsewhere in memory, by which PyTorch chooses some of its CPU kernels
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_unet(tmp_path):
    module = UNet(TINY).eval()
    inputs = (image(2, TINY.in_channels, 8, 8), torch.tensor([3, 700]))
    compiled = compiler.compile(module, inputs, FP32)
    assert compiled.verdict is not None and compiled.verdict.passed
    assert dict(compiled.graph(*inputs).kernels)["conv2d_act"] > 10
    check_file(compiled, inputs, tmp_path / "unet")


def test_yolo26_is_kernels_only():
    model, x = detector(), torch.rand((2, 3, 64, 96), generator=torch.Generator().manual_seed(1))
    compiled = compiler.compile(model, x, FP32)
    assert compiled.verdict is not None and compiled.verdict.detections is not None
    assert compiled.verdict.detections.rows > 200
    graph = compiled.graph(x)
    assert graph.foreign == () and graph.interior == ()
    kernels = dict(graph.kernels)
    convolutions = {name: kernels.pop(name, 0) for name in ("conv2d_act", "depthwise_conv2d_act", "conv_chain")}
    assert kernels == {"upsample_concat_conv_act": 2, "max_pool_chain": 1, "attention_position": 2, "detect_topk": 1}
    assert 40 <= sum(convolutions.values()) <= 87 + 6
    assert graph.chain_length <= 82
    lines = graph.lines()
    assert "rewrite fuse_detect: 1 sites" in lines and f"kernel conv2d_act: {convolutions['conv2d_act']}" in lines


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision(dtype):
    module = small()
    compiled = compiler.compile(module, X, Recipe(dtype=dtype))
    y = compiled(X)
    assert y.dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    torch.testing.assert_close(y.float(), module(X), rtol=0.02, atol=0.05)
    assert next(module.parameters()).dtype == torch.float32, "the module is the caller's"


def test_a_variance_beyond_fp16_is_folded_before_it_is_cast():
    module = small()
    module.norm.running_var.mul_(1e6)
    exact = module.double()(X.double() * 1e3)
    module.float()
    y = compiler.compile(module, X * 1e3, Recipe(dtype="fp16"), verify=False)(X * 1e3)
    assert float((y.double() - exact).abs().max() / exact.abs().max()) < 2e-3


def test_in_place_modules():
    module = net(
        lambda m, x: m.b(m.act(m.a(x).add_(m.skip(x)))),
        a=nn.Conv2d(3, 8, 1), skip=nn.Conv2d(3, 8, 1), act=nn.SiLU(inplace=True), b=nn.Conv2d(8, 4, 3),
    )  # fmt: skip
    graph = compiler.compile(module, X, FP32).graph(X)
    assert dict(graph.sites)["functionalize"] == 2 and graph.foreign == (("aten.silu.default", 1),)


def test_a_network_that_is_not_of_two_dimensions():
    module = net(lambda m, x: m.a(x), a=nn.Conv3d(2, 3, 3))
    compiled = compiler.compile(module, torch.randn(1, 2, 4, 4, 4), FP32)
    assert compiled.graph(torch.randn(1, 2, 4, 4, 4)).foreign == (("aten.conv3d.default", 1),)


def test_dictionaries_and_tuples_come_back_as_they_are():
    module = net(lambda m, x: {"a": m.a(x), "rest": (x, [m.a(x) * 2])}, a=nn.Conv2d(3, 4, 1))
    out = compiler.compile(module, X, FP32)(X)
    assert set(out) == {"a", "rest"} and isinstance(out["rest"], tuple)
    torch.testing.assert_close(out["rest"][1][0], 2 * out["a"])


def test_layouts_are_repaired_for_the_kernels():
    """A reshape between convolutions: the one copy is named with its place."""
    module = net(
        lambda m, x: m.b(m.a(x).flatten(2).transpose(1, 2).reshape(1, 8, 9, 8)),
        a=nn.Conv2d(3, 8, 1), b=nn.Conv2d(8, 4, 3),
    )  # fmt: skip
    graph = compiler.compile(module, X, FP32).graph(X)
    assert ("aten.contiguous.default", 1) in graph.foreign
    assert [finding.what for finding in graph.interior] == ["copy"]


def test_the_graph_survives_functionalisation():
    """What Inductor does to storing calls before it compiles: the same results, on aot_eager and twice."""
    module = pyramid()
    graph_module, graph = lower(module, (image(1, 3, 8, 8),), SINGLE)
    assert dict(graph.sites)["write_into_concat"] == 2
    run = torch.compile(graph_module, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for seed in (1, 2):
            x = image(1, 3, 8, 8, seed=seed)
            torch.testing.assert_close(run(x), module(x), rtol=1e-4, atol=1e-5)


# Recipes


def test_without_rewrites_the_module_runs_as_it_is():
    graph = compiler.compile(small(), X, replace(FP32, rewrites=())).graph(X)
    assert graph.sites == () and graph.kernels == ()
    assert dict(graph.foreign)["aten.batch_norm.default"] == 1


@pytest.mark.parametrize("name", ["fold_batch_norm", "fuse_conv_act", "merge_siblings", "write_into_concat"])
def test_every_rewrite_may_be_left_out(name):
    module = pyramid()
    recipe = replace(FP32, rewrites=tuple(other for other in FP32.rewrites if other != name))
    graph_module, graph = lower(module, (image(1, 3, 8, 8),), recipe)
    check(graph_module, module, [image(1, 3, 8, 8)])
    assert len(graph.sites) == len(FP32.rewrites) - 1


def test_rewrites_run_in_the_pipelines_order():
    recipe = replace(FP32, rewrites=("fuse_conv_act", "fold_batch_norm"))
    assert compiler.compile(small(), X, recipe).graph(X).sites == (("fold_batch_norm", 1), ("fuse_conv_act", 3))


def test_choices_reach_every_kernel():
    graph_module, _ = lower(small(), (X,), replace(SINGLE, precision="ieee"))
    fused = [node for node in graph_module.graph.nodes if "ridgeline" in str(node.target)]
    assert len(fused) == targets(graph_module)["conv2d_act"] == 3
    # dependent launch needs a GPU that has it, whatever the recipe asks
    assert all(node.kwargs["precision"] == "ieee" and node.kwargs["pdl"] is False for node in fused)


# Signatures and weights


def test_a_signature_is_shape_dtype_and_layout():
    compiled = compiler.compile(small(), X, FP32)
    specs = {compiled.graph(x).inputs for x in (X, X.contiguous(), X.double(), X[:, :, :5])}
    assert sorted(str(spec) for (spec,) in specs) == [
        "float32 1x3x5x8 channels-last on cpu",
        "float32 1x3x9x8 channels-last on cpu",
        "float32 1x3x9x8 on cpu",
        "float64 1x3x9x8 channels-last on cpu",
    ]
    assert compiled.report.graphs == tuple(compiled.graph(x) for x in (X, X.contiguous(), X.double(), X[:, :, :5]))
    torch.testing.assert_close(compiled(X.contiguous()), compiled(X))
    # layouts and dtypes that the graph converts share its weights
    modules = {runner.graph_module for runner in compiled._runners.values()}
    assert len(compiled._runners) == 4 and len(modules) == 2


def test_an_input_that_requires_a_gradient_is_refused():
    module = small().requires_grad_(True)
    compiled = compiler.compile(module, X.clone().requires_grad_(True), FP32)
    with pytest.raises(UsageError, match=r"an input requires a gradient, .* call it under no_grad"):
        compiled(X.clone().requires_grad_(True))
    with torch.no_grad():
        assert torch.equal(compiled(X.clone().requires_grad_(True)), compiled(X))


def test_what_is_built_in_inference_mode_runs_outside():
    with torch.inference_mode():
        compiled = compiler.compile(small(), X, FP32)
    assert torch.equal(compiled(X), compiled(X.clone()))


def test_each_signature_is_built_once():
    compiled = compiler.compile(small(), X, FP32)
    graph = compiled.graph(X)
    with torch.no_grad():
        assert compiled.graph(X) is graph
    larger = image(2, 3, 7, 5)
    assert compiled(larger).shape == (2, 4, 7, 5)
    assert compiled.graph(larger) is not graph and isinstance(graph, GraphReport)
    torch.testing.assert_close(compiled.replayer(larger)(), compiled(larger))


def test_autocast_and_gradients_outside_change_nothing():
    module = small().requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = compiler.compile(module, X, FP32, verify=False)
        inside = compiled(X)
    assert inside.dtype == torch.float32 and not inside.requires_grad
    torch.testing.assert_close(inside, compiled(X))


def write_a_weight(module: nn.Module) -> None:
    with torch.no_grad():
        module.conv.weight.add_(1)


def copy_into_a_statistic(module: nn.Module) -> None:
    module.norm.running_mean.copy_(torch.ones(8))


def load(module: nn.Module) -> None:
    module.load_state_dict(small().state_dict())


def load_by_assignment(module: nn.Module) -> None:
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True)


def swap_the_head(module: nn.Module) -> None:
    module.head = nn.Conv2d(8, 4, 1)


def give_other_memory(module: nn.Module) -> None:
    module.conv.bias.data = module.conv.bias.data.clone()


def replace_a_statistic(module: nn.Module) -> None:
    module.norm.running_var = torch.ones(8)


def drop_a_bias(module: nn.Module) -> None:
    module.head.bias = None


def add_a_child(module: nn.Module) -> None:
    module.tail = nn.Identity()


CHANGES = (
    write_a_weight, copy_into_a_statistic, load, load_by_assignment, swap_the_head, give_other_memory,
    replace_a_statistic, drop_a_bias, add_a_child, nn.Module.half, nn.Module.train, lambda module: module.norm.train(),
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_changed_weights_or_mode_are_refused(change):
    module = small()
    compiled = compiler.compile(module, X, FP32, verify=False)
    compiled(X)
    change(module)
    with pytest.raises(
        UsageError, match="weights or mode changed after compile, which replays the old ones"
    ) as refusal:
        compiled(X)
    assert str(refusal.value).count(". ") == 0


def test_what_changes_no_result_is_not_refused():
    module = small()
    compiled = compiler.compile(module, X, FP32, verify=False)
    first = compiled(X)
    module.requires_grad_(True)
    module.conv.register_forward_hook(lambda *_: None)
    assert torch.equal(compiled(X), first)


def test_a_changed_module_is_neither_built_for_another_signature_nor_saved(tmp_path):
    module = small()
    compiled = compiler.compile(module, X, FP32, verify=False)
    write_a_weight(module)
    with pytest.raises(UsageError, match="weights or mode changed"):
        compiled.graph(image(2, 3, 9, 8))
    with pytest.raises(UsageError, match="weights or mode changed"):
        compiled.save(tmp_path / "stale")
    assert list(tmp_path.iterdir()) == []


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        module = small()
    compiled = compiler.compile(module, X, FP32)
    assert compiled.verdict is not None and compiled.verdict.passed


# Refusals


@pytest.mark.parametrize("part", [lambda module: module, lambda module: module.norm], ids=["module", "a part of it"])
def test_train_mode_is_refused(part):
    module = small()
    part(module).train()
    with pytest.raises(UsageError, match=r"the module is in training mode; call \.eval\(\) first"):
        compiler.compile(module, X, FP32)


def test_inputs_are_needed():
    with pytest.raises(UsageError, match="at least one tensor, got none"):
        compiler.compile(small(), (), FP32)


class CountsItsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.calls


class WritesToItsInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (CountsItsCalls, r"CountsItsCalls writes to its own calls in place, by aten\.add_\.Tensor in \(test_compiler"),
        (WritesToItsInput, r"WritesToItsInput writes to its input x in place, by aten\.mul_\.Tensor"),
    ],
)
def test_writes_that_a_replay_would_repeat_or_lose_are_refused(kind, complaint):
    with pytest.raises(NotEngaged, match=complaint):
        compiler.compile(kind().eval(), X, FP32)


class BranchesOnValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class LoopsOverRows(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [row.sum() for row in x.nonzero()]


class Masks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class ReadsANumber(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.max().item()


class LeavesTorch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy())


@pytest.mark.parametrize("kind", [BranchesOnValues, LoopsOverRows, Masks, ReadsANumber, LeavesTorch])
def test_what_cannot_be_exported_is_refused_with_its_line(kind):
    line = kind.forward.__code__.co_firstlineno + 1
    complaint = rf"{kind.__name__} cannot be (exported|captured): .*\(test_compiler\.py:{line}\)"
    with pytest.raises(NotEngaged, match=complaint):
        compiler.compile(kind().eval(), X, FP32)


# A wrong rewrite


def double_every_relu(graph_module) -> int:
    """The planted error."""
    sites = 0
    for node in calls(graph_module, torch.ops.aten.relu.default):
        with graph_module.graph.inserting_before(node):
            wrong = graph_module.graph.call_function(torch.ops.aten.add.Tensor, (node.args[0], node.args[0]))
        replace_node(node, wrong)
        sites += 1
    finish(graph_module)
    return sites


def plant(monkeypatch: pytest.MonkeyPatch, name: str, apply) -> None:
    pipeline = tuple(Rewrite(name, apply) if rewrite.name == name else rewrite for rewrite in compiler.PIPELINE)
    for module in (compiler, lowering):
        monkeypatch.setattr(module, "PIPELINE", pipeline)


@pytest.mark.parametrize("name", ["fold_batch_norm", "merge_siblings", "write_into_concat"])
def test_a_wrong_rewrite_is_found_and_named(monkeypatch, name):
    module = net(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 1))
    compiler.compile(module, X, FP32)
    plant(monkeypatch, name, double_every_relu)
    with pytest.raises(VerificationFailed, match=rf"RMS error .* the first rewrite that breaks it is {name}"):
        compiler.compile(module, X, FP32)
    assert not torch.allclose(compiler.compile(module, X, FP32, verify=False)(X), module(X))


def test_the_first_of_two_wrong_rewrites_is_named_whatever_the_recipes_order(monkeypatch):
    module = net(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 1))
    plant(monkeypatch, "fuse_conv_act", double_every_relu)
    recipe = replace(FP32, rewrites=tuple(reversed(FP32.rewrites)))
    with pytest.raises(VerificationFailed, match="the first rewrite that breaks it is fuse_conv_act"):
        compiler.compile(module, X, recipe)


def test_a_module_whose_results_vary_blames_no_rewrite():
    class Drifting(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Drifting.calls += 1
            return x + 1 / Drifting.calls**2

    with pytest.raises(VerificationFailed, match=r"no part of the pipeline breaks it: .* results vary"):
        compiler.compile(Drifting().eval(), X, FP32)


def test_a_module_that_plain_pytorch_cannot_compute_finely_enough_is_told_the_remedy():
    class Rounded(nn.Module):
        """In float64 another function than in fp32."""

        def forward(self, x: Tensor) -> Tensor:
            return x.double().mul(1 + 1e-3).float() if torch.compiler.is_compiling() else x * 1

    with pytest.raises(VerificationFailed, match=r"; no rewrite is to blame: allow more with Recipe\(limits=Limits\("):
        compiler.compile(Rounded().eval(), X, FP32)


def test_a_wrong_detector_is_found(monkeypatch):
    """One box edge of the head off by a tenth of a grid cell."""

    def shift_a_box(graph_module) -> int:
        (node,) = calls(graph_module, torch.ops.ridgeline.detect_topk.default)
        with graph_module.graph.inserting_before(node):
            moved = graph_module.graph.call_function(torch.ops.aten.add.Tensor, (node.args[0], 0.1))
        moved.meta["val"] = node.args[0].meta["val"]
        node.args = (moved, *node.args[1:])
        finish(graph_module)
        return 1

    def forward(m, x):
        levels = [m.p3(x), m.p4(F.max_pool2d(x, 2)), m.p5(F.max_pool2d(x, 4))]
        boxes, logits = (
            torch.cat([level[:, part].flatten(2) for level in levels], dim=2) for part in (slice(0, 4), slice(4, 9))
        )
        return top_detections(decode_xyxy(boxes, *anchor_grid(64, 64)), logits)

    module = net(forward, p3=nn.Conv2d(3, 9, 1), p4=nn.Conv2d(3, 9, 1), p5=nn.Conv2d(3, 9, 1))
    x = image(1, 3, 8, 8)
    plant(monkeypatch, "fuse_max_pools", shift_a_box)
    # at stride 8 a tenth of a cell is 0.8 pixels
    with pytest.raises(
        VerificationFailed, match=r"boxes by 0\.8 px .* the first rewrite that breaks it is fuse_max_pools"
    ):
        compiler.compile(module, x, FP32)


# On a GPU


@pytest.mark.gpu
def test_captured_saved_and_captured_again(tmp_path):
    module, x = pyramid().cuda(), image(1, 3, 32, 32).cuda()
    compiled = compiler.compile(module, x, Recipe(dtype="fp16", rewrites=FP32.rewrites))
    plan = compiled.graph(x).memory
    assert plan.pool_bytes is not None and plan.pool_bytes >= plan.output_bytes
    assert compiled.report.gpu == torch.cuda.get_device_name()
    check_file(compiled, (x,), tmp_path / "net")
    first = compiled(x).clone()
    write = next(module.parameters())
    with torch.no_grad():
        write.add_(1)
    with pytest.raises(UsageError, match="weights or mode changed"):
        compiled(x)
    assert first.isfinite().all()
