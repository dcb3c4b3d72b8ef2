"""Static cost of PyTorch programs: formulas in pure numbers, formulas of aten operators, and what collects them.

`CostMode` records any eager code; `trace_forward` and `trace_train_step` run a whole module on fake tensors;
`fuse` turns the recorded calls into the kernels that are left when everything that can share a launch does.
"""

from ridgeline.cost._cost import PIPES as PIPES
from ridgeline.cost._cost import Cost as Cost
from ridgeline.cost._formula import Gemm as Gemm
from ridgeline.cost._fuse import FusedKernel as FusedKernel
from ridgeline.cost._fuse import chain_length as chain_length
from ridgeline.cost._fuse import fuse as fuse
from ridgeline.cost._fuse import unfused as unfused
from ridgeline.cost._mode import Call as Call
from ridgeline.cost._mode import CostMode as CostMode
from ridgeline.cost._mode import TensorUse as TensorUse
from ridgeline.cost._table import COSTS as COSTS
from ridgeline.cost._table import cost_of as cost_of
from ridgeline.cost._table import register_cost as register_cost
from ridgeline.cost._table import total as total
from ridgeline.cost._table import unregister_cost as unregister_cost
from ridgeline.cost._trace import Trace as Trace
from ridgeline.cost._trace import trace_forward as trace_forward
from ridgeline.cost._trace import trace_train_step as trace_train_step
from ridgeline.cost.attention import AttentionProblem as AttentionProblem
from ridgeline.cost.attention import attention_flash as attention_flash
from ridgeline.cost.attention import attention_naive as attention_naive
from ridgeline.cost.conv import ConvProblem as ConvProblem
from ridgeline.cost.conv import conv_forward as conv_forward
from ridgeline.cost.conv import conv_im2col as conv_im2col
from ridgeline.cost.conv import conv_input_grad as conv_input_grad
from ridgeline.cost.conv import conv_weight_grad as conv_weight_grad
from ridgeline.cost.matmul import matmul_cost as matmul_cost
from ridgeline.cost.pointwise import chain_fused as chain_fused
from ridgeline.cost.pointwise import chain_unfused as chain_unfused
from ridgeline.cost.pointwise import ops_per_access as ops_per_access
from ridgeline.cost.reduce import softmax_fused as softmax_fused
from ridgeline.cost.reduce import softmax_naive as softmax_naive
