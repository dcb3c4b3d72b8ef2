"""SGD, Adam and AdamW with every number that a schedule may change on the device, so that a step can be captured.

PyTorch's fused implementations read a tensor learning rate, count steps on the device and can be told by a device flag
to skip a step. What they do not read from the device is weight decay; it is applied here, before them, with the same
arithmetic. The user's optimizer stays the owner of all state: its param_groups keep their Python floats, and schedulers
and code that reads `optimizer.param_groups[0]["lr"]` work as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.sgd import sgd

from ridgeline.errors import UsageError

SUPPORTED = (SGD, Adam, AdamW)

# constants of the fused kernels: another value needs another capture
_SETTINGS = ("momentum", "dampening", "nesterov", "maximize", "betas", "eps", "amsgrad", "decoupled_weight_decay")


def axpy_(targets: Sequence[Tensor], sources: Sequence[Tensor], scale: Tensor, *, skip: Tensor | None = None) -> None:
    """targets -= scale·sources, `scale` an fp32 scalar on the device; nothing where the device flag `skip` is 1."""
    _sgd(targets, sources, scale, weight_decay=0.0, maximize=False, skip=skip)


def lerp_(targets: Sequence[Tensor], sources: Sequence[Tensor], weight: Tensor) -> None:
    """targets += weight·(sources - targets), `weight` an fp32 scalar on the device, one read and one write.

    `torch._foreach_lerp_` takes its weight from the host. Ascending on `sources` with weight decay 1 is the same:
    gradient = 1·target - source, target -= weight·gradient.
    """
    _sgd(targets, sources, weight, weight_decay=1.0, maximize=True, skip=None)


def refusal(optimizer: Optimizer) -> str | None:
    """Why this optimizer cannot run without the host, or None if it can."""
    name = type(optimizer).__name__
    if type(optimizer) not in SUPPORTED:
        known = ", ".join(kind.__name__ for kind in SUPPORTED)
        return f"the optimizer {name} cannot be captured, those that can are {known}"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has step hooks, which a graph would not call: remove them"
    for group in optimizer.param_groups:
        if group["differentiable"]:
            return f"{name} has differentiable=True, which its fused kernels refuse"
        if any(isinstance(value, Tensor) for value in group.get("betas", ())):
            return f"{name} has tensors as betas, which its fused kernels read on the host: pass floats"
        trained = [p for p in group["params"] if p.requires_grad]
        if any(not p.is_floating_point() for p in trained):
            return f"{name} trains parameters that are not real floating-point numbers, which its fused kernels refuse"
        if group.get("momentum") and group["dampening"] and any(not optimizer.state.get(p) for p in trained):
            return (
                "SGD with dampening treats its first step differently: call compile_step after one optimizer.step(), "
                "or set dampening=0"
            )
    return None


class PlainOptimizer:
    """An optimizer that needs the host: stepped as it is, never captured."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def settle_(self) -> None:
        """It makes its state when it needs it."""

    def refresh(self) -> None:
        """It reads its own hyper-parameters."""

    def step_(self, found_inf: Tensor | None) -> None:
        assert found_inf is None, "loss scaling is refused for these optimizers"
        self.optimizer.step()

    def settings(self) -> tuple:
        return ()


