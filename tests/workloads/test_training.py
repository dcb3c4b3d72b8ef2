"""train: it learns, it repeats, and it goes on exactly after SIGINT, after twenty SIGKILLs and after a lost file."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from image_set_files import pictures
from killed_run import SMALL
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.errors import EnvironmentUnusable, UsageError, VerificationFailed
from ridgeline.step_recipe import NAMED
from ridgeline.workloads.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from ridgeline.workloads.diffusion import linear_schedule
from ridgeline.workloads.run_log import read_log
from ridgeline.workloads.sampling import sample_checkpoint
from ridgeline.workloads.settings import FILE, PRESETS, Settings
from ridgeline.workloads.training import (
    LOG,
    EagerStep,
    captured_step,
    choose_device,
    ddpm_loss,
    named_step,
    step_maker,
    train,
    validation_loss,
)


@pytest.fixture(autouse=True)
def one_thread(tmp_path, monkeypatch):
    """Tiny tensors: threads cost more than they bring."""
    monkeypatch.setenv("RIDGELINE_CACHE_DIR", str(tmp_path / "cache"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def data(tmp_path) -> str:
    return saved(tmp_path / "train.npz", pictures(10))


@pytest.fixture
def settings(data, monkeypatch) -> Settings:
    """A short run of a network that is smaller than any preset."""
    monkeypatch.setitem(PRESETS, "tiny", SMALL)
    return Settings(data, steps=6, preset="tiny", batch=4, log_every=2, save_every=3, sample_every=0, val_every=0)


def saved(path: Path, images: np.ndarray) -> str:
    np.savez(path, images)
    return str(path)


def losses(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "images_per_s"} for line in read_log(folder / LOG)]


def differences(left: object, right: object, path: str = "") -> list[str]:
    """Where two checkpoints differ."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return [] if torch.equal(left, right) else [path]
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        return [found for key in left for found in differences(left[key], right[key], f"{path}.{key}")]
    if isinstance(left, tuple | list) and isinstance(right, tuple | list) and len(left) == len(right):
        return [
            found for i, pair in enumerate(zip(left, right, strict=True)) for found in differences(*pair, f"{path}.{i}")
        ]
    return [] if left == right else [path]


def test_differences_are_seen():
    one = {"a": (torch.ones(2), 1), "b": {"c": None}}
    assert differences(one, {"a": (torch.ones(2), 1), "b": {"c": None}}) == []
    assert differences(one, {"a": (torch.zeros(2), 2), "b": {"c": None}}) == [".a.0", ".a.1"]
    assert differences(one, {"a": (torch.ones(2), 1)}) == [""]


# --- a run -----------------------------------------------------------------------------------------------------------


def test_a_run_learns_and_its_checkpoint_draws(tmp_path, data):
    flat = np.broadcast_to(np.uint8([230, 30, 30]), (8, 8, 8, 3))
    held_out = saved(tmp_path / "val.npz", flat[:3])
    settings = Settings(
        saved(tmp_path / "flat.npz", flat),
        steps=60,
        val=held_out,
        preset="tiny",
        batch=8,
        lr=3e-3,
        ema_decay=0.9,
        dropout=0.0,
        log_every=20,
        save_every=60,
        sample_every=60,
        val_every=30,
    )
    reported = []
    result = train(settings, tmp_path / "run", device="cpu", report=reported.append)
    lines = losses(tmp_path / "run")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 61))
    assert [line.step for line in reported] == [20, 40, 60]
    first, last = (np.mean([line["loss"] for line in part]) for part in (steps[:5], steps[-10:]))
    assert first > 0.9 and last < 0.35
    validations = [line for line in lines if "val_loss" in line]
    assert [line["step"] for line in validations] == [30, 60]
    assert validations[1]["val_loss"] < validations[0]["val_loss"] < 0.7
    assert (result.step, result.loss, result.val_loss) == (60, steps[-1]["loss"], validations[1]["val_loss"])
    assert steps[5]["lr"] == settings.lr and all(line["grad_norm"] > 0 for line in steps)
    grid = cv2.imread(str(tmp_path / "run" / "samples" / "step-00000060.png"))
    assert grid.shape == (35, 35, 3)
    assert result.checkpoint is not None
    drawn = sample_checkpoint(result.checkpoint, n=4, steps=10)
    assert drawn.shape == (4, 8, 8, 3)
    means = drawn.reshape(-1, 3).mean(axis=0)
    assert means[0] > max(means[1], means[2]) + 25  # red, as all it has seen


