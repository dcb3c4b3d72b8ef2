"""Run a whole forward pass or training step on fake tensors: no GPU, no memory, the user's module untouched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ridgeline.cost._cost import Cost
from ridgeline.cost._cuda import CudaBehaviour
from ridgeline.cost._formula import tensors_in
from ridgeline.cost._mode import Call, CostMode
from ridgeline.cost._table import total
from ridgeline.errors import UsageError

EMA_DECAY = 0.9999


@dataclass(frozen=True, slots=True)
class Trace:
    """The calls of one forward pass or training step, in order, as PyTorch on CUDA would launch them."""

    calls: tuple[Call, ...]
    unknown: tuple[tuple[str, int], ...]  # operators without a formula, and how often each ran
    results: frozenset[int]  # storage numbers of what the caller keeps
    parameters: int  # elements, shared weights once
    weight_bytes: int  # parameters in the dtype they are stored in

    @property
    def total(self) -> Cost:
        """The sum of all known costs: a lower bound while `unknown` is not empty."""
        return total(call.cost for call in self.calls)


def trace_forward(module: nn.Module, inputs: Any, *, dtype: torch.dtype | None = None, tf32: bool = False) -> Trace:
    """The forward pass under no_grad, in the module's own train or eval mode.

    `inputs` is the tuple of positional arguments; only shapes and dtypes matter. `dtype` casts floating parameters,
    buffers and inputs. Raises UsageError where the forward pass depends on values.
    """
    with _fake_copy(module, inputs, dtype) as (net, arguments), torch.no_grad(), CostMode(net, tf32=tf32) as mode:
        out = net(*arguments)
    return _trace(mode, net, tensors_in(out))


def trace_train_step(
    module: nn.Module,
    inputs: Any,
    loss: Callable[..., Tensor] | None = None,
    *,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    dtype: torch.dtype | None = None,
    clip: float | None = 1.0,
    ema: bool = True,
    tf32: bool = False,
) -> Trace:
    """Forward, loss, backward, gradient clipping, optimizer and weight average of a step in steady state.

    `loss(module, *inputs)` returns a scalar; the default is the mean square of every floating output. `optimizer`
    makes one from the parameters; the default is fused AdamW. `dtype` (bf16 or fp16) means autocast over fp32
    weights, by CUDA's policy. The module is traced in its own mode: call `.train()` first. Raises UsageError for a loss
    that is no scalar, and where a step depends on values.
    """
    with _fake_copy(module, inputs, None) as (net, arguments):
        parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
        if not parameters:
            raise UsageError(f"trace_train_step: {type(module).__name__} has no parameter that requires a gradient")
        step = (optimizer or _fused_adamw)(parameters)
        _initialise_(step, parameters)
        average = [tensor.detach().clone() for tensor in _averaged(net)]
        with CostMode(net, tf32=tf32) as mode:
            with torch.autocast("cpu", dtype) if dtype else nullcontext():
                value = (loss or _mean_square)(net, *arguments)
            _check_loss(value)
            value.backward()
            with mode.phase("optimizer"), torch.no_grad():
                if clip is not None:
                    nn.utils.clip_grad_norm_(parameters, clip, foreach=True)
                step.step()
                if ema:
                    torch._foreach_lerp_(average, _averaged(net), 1 - EMA_DECAY)  # pyright: ignore[reportPrivateImportUsage]
    return _trace(mode, net, [value, *average])


@contextmanager
def _fake_copy(module: nn.Module, inputs: Any, dtype: torch.dtype | None) -> Iterator[tuple[nn.Module, Any]]:
    """A copy of the module whose tensors are fake, and fake inputs, inside the mode that runs them.

    The copy is a real object of the user's class, so control flow, hooks, tied weights and buffers work; only
    tensors are replaced, before copying, so nothing of their size is allocated.
    """
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        memo[id(tensor)] = _fake(tensor, fake_mode, dtype)
    try:
        with _FakeStrayTensors(fake_mode, dtype):
            net = copy.deepcopy(module, memo)
    except (TypeError, NotImplementedError) as error:
        raise UsageError(
            f"trace: {type(module).__name__} cannot be copied ({error}); run it under FakeTensorMode and CostMode"
        ) from error
    arguments = tree_map(lambda value: _fake(value, fake_mode, dtype) if isinstance(value, Tensor) else value, inputs)
    try:
        with fake_mode, CudaBehaviour():
            yield net, tuple(arguments)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(
            f"trace: {type(module).__name__} asks for the values of a tensor ({error}), which a trace does not have; "
            f"trace the part before it, or run real tensors under CostMode"
        ) from error


class _FakeStrayTensors(TorchFunctionMode):
    """Makes deepcopy of tensors that are neither parameters nor buffers fake as well."""

    def __init__(self, fake_mode: FakeTensorMode, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.fake_mode, self.dtype = fake_mode, dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return _fake(args[0], self.fake_mode, None)
        return func(*args, **(kwargs or {}))


def _fake(tensor: Tensor, fake_mode: FakeTensorMode, dtype: torch.dtype | None) -> Tensor:
    """Same shape, strides and class, no memory; on the CPU whatever the device, so that any machine can run it."""
    dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with fake_mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def _initialise_(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Lets the optimizer allocate its state in a step that is not recorded."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _fused_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def _averaged(net: nn.Module) -> list[Tensor]:
    """What an exponential moving average tracks: parameters and floating buffers (BatchNorm statistics)."""
    return [tensor.detach() for tensor in (*net.parameters(), *net.buffers()) if tensor.is_floating_point()]


def _check_loss(value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        if isinstance(value, Tensor) and value.numel() == 1:
            got = "one without a gradient"
        raise UsageError(f"trace_train_step: the loss must be a scalar tensor that depends on the module, got {got}")


def _mean_square(module: nn.Module, *inputs: Any) -> Tensor:
    outputs = [out for out in tensors_in(module(*inputs)) if out.is_floating_point() and out.requires_grad]
    if not outputs:
        raise UsageError(f"trace_train_step: {type(module).__name__} returns nothing with a gradient; pass loss=")
    return torch.stack([out.float().square().mean() for out in outputs]).sum()


def _trace(mode: CostMode, net: nn.Module, kept: Any) -> Trace:
    weights = list(net.parameters())
    return Trace(
        calls=tuple(mode.calls),
        unknown=mode.unknown,
        results=frozenset(mode.storage_number(tensor) for tensor in kept),
        parameters=sum(weight.numel() for weight in weights),
        weight_bytes=sum(weight.numel() * weight.element_size() for weight in weights),
    )
