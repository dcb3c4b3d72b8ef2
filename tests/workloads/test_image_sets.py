"""load_images: every kind of source gives the same array, once decoded it is mapped, and damage is named."""

import os
import pickle
import sys
import zipfile

import numpy as np
import pytest
from image_set_files import batch_pickle, pictures, png, write_archive, write_batches, write_folder, write_zip

from ridgeline.errors import EnvironmentUnusable, UsageError
from ridgeline.workloads import image_files
from ridgeline.workloads.image_sets import load_images


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "images"


# --- every kind of source --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "zip", "npz", "npz-nchw", "npy"])
def test_each_kind_gives_the_images(tmp_path, kind):
    images = pictures(6)
    source = tmp_path / f"set.{kind[:3]}"
    if kind == "folder":
        write_folder(source, images)
    elif kind == "zip":
        write_zip(source, images)
    elif kind == "npy":
        np.save(source, images)
    else:
        np.savez_compressed(source, x=images.transpose(0, 3, 1, 2) if kind == "npz-nchw" else images, y=np.arange(6))
    for _ in range(2):  # decoded, then from the cache
        loaded = load_images(source)
        assert loaded.dtype == np.uint8
        assert np.array_equal(loaded, images)


@pytest.mark.parametrize("kind", ["folder", "folder above", "archive"])
def test_batches_give_both_splits(tmp_path, kind):
    images = pictures(10, side=32)
    if kind == "archive":
        source = write_archive(tmp_path / "cifar-10-python.tar.gz", images)
    else:
        source = write_batches(tmp_path / "cifar-10-batches-py", images)
        source = source.parent if kind == "folder above" else source
    assert np.array_equal(load_images(source), images)
    assert np.array_equal(load_images(source, split="test"), images[:1])


def test_batch_files_are_what_python_2_wrote():
    images = pictures(3, side=32)
    batch = pickle.loads(batch_pickle(images), encoding="bytes")
    assert batch[b"labels"] == [0, 1, 2]
    assert np.array_equal(batch[b"data"].reshape(3, 3, 32, 32).transpose(0, 2, 3, 1), images)


def test_a_batch_saved_again_by_python_3_is_read(tmp_path):
    images = pictures(5, side=32)
    write_batches(tmp_path, images)
    rows = images[:1].transpose(0, 3, 1, 2).reshape(1, -1)
    (tmp_path / "test_batch").write_bytes(pickle.dumps({"data": rows, "labels": [0]}, protocol=4))
    assert np.array_equal(load_images(tmp_path, split="test"), images[:1])


def test_several_arrays_are_told_apart_by_split(tmp_path):
    train, test = pictures(4), pictures(2, seed=1)
    np.savez(tmp_path / "both.npz", x_train=train, x_test=test)
    assert np.array_equal(load_images(tmp_path / "both.npz"), train)
    assert np.array_equal(load_images(tmp_path / "both.npz", split="test"), test)
    np.savez(tmp_path / "unclear.npz", first=train, second=test)
    with pytest.raises(UsageError, match=r"2 arrays of images \(first, second\)"):
        load_images(tmp_path / "unclear.npz")


def test_grey_arrays_keep_one_channel(tmp_path):
    np.savez(tmp_path / "digits.npz", pictures(3, channels=1)[..., 0])
    assert load_images(tmp_path / "digits.npz").shape == (3, 8, 8, 1)
    assert load_images(tmp_path / "digits.npz", size=4).shape == (3, 4, 4, 1)


def test_parquet_without_pyarrow_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EnvironmentUnusable, match=r"needs pyarrow: `pip install pyarrow`"):
        load_images(tmp_path / "train.parquet")


