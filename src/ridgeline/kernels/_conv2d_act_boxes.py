"""What conv2d_act copies by boxes: the tensor maps of its operands, and the tiles that are worth timing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from operator import itemgetter

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.kernels._conv import padded
from ridgeline.kernels._conv2d_act_call import Config, Problem
from ridgeline.kernels._conv2d_pass import weight_map
from ridgeline.kernels._nhwc import cdiv, next_power_of_2, pixel_pitch
from ridgeline.kernels._op import Target

_WORTH_FLOPS, _WORTH_CHANNELS = 2**28, 64

_SPLITS = (1, 2, 3, 4, 6, 8)

# What ranks tiles, of an H100/H200: multiply-adds of 16 bits, bytes into shared memory and bytes out, a clock and
# multiprocessor; clocks from a copy's issue to its arrival, and of one more launch with its prologue. The byte rate is
# what makes the 640 TFLOP/s that 128x128 tiles reached on an H200 come out; the others are estimates.
_MADS_A_CLOCK, _BYTES_A_CLOCK, _STORED_A_CLOCK, _LONE_GROUP = 2048, 57, 24, 1.25
_COPY_CLOCKS, _LAUNCH_CLOCKS = 900, 2200
# The same of specialised warps, in clocks of 1.75 GHz: what multiprocessors copy together, what one of them can, the
# start without what overlaps, what a tile's activations and its stores take, and a step at least. With 1400 clocks more
# for a start that nothing overlaps and twice the least step, for one product in flight, this makes 0.76 to 1.11 times
# the 126 times of 3x3 filters that conv2d_fprop has in the H200's table, 0.95 times in geometric mean.
_L2_BYTES_A_CLOCK, _PORT_BYTES_A_CLOCK, _START_CLOCKS = 8800, 100, 3400
_ACTIVATED_A_CLOCK, _TILE_CLOCKS, _STEP_CLOCKS = 8, 300, 110

_ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
# (pixels, channels, warps that multiply): as many stages as a multiprocessor has room for, or as two programs have
_SPECIALIZED = {
    **{(64, 32, 4): (8, 4), (64, 64, 4): (8, 6, 4), (64, 128, 4): (6, 4), (128, 32, 4): (5, 3), (128, 64, 4): (6, 4)},
    **{(128, 128, 4): (5, 3), (128, 128, 8): (5,), (64, 256, 4): (4,), (256, 64, 8): (4,), (128, 256, 8): (3,)},
    (256, 128, 8): (3,),
}


def tensor_maps(problem: Problem, config: Config) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of x and weight, with the axes that the kernel's file names; made on the host, so that a graph captures them."""
    x, weight, conv = problem.x, problem.weight, problem.conv
    (h, w), (n, c), pitch = conv.image, (conv.n, conv.c), pixel_pitch(problem.x) or conv.c
    box, k = [config.box_n, config.box_h, config.box_w], config.block_k
    if problem.is_product:
        x_map = TensorDescriptor(x, [problem.pixels, c], [pitch, 1], [config.block_m, k])
    elif problem.stride[0] == 1:
        x_map = TensorDescriptor(x, [n, h, w, c], [h * w * pitch, w * pitch, pitch, 1], [*box, k])
    else:
        strides = [h * w * pitch, 2 * w * pitch, w * pitch, 2 * pitch, 1]
        # the last channel of the odd column, not of the pitch: what lies behind may belong to another tensor
        shape, block = [n, h // 2, 2, w // 2, pitch + c], [box[0], box[1], 1, box[2], k]
        x_map = TensorDescriptor(x, shape, strides, block)
    length = c * conv.taps
    return x_map, TensorDescriptor(weight, [conv.k, length], [length, 1], [config.block_n, k])


def specialised_maps(problem: Problem, config: Config, y: Tensor) -> dict[str, GluonDescriptor | None]:
    """Of x, weight, residual and y, with the axes that the specialised kernel's file names.

    With a shared reduction y is its parts, [SPLIT, pixels, K] in fp32, and the residual is left to who adds them.
    """
    conv, box = problem.conv, [config.box_n, config.box_h, config.box_w]
    (h, w), y_axes = conv.image, (conv.n, conv.oh, conv.ow)
    x_axes = conv.n, h, w
    if problem.is_product:
        x_axes = y_axes = 1, 1, problem.pixels
    if config.split_k > 1:
        shape, residual = [config.split_k, *y_axes, conv.k], None
        strides = [problem.pixels * conv.k, *_strides(y_axes, conv.k)]
        y_map = _descriptor(y, shape, strides, [1, *box, config.block_n])
    else:
        residual = problem.residual
        y_map = _pixel_map(y, y_axes, [*box, config.block_n])
    return {
        "x_desc": _pixel_map(problem.x, x_axes, [*box, config.block_k]),
        "weight_desc": weight_map(problem.weight, (config.block_n, 1, config.block_k)),
        "residual_desc": None if residual is None else _pixel_map(residual, y_axes, [*box, config.block_n]),
        "y_desc": y_map,
    }


def _pixel_map(tensor: Tensor, axes: tuple[int, int, int], block: list[int]) -> GluonDescriptor:
    """Of a feature map [N, C, H, W], whose pixels the axes count."""
    channels = tensor.shape[1]
    return _descriptor(tensor, [*axes, channels], _strides(axes, pixel_pitch(tensor) or channels), block)


def _strides(axes: tuple[int, int, int], pitch: int) -> list[int]:
    """Of the axes and the channels."""
    _, h, w = axes
    return [h * w * pitch, w * pitch, pitch, 1]


def _descriptor(tensor: Tensor, shape: list[int], strides: list[int], block: list[int]) -> GluonDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, _ELEMENTS[tensor.dtype])
    return GluonDescriptor(tensor, shape, strides, block, layout)  # pyright: ignore[reportArgumentType]