class DeviceOptimizer:
    """A supported optimizer, stepped by its fused kernels from device scalars; `settle_`, then `refresh` come first."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self._device = device
        self._lr: list[_Scalar] = []
        self._weight_decay: list[_Scalar] = []

    def settle_(self) -> None:
        """Make missing state (zeros) and bring present state to the device and layout of its parameter."""
        for group in self.optimizer.param_groups:
            names = _state_names(self.optimizer, group)
            for parameter in group["params"]:
                if parameter.requires_grad and names:
                    _settle_state_(self.optimizer.state[parameter], names, parameter)
        for scalars in (self._lr, self._weight_decay):
            while len(scalars) < len(self.optimizer.param_groups):
                scalars.append(_Scalar(self._device))

    def refresh(self) -> None:
        """Send learning rates and weight decays that changed to the device; no wait, and usually no launch."""
        for group, lr, weight_decay in zip(self.optimizer.param_groups, self._lr, self._weight_decay, strict=True):
            lr.set(group["lr"])
            weight_decay.set(group["weight_decay"])

    def scalars(self) -> list[tuple[Tensor, Tensor]]:
        """The learning rate and the weight decay of each group, float32 scalars on the device that `refresh` sets."""
        return [(lr.tensor, decay.tensor) for lr, decay in zip(self._lr, self._weight_decay, strict=True)]

    @torch.no_grad()
    def step_(self, found_inf: Tensor | None) -> None:
        """One step from the gradients in place; none, and no count of one, where the device scalar `found_inf` is 1."""
        self._decay_(found_inf)
        with self._fused(found_inf):
            self.optimizer.step()

    def settings(self) -> tuple:
        """Everything that is a constant of the kernels, and so of a graph."""
        return tuple(
            (*(group.get(name) for name in _SETTINGS), _decays(group), tuple(map(id, group["params"])))
            for group in self.optimizer.param_groups
        )

    def _decay_(self, found_inf: Tensor | None) -> None:
        """Decoupled (AdamW): parameters -= lr·decay·parameters. Coupled: gradients += decay·parameters."""
        for group, lr, decay in zip(self.optimizer.param_groups, self._lr, self._weight_decay, strict=True):
            trained = [p for p in group["params"] if p.grad is not None]
            if not _decays(group) or not trained:
                continue
            if group.get("decoupled_weight_decay"):
                axpy_(trained, trained, lr.tensor * decay.tensor, skip=found_inf)
            else:
                # maximize turns the gradient's sign later, with the decay in it
                scale = decay.tensor if group["maximize"] else -decay.tensor
                axpy_([p.grad for p in trained], trained, scale)

    @contextmanager
    def _fused(self, found_inf: Tensor | None) -> Iterator[None]:
        """The optimizer with device scalars for floats and the fused kernels chosen; as the user left it afterwards."""
        groups = self.optimizer.param_groups
        before = [dict(group) for group in groups]
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        for group, lr in zip(groups, self._lr, strict=True):
            group.update(lr=lr.tensor, weight_decay=0.0, fused=True, foreach=False)
            if "capturable" in group:
                group["capturable"] = capturing  # PyTorch asks for it during a capture, and warns outside one
        # the attribute by which torch.amp.GradScaler tells fused kernels to skip a step
        self.optimizer.found_inf = found_inf  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            del self.optimizer.found_inf  # pyright: ignore[reportAttributeAccessIssue]
            for group, old in zip(groups, before, strict=True):
                group.update(old)


def load_state_(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict`, but written into the tensors that are there, so that captured steps stay valid."""
    present = optimizer.state
    optimizer.load_state_dict(state)
    loaded, optimizer.state = optimizer.state, present
    for parameter in {*present, *loaded}:
        old, new = present[parameter], loaded.get(parameter, {})
        for name in {*old, *new}:
            value, tensor = new.get(name), old.get(name)
            if not isinstance(tensor, Tensor):
                old[name] = value
            elif value is None:
                tensor.zero_()  # what a checkpoint lacks, its optimizer had not made yet
            else:
                tensor.copy_(torch.as_tensor(value))


def portable_state(optimizer: Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` as a loop without ridgeline would have it: step counts where its own flags want them."""
    state = optimizer.state_dict()
    on_host = {
        index
        for group in state["param_groups"]
        if not (group.get("fused") or group.get("capturable"))
        for index in group["params"]
    }
    # the dicts inside are the optimizer's own, and are copied before they are changed
    state["state"] = {
        index: {
            name: value.cpu() if name == "step" and index in on_host and isinstance(value, Tensor) else value
            for name, value in tensors.items()
        }
        for index, tensors in state["state"].items()
    }
    return state


class _Scalar:
    """A number on the device, and the host's last word on it."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros((), dtype=torch.float32, device=device)
        self._value: float | None = None

    def set(self, value: float | Tensor) -> None:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            self.tensor.copy_(value.reshape(()))
            self._value = None
        elif (number := float(value)) != self._value:
            # a fill carries the number in its launch: no host memory that a later step could overwrite
            self.tensor.fill_(number)
            self._value = number


def _sgd(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    lr: Tensor,
    *,
    weight_decay: float,
    maximize: bool,
    skip: Tensor | None,
) -> None:
    if not targets:
        return
    sgd(
        list(targets),
        list(sources),
        [None] * len(targets),
        fused=True,
        foreach=False,
        found_inf=skip,
        weight_decay=weight_decay,
        momentum=0.0,
        lr=lr,  # pyright: ignore[reportArgumentType]
        dampening=0.0,
        nesterov=False,
        maximize=maximize,
    )


def _decays(group: dict[str, Any]) -> bool:
    decay = group["weight_decay"]
    return isinstance(decay, Tensor) or decay != 0


def _state_names(optimizer: Optimizer, group: dict[str, Any]) -> tuple[str, ...]:
    if isinstance(optimizer, SGD):
        return ("momentum_buffer",) if group["momentum"] else ()
    return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


def _settle_state_(state: dict[str, Any], names: Sequence[str], parameter: Tensor) -> None:
    for name in names:
        value = state.get(name)
        if name == "step":
            if not isinstance(value, Tensor):
                value = torch.full((), float(value or 0), dtype=torch.float32)
            state[name] = value.to(parameter.device, torch.float32)
        elif value is None:
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
        elif value.shape != parameter.shape:
            raise UsageError(
                f"compile_step: the optimizer has {name} of shape {list(value.shape)} for a parameter of shape "
                f"{list(parameter.shape)}: its state belongs to another model"
            )
        elif value.device != parameter.device or value.stride() != parameter.stride():
            # fused kernels want one layout for a parameter and its state
            state[name] = torch.empty_like(parameter, requires_grad=False).copy_(value)
