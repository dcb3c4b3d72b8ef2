"""Convolution of FP8 operands: its numbers on a GPU, all else without one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ridgeline.kernels import conv2d_fp8
from ridgeline.kernels._op import typical_target
from ridgeline.numerics import compare, to_float64
from shared_kernels import sizes_of_one_kernel

SM_90 = typical_target("sm_90")
OP = conv2d_fp8.OP


@pytest.mark.parametrize("dtype", conv2d_fp8.OPERANDS)
@pytest.mark.parametrize("sample", [s for s in OP.samples if not s.real_size], ids=lambda s: s.why)
def test_without_a_gpu_it_is_its_reference(sample, dtype):
    arguments = sample.arguments(dtype, "cpu")
    y = OP(**arguments)
    assert y.dtype == torch.bfloat16 and y.is_contiguous(memory_format=torch.channels_last)
    x, weight = arguments["x"].double(), arguments["weight"].double()
    exact = F.conv2d(x, weight, padding=arguments["padding"]) * 2.0**-8 * weight[0].numel() ** -0.5
    if arguments["bias"] is not None:
        exact += arguments["bias"].double()[:, None, None]
    if arguments["residual"] is not None:
        exact += arguments["residual"].double()
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-6)
    torch.library.opcheck(OP.overload, (), arguments, test_utils=("test_faketensor",))


@pytest.mark.parametrize(("r", "s"), [(3, 3), (1, 5), (1, 1)])
def test_the_gradient_of_x_is_a_convolution_too(r, s):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 24, r, s, generator=generator, dtype=torch.float64)
    dy = torch.randn(2, 16, 6, 7, generator=generator, dtype=torch.float64)
    padding = (r // 2, s // 2)
    expected = torch.nn.grad.conv2d_input((2, 24, 6, 7), weight, dy, padding=padding)
    turned = conv2d_fp8.for_dgrad(weight)
    assert turned.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(F.conv2d(dy, turned, padding=(r - 1 - padding[0], s - 1 - padding[1])), expected)
    narrow = weight.to(torch.float8_e4m3fn)
    assert torch.equal(conv2d_fp8.for_dgrad(narrow).float(), conv2d_fp8.for_dgrad(narrow.float()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.empty(1, 16, 8, 8)}, "x must be torch.float8_e4m3fn or torch.float8_e5m2, got torch.float32"),
        ({"weight": torch.empty(24, 16, 3, 3).to(torch.float8_e5m2)}, "weight must be torch.float8_e4m3fn"),
        ({"inverse": torch.ones(2).double()}, r"inverse must be dense fp32 of one axis on cpu, got torch.float64 of"),
        ({"inverse": torch.ones(4)[::2]}, r"inverse must be dense fp32 of one axis on cpu, got torch.float32 of"),
        ({"weight_row": 2}, "x_row and weight_row must be among the 2 of inverse, got 0 and 2"),
        ({"bias": torch.ones(24).half()}, r"bias must be fp32 or torch.bfloat16 of shape \(24,\)"),
        (
            {
                "x": torch.empty(1, 8, 8, 8).to(torch.float8_e4m3fn),
                "weight": torch.empty(24, 8, 3, 3).to(torch.float8_e4m3fn),
            },
            "channels must be multiples of 16 and filters of 8, got 8 and 24",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused(change, message):
    arguments: dict[str, Any] = {
        "x": torch.empty(1, 16, 8, 8).to(torch.float8_e4m3fn),
        "weight": torch.empty(24, 16, 3, 3).to(torch.float8_e4m3fn),
        "inverse": torch.ones(2),
        "x_row": 0,
        "weight_row": 1,
        "bias": None,
        "padding": (1, 1),
        **change,
    }
    channels_last: dict[str, Any] = {
        name: t.contiguous(memory_format=torch.channels_last) if isinstance(t, torch.Tensor) and t.dim() == 4 else t
        for name, t in arguments.items()
    }
    with pytest.raises((ValueError, TypeError), match=f"conv2d_fp8: {message}"):
        conv2d_fp8.plan(target=SM_90, **channels_last)


# --- on a GPU --------------------------------------------------------------------------------------------------------


def right(arguments, config=None):
    launch = conv2d_fp8.plan(config=config, target=SM_90, **arguments)
    launch.output.fill_(float("nan"))
    launch.run()
    # conv2d's own sums of FP8 values in fp32: TF32 would round them
    with torch.backends.cudnn.flags(allow_tf32=False):
        eager = OP.reference(**arguments)
    verdict = compare(launch.output, OP.reference(**to_float64(arguments)), eager, eps=conv2d_fp8.eps(**arguments))
    assert verdict.passed, f"{config}: {verdict.reason}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", conv2d_fp8.OPERANDS)
@pytest.mark.parametrize("sample", OP.samples, ids=lambda s: s.why)
def test_every_candidate_is_right(sample, dtype):
    arguments = sample.arguments(dtype, "cuda")
    for config in conv2d_fp8.candidates(**arguments):
        right(arguments, config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", OP.dtypes)
@pytest.mark.parametrize(
    ("seed", "channels", "weight"),
    [(0, 16, (16, 3, 3)), (1, 80, (200, 1, 1)), (2, 128, (16, 1, 1)), (3, 80, (200, 3, 3))],
)
def test_random_sizes(seed, channels, weight, dtype):
    def arguments(size, device):
        n, h, w = size
        return conv2d_fp8.fp8_sample("", (n, channels, h, w), weight).arguments(dtype, device)

    sizes = sizes_of_one_kernel(lambda size: conv2d_fp8.plan(target=SM_90, **arguments(size, "meta")), seed)
    for size in sizes:
        right(arguments(size, "cuda"))
