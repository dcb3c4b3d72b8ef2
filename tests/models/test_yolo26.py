"""The detectors: official counts and names, folding, both heads, export, and the recorded reference outputs."""

import copy
import re

import pytest
import torch
from safetensors.torch import load_file

from ridgeline.errors import UsageError
from ridgeline.models import MODELS, build
from ridgeline.models.blocks import Attention
from ridgeline.models.weights import yolo26_from
from ridgeline.models.yolo26 import SCALES, YOLO26, fuse, randomise_
from ridgeline.verifier import detection_errors

# scale: parameters with both heads, fused one-to-one; state-dict entries of the same two
COUNTS = {
    "n": (2_572_280, 2_408_932, 708, 204),
    "s": (10_009_784, 9_496_140, 708, 204),
    "m": (21_896_248, 20_411_132, 768, 224),
    "l": (26_299_704, 24_807_420, 1092, 332),
    "x": (58_993_368, 55_725_948, 1092, 332),
}


@pytest.fixture(scope="module")
def nano() -> YOLO26:
    return randomise_(YOLO26("n"))


def images(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("scale", SCALES)
def test_counts_are_the_official_ones(scale):
    with torch.device("meta"):
        model = YOLO26(scale)
        fused = fuse(model)
    assert (parameters(model), parameters(fused), len(model.state_dict()), len(fused.state_dict())) == COUNTS[scale]
    assert fused.fused and not model.fused
    assert fused.heads == ("one_to_one",) and set(model.heads) == {"one_to_one", "one_to_many"}


def test_names_and_shapes_are_the_official_ones():
    with torch.device("meta"):
        nano, large = YOLO26("n").state_dict(), YOLO26("l").state_dict()
        fused = fuse(YOLO26("n")).state_dict()
    shapes = {
        "model.0.conv.weight": (16, 3, 3, 3),
        "model.0.bn.running_var": (16,),
        "model.0.bn.num_batches_tracked": (),
        "model.2.m.0.cv1.conv.weight": (8, 16, 3, 3),
        "model.6.m.0.m.1.cv2.conv.weight": (32, 32, 3, 3),
        "model.9.cv2.conv.weight": (256, 512, 1, 1),
        "model.10.m.0.attn.qkv.conv.weight": (256, 128, 1, 1),
        "model.10.m.0.attn.pe.conv.weight": (128, 1, 3, 3),
        "model.10.m.0.ffn.1.bn.bias": (128,),
        "model.13.cv1.conv.weight": (128, 384, 1, 1),
        "model.22.m.0.0.cv1.conv.weight": (64, 128, 3, 3),
        "model.22.m.0.1.attn.proj.conv.weight": (128, 128, 1, 1),
        "model.23.cv2.0.0.conv.weight": (16, 64, 3, 3),
        "model.23.cv3.2.0.0.conv.weight": (256, 1, 3, 3),
        "model.23.one2one_cv3.1.1.1.conv.weight": (80, 80, 1, 1),
        "model.23.one2one_cv2.2.2.bias": (4,),
    }
    assert {name: tuple(nano[name].shape) for name in shapes} == shapes
    assert "model.2.m.0.cv3.conv.weight" in large and "model.2.m.1.m.0.cv1.conv.weight" in large
    assert "model.10.m.1.attn.qkv.conv.weight" in large
    assert not [name for name in nano if "dfl" in name]
    # fused: a convolution's weight and bias, and the plain last layers; nothing of a batch norm
    assert all(re.search(r"\.(conv|2)\.(weight|bias)$", name) for name in fused)
    assert {name.split(".")[2] for name in fused if name.startswith("model.23.")} == {"one2one_cv2", "one2one_cv3"}


def test_other_class_counts_change_the_class_branch_only():
    with torch.device("meta"):
        few, many = YOLO26("n", classes=3).state_dict(), YOLO26("n", classes=365).state_dict()
    assert few["model.23.cv3.0.2.weight"].shape == (3, 64, 1, 1)
    assert many["model.23.cv3.0.2.weight"].shape == (365, 100, 1, 1)
    assert few["model.23.cv2.0.2.weight"].shape == (4, 16, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"scale": "q"}, "scale must be one of n, s, m, l, x, got 'q'"),
        ({"classes": 0}, "classes must be at least 1, got 0"),
        ({"heads": ()}, "heads must be some of"),
        ({"heads": ("both",)}, "heads must be some of"),
    ],
)
def test_wrong_arguments_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        YOLO26(**arguments)


