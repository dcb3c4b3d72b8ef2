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

1. `anchor_maxima`  takes the largest logit of every anchor, and of those of each tile of up to 64 anchors the 1st, 2nd,
                    4th, 8th ...: its splitters. Each stands for the anchors from the splitter above it to itself.
2. `collect`        searches the splitters for a bound that k anchors reach (each program for itself: cheaper than
                    another kernel). The first k pairs reach it too, so the pairs that do are listed. Of anchors equal
                    to the bound, those of later tiles are left out: k others come before them.
3. `rank`           counts, for every pair of the list, the pairs before it. That count is its row.

Splitters stand for at least half of the anchors that reach the bound, so these are at most 2.5 k or 2 k + 128, whatever
is tied or alike (on maps too large for so many splitters, 75,000 anchors of 80 classes, more). The list is longer by
the classes that reach the bound on one anchor. `rank` takes time quadratic in up to 4096 pairs; an even sample of more
bounds what is ranked, to about k / 2048 of them, except for k above 2048 and, in fp32, among ties on tied anchors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.cost import Cost
from ridgeline.kernels._conv import FLOATS
from ridgeline.kernels._nhwc import cdiv, next_power_of_2, pixel_pitch, random_nhwc
from ridgeline.kernels._op import (
    LastLaunch,
    Launch,
    Launcher,
    Sample,
    Target,
    define,
    execute,
    nearest_first,
    target_of,
    tuned_config,
)
from ridgeline.kernels._topk import anchor_maxima_kernel, collect_kernel, rank_kernel
from ridgeline.kernels._topk_call import Problem
from ridgeline.models.postprocess import MAX_DETECTIONS, STRIDES, anchor_grid, decode_xyxy, top_detections

