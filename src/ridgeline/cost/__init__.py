"""Static cost of PyTorch programs: `Cost`, the formulas of aten operators, and `CostMode` that collects them."""

from ridgeline.cost._cost import PIPES as PIPES
from ridgeline.cost._cost import Cost as Cost
