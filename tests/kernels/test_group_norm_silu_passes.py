"""group_norm_silu in several passes: tiles side by side and below each other, read again by launches or by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.kernels import _group_norm_silu_call, group_norm_silu, group_norm_silu_backward
from ridgeline.kernels._group_norm_silu_call import BackwardCall, Call, Config, default_config, proposals
from ridgeline.kernels._group_norm_silu_samples import gradient_sample, norm_sample
from ridgeline.kernels._op import typical_target
from ridgeline.sass import compile_many, inspect

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H200 = typical_target("sm_90")
# of 4 groups of 12 channels and 6 x 7 pixels: six columns of 8, three of 16; tiles that end beyond the map
TILES = (Config(2, 16, 4), Config(4, 8, 4), Config(4, 4, 1))
EVERYTHING = Config(4, 64, 8)


def run(arguments: dict[str, Any], config: Config, *, sum_dx: bool = False) -> dict[str, Tensor]:
    """y, dx and the gradients of parameters by the kernels, NaN before; with `sum_dx` also the sum of dx."""
    forward = group_norm_silu.plan(
        config=config, target=H200, **{k: v for k, v in arguments.items() if k not in ("dy", "residual")}
    )
    launch = group_norm_silu_backward.plan(config=config, target=H200, sum_dx=sum_dx, **arguments)
    for one in (forward, launch):
        one.output.fill_(math.nan)
        one.run()
    call = BackwardCall(**arguments)
    given = (call.gamma, call.beta, call.scale, call.shift)
    found = tuple(call.x.new_empty(0) if t is None else t.new_full(t.shape, math.nan) for t in given)
    dx_sum = call.x.new_full((call.x.shape[1],), math.nan)
    group_norm_silu_backward.parameters_launch(call, launch, found, dx_sum).run()
    names = ("y", "dx", "dgamma", "dbeta", "dscale", "dshift", *(("dx_sum",) if sum_dx else ()))
    return dict(zip(names, (forward.output, launch.output, *found, dx_sum), strict=False))


@pytest.mark.parametrize("programs", [1, 4, 1024])
@pytest.mark.parametrize("config", TILES)
def test_passes_give_what_one_pass_gives(config: Config, programs: int, monkeypatch: pytest.MonkeyPatch):
    """However many tiles each program takes: all of a sample, some, one."""
    monkeypatch.setattr(_group_norm_silu_call, "_PROGRAMS", programs)
    arguments = gradient_sample("", (1, 48, 6, 7), 4, scale=True, residual=True, p=0.25).arguments(
        torch.float32, DEVICE
    )
    call = BackwardCall(**arguments)
    assert config.columns(call) > 1 and (config.tiles(call) > 1) == (programs < 1024)
    right = run(arguments, EVERYTHING)
    for name, actual in run(arguments, config).items():
        torch.testing.assert_close(actual, right[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("config", TILES)
def test_one_launch_that_reads_again_also_sums_dx(config: Config):
    again = Config(config.groups, config.pixels, config.num_warps, again=True)
    arguments = gradient_sample("", (2, 48, 6, 7), 4, residual=True).arguments(torch.float32, DEVICE)
    right, actual = run(arguments, EVERYTHING, sum_dx=True), run(arguments, again, sum_dx=True)
    torch.testing.assert_close(right["dx_sum"], right["dx"].sum((0, 2, 3)), rtol=1e-4, atol=1e-4)
    for name, one in actual.items():
        torch.testing.assert_close(one, right[name], rtol=1e-4, atol=1e-4, msg=lambda text, name=name: name + text)
    launch = group_norm_silu_backward.plan(config=again, target=H200, sum_dx=True, **arguments)
    assert launch.grid == (2 * 4 // config.groups,) and not getattr(launch, "before", ())
    # in several launches it is left to a sum of its own
    parted = group_norm_silu_backward.plan(config=config, target=H200, sum_dx=True, **arguments)
    assert len(getattr(parted, "before", ())) == 2 and "ROWS" not in parted.constants


@pytest.mark.parametrize("again", [False, True])
def test_what_is_not_a_number_stays_in_its_group(again: bool):
    arguments = norm_sample("", (1, 48, 4, 4), 4).arguments(torch.float32, DEVICE)
    arguments["x"][0, 30, 1, 1] = math.nan
    launch = group_norm_silu.plan(config=Config(4, 8, 1, again), target=H200, **arguments)
    launch.run()
    assert launch.output[:, 24:36].isnan().all()
    assert not launch.output[:, :24].isnan().any() and not launch.output[:, 36:].isnan().any()


# --- tiles ---------------------------------------------------------------------------------------------------------


def unet(kind: type[Call], c: int, side: int, n: int = 128) -> Any:
    sample = gradient_sample if kind is BackwardCall else norm_sample
    return kind(**sample("", (n, c, side, side), 32).arguments(torch.bfloat16, "meta"))


@pytest.mark.parametrize("kind", [Call, BackwardCall])
def test_passes_are_proposed_where_a_slab_in_registers_is_padded(kind: type[Call]):
    for c in (384, 256):
        call = unet(kind, c, 32)
        configs = proposals(call, H200)
        assert configs[0].whole(call) and 0 < sum(config.whole(call) for config in configs) <= 32
        passes = [config for config in configs if not config.whole(call)]
        assert (c == 384) == (len(passes) > 6) == any(config.again for config in passes)
        for config in passes:
            assert config.block_c(call) * config.columns(call) == config.groups * 12, "padding"
            assert config.block_c(call) * 2 % 32 == 0
            # a multiprocessor's share of L2 has the slab of what is read again
            assert not config.again or kind.held * 1024 * config.groups * 12 * 2 <= 256 * 1024


def test_parts_fill_the_gpu_and_no_more():
    call = unet(Call, 384, 32)
    for groups, parts in ((32, 8), (8, 2), (4, 1)):
        config = Config(groups, 32, 8)
        assert (config.parts(call), config.tiles(call), config.programs(call)) == (parts, 32 // parts, 1024)
        assert Config(groups, 32, 8, again=True).programs(call) == 128 * 32 // groups
    # few large maps: as many as every program can read the statistics of
    assert Config(32, 32, 8).parts(unet(Call, 320, 128, n=2)) == 128
    assert Config(32, 32, 8).parts(unet(Call, 320, 128, n=0)) == 128


def test_the_default_in_one_pass_is_what_was_fastest_on_an_h200():
    fastest = {
        Call: {(128, 32): Config(4, 1024, 8), (256, 32): Config(4, 1024, 8), (384, 32): Config(2, 1024, 8)},
        BackwardCall: {(128, 32): Config(4, 1024, 8), (256, 16): Config(4, 256, 4)},
    }
    for kind, of_maps in fastest.items():
        for (c, side), config in of_maps.items():
            assert default_config(unet(kind, c, side), H200) == config


def test_several_passes_are_the_default_only_where_no_tile_holds_a_slab():
    latent = unet(Call, 320, 128, n=2)
    config = default_config(latent, H200)
    assert config.launches(latent) and config.block_c(latent) == 64 and config.columns(latent) == 5
    assert default_config(unet(BackwardCall, 384, 32), H200) == Config(2, 1024, 16)


# --- machine code --------------------------------------------------------------------------------------------------


def test_machine_code():
    """16 bytes an access, nothing spilled, sixteen warps a multiprocessor, no tile that goes through shared memory."""
    arguments = gradient_sample("", (128, 384, 32, 32), 32).arguments(torch.bfloat16, "meta")
    launches = []
    for config in (Config(32, 32, 8), Config(4, 512, 16, again=True)):
        forward = {name: value for name, value in arguments.items() if name != "dy"}
        launches.append(group_norm_silu.plan(config=config, target=H200, **forward))
        last = group_norm_silu_backward.plan(config=config, target=H200, **arguments)
        launches += [*getattr(last, "before", ()), last]
    for launch, binary in zip(launches, compile_many([one.source("sm_90") for one in launches]), strict=True):
        report, where = inspect(binary), (launch.kernel.__name__, launch.constants)
        assert not report.problems, (where, report.problems)
        assert report.registers <= 65_536 // (32 * 16), where
        assert report.shared_bytes <= 4096, where
        maps = {"dy_ptr", "x_ptr"} & set(launch.arguments)
        assert report.instructions["LDG.E.128"] >= 2 * len(maps), where
        if {"y_ptr", "dx_ptr"} & set(launch.arguments):
            assert report.instructions["STG.E.128"] == 2, where
