"""Weight and bias gradients of FP8 quads: their numbers on a GPU, all else without one; and quads themselves.

test_gluon_kernels.py runs the kernel that multiplies.
"""

import random
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ridgeline.kernels import _quads, conv2d_wgrad_fp8
from ridgeline.kernels._op import typical_target
from ridgeline.kernels.conv2d_wgrad_fp8 import wgrad_fp8_sample
from shared_kernels import random_problem, right_gradients

SM_90 = typical_target("sm_90")
OP = conv2d_wgrad_fp8.OP
SMALL = [s for s in OP.samples if not s.real_size]
E4M3 = torch.float8_e4m3fn


# --- quads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("h", "w"), [(4, 4), (8, 16), (12, 8), (32, 32)])
def test_quads_of_a_gradient_hold_each_pixel_once(h, w):
    x = torch.arange(2 * 3 * h * w).reshape(2, 3, h, w) + 1
    quads = _quads.to_quads(x, beside=False)
    assert quads.shape == _quads.quads_shape(2, 3, h, w, beside=False) == (2, h // 4, 3, w // 4, 4, 4)
    assert quads.is_contiguous() and _quads.size_of(quads, beside=False) == x.shape
    assert torch.equal(_quads.from_quads(quads, beside=False), x)
    for row, column, i, j in product(range(h // 4), range(w // 4), range(4), range(4)):
        assert torch.equal(quads[:, row, :, column, j, i], x[:, :, row + i * h // 4, column + j * w // 4])


@pytest.mark.parametrize(("h", "w"), [(4, 4), (8, 16), (12, 8), (32, 32)])
def test_quads_of_an_activation_hold_each_pixel_and_its_neighbours(h, w):
    x = torch.arange(2 * 3 * h * w).reshape(2, 3, h, w) + 1
    quads = _quads.to_quads(x, beside=True)
    assert quads.shape == _quads.quads_shape(2, 3, h, w, beside=True) == (2, h // 4 + 2, 3, w // 4 + 2, 4, 4)
    assert quads.is_contiguous() and _quads.size_of(quads, beside=True) == x.shape
    assert torch.equal(_quads.from_quads(quads, beside=True), x)
    around = F.pad(x, (1, 1, 1, 1))
    for row, column, i, j in product(range(h // 4 + 2), range(w // 4 + 2), range(4), range(4)):
        assert torch.equal(quads[:, row, :, column, j, i], around[:, :, row + i * h // 4, column + j * w // 4])


@pytest.mark.parametrize("beside", [False, True])
def test_quads_of_fp8_are_those_of_its_bits(beside):
    x = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0)).to(E4M3)
    of_bits = _quads.to_quads(x.view(torch.uint8), beside=beside)
    assert torch.equal(_quads.to_quads(x, beside=beside).view(torch.uint8), of_bits)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("w", [4, 8, 16, 32, 64, 128])
def test_the_tensor_map_has_all_words_and_boxes_of_128_pixels(w, beside):
    """Of one image or several, in memory as it lies."""
    generator = torch.Generator().manual_seed(0)
    quads = _quads.to_quads(torch.randint(256, (9, 16, 8, w), generator=generator).to(torch.uint8), beside=beside)
    desc = _quads.words_map(quads, 16, beside=beside)
    images, rows, channels, words = desc.block_shape
    assert (rows, channels, 4 * images * words) == (1, 16, 128) and words == min(w, 32)
    there = torch.as_strided(desc.base, desc.shape, desc.strides)
    assert torch.equal(there, quads.view(torch.int32).flatten(3))


@pytest.mark.parametrize(
    ("h", "w", "reason"),
    [
        (6, 8, "quads need a multiple of 4 rows, got 6"),
        (0, 8, "quads need a multiple of 4 rows, got 0"),
        *((8, w, f"quads need a power of two of columns, from 4 to 128, got {w}") for w in (2, 12, 48, 96, 256)),
        *((12, w, None) for w in (4, 8, 16, 32, 64, 128)),
    ],
)
def test_some_sizes_have_no_quads(h, w, reason):
    assert _quads.why_not(h, w) == reason


# --- without a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SMALL, ids=lambda s: s.why)
def test_without_a_gpu_it_is_what_autograd_finds(sample):
    arguments = sample.arguments(E4M3, "cpu")
    dw, db = OP(**arguments)
    assert dw.dtype == torch.bfloat16 and dw.is_contiguous(memory_format=torch.channels_last)
    assert db.dtype == torch.float32
    x, dy = (_quads.from_quads(arguments[name], beside=name == "x").double() for name in ("x", "dy"))
    (r, s), inverse = arguments["kernel_size"], arguments["inverse"].double()
    weight = torch.zeros(dy.shape[1], x.shape[1], r, s, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(dy.shape[1], dtype=torch.float64, requires_grad=True)
    F.conv2d(x, weight, bias, padding=(r // 2, s // 2)).backward(dy)
    assert weight.grad is not None and bias.grad is not None
    torch.testing.assert_close(dw.double(), weight.grad * inverse[1] * inverse[2], rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(db.double(), bias.grad * inverse[2], rtol=1e-5, atol=1e-5)
    torch.library.opcheck(OP.overload, (), arguments, test_utils=("test_faketensor",))


@pytest.mark.parametrize("sample", SMALL, ids=lambda s: s.why)
def test_parts_and_pixels_are_added_and_scaled(sample):
    arguments = sample.arguments(E4M3, "cpu")
    launch = conv2d_wgrad_fp8.plan(target=SM_90, **arguments)
    (multiply, _), db = launch.parts, launch.arguments["db_ptr"]
    parts = multiply.output.normal_(generator=torch.Generator().manual_seed(1))
    launch.output.fill_(float("nan"))
    db.fill_(float("nan"))  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    launch.kernel[launch.grid](**launch.arguments, **launch.constants)
    k, c, r, s = launch.output.shape
    scale = arguments["inverse"][1] * arguments["inverse"][2]
    expected = (parts.double().sum(0).view(k, r, s, c).permute(0, 3, 1, 2) * scale).to(torch.bfloat16)
    torch.testing.assert_close(launch.output, expected, rtol=2**-7, atol=1e-7)
    pixels = _quads.from_quads(arguments["dy"], beside=False).double().sum((0, 2, 3)) * arguments["inverse"][2]
    torch.testing.assert_close(db, pixels.float(), rtol=1e-5, atol=1e-5)


def test_the_first_programs_add_pixels_of_a_channel_each():
    arguments = SMALL[0].arguments(E4M3, "cpu")
    launch = conv2d_wgrad_fp8.plan(target=SM_90, **arguments)
    k, db = launch.constants["K"], launch.arguments["db_ptr"]
    assert isinstance(k, int) and isinstance(db, torch.Tensor)
    for tensor in (launch.output, db):
        tensor.fill_(float("nan"))
    launch.kernel[(k - 1,)](**launch.arguments, **launch.constants)
    right = _quads.from_quads(arguments["dy"], beside=False).double().sum((0, 2, 3)) * arguments["inverse"][2]
    torch.testing.assert_close(db[:-1], right[:-1].float(), rtol=1e-5, atol=1e-5)
    assert db[-1].isnan() and launch.output.isnan().all()


def test_no_part_is_empty_and_each_multiprocessor_has_one():
    for sample in OP.samples:
        arguments = sample.arguments(E4M3, "meta")
        for config in conv2d_wgrad_fp8.candidates(target=SM_90, **arguments):
            launch = conv2d_wgrad_fp8.plan(config=config, target=SM_90, **arguments).parts[0]
            parts, one = launch.constants["PARTS"], conv2d_wgrad_fp8.problem(**arguments)
            each = -(-one.groups // parts)  # pyright: ignore[reportOperatorIssue]
            assert (parts - 1) * each < one.groups  # pyright: ignore[reportOperatorIssue]
            assert launch.grid[0] <= SM_90.sm_count


def of_gradient(n, k, h, w):
    return torch.zeros(_quads.quads_shape(n, k, h, w, beside=False)).to(torch.float8_e5m2)


def of_activation(n, c, h, w):
    return torch.zeros(_quads.quads_shape(n, c, h, w, beside=True)).to(E4M3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": of_activation(2, 16, 8, 8).float()}, "x must be torch.float8_e4m3fn, got torch.float32"),
        ({"dy": of_gradient(2, 16, 8, 8).to(E4M3)}, "dy must be torch.float8_e5m2, got torch.float8_e4m3fn"),
        (
            {"x": of_activation(2, 16, 8, 8).transpose(0, 1)},
            r"x must be dense quads of six axes, got shape \(4, 2, 16, 4, 4, 4\)",
        ),
        (
            {"dy": of_gradient(2, 16, 8, 8)[0]},
            r"dy must be dense quads of six axes, got shape \(2, 16, 2, 4, 4\)",
        ),
        ({"x": of_activation(3, 16, 8, 8)}, "dy and x must be of the same images and sizes"),
        ({"x": of_activation(2, 16, 12, 8)}, "dy and x must be of the same images and sizes"),
        ({"x": of_activation(2, 16, 8, 4)}, "dy and x must be of the same images and sizes"),
        # with what lies beside quarters, as an activation's
        (
            {"dy": torch.zeros(2, 4, 16, 4, 4, 4).to(torch.float8_e5m2)},
            r"dy and x must be of the same images and sizes, got \(2, 4, 16, 4, 4, 4\) and \(2, 4, 16, 4, 4, 4\)",
        ),
        ({"x": of_activation(2, 24, 8, 8)}, "channels must be multiples of 16, got 24 and 16"),
        ({"dy": of_gradient(2, 40, 8, 8)}, "channels must be multiples of 16, got 16 and 40"),
        (
            {"dy": of_gradient(2, 16, 8, 12), "x": of_activation(2, 16, 8, 12)},
            "quads need a power of two of columns, from 4 to 128, got 12",
        ),
        ({"kernel_size": (5, 5)}, r"kernel_size must have 1 or 3 rows and columns, got \(5, 5\)"),
        ({"kernel_size": (3, 2)}, "kernel_size must have 1 or 3 rows"),
        ({"promote": 96}, "promote must be 0, or a multiple of 128 that divides 256, got 96"),
        ({"promote": 512}, "promote must be 0, or a multiple of 128 that divides 256, got 512"),
        ({"inverse": torch.ones(2, 1)}, "inverse must be dense fp32 of one axis"),
        ({"x_row": 2}, "dy_row and x_row must be among the 2 rows of inverse, got 0 and 2"),
    ],
)
def test_what_cannot_be_computed_is_refused(change, message):
    arguments: dict[str, Any] = {
        "dy": of_gradient(2, 16, 8, 8),
        "x": of_activation(2, 16, 8, 8),
        "inverse": torch.ones(2),
        "kernel_size": (3, 3),
        "dy_row": 0,
        "x_row": 1,
    }
    with pytest.raises((ValueError, TypeError), match=f"conv2d_wgrad_fp8: {message}"):
        conv2d_wgrad_fp8.plan(target=SM_90, **{**arguments, **change})


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("sample", OP.samples, ids=lambda s: s.why)
def test_every_candidate_is_right(sample):
    arguments = sample.arguments(E4M3, "cuda")
    for config in conv2d_wgrad_fp8.candidates(**arguments):
        right_gradients(arguments, config)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_random_shapes_against_float64(seed):
    """Ten calls a seed: each compiles two kernels of its own."""
    rng = random.Random(seed)
    for _ in range(10):
        x, weight, promote = random_problem(rng)
        arguments = wgrad_fp8_sample("", x, weight, promote=promote).arguments(E4M3, "cuda")
        right_gradients(arguments, rng.choice(conv2d_wgrad_fp8.candidates(**arguments)))


@pytest.mark.gpu
@pytest.mark.parametrize("promote", [0, 128, 256, 1024])
def test_every_promotion_is_right(promote):
    right_gradients(wgrad_fp8_sample("", (64, 128, 32, 32), (128, 3, 3), promote=promote).arguments(E4M3, "cuda"))


@pytest.mark.gpu
def test_equal_calls_give_equal_bits():
    arguments = OP.samples[0].arguments(E4M3, "cuda")
    first, second = (OP(**arguments) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
