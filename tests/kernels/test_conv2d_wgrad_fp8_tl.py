"""Weight and bias gradients of FP8 quads on sm_89 and sm_120: numbers in the interpreter, machine code offline."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from triton.runtime.interpreter import interpreter_builder

from ridgeline.kernels import conv2d_wgrad_fp8
from ridgeline.kernels._conv2d_wgrad_fp8_tl import conv2d_wgrad_fp8_tl_kernel
from ridgeline.kernels._op import Launch, typical_target
from ridgeline.kernels._quads import quads_shape
from ridgeline.kernels.conv2d_wgrad_fp8 import Config, TileConfig, wgrad_fp8_sample
from ridgeline.sass import SassReport, compile_many, inspect
from shared_kernels import random_problem, right_gradients

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
ARCHES = ("sm_89", "sm_120")
OP = conv2d_wgrad_fp8.OP
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
REAL = [sample for sample in OP.samples if sample.real_size]
GPU_OF = {sm_count: replace(typical_target("sm_89"), sm_count=sm_count) for sm_count in (1, 9)}


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "weight", "promote"),
    [
        pytest.param((11, 16, 4, 4), (16, 3, 3), 128, id="4x4, the last group of images is not full"),
        pytest.param((3, 32, 8, 8), (48, 3, 3), 128, id="8x8"),
        pytest.param((3, 32, 8, 16), (32, 1, 3), 0, id="8x16, three taps in a row"),
        pytest.param((1, 48, 4, 32), (80, 3, 3), 128, id="4x32, one image"),
        pytest.param((1, 16, 4, 64), (16, 3, 3), 0, id="4x64, a row of two boxes"),
        pytest.param((3, 144, 8, 8), (144, 1, 1), 128, id="tiles that channels do not fill"),
        pytest.param((1, 16, 16, 32), (16, 1, 3), 256, id="promoted every other row"),
    ],
)
def test_it_is_what_float64_finds(x, weight, promote):
    arguments = wgrad_fp8_sample("", x, weight, promote=promote).arguments(E4M3, DEVICE)
    right_gradients(arguments, target=GPU_OF[1])


@pytest.mark.parametrize("seed", range(20))
def test_random_shapes_against_float64(seed: int):
    """Ten calls a seed, of random sizes, filters, promotions, configs and numbers of multiprocessors."""
    rng = random.Random(seed)
    for _ in range(10):
        x, weight, promote = random_problem(rng)
        target = replace(typical_target("sm_89"), sm_count=rng.choice([1, 3, 9]))
        arguments = wgrad_fp8_sample("", x, weight, promote=promote).arguments(E4M3, DEVICE)
        right_gradients(arguments, rng.choice(conv2d_wgrad_fp8.candidates(target=target, **arguments)), target=target)


@pytest.mark.parametrize("promote", [0, 128])
def test_parts_share_the_images(promote):
    arguments = wgrad_fp8_sample("", (5, 16, 4, 32), (16, 1, 3), promote=promote).arguments(E4M3, DEVICE)
    # two images, two, and one, for each of three taps
    launch = right_gradients(arguments, TileConfig(64, 16, 3, 4, 1), target=GPU_OF[9])
    assert launch.parts[0].constants["PARTS"] == 3 and launch.parts[0].grid == (9,)


def test_what_lies_behind_the_images_is_not_read():
    """The last group of images reaches beyond both maps, where not-a-number stays one even times zero."""
    arguments = wgrad_fp8_sample("", (5, 16, 4, 4), (16, 3, 3)).arguments(E4M3, DEVICE)
    multiply = conv2d_wgrad_fp8.plan(target=GPU_OF[1], **arguments).parts[0]
    maps = {}
    for name in ("dy", "x"):
        numel = arguments[name].numel()
        room = torch.full((2 * numel,), float("nan"), device=DEVICE).to(E5M2)
        room[:numel] = 1.0
        # e5m2 both: the interpreter knows no NaN in e4m3
        maps[f"{name}_ptr"] = room[:numel]
    replace(multiply, arguments={**multiply.arguments, **maps}).run()
    assert multiply.output.isfinite().all()


@pytest.mark.parametrize(
    ("k", "c", "parts"),
    [pytest.param(256, 16, 363, id="of dy"), pytest.param(16, 256, 188, id="of x")],
)
def test_images_beyond_2_to_the_31_bytes_are_found(k, c, parts, monkeypatch):
    """A 32-bit offset of the image that the last part reads would be that of one of the first images."""
    images = (parts - 1) * parts + 1  # as many as parts for each, and one is left to the last
    dy = torch.empty(quads_shape(images, k, 4, 32, beside=False), dtype=torch.uint8, device=DEVICE)
    x = torch.empty(quads_shape(images, c, 4, 32, beside=True), dtype=torch.uint8, device=DEVICE)
    image = max(dy[0].numel(), x[0].numel())
    assert min(dy.numel(), x.numel()) < 2**31 and image * (images - 1) > 2**32
    wrapped = image * (images - 1) % 2**32 // image
    for quads, dtype in ((dy, E5M2), (x, E4M3)):
        quads[: wrapped + 2], quads[-1] = 0, 0
        quads[-1, :, -1] = torch.tensor(1.0).to(dtype).view(torch.uint8)
    dw = torch.full((parts, k, c), float("nan"), device=DEVICE)
    sizes = {"C": c, "K": k, "R": 1, "S": 1, "QUARTER": 1, "W": 32, "BOX_N": 1, "BOX_W": 32}
    tile = {"BLOCK_K": k, "BLOCK_C": c, "SPAN": 1, "PROMOTED": True, "PARTS": parts}
    if not HAS_GPU:
        # the interpreter takes long for each program
        last = {"grid_idx": (parts - 1, 0, 0)}
        monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda *_: vars(interpreter_builder).update(last))
    grid = (parts if HAS_GPU else 1,)
    conv2d_wgrad_fp8_tl_kernel[grid](dy.view(E5M2), x.view(E4M3), dw, images, **sizes, **tile)
    # the pixels of one image
    assert dw[-1, -1, -1] == 4 * 32 and dw[-1].count_nonzero() == 1


# --- configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHES)
def test_every_candidate_is_a_tile_and_no_part_is_empty(arch):
    target = typical_target(arch)
    for sample in OP.samples:
        arguments = sample.arguments(E4M3, "meta")
        configs = conv2d_wgrad_fp8.candidates(target=target, **arguments)
        assert 2 <= len(configs) <= 8 and all(type(config) is TileConfig for config in configs)
        groups = conv2d_wgrad_fp8.problem(**arguments).groups
        for config in configs:
            launch = conv2d_wgrad_fp8.plan(config=config, target=target, **arguments).parts[0]
            parts = launch.constants["PARTS"]
            assert (parts - 1) * -(-groups // parts) < groups  # pyright: ignore[reportOperatorIssue]
            assert launch.grid[0] % parts == 0 and launch.num_stages == config.stages  # pyright: ignore


def test_each_architecture_takes_its_own_configs():
    arguments = REAL[0].arguments(E4M3, "meta")
    for arch, config in (("sm_90", TileConfig(128, 64, 4, 8, 2)), ("sm_89", Config(128, 64, 6, 8, 1))):
        with pytest.raises(ValueError, match=rf"conv2d_wgrad_fp8: {type(config).__name__}.* is not valid .* on {arch}"):
            conv2d_wgrad_fp8.plan(config=config, target=typical_target(arch), **arguments)
    with pytest.raises(ValueError, match=r"conv2d_wgrad_fp8: None is not valid for .* on sm_80"):
        conv2d_wgrad_fp8.plan(target=typical_target("sm_80"), **arguments)
    # two tiles' sums in registers, and buffers beyond what a block may have
    for config in (TileConfig(128, 128, 4, 4, 2), TileConfig(128, 128, 5, 8, 2)):
        with pytest.raises(ValueError, match="is not valid"):
            conv2d_wgrad_fp8.plan(config=config, target=typical_target("sm_89"), **arguments)


# --- machine code ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    arch: str
    config: TileConfig
    x: tuple[int, int, int, int]
    weight: tuple[int, int, int]
    promote: int = 128

    def launch(self) -> Launch:
        arguments = wgrad_fp8_sample("", self.x, self.weight, promote=self.promote).arguments(E4M3, "meta")
        return conv2d_wgrad_fp8.plan(config=self.config, target=typical_target(self.arch), **arguments)


KINDS = (
    (TileConfig(128, 64, 4, 8, 2), (128, 128, 32, 32), (128, 3, 3)),
    (TileConfig(64, 64, 4, 4, 2), (128, 512, 16, 16), (256, 3, 3), 256),
    (TileConfig(128, 128, 4, 8, 2), (128, 256, 4, 4), (256, 3, 3)),
    (TileConfig(64, 128, 4, 8, 2), (128, 384, 32, 32), (128, 1, 1), 0),
)
CASES = tuple(Case(arch, *kind) for arch in ARCHES for kind in KINDS)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def reports() -> dict[Case, SassReport]:
    binaries = compile_many([case.launch().parts[0].source(case.arch) for case in CASES])
    return dict(zip(CASES, map(inspect, binaries), strict=True))


def test_nothing_spills(reports: dict[Case, SassReport]):
    assert {case: report.problems for case, report in reports.items() if report.problems} == {}


def test_operands_go_from_asynchronous_copies_to_fp8_products(reports: dict[Case, SassReport]):
    for case, report in reports.items():
        assert tuple(report.matrix_instructions) == ("QMMA.16832.F32.E5M2.E4M3",), case
        assert report.count("LDSM") > 0 and report.count("LDG") == 0 and report.permutes == 0, case
        copies = {name for name in report.instructions if name.startswith("LDGSTS")}
        assert copies == {"LDGSTS.E.BYPASS.128"}, case
        config = case.config
        assert report.shared_bytes == (config.stages - 1) * (config.k + config.c) * 128, case


def test_promoted_sums_are_added_outside_the_tensor_cores(reports: dict[Case, SassReport]):
    for case, report in reports.items():
        sums = case.config.k * case.config.c // (32 * case.config.num_warps)
        assert report.count("FADD") == (sums if case.promote else 0), case
