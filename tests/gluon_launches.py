"""Launches of the Gluon kernels of training for `gluon_interpreter`, on the CPU, and what their ops return of them."""

from __future__ import annotations

import torch

from ridgeline.kernels import conv2d_fp8, conv2d_wgrad_fp8
from ridgeline.kernels._conv2d_narrow_call import NarrowConfig
from ridgeline.kernels._op import typical_target

SM_90 = typical_target("sm_90")
FORMAT = {conv2d_fp8.OP: torch.float8_e5m2, conv2d_wgrad_fp8.OP: torch.float8_e4m3fn}


def wgmma_configs(op, arguments, target=SM_90):
    """The candidates that are of a Gluon kernel: kernels for few channels are not."""
    return [c for c in op.launcher.candidates(target=target, **arguments) if not isinstance(c, NarrowConfig)]


def first_launch(op, sample, config=None, *, target=SM_90):
    """The launch that multiplies, on the CPU; and its arguments."""
    arguments = sample.arguments(FORMAT.get(op, torch.float16), "cpu")
    config = config or wgmma_configs(op, arguments, target)[0]
    launch = op.launcher.plan(config=config, target=target, **arguments).parts[0]
    launch.output.fill_(float("nan"))
    return launch, arguments


def result(op, launch, arguments):
    """What the op returns, of the sums of a weight gradient too."""
    if launch.output.dim() == 4:
        return launch.output
    shape = op.reference(**arguments).shape
    k, c, r, s = shape
    dw = launch.output.sum(0).view(k, r, s, c).permute(0, 3, 1, 2)
    if op is conv2d_wgrad_fp8.OP:
        dw = dw * (arguments["inverse"][arguments["dy_row"]] * arguments["inverse"][arguments["x_row"]])
    return dw.to(torch.bfloat16 if op is conv2d_wgrad_fp8.OP else torch.float16)
