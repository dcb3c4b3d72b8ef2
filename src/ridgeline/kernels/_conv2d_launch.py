"""How conv2d_fprop, conv2d_dgrad and conv2d_fp8 launch conv2d_gluon_kernel: only what they read and write differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ridgeline.kernels._conv2d_pass import Config, Pass, box_count, box_of, map_of, step_of, tile_configs, weight_map
from ridgeline.kernels._nhwc import cdiv
from ridgeline.kernels._op import Launch, Target


@dataclass(frozen=True)
class Product:
    """The tensors of one call, checked: out = conv2d(operand, weight) * inverse[row] * inverse[row of weight] + bias.

    With `dgrad` the operand is dy and out is dx: the weight's filters are reduced, and its taps run backward.

    inverse   [tensors]           fp32; None: 1
    bias      [channels of out]   None: none
    """

    one: Pass
    operand: Tensor
    weight: Tensor
    out: Tensor
    inverse: Tensor | None = None
    rows: tuple[int, int] | tuple[None, None] = (None, None)  # of inverse, for operand and weight
    bias: Tensor | None = None
    dgrad: bool = False

    def is_valid(self, config: Config, target: Target) -> bool:
        return config.is_valid(self._size, self._step, target)

    def launch(self, kernel: Any, config: Config | None, target: Target) -> Launch:
        """The launch with a config; None: the likeliest. Raises ValueError for one that is not valid.

        `kernel` is conv2d_gluon_kernel, by an import in the op's own file: `source_hash` follows those alone.
        """
        reduced, (n, channels, h, w) = self.operand.shape[1], self.out.shape
        config = config or next(iter(tile_configs(reduced, channels, self._size, target)), None)
        if config is None or not self.is_valid(config, target):
            self.one.refuse(f"{config} is not valid for {self.one.conv} on {target.arch}")
        box, pieces = box_of(n, h, w, config.pixels), config.pieces(self._size, self._step, target)
        tiles = box_count(n, h, w, box) * cdiv(channels, config.channels)
        weight_box = (self._step, 1, config.channels) if self.dgrad else (config.channels, 1, self._step)
        (r, s), (top, left) = self.one.conv.filter, self.one.padding
        if self.dgrad:
            # row h of x meets row h + top - tap of dy, and the last tap comes first
            top, left = r - 1 - top, s - 1 - left
        return Launch(
            kernel=kernel,
            grid=(min(tiles, target.sm_count),),
            arguments={
                "x_desc": map_of(self.operand, box, self._step),
                "weight_desc": weight_map(self.weight, weight_box),
                "y_desc": map_of(self.out, box, config.channels // pieces),
                "inverse_ptr": self.inverse,
                "bias_ptr": self.bias,
                "x_row": self.rows[0],
                "weight_row": self.rows[1],
                "images": n,
                "H": h,
                "W": w,
            },
            constants={
                "REDUCED": reduced, "OUT": channels, "R": r, "S": s, "TOP": top, "LEFT": left, "DGRAD": self.dgrad,
                "BOX_N": box[0], "BOX_H": box[1], "BOX_W": box[2], "BLOCK_N": config.channels, "BLOCK_K": self._step,
                "STAGES": config.stages, "PIECES": pieces,
            },
            num_warps=config.num_warps,
            num_stages=1,
            output=self.out,
        )  # fmt: skip

    @property
    def _size(self) -> int:
        """Bytes of an operand's element."""
        return self.operand.element_size()

    @property
    def _step(self) -> int:
        return step_of(self.operand.shape[1], self._size)
