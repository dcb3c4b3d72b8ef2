"""The choices of a training run: checked when made, stored beside the run, the same again when it is resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path

from ridgeline.atomic import write_file
from ridgeline.errors import UsageError
from ridgeline.models.ddpm_unet import CIFAR10, TINY, UNetConfig
from ridgeline.step_recipe import NAMED
from ridgeline.workloads.checkpoint import MAX_STEP, check_seed
from ridgeline.workloads.sampling import SCHEDULES

FILE = "settings.json"
PRESETS = {"cifar10": CIFAR10, "tiny": TINY}
DTYPES = ("fp32", "bf16")
RECIPES = ("auto", "eager", "graph", *NAMED)
DEFAULT_WARMUP_STEPS = 1000  # or a tenth of the run, if that is less
# what may differ when a run is resumed: where the data lies, how long it goes, how it runs and how often it reports
CHANGEABLE = frozenset(
    {"data", "val", "steps", "log_every", "save_every", "sample_every", "val_every", "tensorboard", "recipe"}
)


@dataclass(frozen=True)
class Settings:
    """How a DDPM is trained; refuses with UsageError what cannot be.

    data, val     sources of images (`image_sets.load_images`); val is held out, None for no validation
    steps         optimizer steps of `batch` images
    preset        network: "cifar10" (32 M parameters) or "tiny", for trying things out on a CPU
    size          pixels a side that images are resized to; None: they all have one size
    skip_bad      leave damaged images out instead of refusing the set
    flip          mirror images at random
    lr, warmup    peak learning rate, reached after `warmup` steps (None: 1000, or a tenth of the run if that is less),
                  then a cosine down to 0 at `steps`
    clip          largest gradient norm
    ema_decay     of the averaged weights, reached by a warm-up of its own (`ema.Ema`)
    dtype         "bf16": autocast, weights stay fp32; "fp32"; None: bf16 on a GPU, fp32 on a CPU
    schedule      of the noise: "linear" or "cosine"
    recipe        how a step runs: "graph", all of it as one CUDA graph, or an error; "eager"; "auto": a graph on a GPU,
                  or eagerly and a warning that says why not; or the name of a `StepRecipe`, as one CUDA graph on a GPU
    *_every       steps between log reads, checkpoints, sample grids and validations; 0 for none of the last two
    tensorboard   also write the log for TensorBoard
    """

    data: str
    steps: int
    val: str | None = None
    preset: str = "cifar10"
    batch: int = 128
    size: int | None = None
    skip_bad: bool = False
    flip: bool = True
    lr: float = 2e-4
    weight_decay: float = 0.0
    warmup: int | None = None
    clip: float = 1.0
    dropout: float = 0.1
    ema_decay: float = 0.9999
    dtype: str | None = None
    schedule: str = "linear"
    seed: int = 0
    log_every: int = 50
    save_every: int = 1000
    sample_every: int = 5000
    val_every: int = 1000
    tensorboard: bool = False
    recipe: str = "auto"

    def __post_init__(self) -> None:
        self._one_of("preset", PRESETS)
        self._one_of("schedule", SCHEDULES)
        self._one_of("dtype", (*DTYPES, None))
        self._one_of("recipe", RECIPES)
        if self.recipe in NAMED and self.dtype not in (None, self.autocast_dtype):
            raise UsageError(
                f"recipe {self.recipe!r} computes in {self.autocast_dtype}, and dtype is {self.dtype!r}: "
                "leave the dtype out"
            )
        for name, least in (("steps", 1), ("batch", 1), ("log_every", 1), ("save_every", 1)):
            self._at_least(name, least)
        check_seed(self.seed)
        for name in ("sample_every", "val_every"):
            self._at_least(name, 0)
        for name, least in (("warmup", 0), ("size", 1)):
            if getattr(self, name) is not None:
                self._at_least(name, least)
        for name in ("lr", "clip"):
            self._number(name, "a number above 0", lambda value: value > 0)
        self._number("weight_decay", "a number of at least 0", lambda value: value >= 0)
        for name in ("dropout", "ema_decay"):
            self._number(name, "in [0, 1)", lambda value: 0 <= value < 1)

    @property
    def autocast_dtype(self) -> str | None:
        """What the network computes in: the recipe's where it has a name, else `dtype`."""
        return NAMED[self.recipe].dtype if self.recipe in NAMED else self.dtype

    @property
    def warmup_steps(self) -> int:
        return min(DEFAULT_WARMUP_STEPS, self.steps // 10) if self.warmup is None else self.warmup

    def lr_factor(self, done: int) -> float:
        """Of `lr`, in the step after `done` steps: a linear rise, then half a cosine down to 0."""
        if done < self.warmup_steps:
            return (done + 1) / self.warmup_steps
        remaining = max(self.steps - self.warmup_steps, 1)
        return 0.5 * (1 + math.cos(math.pi * min((done - self.warmup_steps) / remaining, 1.0)))

    def network(self, shape: tuple[int, ...]) -> UNetConfig:
        """The preset for images [N, H, W, C].

        The CIFAR-10 network attends at 16, 8 and 4 pixels, where images of this size pass them; the tiny one at half
        their side.
        """
        _, height, width, channels = shape
        if height != width:
            raise UsageError(f"images must be square, got {width} x {height}: pass --size to crop and resize")
        preset = PRESETS[self.preset]
        sides = [height >> stage for stage in range(len(preset.channels))]
        wanted = (height // 2,) if preset is TINY else preset.attention_resolutions
        return replace(
            preset,
            image_size=height,
            in_channels=channels,
            out_channels=channels,
            attention_resolutions=tuple(side for side in sides if side in wanted),
            dropout=self.dropout,
        )

    def _one_of(self, name: str, known: object) -> None:
        value = getattr(self, name)
        assert isinstance(known, Mapping | tuple)
        if not isinstance(value, str | None) or value not in known:
            names = ", ".join(str(one) for one in known if one is not None)
            raise UsageError(f"{name} must be one of {names}, got {value!r}")

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or value < least:
            raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if value > MAX_STEP:
            raise UsageError(f"{name} must be at most {MAX_STEP}, got {value}")

    def _number(self, name: str, wanted: str, fits: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        if not isinstance(value, int | float) or not math.isfinite(value) or not fits(value):
            raise UsageError(f"{name} must be {wanted}, got {value!r}")


def settings_for(folder: Path, given: Mapping[str, object], *, resume: bool) -> Settings:
    """The settings of a run: those `given`, over those that the run in `folder` began with when it is resumed.

    Raises UsageError when a run is to be resumed with other settings than it began with (those in CHANGEABLE may
    change), when a setting without a default is not given, and for a `val_every` that has no images.
    """
    saved = _read(folder / FILE) if resume else {}
    for name, value in given.items():
        if name in saved and name not in CHANGEABLE and saved[name] != value:
            raise UsageError(
                f"the run in '{folder}' began with {name}={saved[name]!r}, not {value!r}: leave the option out, "
                "or begin anew in another --out"
            )
    chosen = {**saved, **given}
    for field in fields(Settings):
        if field.default is MISSING and field.name not in chosen:
            raise UsageError(f"--{field.name} is needed to begin a run in '{folder}'")
    if given.get("val_every") and chosen.get("val") is None:
        raise UsageError(
            "--val-every asks for validations, and no --val says on which images: give one, or leave it out"
        )
    try:
        return Settings(**chosen)  # pyright: ignore[reportArgumentType]
    except TypeError as error:
        raise UsageError(f"'{folder / FILE}' holds settings that this version does not know ({error})") from error


def write_settings(folder: Path, settings: Settings) -> None:
    text = json.dumps(asdict(settings), indent=1) + "\n"
    try:
        write_file(folder / FILE, lambda file: file.write(text.encode()))
    except OSError as error:
        raise UsageError(f"cannot write '{folder / FILE}' ({error.strerror}): choose another --out") from error


def _read(path: Path) -> dict[str, object]:
    """The settings a run began with; none where it was killed before it had written them."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"settings '{path}' cannot be read ({error}): begin anew in another --out") from error
    if not isinstance(saved, dict):
        raise UsageError(f"settings '{path}' are no JSON object: begin anew in another --out")
    return saved