def programs(problem: Problem, config: Config) -> int:
    """Of the kernel that multiplies: tiles, times the parts of each; specialised ones take several of these."""
    conv = problem.conv
    if problem.is_product:
        boxes = cdiv(problem.pixels, config.block_m)
    else:
        boxes = cdiv(conv.n, config.box_n) * cdiv(conv.oh, config.box_h) * cdiv(conv.ow, config.box_w)
    return boxes * cdiv(conv.k, config.block_n) * config.split_k


def worth_boxes(problem: Problem, target: Target) -> bool:
    """Whether tiles are wide enough and there is enough to multiply, so that address arithmetic costs more than waste.

    Small maps are mostly latency, which a narrow tile with all loads in flight hides best.
    """
    conv = problem.conv
    wide = conv.c >= _WORTH_CHANNELS and conv.k >= _WORTH_CHANNELS // 2
    return wide and _flops(problem) >= _WORTH_FLOPS and int(target.arch.removeprefix("sm_")) >= 90


def worth_specialised(problem: Problem) -> bool:
    """The same of specialised warps, whose tiles are narrower."""
    return min(problem.conv.c, problem.conv.k) >= _WORTH_CHANNELS // 2 and _flops(problem) >= _WORTH_FLOPS


def _flops(problem: Problem) -> int:
    return 2 * problem.pixels * problem.conv.k * problem.conv.c * problem.conv.taps


def box_configs(problem: Problem, target: Target) -> tuple[Config, ...]:
    """Every valid config worth timing: tiles in the order of the time that `_clocks` expects, each with its variants.

    The model is coarse, so what it finds second for one tile stands behind the best of the next tile.
    """
    tiles: dict[tuple[int, int], dict[int, list[tuple[float, Config]]]] = {}
    for config in _proposed(problem):
        if config.is_valid(problem, target):
            clocks = _clocks(problem, config, target)
            splits = tiles.setdefault((config.block_m, config.block_n), {})
            splits.setdefault(config.split_k, []).append((clocks, config))

    def best(splits: dict[int, list[tuple[float, Config]]]) -> float:
        return min(clocks for variants in splits.values() for clocks, _ in variants)

    places = []
    for i, splits in enumerate(sorted(tiles.values(), key=best)):
        for j, variants in enumerate(sorted(splits.values(), key=lambda found: min(clocks for clocks, _ in found))):
            ranked = sorted(variants, key=itemgetter(0))
            places += [(i + 1.5 * j + 3 * variant, config) for variant, (_, config) in enumerate(ranked)]
    return tuple(config for _, config in sorted(places, key=itemgetter(0)))


def specialised_configs(problem: Problem, target: Target) -> tuple[Config, ...]:
    """The same of specialised warps, whose model is finer: a tile's second choice counts as a seventh slower."""
    valid = (config for config in _proposed_specialised(problem) if config.is_valid(problem, target))
    ranked = sorted(((_specialised_clocks(problem, config, target), config) for config in valid), key=itemgetter(0))
    seen: Counter[tuple[int, int]] = Counter()
    places = []
    for clocks, config in ranked:
        tile = config.block_m, config.block_n
        places.append((clocks * (1 + seen[tile] / 7), config))
        seen[tile] += 1
    return tuple(config for _, config in sorted(places, key=itemgetter(0)))


def _proposed(problem: Problem) -> Iterator[Config]:
    """Tiles that fill wgmma, each with its best box, pipelines of 3 to 6 steps and parts of eight steps and more."""
    conv, full = problem.conv, 128 // problem.x.element_size()  # a row of shared memory
    while conv.c % full:
        full //= 2
    tiles = [(m, n) for m, n in product((64, 128, 256), (128, 64, 32)) if m < 256 or n > 32]
    for (m, n), (k, stages), split in product(tiles, ((full, 4), (2 * full, 3), (full, 6), (full, 3)), _SPLITS):
        if n <= padded(conv.k) and (split == 1 or conv.c * conv.taps >= 8 * split * k):
            # at most 128 accumulators a thread
            for num_warps in {2**15: (8,), 2**14: (8, 4)}.get(m * n, (4,)):
                yield Config(m, n, k, num_warps, stages, split, *_best_box(problem, m))