def test_a_run_repeats_itself_and_another_seed_differs(tmp_path, settings):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(replace(settings, seed=seed), tmp_path / name, device="cpu")
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")
    last = [load_checkpoint(tmp_path / name / "step-00000006.pt") for name in ("a", "b")]
    assert differences(*last) == []


def test_bf16_autocast_trains_fp32_weights(tmp_path, settings):
    train(replace(settings, dtype="bf16"), tmp_path / "bf16", device="cpu")
    train(settings, tmp_path / "fp32", device="cpu")
    rounded, exact = ([line["loss"] for line in losses(tmp_path / name)] for name in ("bf16", "fp32"))
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)
    weights = load_checkpoint(tmp_path / "bf16" / "step-00000006.pt")["model"]
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_any_callable_can_be_the_step(tmp_path, settings):
    parts, batches = [], []

    def make_step(given):
        parts.append(given)

        def step(batch):
            batches.append(batch)
            return batch.mean()  # no optimizer, no gradient norm

        return step

    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step"):
        train(settings, tmp_path / "run", device="cpu", make_step=make_step)
    assert len(batches) == 6
    example = parts[0].example_batch
    assert all(batch.shape == example.shape and batch.stride() == example.stride() for batch in batches)
    assert [line["grad_norm"] for line in losses(tmp_path / "run")] == [None] * 6
    assert losses(tmp_path / "run")[0]["loss"] == batches[0].mean().item()
    assert parts[0].optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)  # the schedule ran to its end


def test_a_captured_step_learns_what_an_eager_one_does_and_resumes(tmp_path, settings):
    """On a CPU `compile_step` runs the same program eagerly: its operations and its state are what is tested."""
    plain = replace(settings, dtype="fp32", log_every=1)
    train(plain, tmp_path / "eager", device="cpu")
    train(plain, tmp_path / "whole", device="cpu", make_step=captured_step)
    with pytest.raises(KeyboardInterrupt):
        stop = lambda line: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731 - at the first report
        train(plain, tmp_path / "parts", device="cpu", make_step=captured_step, report=stop)
    train(plain, tmp_path / "parts", device="cpu", resume=True, make_step=captured_step)
    eager, whole, parts = (losses(tmp_path / name) for name in ("eager", "whole", "parts"))
    assert [line["loss"] for line in whole] == pytest.approx([line["loss"] for line in eager], rel=1e-5)
    assert parts == whole


def test_recipes_are_made_or_refused():
    assert step_maker("eager", torch.device("cuda")) is EagerStep is step_maker("auto", torch.device("cpu"))
    assert step_maker("auto", torch.device("cuda")) is captured_step is step_maker("graph", torch.device("cuda"))
    for recipe in ("graph", *NAMED):
        assert step_maker(recipe, torch.device("cuda")) is not EagerStep
        with pytest.raises(
            EnvironmentUnusable, match=f"--recipe {recipe}: a CUDA graph needs a GPU; use --recipe eager"
        ):
            step_maker(recipe, torch.device("cpu"))


def test_a_recipe_by_name_learns_what_its_autocast_does(tmp_path, settings):
    named = replace(settings, recipe="bf16", val=settings.data, val_every=3)
    train(named, tmp_path / "named", device="cpu", make_step=partial(named_step, "bf16"))
    train(replace(named, recipe="eager", dtype="bf16"), tmp_path / "eager", device="cpu")
    train(replace(named, recipe="fp32"), tmp_path / "exact", device="cpu", make_step=partial(named_step, "fp32"))
    for value in ("loss", "val_loss"):
        rounded, plain, exact = (
            [line[value] for line in losses(tmp_path / name) if value in line] for name in ("named", "eager", "exact")
        )
        assert rounded == pytest.approx(plain, rel=1e-3)  # one moves the weights by the device's rates
        assert rounded != exact


