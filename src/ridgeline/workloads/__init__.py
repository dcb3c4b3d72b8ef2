"""What the verbs are used for: object detection on images, diffusion training."""

from typing import TYPE_CHECKING

from ridgeline.late_import import late_import
from ridgeline.workloads import detection as detection
from ridgeline.workloads import draw as draw
from ridgeline.workloads import images as images
from ridgeline.workloads import subjects as subjects

if TYPE_CHECKING:
    from ridgeline.workloads import compiled_detection as compiled_detection


def __getattr__(name: str) -> object:
    # on first use, because it needs Triton, and detection in plain PyTorch does not
    if name == "compiled_detection":
        return late_import(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
