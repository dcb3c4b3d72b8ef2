"""The `ridgeline` command: parse arguments, call a verb, print its result.

stdout carries the result alone, stderr everything else. Exit codes: 0 ok, 1 threshold, 2 usage or unreadable input,
3 environment unusable, 4 verification failed, 5 requested but not engaged, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import ridgeline
from ridgeline import cli_bench, cli_cache, cli_profile, cli_train
from ridgeline.errors import EnvironmentUnusable, RidgelineError, UsageError, VerificationFailed

if TYPE_CHECKING:
    from torch import device, nn

    from ridgeline.recipe import Recipe
    from ridgeline.workloads.detection import Model

INTERRUPTED = 130
FORMATS = ("table", "json", "csv", "md")
DTYPES = ("fp32", "tf32", "fp16", "bf16")
DEVICES = ("auto", "cpu", "cuda")
DEFAULT_GPU = "NVIDIA H200"  # where the machine has none and none was named; every report prints the GPU it is for


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    arguments.argv = argv
    try:
        with _warnings_of(arguments.verb):
            code = arguments.run(arguments)
        # here and not at exit, where a reader that has gone could no longer be told from a failure
        print(end="", flush=True)
        return code
    except RidgelineError as error:
        print(f"ridgeline {arguments.verb}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # the reader (`head`, `less`) has gone; pointing stdout at nothing keeps the interpreter's exit silent
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def roofline(a: argparse.Namespace) -> int:
    spec = ridgeline.specs.choose_spec(a.gpu, default=DEFAULT_GPU)
    target = ridgeline.targets.resolve(a.model, batch=a.batch, train=a.train)
    if a.fp8:
        if a.html:
            raise UsageError("--html draws the roofline, which --fp8 does not: leave one of them out")
        plan = ridgeline.profiler.plan_fp8_target(target, spec, train=a.train, dtype=a.dtype, quantise=a.fp8)
        print(ridgeline.fp8_text.render(plan, a.format, max_rows=a.rows))
        return 0
    report = ridgeline.profiler.estimate_target(target, spec, train=a.train, dtype=a.dtype)
    if a.html:
        html = ridgeline.report_html
        section = html.report_section(report, command=shlex.join(["ridgeline", *a.argv]))
        html.write_html(a.html, html.page([section], title=f"{report.subject} on {report.gpu}"))
        print(f"wrote {a.html}", file=sys.stderr)
    print(ridgeline.report_text.render(report, a.format, max_rows=a.rows).rstrip("\n"))
    return 0


def detect(a: argparse.Namespace) -> int:
    images = ridgeline.workloads.images.find_images(a.images)  # a typing error costs no download
    _check_tf32(a, ridgeline.workloads.detection.choose_device(a.device))
    model = ridgeline.workloads.detection.load_detector(a.model, a.weights, device=a.device)
    detector, how = _detector(a, model)
    results = ridgeline.workloads.detection.detect_files(detector, images, mode=a.letterbox, size=a.size, conf=a.conf)
    print(f"ridgeline detect: {a.model}, {how}", file=sys.stderr)
    code = 0
    for result, _picture in ridgeline.workloads.draw.draw_files(results, a.out):
        if result.error:
            print(f"ridgeline detect: {result.error}", file=sys.stderr)
            code = result.error.exit_code
        else:
            print(json.dumps(result.to_json(), ensure_ascii=False), flush=True)
    return code


def verify(a: argparse.Namespace) -> int:
    detection, verification = ridgeline.workloads.detection, ridgeline.verification
    limits = verification.PictureLimits(a.limit_map, a.limit_px, a.limit_score)
    recipe = _recipe(a, limits=ridgeline.recipe.Limits(a.limit_factor))
    place = detection.choose_device(a.device)
    subject = ridgeline.workloads.subjects.subject(a.model, weights=a.weights, images=a.images, size=a.size)
    print(f"ridgeline verify: {subject.text}, {a.dtype} on {detection.device_name(place)}", file=sys.stderr)
    detection.multiply_as_(a.dtype)
    module, inputs = subject.module.to(place), tuple(tensor.to(place) for tensor in subject.inputs)
    found = verification.verify(module, inputs, recipe, images=subject.images, limits=limits)
    print(json.dumps(found.to_json()) if a.format == "json" else "\n".join(found.lines(layers=a.layers)), flush=True)
    if not found.passed:
        raise VerificationFailed(found.reason)
    return 0


def doctor(a: argparse.Namespace) -> int:
    diagnosis = ridgeline.doctor.diagnose(measure=a.measure)
    print(diagnosis.to_json() if a.format == "json" else "\n".join(diagnosis.lines()))
    for problem in diagnosis.problems:
        print(f"ridgeline doctor: {problem}", file=sys.stderr)
    return diagnosis.exit_code


def sass(a: argparse.Namespace) -> int:
    report = ridgeline.sass.inspect_op(ridgeline.kernels.find(a.kernel), arch=a.arch, dtype=a.dtype)
    print(report.to_json() if a.format == "json" else "\n".join(report.lines()))
    return 0


def tune(a: argparse.Namespace) -> int:
    choices = {
        "width": None if a.exhaustive else ridgeline.tuning.WIDTH,
        "budget_s": a.budget,
        "force": a.force,
        "progress": lambda done, total, row: print(f"{row.op} {done}/{total}: {row.key}", file=sys.stderr, flush=True),
    }
    if a.model == "ddpm":
        if a.no_pdl or a.precision != "tf32":
            raise UsageError("--no-pdl and --precision are for inference, and ddpm is a training step")
        rows = cli_bench.tune_ddpm(128 if a.batch is None else a.batch, a.dtype or "bf16", **choices)
    elif a.dtype == "fp8":
        raise UsageError("--dtype fp8 is for ddpm's training step: inference runs in fp16, bf16 or fp32")
    else:
        target = ridgeline.targets.resolve(a.model, batch=a.batch)
        recipe = ridgeline.recipe.Recipe(dtype=a.dtype or "fp16", precision=a.precision, pdl=not a.no_pdl)
        rows = ridgeline.compiler.tune(*ridgeline.compiler.on_gpu(target.module, target.inputs), recipe, **choices)
    for row in rows:
        print(json.dumps({"op": row.op, "key": row.key, "config": dict(row.config), "seconds": row.seconds}))
    return 0


def demo(a: argparse.Namespace) -> int:
    spec = ridgeline.specs.choose_spec(a.gpu, default=DEFAULT_GPU)
    for line in ridgeline.demo.run(a.images, spec=spec, weights=a.weights, folder=a.out):
        print(line, flush=True)
    return 0


@contextmanager
def _warnings_of(verb: str) -> Iterator[None]:
    """The library's warnings as lines of this command, where nobody else has taken to showing them."""

    class Stderr(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not logging.root.handlers:
                print(f"ridgeline {verb}: {record.getMessage()}", file=sys.stderr, flush=True)

    handler, logger = Stderr(logging.WARNING), logging.getLogger("ridgeline")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Parser(argparse.ArgumentParser):
    """Refuses in one sentence, like the verbs, where argparse would print its usage first."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # here and not in `parse_args`, because the parser of a verb is asked for what it knows and can name the verb
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {shlex.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(UsageError.exit_code, f"{self.prog}: {message}; `{self.prog} --help` lists what there is\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ridgeline", description="Drive convolutional vision networks to the GPU's roofline.")
    parser.add_argument("--version", action="version", version=f"ridgeline {ridgeline.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for add in (_add_roofline, _add_detect, _add_verify, _add_tune, _add_doctor, _add_sass, _add_demo):
        add(verbs)
    cli_train.add_commands(verbs)
    cli_profile.add_commands(verbs)
    cli_bench.add_commands(verbs)
    cli_cache.add_commands(verbs)
    return parser


def _add_roofline(verbs: argparse._SubParsersAction) -> None:
    p = _verb(verbs, "roofline", roofline, "what a model costs and what bounds it, without a GPU")
    p.add_argument(
        "model", metavar="MODEL", help="yolo26n|s|m|l|x, ddpm-cifar10, package.module:callable or file.py:callable"
    )
    p.add_argument(
        "--gpu", help=f"driver name, short name ('L4') or TOML file; default: this machine's, else {DEFAULT_GPU}"
    )
    p.add_argument("--train", action="store_true", help="cost the training step: forward, backward, clip, AdamW, EMA")
    p.add_argument("--dtype", choices=DTYPES, help="default: fp16, with --train bf16 autocast")
    p.add_argument("--batch", type=int, help="images a step; default 1, for ddpm-cifar10 128")
    p.add_argument(
        "--fp8",
        nargs="?",
        choices=("static", "dynamic", "fused"),
        const="static",
        help="which layers and passes would gain from FP8 instead, quantised by a pass of known scale (default), by "
        "two passes, or by the kernel before",
    )
    p.add_argument("--format", choices=FORMATS, default="table", help="of stdout (default %(default)s)")
    p.add_argument(
        "--rows", type=_count, default=20, help="layers shown in the table and md formats (default %(default)s)"
    )
    p.add_argument(
        "--html", type=_file, metavar="FILE", help="also write one self-contained page with the roofline plot"
    )


def _add_detect(verbs: argparse._SubParsersAction) -> None:
    p = _verb(verbs, "detect", detect, "find objects in images with YOLO26")
    p.add_argument("images", nargs="+", metavar="IMAGE", help="file, folder or glob")
    p.add_argument("--model", default="yolo26n", help="yolo26n|s|m|l|x (default %(default)s)")
    p.add_argument("--weights", type=Path, metavar="FILE", help="official .pt, .safetensors or a plain state dict")
    p.add_argument("--letterbox", choices=("square", "rect"), default="rect", help="default %(default)s")
    p.add_argument(
        "--size", type=int, default=640, help="longer side in pixels, a multiple of 32 up to 4096 (default %(default)s)"
    )
    p.add_argument("--conf", type=float, default=0.25, help="keep scores above this (default %(default)s)")
    p.add_argument(
        "--out", type=Path, default=Path("detections"), metavar="DIR", help="pictures with boxes (default %(default)s)"
    )
    _add_device(p)
    p.add_argument(
        "--dtype", choices=DTYPES, help="default: fp16 where compiled, fp32 in plain PyTorch; tf32 needs a GPU"
    )
    p.add_argument("--eager", action="store_true", help="plain PyTorch also on a GPU; on the CPU it always is")
    _add_no_pdl(p)
    p.add_argument("--format", choices=("json",), default="json", help="one object a line on stdout")


def _add_verify(verbs: argparse._SubParsersAction) -> None:
    p = _verb(verbs, "verify", verify, "compile a model and compare it with itself untouched, on the CPU too, slowly")
    p.add_argument("model", metavar="MODEL", help="yolo26n|s|m|l|x, package.module:callable or file.py:callable")
    p.add_argument("--weights", type=Path, metavar="FILE", help="default: the cache folder, else seeded random ones")
    p.add_argument("--images", nargs="+", metavar="IMAGE", help="for a detector; default: the bundled picture")
    p.add_argument(
        "--size", type=int, help="side of a detector's square input, a multiple of 32 up to 4096 (default 640)"
    )
    _add_device(p)
    p.add_argument("--dtype", choices=DTYPES, default="fp16", help="default %(default)s")
    _add_no_pdl(p)
    for name, default, text in (
        ("--limit-factor", 2.0, "results may err this often as much as plain PyTorch in the dtype (default 2)"),
        ("--limit-map", 0.99, "least mAP 50-95 on the images (default 0.99)"),
        ("--limit-px", math.inf, "how far a box may move on the images; default: any"),
        ("--limit-score", math.inf, "how far a score may move on the images; default: any"),
    ):
        p.add_argument(name, type=float, default=default, metavar="X", help=text)
    p.add_argument("--layers", type=_count, default=20, help="kernels shown, the worst ones (default %(default)s)")
    p.add_argument(
        "--format", choices=("table", "json"), default="table", help="default %(default)s; json holds every kernel"
    )


def _add_tune(verbs: argparse._SubParsersAction) -> None:
    p = _verb(verbs, "tune", tune, "search kernel configs for a model on this GPU, once, into the user's tables")
    what = "yolo26n|s|m|l|x, ddpm (its training step, norms last), package.module:callable or file.py:callable"
    p.add_argument("model", metavar="MODEL", help=what)
    p.add_argument(
        "--dtype", choices=("fp16", "bf16", "fp32", "fp8"), help="default fp16, for ddpm bf16; fp8 for ddpm alone"
    )
    p.add_argument(
        "--precision", choices=("tf32", "ieee"), default="tf32", help="of fp32 products (default %(default)s)"
    )
    p.add_argument("--batch", type=int, help="images a call; default 1, for ddpm 128")
    _add_no_pdl(p)
    p.add_argument("--budget", type=float, metavar="SECONDS", help="begin no further problem after this long")
    p.add_argument("--exhaustive", action="store_true", help="time every candidate, not the likeliest 12")
    p.add_argument("--force", action="store_true", help="time every candidate again, also where the table has times")


def _add_doctor(verbs: argparse._SubParsersAction) -> None:
    p = _verb(verbs, "doctor", doctor, "what this machine can do, and what stands in the way")
    p.add_argument("--measure", action="store_true", help="measure the GPU's ceilings again (about a minute)")
    p.add_argument("--format", choices=("table", "json"), default="table", help="of stdout (default %(default)s)")


def _add_sass(verbs: argparse._SubParsersAction) -> None:
    p = _verb(verbs, "sass", sass, "compile a kernel for an architecture, without a GPU, and count its instructions")
    p.add_argument("kernel", metavar="KERNEL", help="such as conv2d_act; an unknown name lists them all")
    p.add_argument("--arch", default="sm_90", help="sm_80, sm_86, sm_89, sm_90 or sm_120 (default %(default)s)")
    p.add_argument(
        "--dtype", choices=("fp32", "fp16", "bf16"), default="fp16", help="of the tensors (default %(default)s)"
    )
    p.add_argument("--format", choices=("table", "json"), default="table", help="of stdout (default %(default)s)")


def _add_demo(verbs: argparse._SubParsersAction) -> None:
    p = _verb(verbs, "demo", demo, "the main job end to end: rooflines, detection, one HTML page")
    p.add_argument("images", nargs="*", metavar="IMAGE", help="default: the bundled picture")
    p.add_argument("--gpu", help=f"default: this machine's, else {DEFAULT_GPU}")
    p.add_argument("--weights", type=Path, metavar="FILE", help="YOLO26n weights; default: the cache folder")
    p.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="page and pictures (default %(default)s)"
    )


def _add_device(p: argparse.ArgumentParser) -> None:
    p.add_argument("--device", choices=DEVICES, default="auto", help="default: the GPU when there is one")


def _add_no_pdl(p: argparse.ArgumentParser) -> None:
    p.add_argument("--no-pdl", action="store_true", help="kernels wait for their predecessor's end, also on sm_90")


def _recipe(a: argparse.Namespace, **choices: Any) -> Recipe:
    """The recipe of --dtype and --no-pdl, where "fp32" stands for strict products."""
    dtype = "fp32" if a.dtype == "tf32" else a.dtype
    precision = "ieee" if a.dtype == "fp32" else "tf32"
    return ridgeline.recipe.Recipe(dtype=dtype, precision=precision, pdl=not a.no_pdl, **choices)


def _check_tf32(a: argparse.Namespace, place: device) -> None:
    """Refuse what would be fp32 under another name."""
    torch = sys.modules["torch"]  # loaded by whoever made `place`
    if a.dtype == "tf32" and (place.type == "cpu" or torch.cuda.get_device_capability(place) < (8, 0)):
        name = ridgeline.workloads.detection.device_name(place)
        raise EnvironmentUnusable(
            f"--dtype tf32: {name} has no TF32 products: use --dtype fp32, or a GPU from sm_80 on"
        )


def _detector(a: argparse.Namespace, model: nn.Module) -> tuple[Model, str]:
    """What runs the detector, and how, in words: compiled on a GPU unless --eager."""
    detection = ridgeline.workloads.detection
    place = detection.choose_device(a.device)
    if place.type == "cpu" or a.eager:
        a.dtype = a.dtype or "fp32"
        detection.multiply_as_(a.dtype)
        detector, how = model.to(detection.EAGER_DTYPES[a.dtype]), "plain PyTorch"
    else:
        a.dtype = a.dtype or "fp16"
        detector = ridgeline.workloads.compiled_detection.CompiledDetector(model, _recipe(a))
        how = "compiled, each input shape verified"
    return detector, f"{a.dtype} on {detection.device_name(place)}, {how}"


def _verb(verbs: argparse._SubParsersAction, name: str, run: object, text: str) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(run=run)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, got {text!r}")
    return int(text)


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, and {text!r} is a folder")
    return path