def _proposed_specialised(problem: Problem) -> Iterator[Config]:
    """Each tile with its best box, its pipelines, and parts of four steps and more.

    A step is a row of shared memory, which may reach beyond the last channel, or half of one where that fits better.
    """
    conv = problem.conv
    steps = [min(64, max(16, next_power_of_2(conv.c)))]
    if conv.c > 64 and conv.c % 64 == 32:
        steps.append(32)
    for (m, n, num_warps), depths in _SPECIALIZED.items():
        if n <= max(32, next_power_of_2(conv.k)):
            for k, stages, split in product(steps, depths, _SPLITS):
                if split == 1 or conv.taps * cdiv(conv.c, k) >= 4 * split:
                    # as many bytes ahead in half steps
                    yield Config(m, n, k, num_warps, stages * steps[0] // k, split, *_best_box(problem, m), True)


def _best_box(problem: Problem, block_m: int) -> tuple[int, int]:
    """(rows, columns) of the box of so many pixels that covers the output in the fewest boxes with the least edge."""
    conv = problem.conv
    if problem.is_product:
        return 1, block_m
    sides = [2**i for i in range(block_m.bit_length())]
    most = next_power_of_2(conv.n)
    boxes = [(h, w) for h, w in product(sides, sides) if block_m // most <= h * w <= block_m]

    def cost(box: tuple[int, int]) -> tuple[int, int]:
        h, w = box
        images = block_m // (h * w)
        # pixels that a 3x3 filter sees: neighbouring boxes read their common edge twice
        seen = images * (h + 2) * (w + 2)
        return cdiv(conv.n, images) * cdiv(conv.oh, h) * cdiv(conv.ow, w), seen

    return min(boxes, key=cost)


def _clocks(problem: Problem, config: Config, target: Target) -> float:
    """What the busiest multiprocessor needs: its programs one after the other, each step at the slower of two rates.

    A model for ranking: it knows no caches, and of two programs on one multiprocessor only that they hide a wait.
    """
    conv, size = problem.conv, problem.x.element_size()
    m, n, k = config.block_m, config.block_n, config.block_k
    rounds = cdiv(programs(problem, config), target.sm_count)
    steps = cdiv(conv.taps * conv.c // k, config.split_k)
    resident = max(1, min(rounds, target.shared_bytes // (config.num_stages * (m + n) * k * size)))
    multiply, copy = m * n * k * size / 2 / _MADS_A_CLOCK, (m + n) * k * size / _BYTES_A_CLOCK
    if config.num_warps * resident < 8:
        # rows of a box reach wgmma through registers, and a lone group of four warps waits for each of them
        multiply *= _LONE_GROUP
    # a lone program waits where its pipeline is shorter than a copy takes
    wait = _COPY_CLOCKS / (config.num_stages - 1) / resident
    out = m * n * (size if config.split_k == 1 else 4) / _STORED_A_CLOCK
    clocks = _COPY_CLOCKS + rounds * (steps * max(multiply, copy, wait) + out)
    return clocks + _sum_clocks(problem, config, target)


def _specialised_clocks(problem: Problem, config: Config, target: Target) -> float:
    """As `_clocks`: two programs on one multiprocessor hide what one of them stores."""
    m, n, k, size = config.block_m, config.block_n, config.block_k, problem.x.element_size()
    units = programs(problem, config)
    rounds = cdiv(units, target.sm_count)
    shared = min(rounds, config.resident(problem, target))
    port = min(_PORT_BYTES_A_CLOCK, _L2_BYTES_A_CLOCK / min(units, target.sm_count))
    alone = max(_STEP_CLOCKS, _COPY_CLOCKS / (config.num_stages - 1)) / shared
    step = max(m * n * k / _MADS_A_CLOCK, (m + n) * k * size / port, alone)
    main = cdiv(config.steps(problem), config.split_k) * step
    activated = config.split_k == 1 and problem.act != "none"
    tile = _TILE_CLOCKS + m * n / (_ACTIVATED_A_CLOCK if activated else _STORED_A_CLOCK)
    clocks = rounds * (main + tile) if shared == 1 else rounds * max(main, tile) + tile
    return _START_CLOCKS + clocks + _sum_clocks(problem, config, target)


def _sum_clocks(problem: Problem, config: Config, target: Target) -> float:
    """Of the kernel that adds parts."""
    if config.split_k == 1:
        return 0
    read = 4 * config.split_k * problem.pixels * problem.conv.k / target.sm_count
    return _LAUNCH_CLOCKS + read / _BYTES_A_CLOCK
