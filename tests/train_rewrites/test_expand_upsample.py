"""Nearest upsampling by a whole factor becomes an expand, bit for bit the same; all else is left alone."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.debugging import aot_eager

from ridgeline.train_backend import TrainBackend


def run(fn, x):
    x = x.detach().requires_grad_()
    y = fn(x)
    (y * torch.arange(y.numel()).view_as(y)).sum().backward()
    return y, x.grad


def image(height=3, width=5, layout=torch.channels_last):
    return torch.randn(2, 8, height, width, generator=torch.Generator().manual_seed(0)).contiguous(memory_format=layout)


def both(fn, x):
    backend = TrainBackend(("expand_upsample",), aot_eager)
    expected, actual = run(fn, x), run(torch.compile(fn, backend=backend, dynamic=False), x)
    torch.testing.assert_close(actual, expected)
    return backend.sites["expand_upsample"], actual[0]


@pytest.mark.parametrize(
    "options",
    [{"scale_factor": 2.0}, {"scale_factor": (3, 3)}, {"size": (6, 10)}, {"scale_factor": 2, "mode": "nearest"}],
)
def test_equals_interpolate(options):
    sites, y = both(lambda x: F.interpolate(x, **options), image())
    assert sites == 1 and y.is_contiguous(memory_format=torch.channels_last)


def test_does_not_fire_on_a_scale_that_reads_other_pixels():
    """2.4 times 2 x 2 is 4 x 4 pixels as 2 times is; PyTorch's CPU kernel and its decomposition differ on which."""
    backend = TrainBackend(("expand_upsample",), aot_eager)
    torch.compile(lambda x: F.interpolate(x, scale_factor=2.4), backend=backend, dynamic=False)(image(2, 2))
    assert backend.sites == {"expand_upsample": 0}


@pytest.mark.parametrize(
    ("options", "x"),
    [
        ({"scale_factor": 2.0, "mode": "bilinear"}, image()),
        ({"scale_factor": (2.0, 3.0)}, image()),
        ({"scale_factor": 1.0}, image()),
        ({"size": (7, 10)}, image()),
        ({"scale_factor": 2.0}, image(layout=torch.contiguous_format)),
        ({"scale_factor": 2.0}, image()[0]),
    ],
)
def test_does_not_fire_on(options, x):
    assert both(lambda x: F.interpolate(x, **options), x)[0] == 0