@pytest.mark.parametrize(
    ("recipe", "change"),
    [
        ("fp8", lambda scales: scales["fp8"]["scaling"]["scale"].fill_(3.0)),
        ("fp16", lambda scales: scales["scaler"].update(scale=512.0)),
    ],
)
def test_scales_go_on_from_a_checkpoint(tmp_path, settings, monkeypatch, recipe, change):
    monkeypatch.setitem(PRESETS, "tiny", replace(SMALL, channels=(16,)))  # FP8 takes multiples of 16
    settings = replace(settings, recipe=recipe)
    named = {"device": "cpu", "make_step": partial(named_step, recipe)}
    train(settings, tmp_path / "run", **named)
    state = load_checkpoint(tmp_path / "run" / "step-00000006.pt")
    change(state["scales"])
    save_checkpoint(tmp_path / "run", 6, state)
    train(replace(settings, steps=7), tmp_path / "run", resume=True, **named)
    after = load_checkpoint(tmp_path / "run" / "step-00000007.pt")["scales"]
    assert differences(after, state["scales"]) in ([], [".scaler._growth_tracker"])  # one good step more
    state["scales"].pop("fp8")
    save_checkpoint(tmp_path / "run", 8, state)
    with pytest.raises(UsageError, match=r"step-00000008\.pt' does not fit this run \('fp8'\)"):
        train(replace(settings, steps=9), tmp_path / "run", resume=True, **named)


def test_a_run_goes_on_under_another_recipe(tmp_path, settings):
    first = replace(settings, steps=3, recipe="bf16")
    train(first, tmp_path / "run", device="cpu", make_step=partial(named_step, "bf16"))
    for steps, recipe in ((4, "fp8"), (5, "auto"), (6, "bf16")):
        make_step = partial(named_step, recipe) if recipe in NAMED else None
        longer = replace(settings, steps=steps, recipe=recipe)
        assert train(longer, tmp_path / "run", resume=True, device="cpu", make_step=make_step).step == steps


def test_a_step_reads_nothing_on_the_host(tmp_path, settings):
    names: set[str] = set()

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.add(func.name())
            return func(*args, **(kwargs or {}))

    def make_step(parts):
        eager = EagerStep(parts)

        def step(batch):
            with Reads():
                return eager(batch)

        return step

    train(replace(settings, steps=2), tmp_path / "run", device="cpu", make_step=make_step)
    assert "aten::convolution_backward" in names
    assert not {name for name in names if "_local_scalar_dense" in name or "nonzero" in name}


def test_a_loss_that_is_not_finite_is_never_saved(tmp_path, settings):
    def make_step(parts):
        steps = iter(range(1, 100))
        return lambda batch: batch.mean() * (float("nan") if next(steps) == 5 else 1.0)

    with pytest.warns(UserWarning), pytest.raises(VerificationFailed, match="became nan at step 5"):
        train(settings, tmp_path / "run", device="cpu", make_step=make_step)
    assert [step for step, _ in checkpoints(tmp_path / "run")] == [3]
    assert [line["step"] for line in losses(tmp_path / "run")] == [1, 2, 3, 4]


def test_validation_is_the_same_each_time_and_leaves_the_run_alone(settings):
    parts = []
    images = pictures(130)  # one batch and a short one

    class Model(torch.nn.Module):
        def forward(self, x, t):
            assert not self.training
            parts.append(x)
            return torch.zeros_like(x)

    model, schedule = Model().train(), linear_schedule()
    state = torch.get_rng_state()
    first, again = (validation_loss(model, images, schedule, "fp32") for _ in range(2))
    assert first == again == pytest.approx(1.0, abs=0.02)  # the mean square of unit noise
    assert [len(x) for x in parts] == [128, 2, 128, 2]
    assert torch.equal(torch.get_rng_state(), state) and model.training


def test_the_loss_draws_new_noise_each_time():
    loss = ddpm_loss(linear_schedule(), None)
    x0 = torch.zeros(4, 3, 8, 8)
    torch.manual_seed(0)
    values = [loss(lambda x, t: torch.zeros_like(x), x0).item() for _ in range(2)]
    torch.manual_seed(0)
    assert values[0] != values[1]
    assert loss(lambda x, t: torch.zeros_like(x), x0).item() == values[0]


