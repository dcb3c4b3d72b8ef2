"""The demo: one line a step, the page's path last; refusals before any work, and nothing half-written."""

import re
from pathlib import Path

import pytest

from ridgeline import demo
from ridgeline.cli import main
from ridgeline.errors import UsageError
from ridgeline.specs import find_spec


@pytest.fixture(scope="module")
def estimates():
    """`estimate_target` that remembers: the reports of two runs are the same, and each takes seconds."""
    reports = {}

    def remembered(target, spec, *, train=False, dtype=None):
        key = (target.name, spec.name, train, dtype)
        if key not in reports:
            reports[key] = real(target, spec, train=train, dtype=dtype)
        return reports[key]

    real = demo.estimate_target
    return remembered


@pytest.fixture(autouse=True)
def quick(estimates, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "estimate_target", estimates)
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "cache"))


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_without_weights(tmp_path, capsys):
    out = tmp_path / "deep" / "out"
    assert main(["demo", "--gpu", "NVIDIA L4", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert re.match(r"yolo26n forward pass, batch 1, fp16 on NVIDIA L4: [\d.]+ GFLOP, ", lines[0])
    assert re.match(r"ddpm-cifar10 training step, batch 128, bf16 on NVIDIA L4: [\d.]+ TFLOP, ", lines[1])
    assert lines[2].startswith("detection left out: yolo26n has no weights yet: save https://")
    assert lines[3] == str(out / "demo.html")
    page = (out / "demo.html").read_text(encoding="utf-8")
    assert files_in(out) == ["demo.html"]
    assert len(page.encode()) < 500_000
    assert "<h2>yolo26n</h2>" in page
    assert "<h2>ddpm-cifar10</h2>" in page
    assert "yolo26n has no weights yet" in page
    assert "<img" not in page
    assert "ridgeline roofline ddpm-cifar10 --train --gpu &#x27;NVIDIA L4&#x27;" in page


def test_with_weights_on_the_bundled_picture(tmp_path, test_data):
    weights = test_data / "yolo26n-w8.pt"
    lines = list(demo.run([], spec=find_spec("NVIDIA L4"), weights=weights, folder=tmp_path / "out"))
    found = re.match(r"(\d+) objects found in 1 image\(s\) by yolo26n, pictures in ", lines[2])
    assert found
    assert int(found[1]) >= 3
    assert lines[-1] == str(tmp_path / "out" / "demo.html")
    assert files_in(tmp_path / "out") == ["demo.html", "detections/street-detected.jpg"]
    page = Path(lines[-1]).read_text(encoding="utf-8")
    assert len(page.encode()) < 800_000
    assert page.count("<img") == 1
    # the command below the picture finds the same objects again
    assert f"ridgeline detect {demo.STREET} --weights {weights}" in page


def test_own_images(tmp_path, test_data):
    images = [str(test_data / "images" / name) for name in ("bus.jpg", "zidane.jpg")]
    lines = list(demo.run(images, spec=find_spec("L4"), weights=test_data / "yolo26n-w8.pt", folder=tmp_path))
    assert " objects found in 2 image(s) " in lines[2]
    assert files_in(tmp_path / "detections") == ["bus-detected.jpg", "zidane-detected.jpg"]


def refuse(monkeypatch, **arguments) -> str:
    """The refusal of a demo that may not even begin to work."""
    monkeypatch.setattr(demo, "estimate_target", pytest.fail)
    choices = {"images": [], "spec": find_spec("L4"), "weights": None, **arguments}
    with pytest.raises(UsageError) as refusal:
        demo.run(**choices)
    return str(refusal.value)


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert "cannot be made (Not a directory)" in refuse(monkeypatch, folder=tmp_path / "file" / "out")
    assert files_in(tmp_path) == ["file"]


def test_images_and_weights_are_looked_at_first(tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert "'absent.jpg' does not exist" in refuse(monkeypatch, images=["absent.jpg"], folder=out)
    assert "'absent.pt' does not exist" in refuse(monkeypatch, weights=Path("absent.pt"), folder=out)
    (tmp_path / "broken.pt").write_bytes(b"PK\x03\x04")
    assert "broken.pt" in refuse(monkeypatch, weights=tmp_path / "broken.pt", folder=out)
    assert not out.exists()


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "demo.html").mkdir()
    steps = demo.run([], spec=find_spec("NVIDIA L4"), weights=None, folder=tmp_path)
    with pytest.raises(UsageError, match=r"cannot write .*demo\.html"):
        list(steps)
    assert files_in(tmp_path) == []


def test_a_broken_image_ends_the_demo_without_a_page(tmp_path, test_data):
    bus = (test_data / "images" / "bus.jpg").read_bytes()
    (tmp_path / "half.jpg").write_bytes(bus[: len(bus) // 2])
    choices = {"spec": find_spec("NVIDIA L4"), "weights": test_data / "yolo26n-w8.pt", "folder": tmp_path / "out"}
    with pytest.raises(UsageError, match=r"half\.jpg"):
        list(demo.run([str(tmp_path / "half.jpg")], **choices))
    assert files_in(tmp_path / "out") == []
