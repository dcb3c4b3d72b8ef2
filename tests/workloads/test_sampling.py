"""Sampling: a model that knows the answer is led to it, draws repeat by seed, grids and checkpoints are right."""

import cv2
import numpy as np
import pytest
import torch
from image_set_files import pictures

from ridgeline.errors import UsageError
from ridgeline.models.ddpm_unet import TINY, UNet
from ridgeline.workloads.checkpoint import save_checkpoint
from ridgeline.workloads.diffusion import linear_schedule
from ridgeline.workloads.loader import to_model_range, to_pixels
from ridgeline.workloads.sampling import check_grid_path, load_model, sample, sample_checkpoint, write_grid

SHORT = linear_schedule(60, last_beta=0.2)
LONG = linear_schedule()


def oracle(pixels: torch.Tensor, schedule, seen: list[int]):
    """The best possible noise estimate for a world whose only image is `pixels` [1, H, W, C]."""
    x0 = to_model_range(pixels, torch.tensor([False]))

    def model(x, t):
        seen.append(int(t[0]))
        assert t.shape == x.shape[:1]
        signal, noise = (table[t][:, None, None, None] for table in (schedule.signal, schedule.noise))
        return (x - signal * x0) / noise

    return model


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("sampler", "steps", "schedule"), [("ddim", 7, LONG), ("ddim", 1, LONG), ("ddpm", None, SHORT)]
)
def test_a_model_that_knows_the_image_is_led_to_it(sampler, steps, schedule):
    image = torch.from_numpy(pictures(1))
    model = oracle(image, schedule, seen := [])
    found = sample(model, schedule, (3, 3, 8, 8), sampler=sampler, steps=steps, generator=generator())
    assert found.dtype == torch.uint8
    assert torch.equal(found, image.expand(3, -1, -1, -1))
    assert len(seen) == (steps or schedule.steps)
    assert seen[0] == schedule.steps - 1
    assert steps == 1 or seen[-1] == 0
    assert seen == sorted(set(seen), reverse=True)


def test_ddim_takes_fifty_steps_unless_told_and_all_of_a_short_schedule():
    image = torch.from_numpy(pictures(1))
    for schedule, expected in ((LONG, 50), (linear_schedule(20), 20)):
        sample(oracle(image, schedule, seen := []), schedule, (1, 3, 8, 8), generator=generator())
        assert len(seen) == expected


def test_images_stay_in_range_whatever_the_model_says():
    def wild(x, t):
        return -1e4 * torch.ones_like(x)

    assert (sample(wild, LONG, (2, 3, 4, 4), steps=3, generator=generator()) == 255).all()


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_a_draw_follows_from_the_generator(sampler):
    def zero(x, t):
        return torch.zeros_like(x)

    first, again, other = (
        sample(zero, SHORT, (2, 3, 4, 4), sampler=sampler, generator=generator(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"sampler": "euler"}, "must be ddim or ddpm, got 'euler'"),
        ({"sampler": "ddpm", "steps": 50}, "steps=50 belongs to ddim, ddpm takes all 60"),
        ({"steps": 0}, "between 1 and the schedule's 60, got 0"),
        ({"steps": 61}, "between 1 and the schedule's 60, got 61"),
    ],
)
def test_wrong_choices_are_refused(keywords, says):
    with pytest.raises(UsageError, match=says):
        sample(lambda x, t: x, SHORT, (1, 3, 4, 4), generator=generator(), **keywords)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def state(**changes):
    torch.manual_seed(0)
    ema = UNet(TINY)
    return {
        "network": vars(TINY),
        "schedule": "linear",
        "ema": {"module": ema.state_dict(), "updates": 1},
        "model": {},
        **changes,
    }


def test_a_checkpoint_is_sampled_with_its_averaged_weights(tmp_path):
    path = save_checkpoint(tmp_path, 1, state())
    model, schedule = load_model(path)
    assert not model.training and schedule.steps == 1000
    expected = sample(model, schedule, (3, 3, 8, 8), steps=3, generator=generator(5))
    assert np.array_equal(sample_checkpoint(path, n=3, steps=3, seed=5), expected.numpy())
    torch.manual_seed(0)
    for name, weight in UNet(TINY).state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"network": None}, "lacks its network"),
        ({"schedule": "sigmoid"}, "lacks its network"),
        ({"ema": {}}, "lacks its network"),
        ({"ema": {"module": {"time_in.weight": "x"}}}, "other than tensors"),
        ({"ema": {"module": {"time_in.weight": torch.zeros(1)}}}, r"time_in.weight is \[1\], but must be \[64, 16\]"),
        ({"network": {**vars(TINY), "channels": (1 << 40, 32)}}, "describes no network"),
        ({"network": {**vars(TINY), "channels": (1 << 16, 32)}}, r"time_in.weight is \[64, 16\], but must be"),
        ({"network": {**vars(TINY), "channels": "abc"}}, "describes no network"),
        ({"network": {**vars(TINY), "blocks": 1 << 40}}, "describes no network"),
        ({"network": {**vars(TINY), "heads": 0}}, "heads must be at least 1"),
    ],
)
def test_a_checkpoint_that_does_not_hold_together_is_refused(tmp_path, changes, says):
    path = save_checkpoint(tmp_path, 1, state(**changes))
    with pytest.raises(UsageError, match=says):
        sample_checkpoint(path, n=1, steps=1)


def test_no_images_and_too_many_are_refused(tmp_path):
    for n in (0, 10**20):
        with pytest.raises(UsageError, match=f"^n must be at least 1 and at most 1000000, got {n}"):
            sample_checkpoint(tmp_path / "x.pt", n=n)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_are_those_of_training(tmp_path, seed):
    with pytest.raises(UsageError, match=f"^seed must be a whole number from 0 to {2**63 - 1}, got {seed}"):
        sample_checkpoint(tmp_path / "x.pt", seed=seed)
    path = save_checkpoint(tmp_path, 1, state())
    assert sample_checkpoint(path, n=1, steps=1, seed=2**63 - 1).shape == (1, 8, 8, 3)


# --- grids -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_a_grid_holds_each_image(tmp_path, channels):
    images = pictures(5, side=4, channels=channels)
    write_grid(tmp_path / "new" / "grid.png", images)
    sheet = cv2.imread(str(tmp_path / "new" / "grid.png"), cv2.IMREAD_UNCHANGED)
    sheet = sheet[..., ::-1] if channels == 3 else sheet[..., None]
    assert sheet.shape == (9, 14, channels)  # 2 rows of 3, one pixel between
    assert np.array_equal(sheet[:4, :4], images[0])
    assert np.array_equal(sheet[5:, 5:9], images[4])
    assert (sheet[4] == 0).all() and (sheet[5:, 10:] == 0).all()


def test_a_grid_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="name a file in a writable folder"):
        write_grid(tmp_path / "file" / "grid.png", pictures(1))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("grid.jpg", "must end in .png"),
        ("grid", "must end in .png"),
        ("folder.png", "is a folder: name a .png file"),
        ("absent/grid.png", "absent' is no folder"),
    ],
)
def test_a_grid_is_a_png_in_a_folder_that_is_there(tmp_path, name, says):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UsageError, match=says):
        check_grid_path(tmp_path / name)
    check_grid_path(tmp_path / "grid.PNG")


def test_pixels_of_a_sample_are_rounded():
    assert to_pixels(torch.full((1, 1, 1, 1), 0.5)).item() == 191
