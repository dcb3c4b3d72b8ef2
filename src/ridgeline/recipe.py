"""Recipe: the choices `compile` follows. A value, not a global; a choice changes speed or rounding, never meaning."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.errors import UsageError
from ridgeline.kernels._op import DTYPES
from ridgeline.rewrites import PIPELINE

PRECISIONS = ("tf32", "ieee")


@dataclass(frozen=True)
class Limits:
    """What `verify` allows, as multiples of the error that the untouched module makes in the same dtype."""

    error_factor: float = 2.0

    def __post_init__(self) -> None:
        if not isinstance(self.error_factor, (int, float)) or not self.error_factor >= 1:
            raise UsageError(f"limits: error_factor must be at least 1, got {self.error_factor}")


@dataclass(frozen=True)
class Recipe:
    """How a module is compiled.

    dtype       arithmetic and storage: "fp16", "bf16", or "fp32" with products as `precision` says
    precision   "tf32" (tensor cores, 10 mantissa bits) or "ieee"; no effect on fp16 and bf16
    rewrites    names from `rewrites.PIPELINE`, run in the pipeline's order
    pdl         programmatic dependent launch on GPUs that have it (sm_90 and later)
    capture     one CUDA graph a signature; False runs the graph of kernels eagerly
    side_streams  streams beside the main one that independent branches of a captured graph may run on
    """

    dtype: str = "fp16"
    precision: str = "tf32"
    rewrites: tuple[str, ...] = tuple(rewrite.name for rewrite in PIPELINE)
    pdl: bool = True
    capture: bool = True
    side_streams: int = 6
    limits: Limits = Limits()

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"recipe: dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.precision not in PRECISIONS:
            raise UsageError(f"recipe: precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if not 0 <= self.side_streams <= 16:
            raise UsageError(f"recipe: side_streams must lie between 0 and 16, got {self.side_streams}")
        if not isinstance(self.limits, Limits):
            raise UsageError(f"recipe: limits must be recipe.Limits, as Limits(error_factor=3), got {self.limits!r}")
        if not isinstance(self.rewrites, tuple):
            raise UsageError(f"recipe: rewrites must be a tuple of names, got {self.rewrites!r}")
        known = [rewrite.name for rewrite in PIPELINE]
        for name in self.rewrites:
            if name not in known:
                raise UsageError(f"recipe: unknown rewrite {name!r}, known are {', '.join(known)}")


def chosen(recipe: Recipe | None) -> Recipe:
    """A recipe as given, or the default. Raises UsageError for what is none, as a name or a StepRecipe."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise UsageError(f"recipe must be a ridgeline.Recipe, as Recipe(dtype='fp16'), got {recipe!r:.80}")
    return recipe or Recipe()
