"""What conv2d_act copies by boxes: the tensor maps of its operands, and the tiles that are worth timing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from operator import itemgetter

from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.kernels._conv import padded
from ridgeline.kernels._conv2d_act_call import Config, Problem
from ridgeline.kernels._nhwc import cdiv, next_power_of_2, pixel_pitch
from ridgeline.kernels._op import Target

_WORTH_FLOPS, _WORTH_CHANNELS = 2**28, 64

_SPLITS = (1, 2, 3, 4, 6, 8)

# What ranks tiles, of an H100/H200: multiply-adds of 16 bits, bytes into shared memory and bytes out, a clock and
# multiprocessor; clocks from a copy's issue to its arrival, and of one more launch with its prologue. The byte rate is
# what makes the 640 TFLOP/s that 128x128 tiles reached on an H200 come out; the others are estimates.
_MADS_A_CLOCK, _BYTES_A_CLOCK, _STORED_A_CLOCK, _LONE_GROUP = 2048, 57, 24, 1.25
_COPY_CLOCKS, _LAUNCH_CLOCKS = 900, 2200


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


def programs(problem: Problem, config: Config) -> int:
    """Of the kernel that multiplies: tiles, times the parts of each."""
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
    flops = 2 * problem.pixels * conv.k * conv.c * conv.taps
    wide = conv.c >= _WORTH_CHANNELS and conv.k >= _WORTH_CHANNELS // 2
    return wide and flops >= _WORTH_FLOPS and int(target.arch.removeprefix("sm_")) >= 90


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
    if config.split_k > 1:
        read = 4 * config.split_k * problem.pixels * conv.k / target.sm_count
        clocks += _LAUNCH_CLOCKS + read / _BYTES_A_CLOCK
    return clocks
