"""Settings: checked when made, stored with the run, and the same again when it goes on."""

import json
import math

import pytest

from ridgeline.errors import UsageError
from ridgeline.models.ddpm_unet import CIFAR10
from ridgeline.workloads.settings import FILE, Settings, settings_for, write_settings


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"steps": 10**8}, "steps must be at most 99999999, got 100000000"),  # checkpoints have eight digits
        ({"log_every": 10**20}, "log_every must be at most 99999999, got 1"),
        ({"batch": "8"}, "batch must be a whole number of at least 1, got '8'"),
        ({"seed": -1}, "seed must be a whole number from 0 to 9223372036854775807, got -1"),
        ({"seed": 2**63}, "seed must be a whole number from 0 to 9223372036854775807, got 9223372036854775808"),
        ({"warmup": -1}, "warmup must be"),
        ({"size": 0}, "size must be"),
        ({"val_every": -1}, "val_every must be"),
        ({"save_every": 0}, "save_every must be"),
        ({"lr": 0.0}, "lr must be a number above 0, got 0.0"),
        ({"lr": math.nan}, "lr must be"),
        ({"clip": math.inf}, "clip must be"),
        ({"weight_decay": -0.1}, "weight_decay must be a number of at least 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"ema_decay": -0.5}, "ema_decay must be"),
        ({"preset": "huge"}, "preset must be one of cifar10, tiny, got 'huge'"),
        ({"schedule": None}, "schedule must be one of linear, cosine, got None"),
        ({"dtype": "fp16"}, "dtype must be one of fp32, bf16, got 'fp16'"),
        ({"dtype": ["bf16"]}, "dtype must be"),
        ({"recipe": "int4"}, "recipe must be one of auto, eager, graph, bf16, .*got 'int4'"),
        ({"recipe": "fp8", "dtype": "fp32"}, "recipe 'fp8' computes in bf16, and dtype is 'fp32': leave the dtype out"),
    ],
)
def test_wrong_settings_are_refused(wrong, says):
    with pytest.raises(UsageError, match=f"^{says}"):
        Settings(**{"data": "x", "steps": 10, **wrong})


def test_learning_rate_rises_then_falls_to_zero():
    settings = Settings("x", steps=110, warmup=10)
    factors = [settings.lr_factor(done) for done in range(111)]
    assert factors[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert factors[10] == 1 and factors[60] == pytest.approx(0.5)
    assert factors[110] == pytest.approx(0, abs=1e-12)
    assert factors[10:] == sorted(factors[10:], reverse=True)


def test_warmup_is_a_tenth_of_a_short_run():
    assert Settings("x", steps=200).warmup_steps == 20
    assert Settings("x", steps=500_000).warmup_steps == 1000
    assert Settings("x", steps=500_000, warmup=7).warmup_steps == 7
    assert Settings("x", steps=1, warmup=0).lr_factor(0) == 1


def test_a_recipe_brings_its_dtype():
    assert Settings("x", steps=1, recipe="fp16").autocast_dtype == "fp16"
    assert Settings("x", steps=1, recipe="fp8", dtype="bf16").autocast_dtype == "bf16"
    assert Settings("x", steps=1, recipe="eager").autocast_dtype is None


def test_networks_follow_the_images():
    cifar, tiny = Settings("x", steps=1, dropout=0.2), Settings("x", steps=1, preset="tiny")
    assert cifar.network((50_000, 32, 32, 3)).attention_resolutions == CIFAR10.attention_resolutions == (16, 8, 4)
    assert cifar.network((9, 64, 64, 3)).attention_resolutions == (16, 8)
    assert cifar.network((9, 32, 32, 3)).dropout == 0.2
    network = tiny.network((9, 28, 28, 1))
    assert (network.image_size, network.in_channels, network.out_channels) == (28, 1, 1)
    assert network.attention_resolutions == (14,)
    with pytest.raises(UsageError, match=r"square, got 40 x 32: pass --size"):
        cifar.network((9, 32, 40, 3))
    with pytest.raises(UsageError, match="multiple of 8"):
        cifar.network((9, 20, 20, 3))


# --- a run's folder --------------------------------------------------------------------------------------------------


def test_a_new_run_needs_data_and_steps(tmp_path):
    with pytest.raises(UsageError, match="--steps is needed to begin"):
        settings_for(tmp_path, {"data": "x"}, resume=True)
    assert settings_for(tmp_path, {"data": "x", "steps": 5}, resume=False) == Settings("x", 5)


def test_a_resumed_run_keeps_what_it_began_with(tmp_path):
    began = Settings("x", 5, batch=16, lr=1e-3)
    write_settings(tmp_path, began)
    assert settings_for(tmp_path, {}, resume=True) == began
    assert settings_for(tmp_path, {"batch": 16}, resume=True) == began
    moved = settings_for(tmp_path, {"data": "elsewhere", "steps": 9, "log_every": 1}, resume=True)
    assert moved == Settings("elsewhere", 9, batch=16, lr=1e-3, log_every=1)
    with pytest.raises(UsageError, match="began with batch=16, not 8: leave the option out"):
        settings_for(tmp_path, {"batch": 8}, resume=True)


def test_validations_need_images(tmp_path):
    with pytest.raises(UsageError, match="--val-every asks for validations, and no --val says on which images"):
        settings_for(tmp_path, {"data": "x", "steps": 5, "val_every": 2}, resume=False)
    for given in ({"val_every": 0}, {"val_every": 2, "val": "y"}):
        assert settings_for(tmp_path, {"data": "x", "steps": 5, **given}, resume=False) == Settings("x", 5, **given)
    write_settings(tmp_path, Settings("x", 5, val="y"))
    assert settings_for(tmp_path, {"val_every": 2}, resume=True).val_every == 2


def test_settings_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write '.*settings\.json' \(Not a directory\): choose another --out"):
        write_settings(tmp_path / "file", Settings("x", 5))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read"),
        ("[]", "no JSON object"),
        (json.dumps({"data": "x", "steps": 5, "colour": 1}), "settings that this version does not know"),
        (json.dumps({"data": "x", "steps": "many"}), "steps must be a whole number"),
    ],
)
def test_damaged_settings_are_refused(tmp_path, text, says):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UsageError, match=says):
        settings_for(tmp_path, {}, resume=True)
