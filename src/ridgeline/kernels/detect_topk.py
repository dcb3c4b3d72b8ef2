"""Detections from raw head outputs: decode, then the best (anchor, class) pairs, best first; three short kernels.

box_p3, box_p4, box_p5           [N, 4, H, W]  distances (left, top, right, bottom) in grid units at strides 8, 16, 32
logits_p3, logits_p4, logits_p5  [N, C, H, W]  of the same three sizes, each half the one before; boxes and logits are
                                               channels_last or channel slices of it; fp32, fp16, bf16
limit                            most detections of an image
pdl                              programmatic dependent launch of all three kernels; sm_90 and later
y                                [N, min(limit, anchors), 6]  fp32: x1, y1, x2, y2 in pixels, score, class

Exactly `models.postprocess.top_detections` on decoded boxes, ties and NaN (above every number) included. Raises
ValueError or TypeError for any other layout, size, dtype or choice.

That function first takes the k anchors with the largest logit, then the k largest of their k·C logits. Both steps are
one: the answer is the first k of all pairs in the order (logit descending, largest logit of the anchor descending,
anchor, class), because an anchor outside its first step has k anchors before it, each with a pair before all of its
own. So no exact selection is needed until the last kernel:

1. `group_maxima`  deals the pairs into groups, more than k of them, and takes the largest logit of each.
2. `collect`       bounds the k-th pair from below by the k-th largest group maximum, found by bisection (each
                   program for itself: cheaper than another kernel), and appends the pairs that reach it to a list.
                   Of the pairs equal to the bound, those of later anchors with no better pair are left out.
3. `rank`          counts, for every pair of the list, the pairs before it. That count is its row.

Nothing is sorted, the order of the list is free, and every step spreads over the whole GPU. The list has room for all
anchors · C pairs, so no input can overflow it; one on which most logits are equal is ranked in time quadratic in their
number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.kernels._conv import FLOATS, INT32_ELEMENTS
from ridgeline.kernels._nhwc import cdiv, check_map, next_power_of_2, pixel_pitch, random_nhwc
from ridgeline.kernels._op import Launch, Launcher, Sample, Target, define, execute, target_of, tuned_config
from ridgeline.kernels._topk import collect_kernel, group_maxima_kernel, rank_kernel
from ridgeline.models.postprocess import MAX_DETECTIONS, STRIDES, anchor_grid, decode_xyxy, top_detections

_BLOCK_LIST = 1024  # pairs that `rank` compares with at once; most lists are shorter
_MOST_LOGITS = 8192  # of a program of `group_maxima`: 64 a thread


def reference(
    box_p3: Tensor,
    box_p4: Tensor,
    box_p5: Tensor,
    logits_p3: Tensor,
    logits_p4: Tensor,
    logits_p5: Tensor,
    *,
    limit: int = MAX_DETECTIONS,
    pdl: bool = False,  # noqa: ARG001 - a choice of scheduling, not of meaning
) -> Tensor:
    height, width = (STRIDES[0] * side for side in box_p3.shape[2:])
    points, strides = anchor_grid(height, width, box_p3.device)
    distances = torch.cat([level.flatten(2) for level in (box_p3, box_p4, box_p5)], dim=2)
    logits = torch.cat([level.flatten(2) for level in (logits_p3, logits_p4, logits_p5)], dim=2)
    found = top_detections(decode_xyxy(distances, points, strides), logits, limit=limit)
    return found.to(torch.promote_types(box_p3.dtype, torch.float32))


def cost(
    box_p3: Tensor,
    box_p4: Tensor,
    box_p5: Tensor,
    logits_p3: Tensor,
    logits_p4: Tensor,
    logits_p5: Tensor,
    *,
    limit: int = MAX_DETECTIONS,
    pdl: bool = False,  # noqa: ARG001
) -> Cost:
    """One comparison a logit, every map read once."""
    logits = (logits_p3, logits_p4, logits_p5)
    anchors = sum(level[0, 0].numel() for level in logits)
    read_bytes = sum(level.nbytes for level in (box_p3, box_p4, box_p5, *logits))
    rows = box_p3.shape[0] * min(limit, anchors)
    return Cost(sum(level.numel() for level in logits), read_bytes, rows * 6 * 4, "cuda_fp32")


@dataclass(frozen=True)
class Problem:
    """One call, checked."""

    box_p3: Tensor
    box_p4: Tensor
    box_p5: Tensor
    logits_p3: Tensor
    logits_p4: Tensor
    logits_p5: Tensor
    limit: int = MAX_DETECTIONS
    pdl: bool = False
    out: Tensor | None = None

    def __post_init__(self) -> None:
        first, logits = self.box_p3, self.logits_p3
        if any(t.dim() != 4 for t in (*self.boxes, *self.logits)) or 0 in logits.shape[1:]:
            _refuse(f"boxes and logits must have 4 axes, got {tuple(first.shape)} and {tuple(logits.shape)}")
        if first.dtype not in FLOATS or logits.dtype not in FLOATS:
            _refuse(f"maps must be fp32, fp16 or bf16, got {first.dtype} boxes and {logits.dtype} logits", TypeError)
        n, _, h, w = first.shape
        if h % 4 or w % 4:
            _refuse(f"the map of stride 8 must have sides that are multiples of 4, got {h}x{w}")
        if self.limit < 1:
            _refuse(f"limit must be at least 1, got {self.limit}")
        for level, box, logit in zip((3, 4, 5), self.boxes, self.logits, strict=True):
            size = h >> (level - 3), w >> (level - 3)
            check_map("detect_topk", f"box_p{level}", box, like=first, shape=(n, 4, *size))
            check_map("detect_topk", f"logits_p{level}", logit, like=logits, shape=(n, self.classes, *size))
            for name, tensor in (("box", box), ("logits", logit)):
                if tensor.device != first.device:
                    _refuse(f"{name}_p{level} must be on {first.device} like box_p3, got {tensor.device}")
                if size[0] * size[1] * (pixel_pitch(tensor) or 0) >= INT32_ELEMENTS:
                    _refuse(f"{name}_p{level} must span less than 2^31 elements an image, got {tuple(tensor.shape)}")
        if self.anchors * self.classes >= INT32_ELEMENTS:
            _refuse(f"anchors times classes must be below 2^31, got {self.anchors} times {self.classes}")

    @property
    def boxes(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.box_p3, self.box_p4, self.box_p5

    @property
    def logits(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.logits_p3, self.logits_p4, self.logits_p5

    @property
    def classes(self) -> int:
        return self.logits_p3.shape[1]

    @property
    def cells(self) -> tuple[int, ...]:
        """Anchors of each level."""
        return tuple(box.shape[2] * box.shape[3] for box in self.boxes)

    @property
    def anchors(self) -> int:
        return sum(self.cells)

    @property
    def detections(self) -> int:
        return min(self.limit, self.anchors)

    @property
    def group(self) -> int:
        """Cells of a group on the coarsest level, four and sixteen times as many on the finer ones.

        The most that leave every level alone a third more groups than there are detections: in a network that has
        learned nothing all of the best pairs may lie on one level.
        """
        fits = (size for size in (4, 2) if 16 * size <= self.tile)
        return next((size for size in fits if 3 * self.level_groups(size) >= 4 * self.detections), 1)

    @property
    def chunk(self) -> int:
        """Classes of a group: the most that leave six groups for each detection, at least eight classes."""
        widest = next_power_of_2(self.classes)
        sizes = (widest >> shift for shift in range(widest.bit_length()) if widest >> shift >= 8)
        return next((size for size in sizes if self.groups(size) >= 6 * self.detections), min(8, widest))

    @property
    def tile(self) -> int:
        """Cells a program of `group_maxima`."""
        return max(16, min(64, _MOST_LOGITS // next_power_of_2(self.classes)))

    @property
    def tiles(self) -> int:
        """Programs of `group_maxima`, each on one level."""
        cells = self.level_groups(self.group) * self.group
        return sum(cdiv(cells * finer, self.tile) for finer in (16, 4, 1))

    def level_groups(self, group: int) -> int:
        return cdiv(self.cells[-1], group)

    def groups(self, chunk: int) -> int:
        return len(self.cells) * self.level_groups(self.group) * cdiv(self.classes, chunk)


@dataclass(frozen=True)
class Config:
    """Anchors a program of `collect`, rows a program of `rank`, warps of all three kernels."""

    collect_anchors: int
    rank_rows: int
    num_warps: int

    def is_valid(self, problem: Problem, target: Target) -> bool:  # noqa: ARG002 - the contract's signature
        """Whether blocks are powers of two and a thread of `collect` keeps its logits in registers."""
        logits = self.collect_anchors * next_power_of_2(problem.classes)
        return (
            all(block >= 1 and block & (block - 1) == 0 for block in (self.collect_anchors, self.rank_rows))
            and self.num_warps in (1, 2, 4, 8)
            and (logits <= 32 * 32 * self.num_warps or self.collect_anchors == 1)
            and self.rank_rows * _BLOCK_LIST <= 128 * 32 * self.num_warps
        )


@dataclass(frozen=True)
class LastLaunch(Launch):
    """The last of several launches, run in order."""

    before: tuple[Launch, ...] = ()

    def run(self) -> None:
        for launch in self.before:
            launch.run()
        super().run()


def default_config(problem: Problem, target: Target) -> Config:  # noqa: ARG001 - the contract's signature
    """Sixteen logits a thread in `collect`; in `rank` a list of 1024 pairs fills two programs a multiprocessor."""
    return Config(max(1, min(64, 2048 // next_power_of_2(problem.classes))), 4, 4)


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    """The default, then every other valid config worth timing."""
    problem = Problem(**arguments)
    target = target or target_of(problem.box_p3)
    default = default_config(problem, target)
    tried = (Config(a, r, w) for a in (4, 8, 16, 32, 64) for r in (4, 8, 16) for w in (2, 4, 8))
    return (default, *(c for c in tried if c != default and c.is_valid(problem, target)))


def plan(*, config: Config | None = None, target: Target | None = None, **arguments: Any) -> LastLaunch:
    """The launches for one call; `arguments` are Problem's. Runs nothing."""
    problem = Problem(**arguments)
    target = target or target_of(problem.box_p3)
    if config is None:
        tuned = tuned_config(OP, Config, lambda c: c.is_valid(problem, target), **arguments)
        config = tuned or default_config(problem, target)
    if not config.is_valid(problem, target):
        raise ValueError(f"detect_topk: {config} is not valid for {problem.classes} classes on {target.arch}")
    n, group_count = problem.box_p3.shape[0], problem.groups(problem.chunk)
    y = _empty(problem, (n, problem.detections, 6), torch.float32) if problem.out is None else problem.out
    groups = {name: _empty(problem, (n, group_count), torch.int32) for name in ("group_key_ptr", "group_anchor_ptr")}
    count = {"count_ptr": _empty(problem, (n,), torch.int32)}
    pairs = (n, problem.anchors * problem.classes)
    found = {"order_ptr": _empty(problem, pairs, torch.int64), "pair_ptr": _empty(problem, pairs, torch.int32)}
    maps = {f"logits{level}_ptr": logits for level, logits in enumerate(problem.logits)}
    boxes = {f"box{level}_ptr": box for level, box in enumerate(problem.boxes)}
    shared = {"C": problem.classes, "PDL": problem.pdl, **{f"CELLS{i}": cells for i, cells in enumerate(problem.cells)}}
    logit_pitches = {f"PITCH{level}": pixel_pitch(logits) or 0 for level, logits in enumerate(problem.logits)}
    box_pitches = {f"PITCH{level}": pixel_pitch(box) or 0 for level, box in enumerate(problem.boxes)}
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": 1, "pdl": problem.pdl}
    maxima = Launch(
        kernel=group_maxima_kernel,
        grid=(problem.tiles, n),
        arguments={**maps, **groups, **count},
        constants={
            **shared, **logit_pitches, "GROUP": problem.group, "CHUNK": problem.chunk,
            "BLOCK_A": problem.tile, "BLOCK_C": next_power_of_2(problem.classes),
        },
        output=groups["group_key_ptr"],
        **options,
    )  # fmt: skip
    collect = Launch(
        kernel=collect_kernel,
        grid=(sum(cdiv(cells, config.collect_anchors) for cells in problem.cells), n),
        arguments={**maps, **groups, **count, **found},
        constants={
            **shared, **logit_pitches, "K": problem.detections, "GROUPS": group_count,
            "BLOCK_G": next_power_of_2(group_count), "BLOCK_A": config.collect_anchors,
            "BLOCK_C": next_power_of_2(problem.classes),
        },
        output=found["order_ptr"],
        **options,
    )  # fmt: skip
    # every pair of a usual list is a row of some program; a longer list takes more rounds
    programs = cdiv(min(_BLOCK_LIST, problem.anchors * problem.classes), config.rank_rows)
    return LastLaunch(
        kernel=rank_kernel,
        grid=(programs, n),
        arguments={**boxes, **count, **found, "y_ptr": y},
        constants={
            **shared, **box_pitches, "WIDTH0": problem.box_p3.shape[3], "STRIDE0": STRIDES[0],
            "K": problem.detections, "BLOCK_ROWS": config.rank_rows, "BLOCK_LIST": _BLOCK_LIST,
        },
        output=y,
        before=(maxima, collect),
        **options,
    )  # fmt: skip