@pytest.mark.parametrize("column", ["img", "image"])
def test_parquet_folder_gives_the_split(tmp_path, column):
    pyarrow = pytest.importorskip("pyarrow", reason="reads parquet: `pip install pyarrow`")
    parquet = pytest.importorskip("pyarrow.parquet")
    images = pictures(5)
    for name, part in (("train-00000", images[:3]), ("train-00001", images[3:]), ("test-00000", images[:1])):
        rows = [{"bytes": png(image), "path": f"{i}.png"} for i, image in enumerate(part)]
        parquet.write_table(
            pyarrow.table({column: rows, "label": list(range(len(part)))}), tmp_path / f"{name}.parquet"
        )
    assert np.array_equal(load_images(tmp_path), images)
    assert np.array_equal(load_images(tmp_path, split="test"), images[:1])
    parquet.write_table(pyarrow.table({"label": [1]}), tmp_path / "other.parquet")
    with pytest.raises(UsageError, match="no column named img or image"):
        load_images(tmp_path / "other.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(UsageError, match="no readable parquet"):
        load_images(tmp_path / "broken.parquet")


def test_real_zip(test_data):
    images = load_images(test_data / "cifar10-test-4k.zip")
    assert images.shape == (4000, 32, 32, 3)
    assert 100 < images.mean() < 140
    assert np.array_equal(load_images(test_data / "cifar10-test-4k.zip"), images)


# --- the cache -------------------------------------------------------------------------------------------------------


def test_a_cached_set_is_mapped_and_not_decoded_again(tmp_path, cache, monkeypatch):
    images = pictures(4)
    source = write_zip(tmp_path / "set.zip", images)
    load_images(source)
    monkeypatch.setattr(image_files, "decode_image", lambda data, name: pytest.fail("decoded again"))
    loaded = load_images(source)
    assert isinstance(loaded, np.memmap)
    assert not loaded.flags.writeable
    assert np.array_equal(loaded, images)
    assert len(list(cache.iterdir())) == 1


def test_a_changed_source_is_read_again_and_replaces_its_copy(tmp_path, cache):
    source = write_zip(tmp_path / "set.zip", pictures(4))
    load_images(source)
    load_images(source, size=4)
    write_zip(source, pictures(5, seed=1))
    assert np.array_equal(load_images(source), pictures(5, seed=1))
    assert sorted(np.load(path).shape[:2] for path in cache.iterdir()) == [(4, 4), (5, 8)]  # the other size is kept


def test_a_touched_file_in_a_folder_counts_as_changed(tmp_path):
    folder = write_folder(tmp_path / "set", pictures(4))
    load_images(folder)
    new = pictures(1, seed=1)[0]
    (folder / "a" / "0000.png").write_bytes(png(new))
    os.utime(folder / "a" / "0000.png", ns=(1, 1))
    assert np.array_equal(load_images(folder)[0], new)


def test_a_damaged_copy_is_decoded_again(tmp_path, cache, caplog):
    source = write_zip(tmp_path / "set.zip", pictures(4))
    load_images(source)
    (copy,) = cache.iterdir()
    copy.write_bytes(copy.read_bytes()[:-1])
    assert np.array_equal(load_images(source), pictures(4))
    assert "ignored, unreadable" in caplog.text


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path, cache, caplog):
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    assert np.array_equal(load_images(write_zip(tmp_path / "set.zip", pictures(4))), pictures(4))
    assert "not cached" in caplog.text


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_other_sizes_are_taken_as_they_are(tmp_path):
    assert load_images(write_folder(tmp_path / "set", pictures(2, side=20))).shape == (2, 20, 20, 3)


def test_mixed_sizes_need_one(tmp_path):
    folder = write_folder(tmp_path / "set", pictures(2))
    wide = np.zeros((10, 14, 3), np.uint8)
    wide[:, 2:12] = 200
    (folder / "b" / "9.png").write_bytes(png(wide))
    with pytest.raises(UsageError, match=r"2 sizes \(8 x 8 in .*0000.png, 14 x 10 in .*9.png\): pass --size"):
        load_images(folder)
    images = load_images(folder, size=10)
    assert images.shape == (3, 10, 10, 3)
    assert (images[2] == 200).all()  # the central square, untouched
    assert (load_images(folder, size=5)[2] == 200).all()


# --- damage ----------------------------------------------------------------------------------------------------------


def test_every_damaged_image_is_named(tmp_path, caplog, cache):
    images = pictures(6)
    folder = write_folder(tmp_path / "set", images)
    for name in ("a/0001.png", "b/0004.png"):
        (folder / name).write_bytes((folder / name).read_bytes()[:60])
    with pytest.raises(UsageError, match=r"2 of 6 images in .*: .*0001.png, .*0004.png; .*--skip-bad") as refused:
        load_images(folder)
    assert "\n" not in str(refused.value)
    for _ in range(2):  # said again each time: such a set is not cached
        caplog.clear()
        assert np.array_equal(load_images(folder, skip_bad=True), images[[0, 2, 3, 5]])
        assert "skipped 2 damaged images" in caplog.text and "0004.png" in caplog.text
    assert not cache.exists()


def test_damage_inside_a_zip_is_named(tmp_path):
    source = write_zip(tmp_path / "set.zip", pictures(3))
    with zipfile.ZipFile(source) as archive:
        entry = archive.getinfo("train/cat/0001.png")
    data = bytearray(source.read_bytes())
    data[entry.header_offset + 80] ^= 0xFF
    source.write_bytes(data)
    with pytest.raises(UsageError, match=r"1 of 3 images .*train/cat/0001.png"):
        load_images(source)
    assert len(load_images(source, skip_bad=True)) == 2


