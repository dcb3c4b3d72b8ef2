"""The command end to end: what stands on stdout, what on stderr, which exit code, and that all formats agree."""

import argparse
import csv
import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ridgeline
from graphs import by_reference
from planted import plant, scale_a_weight
from ridgeline import compiler, units
from ridgeline.cli import _parser, main
from ridgeline.report import from_dict
from ridgeline.workloads import ddpm_ladder
from tiny_detector import TinyDetector, save_pictures

NET = """
import torch
from torch import nn


def build(batch: int = 1):
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 8, 1))
    return net.eval(), torch.zeros(batch, 3, 32, 32)

def asks(): return Asks(), torch.zeros(4)
def misfit(): return nn.Conv2d(3, 8, 3), torch.zeros(1, 4, 8, 8)
def noise(): return build()[0], torch.rand((1, 3, 32, 32), generator=torch.Generator().manual_seed(0))
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
        (
            "roofline net.py:build --gpu L4 --bogus",
            2,
            "ridgeline roofline: unrecognized arguments: --bogus; `ridgeline r",
        ),
        ("cache ls --bogus", 2, "ridgeline cache ls: unrecognized arguments: --bogus"),
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
        ("detect net.py --weights .", 2, "weights file '.' is a folder"),
        (
            "detect net.py --dtype tf32 --device cpu",
            3,
            "ridgeline detect: --dtype tf32: the CPU has no TF32 products: use",
        ),
        ("detect net.py --model yolo99", 2, "no weights are known for model 'yolo99'"),
        ("verify", 2, "the following arguments are required: MODEL"),
        ("verify yolo99", 2, "unknown model 'yolo99'"),
        ("verify yolo26n --weights absent.pt", 2, "weights file 'absent.pt' does not exist"),
        ("verify yolo26n --images absent", 2, "'absent' does not exist"),
        ("verify yolo26n --size 65", 2, "must be a positive multiple of 32, got 65"),
        ("verify yolo26n --size 0", 2, "must be a positive multiple of 32, got 0"),
        ("verify yolo26n --size 100000", 2, "image size must be at most 4096, got 100000"),
        ("tune yolo26n --dtype fp8", 2, "ridgeline tune: --dtype fp8 is for ddpm's training step"),
        ("tune ddpm --batch 0", 2, "ridgeline tune: batch must be at least 1, got 0"),
        (
            "cache clear --op nope",
            2,
            "ridgeline cache: no table of the user's fits --op nope: `ridgeline cache ls` lists",
        ),
        ("cache clear --gpu nope --op nope", 2, "no table of the user's fits --op nope --gpu nope"),
        ("cache clear --op !!", 2, "argument --op: must have a letter or digit, got '!!'"),
        ("cache export out --gpu nope", 2, "no table of the present kernels fits --gpu nope"),
        ("cache export net.py", 2, "ridgeline cache: cannot write net.py/"),
        ("verify yolo26n --dtype fp8", 2, "argument --dtype: invalid choice: 'fp8'"),
        ("verify yolo26n --limit-map 1.5", 2, "the limit of mAP must lie in 0..1, got 1.5"),
        ("verify yolo26n --limit-factor 0", 2, "error_factor must be at least 1, got 0.0"),
        ("verify net.py:build --size 64", 2, "--size is for yolo26n, "),
        ("verify net.py:build --weights net.py", 2, "--weights is for yolo26n, "),
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


@pytest.mark.parametrize("argv", ["verify net.py:build", "detect net.py"])
def test_without_a_gpu_cuda_is_refused_with_3(run, monkeypatch, argv):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = run(*argv.split(), "--device", "cuda")
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert "torch sees no CUDA GPU" in err


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


def test_warnings_of_the_library_are_lines_of_the_verb(run, folder, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])  # as outside pytest
    table = folder / "cache" / "tuned" / "some-gpu" / "conv2d_act.json"
    table.parent.mkdir(parents=True)
    table.write_text("{")
    code, _, err = run("cache", "ls")
    assert code == 0
    assert re.fullmatch(rf"ridgeline cache: {table}: ignored, no readable table \(.*\)\n", err)


def test_every_argument_says_what_it_is():
    def silent(parser: argparse.ArgumentParser) -> Iterator[str]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for verb in action.choices.values():
                    yield from silent(verb)
            elif not action.help:
                yield f"{parser.prog} {action.metavar or action.option_strings}"

    assert list(silent(_parser())) == []


def test_version_and_help():
    version = child("--version")
    assert (version.returncode, version.stdout) == (0, f"ridgeline {ridgeline.__version__}\n")
    overview = child("--help")
    assert overview.returncode == 0
    assert all(verb in overview.stdout for verb in ("roofline", "detect", "verify", "doctor", "sass", "demo"))


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
    how, complaint = err.splitlines()
    assert how.startswith("ridgeline detect: yolo26n, fp")
    assert complaint.startswith("ridgeline detect: 'photos/a.jpg'")
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


@pytest.fixture
def tiny(monkeypatch, folder):
    """`detect` finds a small detector instead of YOLO26, on the CPU, and pictures in the working directory."""
    detection = ridgeline.workloads.detection
    monkeypatch.setattr(detection, "load_detector", lambda *_args, **_choices: TinyDetector())
    monkeypatch.setattr(detection, "choose_device", lambda _name: torch.device("cpu"))
    save_pictures(folder / "pictures", 2)
    with by_reference():
        yield


@pytest.fixture
def gpu_in_name(monkeypatch, tiny):
    """The command takes the path of a GPU; what it compiles runs through the references all the same."""
    detection = ridgeline.workloads.detection
    monkeypatch.setattr(detection, "choose_device", lambda _name: torch.device("cuda"))
    monkeypatch.setattr(detection, "device_name", lambda _device: "NVIDIA Test")


def best_scores(out: str) -> list[float]:
    """Of the 20 best boxes of each picture."""
    return [box["score"] for line in out.splitlines() for box in json.loads(line)["boxes"][:20]]


def test_detect_says_what_it_uses(run, tiny):
    for argv, how in (
        ((), "fp32 on the CPU, plain PyTorch"),
        (("--eager",), "fp32 on the CPU, plain PyTorch"),
        (("--dtype", "bf16", "--no-pdl"), "bf16 on the CPU, plain PyTorch"),
    ):
        code, out, err = run("detect", "pictures", "--size", "64", *argv)
        assert (code, err) == (0, f"ridgeline detect: yolo26n, {how}\n")
        assert len(best_scores(out)) == 2 * 20


def test_detect_compiles_on_a_gpu_unless_told_otherwise(run, gpu_in_name, monkeypatch):
    recipes = []
    build = compiler.compile
    monkeypatch.setattr(compiler, "compile", lambda *args: (recipes.append(args[2]), build(*args))[1])
    choices = ("detect", "pictures", "--size", "64", "--letterbox", "square")
    code, compiled, err = run(*choices, "--no-pdl")
    assert (code, err) == (0, "ridgeline detect: yolo26n, fp16 on NVIDIA Test, compiled, each input shape verified\n")
    # two pictures of one shape are one compilation
    assert [(recipe.dtype, recipe.pdl) for recipe in recipes] == [("fp16", False)]
    code, eager, err = run(*choices, "--eager")
    assert (code, err) == (0, "ridgeline detect: yolo26n, fp32 on NVIDIA Test, plain PyTorch\n")
    assert len(recipes) == 1
    assert best_scores(compiled) == pytest.approx(best_scores(eager), abs=0.005) and compiled != eager


def test_detect_with_wrong_numbers_ends_with_4_and_no_result(run, gpu_in_name, monkeypatch):
    plant(monkeypatch, "functionalize", scale_a_weight(1, 1.1))
    code, out, err = run("detect", "pictures", "--size", "64", "--dtype", "fp32")
    assert (code, out) == (4, "")
    assert "the first rewrite that breaks it is functionalize" in err.splitlines()[-1]


UNCERTAIN_SCORES = {
    ("rect", "bus.jpg", 4): 0.05
}  # a person whom the left edge cuts: letterbox, photo, row of the reference


@pytest.mark.gpu
@pytest.mark.parametrize("letterbox", ["rect", "square"])
def test_compiled_detections_are_those_of_the_reference(run, test_data, letterbox):
    """Every photo: the same boxes above 0.25, within 1 pixel and 0.01, although it runs in fp16.

    One score is itself uncertain: noise of half a step of fp16 on each activation of the untouched fp32 model moves
    it by 0.02 (root mean square), as docs/log.md shows.
    """
    weights, photos = str(test_data / "yolo26n-w8.pt"), test_data / "images"
    code, out, err = run("detect", str(photos), "--weights", weights, "--letterbox", letterbox)
    assert code == 0 and "fp16" in err and "compiled" in err
    reference = json.loads((test_data / "reference-detections.json").read_text())["modes"][f"{letterbox}640"]
    for line in out.splitlines():
        found = json.loads(line)
        expected = reference[Path(found["image"]).name]
        kept = [row for row, score in enumerate(expected["scores"]) if score > 0.25]
        left = list(kept)
        for box in found["boxes"]:
            edges = [box[edge] for edge in ("x1", "y1", "x2", "y2")]
            near = [
                row
                for row in left
                if expected["classes"][row] == box["class"]
                and edges == pytest.approx(expected["boxes"][row], abs=1.0)
                and box["score"]
                == pytest.approx(
                    expected["scores"][row], abs=UNCERTAIN_SCORES.get((letterbox, Path(found["image"]).name, row), 0.01)
                )
            ]
            assert near, f"{found['image']}: {box} is not in the reference"
            left.remove(near[0])
        assert left == [], f"{found['image']}: reference rows {left} were not found"


def test_sizes_that_fill_the_memory_are_refused(run, tiny):
    code, out, err = run("detect", "pictures", "--size", "100000")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "image size must be at most 4096, got 100000" in err


def test_a_damaged_file_in_the_cache_is_named_by_its_path(run, folder):
    save_pictures(folder / "pictures", 1)
    path = folder / "cache" / "weights" / "yolo26n.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    code, out, err = run("detect", "pictures", "--device", "cpu")
    assert (code, out) == (2, "")
    assert (
        err == f"ridgeline detect: weights file '{path}' is truncated (its zip directory is missing): fetch it again\n"
    )


# --- tune ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [(), ("--no-pdl",)])
def test_tune_hands_its_choices_on(run, monkeypatch, argv):
    recipes = []
    monkeypatch.setattr(compiler, "on_gpu", lambda module, inputs: (module, inputs))
    monkeypatch.setattr(compiler, "tune", lambda _module, _inputs, recipe, **_choices: recipes.append(recipe) or ())
    assert run("tune", "net.py:build", "--dtype", "bf16", *argv) == (0, "", "")
    assert [(recipe.dtype, recipe.precision, recipe.pdl) for recipe in recipes] == [("bf16", "tf32", not argv)]


def test_tune_hands_a_training_step_to_its_workload(run, monkeypatch):
    asked = []
    monkeypatch.setattr(ddpm_ladder, "tune", lambda *given, **_choices: asked.append(given) or ())
    assert run("tune", "ddpm") == (0, "", "")
    assert run("tune", "ddpm", "--batch", "64", "--dtype", "fp16") == (0, "", "")
    assert [(conditions.batch, dtype) for conditions, dtype in asked] == [(128, "bf16"), (64, "fp16")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="what it says where there is no GPU")
def test_tuning_a_training_step_needs_a_gpu(run):
    message = "ridgeline tune: this needs a CUDA GPU, and torch sees none: run `ridgeline doctor`\n"
    assert run("tune", "ddpm") == (3, "", message)


@pytest.mark.parametrize("argv", [("--no-pdl",), ("--precision", "ieee")])
def test_a_training_step_has_no_choices_of_inference(run, argv):
    code, out, err = run("tune", "ddpm", *argv)
    assert (code, out) == (2, "")
    assert "--no-pdl and --precision are for inference, and ddpm is a training step" in err


# --- verify --------------------------------------------------------------------------------------------------------


def test_verify_yolo26_at_a_small_size(run):
    """Every kernel has its place in the table, none errs more than it must, and the detections are the same."""
    with by_reference():
        code, out, err = run("verify", "yolo26n", "--size", "64", "--format", "json", "--no-pdl")
    found = json.loads(out)
    assert code == 0
    assert re.fullmatch(r"ridgeline verify: yolo26n with seeded random weights, fp16 on .+\n", err)
    assert (found["passed"], found["dtype"], found["pdl"]) == (True, "fp16", False)
    assert len(found["layers"]) > 50
    assert [layer["where"] for layer in found["layers"] if not layer["compared"] or layer["of_allowed"] > 1] == []
    assert {"conv2d_act", "attention_position", "detect_topk"} <= {layer["op"] for layer in found["layers"]}
    assert found["results"]["detections"]["rows"] > 70
    assert found["pictures"]["map_5095"] > 0.99 and found["pictures"]["detections"] > 5


def test_verify_fails_with_4_and_the_table(run, monkeypatch):
    plant(monkeypatch, "functionalize", scale_a_weight(0))
    choices = ("verify", "net.py:noise", "--dtype", "fp32", "--device", "cpu")
    with by_reference():
        code, out, err = run(*choices)
    assert code == 4
    how, refusal = err.splitlines()
    assert how == "ridgeline verify: net.py:noise, fp32 on the CPU"
    assert refusal.startswith("ridgeline verify: RMS error")
    assert refusal.endswith("; the first rewrite that breaks it is functionalize")
    title, first, *_, verdict = out.splitlines()
    assert "relative RMS" in title and first.endswith(" !")
    assert verdict == "verdict   FAILED: the first rewrite that breaks it is functionalize"
    # the same build is right within limits that are wide enough
    with by_reference():
        code, out, _ = run(*choices, "--limit-factor", "1e6", "--layers", "0")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["layers", "results", "verdict"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "tf32", "fp32"])
def test_verify_the_real_detector(run, test_data, dtype):
    weights, photos = str(test_data / "yolo26n-w8.pt"), str(test_data / "images")
    limits = ("--limit-px", "1", "--limit-score", "0.01") if dtype == "fp16" else ()
    code, out, err = run("verify", "yolo26n", "--weights", weights, "--images", photos, "--dtype", dtype, *limits)
    assert code == 0, out + err


# --- sass ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sass_counts_matrix_instructions(run):
    code, out, err = run("sass", "conv2d_act", "--arch", "sm_90", "--format", "json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["arch"] == "sm_90"
    assert any(name.startswith("HGMMA") for name in report["matrix_instructions"])
    assert report["problems"] == []
