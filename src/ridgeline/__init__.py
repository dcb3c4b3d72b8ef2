"""ridgeline: drive convolutional vision networks to the GPU's roofline.

Public names resolve on first use, so that importing the package costs neither torch nor Triton.
"""

from typing import TYPE_CHECKING

from ridgeline.late_import import late_import

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ridgeline import backend as backend
    from ridgeline import compile_report as compile_report
    from ridgeline import compiler as compiler
    from ridgeline import demo as demo
    from ridgeline import doctor as doctor
    from ridgeline import fp8_text as fp8_text
    from ridgeline import kernels as kernels
    from ridgeline import models as models
    from ridgeline import profiler as profiler
    from ridgeline import profiling as profiling
    from ridgeline import recipe as recipe
    from ridgeline import report_html as report_html
    from ridgeline import report_text as report_text
    from ridgeline import sass as sass
    from ridgeline import specs as specs
    from ridgeline import targets as targets
    from ridgeline import train_step as train_step
    from ridgeline import tuned as tuned
    from ridgeline import tuning as tuning
    from ridgeline import verification as verification
    from ridgeline import workloads as workloads
    from ridgeline.compiler import Compiled as Compiled
    from ridgeline.compiler import compile as compile  # noqa: A004
    from ridgeline.compiler import load as load
    from ridgeline.compiler import tune as tune
    from ridgeline.cost import Cost as Cost
    from ridgeline.cost import CostMode as CostMode
    from ridgeline.cost import register_cost as register_cost
    from ridgeline.ema import Ema as Ema
    from ridgeline.explaining import explain as explain
    from ridgeline.obstacles import preflight as preflight
    from ridgeline.profile_record import Profile as Profile
    from ridgeline.profiler import estimate as estimate
    from ridgeline.profiling import profile as profile
    from ridgeline.recipe import Recipe as Recipe
    from ridgeline.report import Report as Report
    from ridgeline.report import Row as Row
    from ridgeline.specs import DeviceSpec as DeviceSpec
    from ridgeline.specs import find_spec as find_spec
    from ridgeline.step_recipe import StepRecipe as StepRecipe
    from ridgeline.step_verifier import StepAgreement as StepAgreement
    from ridgeline.step_verifier import StepLimits as StepLimits
    from ridgeline.train_step import StepReport as StepReport
    from ridgeline.train_step import TrainStep as TrainStep
    from ridgeline.train_step import compile_step as compile_step
    from ridgeline.verification import Verification as Verification
    from ridgeline.verification import verify as verify

_HOME = {
    "Compiled": "ridgeline.compiler",
    "compile": "ridgeline.compiler",
    "load": "ridgeline.compiler",
    "tune": "ridgeline.compiler",
    "Recipe": "ridgeline.recipe",
    "Cost": "ridgeline.cost",
    "CostMode": "ridgeline.cost",
    "register_cost": "ridgeline.cost",
    "estimate": "ridgeline.profiler",
    "Report": "ridgeline.report",
    "Row": "ridgeline.report",
    "DeviceSpec": "ridgeline.specs",
    "find_spec": "ridgeline.specs",
    "Verification": "ridgeline.verification",
    "verify": "ridgeline.verification",
    "compile_step": "ridgeline.train_step",
    "TrainStep": "ridgeline.train_step",
    "StepReport": "ridgeline.train_step",
    "StepRecipe": "ridgeline.step_recipe",
    "StepAgreement": "ridgeline.step_verifier",
    "StepLimits": "ridgeline.step_verifier",
    "Ema": "ridgeline.ema",
    "preflight": "ridgeline.obstacles",
    "Profile": "ridgeline.profile_record",
    "profile": "ridgeline.profiling",
    "explain": "ridgeline.explaining",
    "mark_step": "ridgeline.step_marks",
}
_MODULES = frozenset(
    {
        "backend",
        "compile_report",
        "compiler",
        "demo",
        "doctor",
        "fp8_text",
        "kernels",
        "models",
        "profiler",
        "profiling",
        "recipe",
        "report_html",
        "report_text",
        "sass",
        "specs",
        "targets",
        "train_step",
        "tuned",
        "tuning",
        "verification",
        "workloads",
    }
)

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(late_import(_HOME[name]), name)
    if name in _MODULES:
        return late_import(f"ridgeline.{name}")
    raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