def test_nothing_readable_is_refused_even_when_skipping(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.png").write_bytes(b"")
    with pytest.raises(UsageError, match="holds no image that can be read"):
        load_images(tmp_path / "set", skip_bad=True)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("set.zip", b"PK\x03\x04 cut short", "damaged or no zip"),
        ("set.npz", b"PK\x03\x04 cut short", "damaged or no zip"),
        ("set.npy", b"\x93NUMPY\x01\x00", "damaged or no numpy"),
        ("set.tar.gz", b"\x1f\x8b nonsense", "damaged or no tar"),
        ("set.csv", b"1,2", "of no known kind"),
        ("data_batch_1", b"\x80\x02", "of no known kind"),
    ],
)
def test_foreign_and_damaged_files_are_refused(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=says):
        load_images(tmp_path / name)


def test_absent_and_empty_sources_are_refused(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        load_images(tmp_path / "absent")
    with pytest.raises(UsageError, match="neither images, nor CIFAR-10 batches, nor parquet"):
        load_images(tmp_path)
    with pytest.raises(UsageError, match="size must be at least 1 pixel, got 0"):
        load_images(tmp_path, size=0)


def test_arrays_that_are_no_images_are_refused(tmp_path):
    np.savez(tmp_path / "floats.npz", np.zeros((2, 8, 8, 3), np.float32))
    np.savez(tmp_path / "objects.npz", np.array([{"a": 1}], dtype=object))
    for name in ("floats", "objects"):
        with pytest.raises(UsageError, match=r"no uint8 array \[N, H, W, C\]"):
            load_images(tmp_path / f"{name}.npz")


def test_an_array_that_claims_too_much_takes_no_memory(tmp_path):
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1099511627776, 8, 8, 3), }"
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    bomb = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (tmp_path / "bomb.npy").write_bytes(bomb)
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w") as archive:
        archive.writestr("x.npy", bomb)
    for name in ("bomb.npy", "bomb.npz"):
        with pytest.raises(UsageError, match="takes more than the"):
            load_images(tmp_path / name)


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("HOSTILE",)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda images: batch_pickle(images)[:-50], "no CIFAR-10 batch"),
        (lambda images: batch_pickle(images, raw=b"short"), r"shape \[1, 3072\] in 5 bytes"),
        (lambda images: batch_pickle(images, function=b"scalar"), "no array of bytes"),
        (lambda images: pickle.dumps({"data": Hostile()}), "no array of bytes"),
        (lambda images: pickle.dumps(Hostile()), "no array of bytes"),
        (lambda images: b"\x80\x02}U\x04data\x8d" + b"\xff" * 8, "malformed"),
        (lambda images: b"", "malformed"),
        (lambda images: batch_pickle(images[:, :16]), r"rows of 3072"),
    ],
)
def test_a_hostile_or_damaged_batch_is_refused_and_runs_nothing(tmp_path, monkeypatch, damage, says):
    monkeypatch.chdir(tmp_path)
    folder = write_batches(tmp_path / "set", pictures(5, side=32))
    (folder / "data_batch_2").write_bytes(damage(pictures(1, side=32)))
    with pytest.raises(UsageError, match=says) as refused:
        load_images(folder)
    assert "data_batch_2" in str(refused.value)
    assert not (tmp_path / "HOSTILE").exists()


def test_the_hostile_pickle_would_act(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps({"data": Hostile()}))
    assert (tmp_path / "HOSTILE").exists()


def test_a_missing_batch_is_named(tmp_path):
    folder = write_batches(tmp_path / "set", pictures(5, side=32))
    (folder / "data_batch_3").unlink()
    with pytest.raises(UsageError, match="data_batch_3' cannot be read"):
        load_images(folder)
    write_archive(tmp_path / "a.tar", pictures(5, side=32))
    (tmp_path / "b.tar").write_bytes(b"\0" * 10240)  # an archive without a member
    with pytest.raises(UsageError, match="holds no data_batch_1"):
        load_images(tmp_path / "b.tar")


def test_limits_stop_a_set_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(image_files, "MAX_SET_BYTES", 3 * 8 * 8 * 3)
    with pytest.raises(UsageError, match="takes more than the 576 bytes"):
        load_images(write_folder(tmp_path / "set", pictures(4)))
