"""Frames in, results out: a model behind its letterbox as one module, so that `compile` fuses the two.

detector = from_frame(model, 1080, 1920)
fast = ridgeline.compile(detector, frame)      # frame: uint8 [1080, 1920, 3] on the model's device
boxes = letterbox.boxes_back(rows, detector.fit)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.kernels import _letterbox
from ridgeline.workloads.letterbox import Letterbox, plan

ORDERS = ("rgb", "bgr")


class FromFrame(nn.Module):
    """Calls `model`, which takes RGB [N, 3, H, W] in 0..1, on frames: uint8 [height, width, 3], or a batch of them.

    Bit-equal to `letterbox.apply` and `letterbox.to_tensor` on a CPU, in the dtype the module is cast to. Boxes come
    out in canvas pixels: `letterbox.boxes_back(boxes, module.fit)` maps them to the frame.
    """

    rows: Tensor
    columns: Tensor
    like: Tensor

    def __init__(self, model: nn.Module, fit: Letterbox, *, order: str = "rgb") -> None:
        """`order` is that of the frame's channels: "rgb", or "bgr" as OpenCV decodes. Raises UsageError for another."""
        super().__init__()
        if order not in ORDERS:
            raise UsageError(f"a frame's channel order must be one of {', '.join(ORDERS)}, got {order!r}")
        self.model, self.fit, self.order = model, fit, order
        weights = [tensor for tensor in model.parameters() if tensor.is_floating_point()]
        device = weights[0].device if weights else torch.device("cpu")
        rows = _letterbox.axis_table(fit.image_h, fit.new_h, fit.top, fit.bottom, vertical=True)
        columns = _letterbox.axis_table(fit.image_w, fit.new_w, fit.left, fit.right, vertical=False)
        # not persistent: the state dict is the model's
        self.register_buffer("rows", rows.to(device), persistent=False)
        self.register_buffer("columns", columns.to(device), persistent=False)
        # the dtype to feed the model: a cast of this module casts it, while a batch norm's weights may stay in fp32
        dtype = weights[0].dtype if weights else torch.float32
        self.register_buffer("like", torch.empty(0, dtype=dtype, device=device), persistent=False)
        self.training = model.training

    def forward(self, frame: Tensor) -> Tensor:
        expected = (self.fit.image_h, self.fit.image_w, 3)
        if frame.dtype != torch.uint8 or frame.dim() not in (3, 4) or frame.shape[-3:] != expected:
            raise UsageError(
                f"a frame must be uint8 {list(expected)} as planned, got {frame.dtype} {list(frame.shape)}"
            )
        frames = frame if frame.dim() == 4 else frame[None]
        x = _letterbox.OPERATOR(
            frames.permute(0, 3, 1, 2), self.rows, self.columns, dtype=self.like.dtype, reverse=self.order == "bgr"
        )
        return self.model(x)


def from_frame(
    model: nn.Module, height: int, width: int, *, size: int = 640, mode: str = "square", order: str = "rgb"
) -> FromFrame:
    """`model` behind the letterbox of height x width frames; `size` and `mode` as for `letterbox.plan`.

    Raises UsageError for a size, mode or order that does not exist.
    """
    return FromFrame(model, plan(height, width, size, mode=mode), order=order)
