"""What the verbs are used for: object detection on images, diffusion training."""

from ridgeline.workloads import compiled_detection as compiled_detection
from ridgeline.workloads import detection as detection
from ridgeline.workloads import draw as draw
from ridgeline.workloads import images as images
from ridgeline.workloads import subjects as subjects