def test_every_size_that_is_a_multiple_of_32_runs_and_no_other(nano):
    with torch.no_grad():
        detections = nano(images(2, 3, 64, 96))
        predictions = nano.one_to_many(images(2, 3, 64, 96))
    anchors = 8 * 12 + 4 * 6 + 2 * 3
    assert detections.shape == (2, anchors, 6)  # fewer anchors than 300: all of them
    assert predictions.shape == (2, 84, anchors)
    assert (detections[:, :-1, 4] >= detections[:, 1:, 4]).all()
    for height, width in ((48, 64), (64, 65), (0, 64)):
        with pytest.raises(
            ValueError, match=f"input is {height}x{width} pixels, but both sides must be multiples of 32"
        ):
            nano(torch.zeros(1, 3, height, width))


def test_a_batch_equals_its_images(nano):
    model, batch = copy.deepcopy(nano).double(), images(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        together = model.one_to_many(batch)
        apart = torch.cat([model.one_to_many(image[None]) for image in batch])
    torch.testing.assert_close(together, apart, rtol=1e-6, atol=1e-4)


def test_random_values_tell_anchors_apart(nano):
    with torch.no_grad():
        _, logits = nano.detect.raw(nano.features(images(1, 3, 64, 64)), "one_to_one")
    assert 0.1 < logits.std() < 10
    assert torch.equal(randomise_(YOLO26("n"), seed=0).model[0].conv.weight, nano.model[0].conv.weight)
    assert not torch.equal(randomise_(YOLO26("n"), seed=1).model[0].conv.weight, nano.model[0].conv.weight)


@pytest.mark.parametrize("side", [64, 640])
@pytest.mark.parametrize("head", ["one_to_one", "one_to_many"])
def test_random_values_give_scores_and_boxes_like_a_trained_network(nano, side, head):
    """Scores neither saturate nor vanish, and boxes have area: comparing two such outputs compares something."""
    x, model = images(1, 3, side, side), fuse(nano, head=head)
    with torch.no_grad():
        distances, logits = model.detect.raw(model.features(x), head)
        found = model.one_to_one(x)[0] if head == "one_to_one" else None
    best = logits.sigmoid().flatten().sort(descending=True)[0][:300]
    assert best[-1] > 0.05 and best[0] < 0.995 and best[0] - best[-1] > 0.1
    assert (distances > 0).float().mean() > 0.99 and distances.mean() < 8
    if found is not None:
        agreed = detection_errors(found[None], found[None])
        assert agreed.rows == len(found) - 1 and len(found) == min(300, side**2 * 21 // 1024)
        assert found[:, 5].unique().numel() > 3


@pytest.mark.parametrize("head", ["one_to_one", "one_to_many"])
def test_fusing_changes_nothing_but_rounding(nano, head):
    # in float64 the only difference left is the order of operations
    model = copy.deepcopy(nano).double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = images(1, 3, 64, 64, dtype=torch.float64)
    fused = fuse(model, head=head)
    with torch.no_grad():
        features = list(zip(fused.features(x), model.features(x), strict=True))
        raw = zip(*(m.detect.raw(m.features(x), head) for m in (fused, model)), strict=True)
    for a, b in (*features, *raw):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    assert fused.heads == (head,) and not fused.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_half_precision_weights_are_folded_in_float64(nano):
    half = copy.deepcopy(nano).half()
    folded = fuse(half).state_dict()
    exact = fuse(half.double()).state_dict()
    assert all(torch.equal(folded[name], exact[name].half()) for name in exact)


def test_a_half_precision_network_answers_in_float32(nano):
    fused, x = fuse(nano, head="one_to_many"), images(1, 3, 64, 64)
    with torch.no_grad():
        exact, found = fused(x), copy.deepcopy(fused).half()(x.half())
    assert found.dtype == torch.float32
    assert (found[:, 4:] - exact[:, 4:]).abs().mean() < 0.001
    assert not torch.equal(found[:, :4], found[:, :4].half().float())  # boxes finer than half precision can hold


def test_fusing_twice_and_a_missing_head(nano):
    fused = fuse(nano)
    again = fuse(fused).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in fused.state_dict().items())
    with pytest.raises(ValueError, match="holds the one_to_one head only, one_to_many was asked for"):
        fuse(fused, head="one_to_many")
    with pytest.raises(ValueError, match="holds the one_to_one head only, one_to_many was asked for"):
        fused.one_to_many(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize("head", ["one_to_one", "one_to_many"])
def test_export_gives_the_same_answer(nano, head):
    model, x = fuse(nano, head=head), images(1, 3, 64, 64)
    program = torch.export.export(model, (x,))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert sum("conv2d" in target for target in targets) == 102
    assert not [target for target in targets if "batch_norm" in target or "topk" in target]
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-4)


def test_forward_is_the_head_that_is_there(nano):
    x = images(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(nano(x), nano.one_to_one(x))
        many = fuse(nano, head="one_to_many")
        assert torch.equal(many(x), many.one_to_many(x))


def test_attention_is_the_textbook_sum():
    torch.manual_seed(0)
    block = Attention(128).eval()
    x = torch.randn(1, 128, 3, 5)
    with torch.no_grad():
        qkv = block.qkv(x).reshape(2, 128, 15)  # two heads, each 32 + 32 + 64 channels
        out, values = [], []
        for head in qkv:
            q, k, v = head[:32], head[32:64], head[64:]
            columns = []
            for i in range(15):
                weight = torch.softmax((q[:, i, None] * k).sum(0) / 32**0.5, dim=0)
                columns.append((v * weight).sum(1))
            out.append(torch.stack(columns, dim=1))
            values.append(v)
        mixed = torch.cat(out).reshape(1, 128, 3, 5) + block.pe(torch.cat(values).reshape(1, 128, 3, 5))
        torch.testing.assert_close(block(x), block.proj(mixed), rtol=1e-4, atol=1e-5)


def test_models_by_name():
    assert list(MODELS) == ["yolo26n", "yolo26s", "yolo26m", "yolo26l", "yolo26x", "ddpm-cifar10"]
    module, inputs = MODELS["yolo26n"](2)
    assert [tuple(tensor.shape) for tensor in inputs] == [(2, 3, 640, 640)]
    assert module.fused and not module.training and inputs[0].min() >= 0 and inputs[0].max() <= 1
    assert not build("yolo26n").fused
    with pytest.raises(UsageError, match="unknown detector 'yolo99'"):
        build("yolo99")
    with pytest.raises(UsageError, match="batch must be at least 1, got 0"):
        MODELS["yolo26n"](0)


def reference(test_data) -> tuple[torch.Tensor, torch.Tensor]:
    """Network input (RGB, 0..1) and the 300 recorded detections of one photo; the recorded image is BGR."""
    tensors = load_file(test_data / "reference-bus.safetensors")
    image = tensors["letterboxed_u8"].flip(-1).permute(2, 0, 1)[None].float() / 255
    return image.contiguous(), tensors["end2end_300x6"]


def test_all_300_reference_detections_are_reproduced(test_data):
    image, expected = reference(test_data)
    with torch.no_grad():
        found = yolo26_from(test_data / "yolo26n-w8.pt")(image)[0]
    # measured: 2.5e-4 pixel and 4.8e-7, from another order of fp32 operations
    assert torch.equal(found[:, 5], expected[:, 5])
    torch.testing.assert_close(found[:, :4], expected[:, :4], rtol=0, atol=2e-3)
    torch.testing.assert_close(found[:, 4], expected[:, 4], rtol=0, atol=5e-6)


def test_weights_fused_and_rounded_to_half_agree_where_it_matters(test_data):
    image, expected = reference(test_data)
    with torch.no_grad():
        found = yolo26_from(test_data / "yolo26n-w8-fused.safetensors")(image)[0]
    seen = int((expected[:, 4] > 0.05).sum())
    # measured on these rows: 0.004 pixel and 1.2e-4
    assert seen == 8 and int((found[:, 4] > 0.05).sum()) == seen
    assert torch.equal(found[:seen, 5], expected[:seen, 5])
    torch.testing.assert_close(found[:seen, :4], expected[:seen, :4], rtol=0, atol=0.05)
    torch.testing.assert_close(found[:seen, 4], expected[:seen, 4], rtol=0, atol=1e-3)