def detect_topk(
    box_p3: Tensor,
    box_p4: Tensor,
    box_p5: Tensor,
    logits_p3: Tensor,
    logits_p4: Tensor,
    logits_p5: Tensor,
    *,
    limit: int = MAX_DETECTIONS,
    pdl: bool = False,
) -> Tensor:
    problem = Problem(box_p3, box_p4, box_p5, logits_p3, logits_p4, logits_p5, limit, pdl)
    return execute("detect_topk", plan(**vars(problem)), box_p3)


def _empty(problem: Problem, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=problem.box_p3.device)


def _refuse(text: str, kind: type[Exception] = ValueError) -> NoReturn:
    raise kind(f"detect_topk: {text}")


def _sample(
    why: str, n: int, classes: int, size: tuple[int, int], *, real_size: bool = False, **choices: Any
) -> Sample:
    """`size` is the image's, in pixels."""

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        maps = {}
        for level, stride in zip((3, 4, 5), STRIDES, strict=True):
            shape = (size[0] // stride, size[1] // stride)
            maps[f"box_p{level}"] = random_nhwc((n, 4, *shape), dtype, device, seed=level)
            maps[f"logits_p{level}"] = random_nhwc((n, classes, *shape), dtype, device, seed=10 + level)
        return {**maps, **choices}

    return Sample(why, arguments, real_size)


SAMPLES = (
    _sample("fewer detections than anchors", 1, 5, (64, 32), limit=6),
    _sample("two images, more detections than anchors, one class", 2, 1, (32, 32)),
    _sample("YOLO26n at 640", 1, 80, (640, 640), real_size=True),
    _sample("80 classes at 1280", 1, 80, (1280, 1280), real_size=True),
    _sample("batch 32 at 640", 32, 80, (640, 640), real_size=True),
)

OP = define(
    detect_topk,
    reference=reference,
    cost=cost,
    launcher=Launcher(plan, candidates),
    samples=SAMPLES,
    dtypes=FLOATS,
)