_BLOCK_LIST = 512  # entries of the list that a program of `rank` compares with at once


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
class Config:
    """Warps of each kernel, tiles a program of `collect`, rows a program of `rank`."""

    maxima_warps: int
    collect_warps: int
    collect_tiles: int
    rank_warps: int
    rank_rows: int

    def is_valid(self, problem: Problem, target: Target) -> bool:  # noqa: ARG002 - the contract's signature
        """Whether blocks are powers of two and a thread keeps what it has loaded in registers, as far as it can."""
        logits = problem.tile * problem.block_c
        held_bytes = max(2 * logits, next_power_of_2(problem.splitters) * problem.splitter_dtype.itemsize)
        return (
            {self.maxima_warps, self.collect_warps, self.rank_warps} <= {1, 2, 4, 8, 16}
            and self.maxima_warps >= min(16, logits // (64 * 32))
            and self.collect_warps >= min(16, held_bytes // (128 * 32))
            and 1 <= self.collect_tiles <= problem.tiles
            and self.rank_rows in (1, 2, 4, 8, 16, 32, 64)
            and self.rank_rows * _BLOCK_LIST <= 128 * 32 * self.rank_warps
        )


def default_config(problem: Problem, target: Target) -> Config:
    """Each program of `collect` searches all splitters, so there are no more programs than run at once."""
    tiles = max(1, min(problem.tiles, cdiv(problem.tiles * problem.box_p3.shape[0], 2 * target.sm_count)))
    return next(c for w in (8, 16) if (c := Config(w, w, tiles, 2, 1)).is_valid(problem, target))


def candidates(*, target: Target | None = None, **arguments: Any) -> tuple[Config, ...]:
    """The default, then every other valid config worth timing, those nearest to it first; none that suits lists of one
    length alone.
    """
    problem = Problem(**arguments)
    target = target or target_of(problem.box_p3)
    default = default_config(problem, target)
    tiles = (default.collect_tiles, 2 * default.collect_tiles)
    tried = (Config(m, c, t, r, r // 2) for m in (4, 8) for c in (4, 8, 16) for t in tiles for r in (2, 4, 8))
    return nearest_first(default, (c for c in tried if c.is_valid(problem, target)))


def typical(**arguments: Any) -> dict[str, Any]:
    """The call on logits like those of a detector: how long the lists become, and so the best config, follows them."""
    made = {}
    for level in (3, 4, 5):
        x = arguments[f"logits_p{level}"]
        made[f"logits_p{level}"] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        made[f"logits_p{level}"].copy_(_detector_logits(x.shape, x.dtype, str(x.device), seed=10 + level))
    return {**arguments, **made}


def plan(*, config: Config | None = None, target: Target | None = None, **arguments: Any) -> LastLaunch:
    """The launches for one call; `arguments` are Problem's. Runs nothing."""
    problem = Problem(**arguments)
    target = target or target_of(problem.box_p3)
    if config is None:
        tuned = tuned_config(OP, Config, lambda c: c.is_valid(problem, target), **arguments)
        config = tuned or default_config(problem, target)
    if not config.is_valid(problem, target):
        raise ValueError(f"detect_topk: {config} is not valid for {problem.classes} classes on {target.arch}")
    n, programs = problem.box_p3.shape[0], _rank_programs(problem, config, target)
    room = max(problem.pairs, programs * config.rank_rows, 2 * _BLOCK_LIST)
    y = _empty(problem, (n, problem.detections, 6), torch.float32) if problem.out is None else problem.out
    maxima = {
        "anchor_key_ptr": _empty(problem, (n, problem.anchors), torch.int32),
        "splitter_ptr": _empty(problem, (n, problem.splitters), problem.splitter_dtype),
    }
    count = {"count_ptr": _empty(problem, (n,), torch.int32)}
    found = {
        "order_ptr": _empty(problem, (n, room), torch.int64),
        "pair_ptr": None if problem.pair_bits else _empty(problem, (n, room), torch.int32),
    }
    maps = {f"logits{level}_ptr": logits for level, logits in enumerate(problem.logits)}
    boxes = {f"box{level}_ptr": box for level, box in enumerate(problem.boxes)}
    cells = {f"CELLS{level}": cells for level, cells in enumerate(problem.cells)}
    shared = {"C": problem.classes, "PDL": problem.pdl, "SHIFT": problem.shift, **cells}
    tiling = {
        "TILES": problem.tiles, "SLOTS": problem.slots, "TILE_BITS": problem.tile_bits, "BLOCK_A": problem.tile,
        "BLOCK_C": problem.block_c, "WORD_BITS": problem.word_bits, **_pitches(problem.logits),
    }  # fmt: skip
    listing = {"K": problem.detections, "PAIR_BITS": problem.pair_bits, "ROOM": room}
    options: dict[str, Any] = {"num_stages": 1, "pdl": problem.pdl}
    first = Launch(
        kernel=anchor_maxima_kernel,
        grid=(problem.tiles, n),
        arguments={**maps, **maxima, **count},
        constants={**shared, **tiling},
        num_warps=config.maxima_warps,
        output=maxima["splitter_ptr"],
        **options,
    )
    search = {"PROGRAM_TILES": config.collect_tiles, "BLOCK_S": next_power_of_2(problem.splitters)}
    collect = Launch(
        kernel=collect_kernel,
        grid=(cdiv(problem.tiles, config.collect_tiles), n),
        arguments={**maps, **maxima, **count, **found},
        constants={**shared, **tiling, **listing, **search},
        num_warps=config.collect_warps,
        output=count["count_ptr"],
        **options,
    )
    decode = {"WIDTH0": problem.box_p3.shape[3], "STRIDE0": STRIDES[0], **_pitches(problem.boxes)}
    return LastLaunch(
        kernel=rank_kernel,
        grid=(programs, n),
        arguments={**boxes, **count, **found, "y_ptr": y},
        constants={**shared, **listing, **decode, "BLOCK_ROWS": config.rank_rows, "BLOCK_LIST": _BLOCK_LIST},
        num_warps=config.rank_warps,
        output=y,
        before=(first, collect),
        **options,
    )


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


def _pitches(maps: tuple[Tensor, ...]) -> dict[str, int]:
    return {f"PITCH{level}": pixel_pitch(x) or 0 for level, x in enumerate(maps)}


def _rank_programs(problem: Problem, config: Config, target: Target) -> int:
    """For an image: every pair of a usual list is a row of some program, but many images fill the GPU with fewer."""
    rows = min(1024, problem.pairs, 4 * problem.detections)
    most = max(64, cdiv(8 * target.sm_count, max(1, problem.box_p3.shape[0])))
    return min(cdiv(rows, config.rank_rows), most)


def _sample(
    why: str, n: int, classes: int, size: tuple[int, int], *, real_size: bool = False, **choices: Any
) -> Sample:
    """`size` is the image's, in pixels."""

    def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
        maps = {}
        for level, stride in zip((3, 4, 5), STRIDES, strict=True):
            shape = (size[0] // stride, size[1] // stride)
            maps[f"box_p{level}"] = random_nhwc((n, 4, *shape), dtype, device, seed=level)
            make = _detector_logits if real_size else random_nhwc
            maps[f"logits_p{level}"] = make((n, classes, *shape), dtype, device, seed=10 + level)
        return {**maps, **choices}

    return Sample(why, arguments, real_size)


def _detector_logits(shape: Sequence[int], dtype: torch.dtype, device: str, *, seed: int) -> Tensor:
    """Like those of a trained YOLO26n on a photo: low, smooth over cells, alike for all classes.

    The pairs that reach the bound then lie together; those of independent logits are spread evenly, one to an anchor.
    """
    n, c, h, w = shape
    if device == "meta":
        return random_nhwc((n, c, h, w), dtype, device, seed=seed)
    coarse = random_nhwc((n, c + 1, cdiv(h, 8), cdiv(w, 8)), torch.float32, device, seed=seed)
    smooth = F.interpolate(coarse, size=(h, w), mode="bilinear")
    of_class = random_nhwc((1, c, 1, 1), torch.float32, device, seed=0)
    logits = 2.0 * smooth[:, 1:] + 4.0 * smooth[:, :1] + of_class - 19.0
    return logits.to(dtype).contiguous(memory_format=torch.channels_last)


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
    launcher=Launcher(plan, candidates, typical),
    samples=SAMPLES,
    dtypes=FLOATS,
)
