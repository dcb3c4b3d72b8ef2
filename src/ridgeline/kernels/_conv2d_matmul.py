"""A convolution with filters of one pixel as the product of matrices that it is, by PyTorch.

x   [N, C, H, W]    channels_last, or a channel slice of it  =  pixels [N H W, C] of the same memory
w   [K, C, 1, 1]    channels_last                            =  a linear layer's weight [K, C]

cuBLAS computes these where cuDNN computes the convolution; which is faster is a matter of sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ridgeline.cost.conv import ConvProblem


def is_matmul(conv: ConvProblem) -> bool:
    """Whether each pixel of y is made of one of x."""
    alone = conv.filter == conv.stride == conv.dilation == (1, 1)
    return alone and conv.padding == (0, 0) and conv.groups == 1


def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """y [N, K, H, W] channels_last, as conv2d returns it; a bias is rounded to the dtype of x."""
    y = F.linear(_pixels(x), _matrix(weight), None if bias is None else bias.to(x.dtype))
    y = _map(y, x)
    return y if residual is None else y + residual


def input_gradient(dy: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """dx [N, C, H, W] channels_last."""
    dx = _map(_pixels(dy) @ _matrix(weight), dy)
    return dx if residual is None else dx + residual


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dw [K, C, 1, 1] channels_last."""
    return (_pixels(dy).t() @ _pixels(x))[:, :, None, None]


def called_if(conv: ConvProblem, call: Callable[[], Tensor]) -> Callable[[], Tensor] | None:
    """A call of one of these where the convolution is such a product, for `Launcher.matmul`."""
    return call if is_matmul(conv) else None


def _pixels(tensor: Tensor) -> Tensor:
    return tensor.permute(0, 2, 3, 1).reshape(-1, tensor.shape[1])


def _matrix(weight: Tensor) -> Tensor:
    return weight.flatten(1)


def _map(pixels: Tensor, like: Tensor) -> Tensor:
    n, _, h, w = like.shape
    return pixels.view(n, h, w, pixels.shape[1]).permute(0, 3, 1, 2)
