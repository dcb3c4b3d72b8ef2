"""StepRecipe: how a training step is run, and the recipes that have names."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from ridgeline.errors import UsageError
from ridgeline.fp8_review import Fp8Limits
from ridgeline.fp8_scaling import ScalingRule
from ridgeline.loss_scale import ScaleRule
from ridgeline.train_rewrites import BY_NAME
from ridgeline.train_rewrites.fp8_passes import PASSES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COMPILED = ("loss", "model", "none")
MODES = ("default", "max-autotune-no-cudagraphs")
CHOICES = ("auto", "always", "never")


@dataclass(frozen=True)
class StepRecipe:
    """How a training step is run.

    dtype             of autocast: "bf16", "fp16" (the loss is scaled), "fp32" (no autocast)
    compile           what torch.compile gets on a GPU: the "loss" callable with the model in it, the "model", or "none"
    compile_mode      of torch.compile: "default" or "max-autotune-no-cudagraphs"
    channels_last     turn 4-D weights, their optimizer state and 4-D inputs channels-last, weights in place
    capture           one CUDA graph for the whole step; False runs it eagerly
    require           raise NotEngaged where a step would run eagerly instead
    max_graphs        graphs kept, one a batch shape and mode; further shapes run eagerly
    scale             of the loss in fp16
    rewrites          of the compiled graph, by name (train_rewrites.PIPELINE); they take channels-last maps
    side_stream       weight gradients of a compiled channels-last step run beside the rest of the backward, in memory
                      that is given to nothing else meanwhile
    optimizer_kernel  clip, AdamW and average in one pass (kernels/adamw_ema): "auto" where a GPU has fp32 weights in
                      torch.optim.AdamW, "always" or NotEngaged, "never"
    weight_copies     that pass keeps bf16 copies of weights, so that a compiled bf16 step casts none and leaves their
                      gradients bf16: "auto" where it can, "always" or NotEngaged, "never"
    fp8               convolutions of compiled bf16 steps in FP8, on sm_89, sm_90, sm_120: "auto" where that is faster,
                      by tables or rooflines; "always" where there are kernels, or NotEngaged; "never"
    fp8_passes        of theirs that may: of "fprop", "dgrad", "wgrad"
    fp8_scaling       how their scales follow magnitudes
    fp8_limits        what their counters may show; a layer that exceeds it returns to bf16
    generators        that the loss draws from, besides the default ones; on the model's device
    """

    dtype: str = "bf16"
    compile: str = "loss"
    compile_mode: str = "default"
    channels_last: bool = False
    capture: bool = True
    require: bool = False
    max_graphs: int = 4
    scale: ScaleRule = field(default_factory=ScaleRule)
    rewrites: tuple[str, ...] = ()
    side_stream: bool = False
    optimizer_kernel: str = "auto"
    weight_copies: str = "never"
    fp8: str = "never"
    fp8_passes: tuple[str, ...] = PASSES
    fp8_scaling: ScalingRule = field(default_factory=ScalingRule)
    fp8_limits: Fp8Limits = field(default_factory=Fp8Limits)
    generators: tuple[torch.Generator, ...] = ()

    def __post_init__(self) -> None:
        choices = {"dtype": DTYPES, "compile": COMPILED, "compile_mode": MODES}
        choices |= {"optimizer_kernel": CHOICES, "weight_copies": CHOICES, "fp8": CHOICES}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise UsageError(f"recipe: {name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in self.rewrites:
            if name not in BY_NAME:
                raise UsageError(f"recipe: rewrites must be among {', '.join(BY_NAME)}, got {name!r}")
        if self.max_graphs < 1:
            raise UsageError(f"recipe: max_graphs must be at least 1, got {self.max_graphs}")
        if self.require and not self.capture:
            raise UsageError("recipe: require=True asks for the graph that capture=False forbids: drop one of them")
        if self.side_stream and not self.channels_last:
            raise UsageError("recipe: side_stream=True needs channels_last=True: other gradients are copied too early")
        if self.fp8 != "never":
            self._check_fp8()

    def _check_fp8(self) -> None:
        for name, wanted, why in (
            ("dtype", "bf16", "what FP8 does not compute stays bf16"),
            ("channels_last", True, "FP8 takes channels-last maps and weights"),
        ):
            if getattr(self, name) != wanted:
                raise UsageError(f"recipe: fp8={self.fp8!r} needs {name}={wanted!r}: {why}")
        if self.compile == "none":
            raise UsageError(f"recipe: fp8={self.fp8!r} needs a compiled step, and the recipe has compile='none'")
        if not self.fp8_passes or not set(self.fp8_passes) <= set(PASSES):
            known, got = ", ".join(PASSES), ", ".join(self.fp8_passes) or "none"
            raise UsageError(f"recipe: fp8_passes must be one or more of {known}, got {got}")
        if self.fp8_scaling.current:
            raise UsageError(
                "recipe: fp8_scaling must be delayed: a step's graph quantises by the scales of earlier steps"
            )


_BF16 = StepRecipe(channels_last=True, rewrites=tuple(BY_NAME), side_stream=True, weight_copies="auto")

# "writeup-5" is what PyTorch's own kernels reach in one graph; the others add ridgeline's
NAMED = {
    "bf16": _BF16,
    "fp8": replace(_BF16, fp8="auto"),
    "fp16": StepRecipe(dtype="fp16", channels_last=True, rewrites=tuple(BY_NAME)),
    "fp32": StepRecipe(dtype="fp32", channels_last=True, rewrites=tuple(BY_NAME)),
    "writeup-5": StepRecipe(channels_last=True, optimizer_kernel="never"),
}


def step_recipe(recipe: StepRecipe | str | None) -> StepRecipe:
    """A recipe as given, by its name, or the default. Raises UsageError for what is none, as a Recipe of `compile`."""
    if recipe is None or isinstance(recipe, StepRecipe):
        return recipe or StepRecipe()
    if not isinstance(recipe, str) or recipe not in NAMED:
        raise UsageError(f"recipe must be a StepRecipe or one of {', '.join(NAMED)}, got {recipe!r:.80}")
    return NAMED[recipe]
