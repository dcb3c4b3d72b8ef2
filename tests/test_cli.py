"""The command end to end: what stands on stdout, what on stderr, which exit code, and that all formats agree."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ridgeline
from ridgeline import units
from ridgeline.cli import main
from ridgeline.report import from_dict

NET = """
import torch
from torch import nn


def build(batch: int = 1):
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 8, 1))
    return net.eval(), torch.zeros(batch, 3, 32, 32)

def asks(): return Asks(), torch.zeros(4)
def misfit(): return nn.Conv2d(3, 8, 3), torch.zeros(1, 4, 8, 8)
def frozen(): return build()[0].requires_grad_(False), torch.zeros(1, 3, 32, 32)
def interrupted(): raise KeyboardInterrupt


class Asks(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working directory with net.py, and a cache folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


@pytest.fixture
def run(capsys):
    """`run("doctor")` -> (exit code, stdout, stderr); a refusal of the parser counts like one of a verb."""

    def run_main(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(list(argv))
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run_main


def roofline_json(run, *argv: str):
    code, out, err = run("roofline", "net.py:build", "--format", "json", *argv)
    assert (code, err) == (0, "")
    return from_dict(json.loads(out))


def child(*argv: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ridgeline", *argv], capture_output=True, text=True, check=False, **options
    )


# --- roofline ------------------------------------------------------------------------------------------------------


def test_all_formats_tell_the_same(run):
    report = roofline_json(run, "--gpu", "L4")
    _, table, _ = run("roofline", "net.py:build", "--gpu", "L4")
    _, text, _ = run("roofline", "net.py:build", "--gpu", "L4", "--format", "csv")
    _, markdown, _ = run("roofline", "net.py:build", "--gpu", "L4", "--format", "md")
    rows = list(csv.DictReader(io.StringIO(text)))
    unfused = [row for row in rows if row["schedule"] == "unfused"]
    fused = [row for row in rows if row["schedule"] == "fused"]
    assert (len(unfused), len(fused)) == (len(report.rows), len(report.fused_rows)) == (4, 2)
    assert sum(float(row["flops"]) for row in unfused) == report.flops
    assert sum(float(row["seconds"]) for row in unfused) == pytest.approx(report.unfused_s)
    assert sum(float(row["seconds"]) for row in fused) == pytest.approx(report.floor_s)
    for layout in (table, markdown):
        found = dict(re.findall(r"(work|unfused sum|fused floor)[ |]+([\d.]+ \S+)", layout))
        assert found["work"] == units.flops(report.flops)
        assert found["unfused sum"] == units.seconds(report.unfused_s)
        assert found["fused floor"] == units.seconds(report.floor_s)
        assert layout.endswith("\n")
        assert not layout.endswith("\n\n")


def test_json_totals_are_those_of_its_rows(run):
    code, out, _ = run("roofline", "net.py:build", "--gpu", "L4", "--format", "json")
    data = json.loads(out)
    assert code == 0
    assert data["summary"]["floor_s"] == pytest.approx(sum(row["seconds"] for row in data["fused_rows"]))
    # 16 filters of 3x3x3 and 8 of 16, on 32 x 32
    convolutions = [row["flops"] for row in data["rows"] if row["kind"].startswith("conv")]
    assert convolutions == [2 * 32 * 32 * 16 * 27, 2 * 32 * 32 * 8 * 16]


def test_rows_cuts_the_table_and_not_the_csv(run):
    _, short, _ = run("roofline", "net.py:build", "--gpu", "L4", "--rows", "1")
    _, long, _ = run("roofline", "net.py:build", "--gpu", "L4", "--rows", "99")
    assert "more rows" in short
    assert "more rows" not in long
    _, cut, _ = run("roofline", "net.py:build", "--gpu", "L4", "--rows", "1", "--format", "csv")
    assert len(cut.splitlines()) == 1 + 4 + 2


def test_html_is_one_small_file_that_loads_nothing(run, folder):
    code, out, err = run("roofline", "net.py:build", "--gpu", "L4", "--train", "--html", "page.html")
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert code == 0
    assert err == "wrote page.html\n"
    assert out.startswith("model")
    assert page.startswith("<!DOCTYPE html>")
    assert len(page.encode()) < 300_000
    assert "http://" not in page
    assert "https://" not in page
    assert re.findall(r'\b(?:src|href)="(?!data:|#)', page) == []
    assert "ridgeline roofline net.py:build --gpu L4 --train --html page.html" in page
    assert sorted(path.name for path in folder.iterdir() if path.suffix in (".html", ".tmp")) == ["page.html"]


@pytest.mark.parametrize("place", ["absent/page.html", ".", ""])
def test_html_that_cannot_be_written_leaves_nothing(run, folder, place):
    code, out, err = run("roofline", "net.py:build", "--gpu", "L4", "--html", place)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert [path for path in folder.rglob("*") if "tmp" in path.name or "html" in path.name] == []


def test_train_has_three_phases_and_more_work(run):
    forward, step = roofline_json(run, "--gpu", "L4"), roofline_json(run, "--gpu", "L4", "--train")
    assert {row.phase for row in forward.rows} == {"forward"}
    assert {row.phase for row in step.rows} == {"forward", "backward", "optimizer"}
    assert (forward.dtype, step.dtype) == ("fp16", "bf16")
    # the first layer's input gradient is not computed: 2 of 3 passes there, 3 of 3 in the second
    first, second = 2 * 32 * 32 * 16 * 27, 2 * 32 * 32 * 8 * 16
    convolutions = sum(row.flops for row in step.rows if row.kind.startswith("conv"))
    assert convolutions == pytest.approx(2 * first + 3 * second, rel=0.01)  # and the bias gradients


@pytest.mark.parametrize(
    ("dtype", "pipe", "weight_bytes"),
    [("fp32", "cuda_fp32", 4), ("tf32", "tensor_tf32", 4), ("fp16", "tensor_fp16", 2), ("bf16", "tensor_bf16", 2)],
)
def test_dtype_chooses_the_unit(run, dtype, pipe, weight_bytes):
    report = roofline_json(run, "--gpu", "L4", "--dtype", dtype)
    assert report.dtype == dtype
    assert {row.pipe for row in report.rows if row.kind.startswith("conv")} == {pipe}
    assert report.weight_bytes == weight_bytes * report.parameters


def test_batch_scales_the_work(run):
    one, eight = roofline_json(run, "--gpu", "L4"), roofline_json(run, "--gpu", "L4", "--batch", "8")
    assert (one.batch, eight.batch) == (1, 8)
    assert eight.flops == 8 * one.flops
    assert eight.weight_bytes == one.weight_bytes
    assert one.floor_s < eight.floor_s < 8 * one.floor_s


def test_gpu_by_any_of_its_names_or_by_file(run, folder):
    gpus = Path(ridgeline.__file__).parent / "gpus"
    (folder / "mine.toml").write_text((gpus / "l4.toml").read_text().replace("NVIDIA L4", "Mine").replace('"L4"', ""))
    assert {roofline_json(run, "--gpu", name).gpu for name in ("NVIDIA L4", "L4", " nvidia  l4 ")} == {"NVIDIA L4"}
    assert roofline_json(run, "--gpu", "mine.toml").gpu == "Mine"
    assert roofline_json(run, "--gpu", "mine.toml").floor_s == roofline_json(run, "--gpu", "L4").floor_s


def test_without_gpu_and_without_name_an_h200_is_meant(run, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert roofline_json(run).gpu == "NVIDIA H200"


def test_a_module_in_the_working_directory(run, folder):
    (folder / "net_for_the_command.py").write_text(NET)
    code, out, _ = run("roofline", "net_for_the_command:build", "--gpu", "L4")
    assert code == 0
    assert "net_for_the_command:build, inference" in out


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ("roofline yolo99 --gpu L4", 2, "unknown model 'yolo99'"),
        ("roofline net.py:build --gpu L41", 2, "no spec for GPU 'L41'"),
        ("roofline net.py:build --gpu absent.toml", 2, "absent.toml: cannot read the GPU file"),
        ("roofline net.py:build --gpu L4 --dtype fp8", 2, "argument --dtype: invalid choice: 'fp8'"),
        ("roofline net.py:build --gpu L4 --format xml", 2, "argument --format: invalid choice: 'xml'"),
        ("roofline net.py:build --gpu L4 --batch two", 2, "argument --batch: invalid int value: 'two'"),
        ("roofline net.py:build --gpu L4 --batch 0", 2, "--batch must be at least 1, got 0"),
        ("roofline net.py:build --gpu L4 --rows -1", 2, "argument --rows: must be a whole number of at least 0"),
        ("roofline net.py:build --gpu L4 --bogus", 2, "unrecognized arguments: --bogus"),
        ("roofline net.py:frozen --gpu L4 --batch 2", 2, "unexpected keyword argument 'batch'"),
        ("roofline net.py:frozen --gpu L4 --train", 2, "no parameter that requires a gradient"),
        ("roofline net.py:asks --gpu L4", 2, "Asks asks for the values of a tensor"),
        ("roofline net.py:misfit --gpu L4", 2, "the forward pass fails on inputs of shape [1, 4, 8, 8]: "),
        ("roofline net.py:build --gpu T4 --dtype bf16", 3, "NVIDIA T4 (sm_75) has no tensor_bf16 unit: use --dtype"),
        ("roofline net.py:build --gpu T4 --train", 3, "use --dtype fp16"),
        ("roofline", 2, "the following arguments are required: MODEL"),
        ("detect", 2, "the following arguments are required: IMAGE"),
        ("detect absent.jpg", 2, "'absent.jpg' does not exist"),
        ("detect net.py --weights absent.pt", 2, "weights file 'absent.pt' does not exist"),
        ("detect net.py --weights net.py", 2, "weights file 'net.py' must be"),
        ("detect net.py --model yolo99", 2, "no weights are known for model 'yolo99'"),
        ("sass conv3d", 2, "kernel must be one of conv2d_act"),
        ("sass conv2d_act --arch sm_99", 2, "architecture must be one of sm_80"),
        ("demo absent.jpg", 2, "'absent.jpg' does not exist"),
        ("explode", 2, "argument VERB: invalid choice: 'explode'"),
        ("", 2, "the following arguments are required: VERB"),
    ],
)
def test_refusals_are_one_sentence_on_stderr(run, argv, code, words):
    got, out, err = run(*argv.split())
    assert (got, out) == (code, "")
    assert err.startswith("ridgeline")
    assert words in err
    assert err.count("\n") == 1


def test_t4_does_the_same_in_fp16(run):
    assert roofline_json(run, "--gpu", "T4", "--dtype", "fp16").gpu == "NVIDIA T4"


def test_interruption_is_130_and_silent(run):
    assert run("roofline", "net.py:interrupted", "--gpu", "L4") == (130, "", "")


# --- the process ---------------------------------------------------------------------------------------------------


def test_a_reader_that_leaves_is_no_failure():
    # more than a pipe holds, and the reading end is closed before the first byte
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "ridgeline", "roofline", "net.py:build", "--gpu", "L4", "--format", "json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_version_and_help():
    version = child("--version")
    assert (version.returncode, version.stdout) == (0, f"ridgeline {ridgeline.__version__}\n")
    overview = child("--help")
    assert overview.returncode == 0
    assert all(verb in overview.stdout for verb in ("roofline", "detect", "doctor", "sass", "demo"))


# --- doctor --------------------------------------------------------------------------------------------------------


def test_doctor_says_what_is_there(run):
    code, out, err = run("doctor", "--format", "json")
    diagnosis = json.loads(out)
    assert code == (3 if diagnosis["problems"] else 0)
    assert err.count("\n") == len(diagnosis["problems"])
    assert {"Python", "torch", "GPU", "cache folder"} <= {row["name"] for row in diagnosis["rows"]}
    _, table, _ = run("doctor")
    assert all(row["name"] in table for row in diagnosis["rows"])


def test_doctor_finds_a_cache_folder_that_takes_no_file(run, folder, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(folder / "net.py" / "cache"))
    code, out, err = run("doctor")
    assert code == 3
    assert "BAD  cache folder" in out
    assert "ridgeline doctor: cannot write" in err


# --- detect --------------------------------------------------------------------------------------------------------


def test_detect_goes_on_after_a_broken_image(run, folder, test_data):
    (folder / "photos").mkdir()
    bus = (test_data / "images" / "bus.jpg").read_bytes()
    (folder / "photos" / "a.jpg").write_bytes(bus[: len(bus) // 2])
    (folder / "photos" / "b.jpg").write_bytes(bus)
    code, out, err = run("detect", "photos", "--weights", str(test_data / "yolo26n-w8.pt"), "--out", "found")
    (line,) = out.splitlines()
    result = json.loads(line)
    assert code == 2
    assert err.startswith("ridgeline detect: 'photos/a.jpg'")
    assert err.count("\n") == 1
    assert (result["image"], result["shape_hw"]) == ("photos/b.jpg", [1080, 810])
    assert sorted(box["name"] for box in result["boxes"]) == ["bus", "person", "person", "person", "person"]
    assert [path.name for path in (folder / "found").iterdir()] == ["b-detected.jpg"]


def test_detect_takes_its_choices(run, test_data):
    weights = str(test_data / "yolo26n-w8.pt")
    image = str(test_data / "images" / "bus.jpg")
    code, out, _ = run("detect", image, "--weights", weights, "--letterbox", "square", "--size", "320", "--conf", "0.8")
    boxes = json.loads(out)["boxes"]
    assert code == 0
    assert boxes
    assert min(box["score"] for box in boxes) > 0.8
    for choice, value in (("--size", "641"), ("--conf", "nan"), ("--model", "yolo26s")):
        code, out, err = run("detect", image, "--weights", weights, choice, value)
        assert (code, out, err.count("\n")) == (2, "", 1)


# --- sass ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sass_counts_matrix_instructions(run):
    code, out, err = run("sass", "conv2d_act", "--arch", "sm_90", "--format", "json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["arch"] == "sm_90"
    assert any(name.startswith("HGMMA") for name in report["matrix_instructions"])
    assert report["problems"] == []
