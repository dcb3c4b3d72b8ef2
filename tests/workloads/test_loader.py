"""Batches: every image once an epoch, the same on every device, position exact, pixels scaled and mirrored right."""

import numpy as np
import pytest
import torch
from image_set_files import pictures

from ridgeline.errors import UsageError
from ridgeline.workloads.loader import Batches, Position, to_model_range, to_pixels


def numbered(count: int) -> np.ndarray:
    """Images that show their own index, 1 x 1 pixel."""
    return np.arange(count, dtype=np.uint8).reshape(count, 1, 1, 1)


def indices(batch: torch.Tensor) -> list[int]:
    return to_pixels(batch).flatten().tolist()


def test_an_epoch_uses_each_image_once_and_batches_span_epochs():
    batches = Batches(numbered(10), 4)
    seen = [index for _ in range(5) for index in indices(next(batches))]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]  # another order


def test_a_batch_larger_than_the_set_repeats_it():
    seen = indices(next(Batches(numbered(3), 8)))
    assert sorted(seen[:3]) == sorted(seen[3:6]) == [0, 1, 2]
    assert len(seen) == 8


def test_order_follows_from_the_seed():
    first, again, other = (indices(next(Batches(numbered(50), 50, seed=seed))) for seed in (0, 0, 1))
    assert first == again != other


def test_position_counts_what_was_returned():
    batches = Batches(numbered(10), 4)
    assert batches.position == Position(0, 0)
    positions = []
    for _ in range(6):
        next(batches)
        positions.append(batches.position)
    assert positions == [
        Position(0, 4),
        Position(0, 8),
        Position(1, 2),
        Position(1, 6),
        Position(2, 0),
        Position(2, 4),
    ]


@pytest.mark.parametrize("taken", [0, 1, 2, 5, 13])
def test_setting_the_position_continues_exactly(taken):
    images = pictures(10)
    expected, resumed = Batches(images, 3, seed=7), Batches(images, 3, seed=7)
    for _ in range(taken):
        next(expected)
    resumed.position = expected.position
    for _ in range(8):
        assert torch.equal(next(resumed), next(expected))
        assert resumed.position == expected.position


@pytest.mark.parametrize("position", [Position(-1, 0), Position(0, 10), Position(0, -1)])
def test_a_position_outside_the_set_is_refused(position):
    batches = Batches(numbered(10), 4)
    with pytest.raises(UsageError, match="outside a set of 10 images"):
        batches.position = position


def test_batches_are_fp32_channels_last_in_range():
    batch = next(Batches(pictures(8), 4))
    assert batch.shape == (4, 3, 8, 8)
    assert batch.dtype == torch.float32
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert -1 <= batch.min() < -0.9 and 0.9 < batch.max() <= 1


def test_about_half_the_images_are_mirrored_and_no_other_change_is_made():
    images = pictures(200, side=4)
    plain = to_pixels(next(Batches(images, 200, flip=False)))
    mixed = to_pixels(next(Batches(images, 200)))
    mirrored = [torch.equal(a, b.flip(1)) for a, b in zip(mixed, plain, strict=True)]
    same = [torch.equal(a, b) for a, b in zip(mixed, plain, strict=True)]
    assert all(a != b for a, b in zip(mirrored, same, strict=True))
    assert 70 < sum(mirrored) < 130
    order = np.random.default_rng([0, 0]).permutation(200)
    assert np.array_equal(plain.numpy(), images[order])


def test_range_and_pixels_are_inverse():
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1)
    x = to_model_range(pixels, torch.tensor([False]))
    assert x[0, 0, 0, 0] == -1 and x[0, 0, -1, -1] == 1
    assert torch.equal(to_pixels(x), pixels)
    assert to_pixels(torch.tensor([[[[-7.0, 0.001, 9.0]]]])).flatten().tolist() == [0, 128, 255]


def test_memory_mapped_images_are_read(tmp_path):
    images = pictures(6)
    np.save(tmp_path / "x.npy", images)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert torch.equal(next(Batches(mapped, 4)), next(Batches(images, 4)))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((pictures(2).astype(np.float32), 1), r"must be uint8 \[N, H, W, C\], got float32"),
        ((pictures(2)[0], 1), r"got uint8 \[8, 8, 3\]"),
        ((pictures(2)[:0], 1), r"got uint8 \[0, 8, 8, 3\]"),
        ((pictures(2), 0), "batch must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments, says):
    with pytest.raises(UsageError, match=says):
        Batches(*arguments)


def test_an_unknown_residence_is_refused():
    with pytest.raises(UsageError, match="must be auto, device or host, got 'disk'"):
        Batches(pictures(2), 1, resident="disk")


@pytest.mark.gpu
@pytest.mark.parametrize("resident", ["device", "host", "auto"])
def test_gpu_batches_equal_those_of_the_cpu_without_waiting(resident):
    images = pictures(50, side=32)
    expected, batches = Batches(images, 16, seed=3), Batches(images, 16, seed=3, device="cuda", resident=resident)
    found = [next(batches)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found += [next(batches) for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for batch in found:
        assert batch.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(batch.cpu(), next(expected))
    assert batches.position == expected.position
    batches.position = Position(1, 5)
    expected.position = Position(1, 5)
    assert torch.equal(next(batches).cpu(), next(expected))


@pytest.mark.gpu
def test_gpu_set_stays_on_the_host_where_it_does_not_fit(monkeypatch):
    images = pictures(8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * images.nbytes - 1, 0))
    assert Batches(images, 4, device="cuda")._on_device is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * images.nbytes, 0))
    assert Batches(images, 4, device="cuda")._on_device is not None