# --- stopping and going on -------------------------------------------------------------------------------------------


def whole(tmp_path: Path, settings: Settings) -> Path:
    train(settings, tmp_path / "whole", device="cpu")
    return tmp_path / "whole"


@pytest.mark.parametrize("at", [2, 4])
def test_sigint_saves_and_the_run_goes_on_exactly(tmp_path, settings, at, caplog):
    def interrupt(line):
        if line.step == at:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(settings, tmp_path / "run", device="cpu", report=interrupt)
    assert signal.getsignal(signal.SIGINT) is handler
    assert f"interrupted at step {at}, saved as" in caplog.text
    assert checkpoints(tmp_path / "run")[0][0] == at
    np.random.rand()
    torch.rand(1)  # whatever else the process draws meanwhile
    result = train(settings, tmp_path / "run", resume=True, device="cpu")
    assert result.step == 6
    assert losses(tmp_path / "run") == losses(whole(tmp_path, settings))
    ends = [load_checkpoint(tmp_path / name / "step-00000006.pt") for name in ("run", "whole")]
    assert differences(*ends) == []


def test_a_second_sigint_interrupts_at_once(tmp_path, settings):
    def interrupt(line):
        # raised in this thread, and handled before the next: two of os.kill may arrive as one
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    # a shell's background job is started with the signal ignored, and a second one is left to who had it before
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(settings, tmp_path / "run", device="cpu", report=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert checkpoints(tmp_path / "run") == []


def test_outside_the_main_thread_signals_are_left_alone(tmp_path, settings):
    results = []
    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(
        target=lambda: results.append(train(replace(settings, steps=1), tmp_path / "run", device="cpu"))
    )
    thread.start()
    thread.join()
    assert results[0].step == 1
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork: run on Linux or macOS")
def test_twenty_sigkills_change_nothing(tmp_path, data):
    val = saved(tmp_path / "val.npz", pictures(4, seed=1))
    script = Path(__file__).with_name("killed_run.py")
    child = subprocess.run([sys.executable, script, data, val, tmp_path], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    seen = json.loads(child.stdout)
    killed, uninterrupted = seen["logs"]
    assert len(seen["killed_at"]) == 20
    assert seen["killed_at"][-1] > 20  # they were spread over the run
    assert killed == uninterrupted
    assert [line["step"] for line in uninterrupted if "loss" in line] == list(range(1, 101))
    assert sum("val_loss" in line for line in uninterrupted) == 10
    ends = [load_checkpoint(tmp_path / name / "step-00000100.pt") for name in ("killed", "whole")]
    assert differences(*ends) == []


def test_a_lost_checkpoint_costs_one_interval(tmp_path, settings):
    train(settings, tmp_path / "run", device="cpu")
    expected = losses(tmp_path / "run")
    (tmp_path / "run" / "step-00000006.pt").write_bytes(b"PK lost")
    train(settings, tmp_path / "run", resume=True, device="cpu")
    assert losses(tmp_path / "run") == expected


def test_a_longer_run_goes_on_from_the_end(tmp_path, settings):
    train(settings, tmp_path / "run", device="cpu")
    again = train(settings, tmp_path / "run", resume=True, device="cpu")
    assert (again.step, again.loss) == (6, None)
    longer = train(replace(settings, steps=8), tmp_path / "run", resume=True, device="cpu")
    assert longer.step == 8
    assert [line["step"] for line in losses(tmp_path / "run")] == list(range(1, 9))


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_run_is_not_overwritten(tmp_path, settings):
    train(replace(settings, steps=1), tmp_path / "run", device="cpu")
    with pytest.raises(UsageError, match="holds a run already: go on with --resume"):
        train(settings, tmp_path / "run", device="cpu")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def test_a_run_is_not_resumed_to_an_earlier_end(tmp_path, settings):
    train(settings, tmp_path / "run", device="cpu")
    before = files(tmp_path / "run")
    with pytest.raises(UsageError, match=r"the run in '.*run' is at step 6, beyond --steps 5: give more"):
        train(replace(settings, steps=5), tmp_path / "run", resume=True, device="cpu")
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize("choice", [{"tensorboard": True}, {"recipe": "fp8"}, {"recipe": "graph"}])
def test_what_the_machine_lacks_is_said_before_anything_is_written(tmp_path, settings, monkeypatch, choice):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(EnvironmentUnusable):
        train(replace(settings, **choice), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    train(replace(settings, steps=3), tmp_path / "run", device="cpu")
    before = files(tmp_path / "run")
    with pytest.raises(EnvironmentUnusable):
        train(replace(settings, **choice), tmp_path / "run", resume=True, device="cpu")
    assert files(tmp_path / "run") == before
    assert json.loads(before[FILE]) == asdict(replace(settings, steps=3))


def test_another_set_is_refused(tmp_path, settings):
    train(settings, tmp_path / "run", device="cpu")
    other = replace(settings, data=saved(tmp_path / "other.npz", pictures(9)))
    with pytest.raises(UsageError, match=r"trained on images of shape .*10, 8, 8, 3.* --data has \[9, 8, 8, 3\]"):
        train(other, tmp_path / "run", resume=True, device="cpu")
    val = replace(settings, val=saved(tmp_path / "val.npz", pictures(2, side=4)))
    with pytest.raises(UsageError, match=r"--val have shape \[4, 4, 3\], those of --data \[8, 8, 3\]"):
        train(val, tmp_path / "new", device="cpu")


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("ema"),
        lambda state: state["model"].popitem(),
        lambda state: state.update(model=[]),
        lambda state: state["optimizer"][0].update(exp_avg=torch.zeros(1)),
        lambda state: state["optimizer"].update({10**6: {"step": torch.zeros(())}}),
        lambda state: state.update(position=(0, 99)),
        lambda state: state.update(position=("a", 0)),
        lambda state: state["random"].update(torch=torch.zeros(3, dtype=torch.uint8)),
        lambda state: state["random"].update(python=(3, (2**40,) * 625, None)),
        lambda state: state["random"].update(numpy=()),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, settings, change):
    train(replace(settings, steps=1), tmp_path / "run", device="cpu")
    state = load_checkpoint(tmp_path / "run" / "step-00000001.pt")
    change(state)
    save_checkpoint(tmp_path / "run", 1, state)
    log = (tmp_path / "run" / LOG).read_bytes()
    with pytest.raises(UsageError):
        train(settings, tmp_path / "run", resume=True, device="cpu")
    assert (tmp_path / "run" / LOG).read_bytes() == log


def test_devices_are_chosen_or_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(EnvironmentUnusable, match="--device cuda: torch sees no CUDA GPU"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == torch.device("cuda")


@pytest.mark.gpu
def test_gpu_trains_resumes_and_draws(tmp_path, settings):
    settings = replace(settings, steps=12, val=settings.data, val_every=6, sample_every=6)
    with pytest.raises(KeyboardInterrupt):
        train(settings, tmp_path / "run", device="cuda", report=lambda line: os.kill(os.getpid(), signal.SIGINT))
    result = train(settings, tmp_path / "run", resume=True, device="cuda")
    train(settings, tmp_path / "whole", device="cuda")
    found, expected = (
        [line["loss"] for line in losses(tmp_path / name) if "loss" in line] for name in ("run", "whole")
    )
    assert found == pytest.approx(expected, rel=1e-3)  # weight gradients may be summed with atomics
    assert result.checkpoint is not None
    assert sample_checkpoint(result.checkpoint, n=2, steps=3, device="cuda").shape == (2, 8, 8, 3)


@pytest.mark.gpu
def test_gpu_steps_wait_for_nothing(tmp_path, settings):
    def make_step(parts):
        eager, warm = EagerStep(parts), iter(range(100))

        def step(batch):
            # the first steps set up libraries
            torch.cuda.set_sync_debug_mode("error" if next(warm) > 2 else "default")
            try:
                return eager(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return step

    assert train(settings, tmp_path / "run", device="cuda", make_step=make_step).step == 6
