"""Which lines of a training step would wait for the GPU or break its capture in a CUDA graph, found without a GPU.

The step runs once, on the tensors it has, under three watchers: of Python calls (`torch.tensor`, `.cpu()`, print), of
every aten operator below them, the backward pass included, and of optimizers, whose rates a graph would keep. A finding
is the innermost line of the caller's own code. Operators are judged by PyTorch's tags for data-dependent values and
shapes, so new ones are known too.

Where the step's tensors are on the CPU they stand for the GPU's; a tensor made without a `device=`, from nothing or
from Python values, stands for a host tensor, which may be read freely.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


@dataclass(frozen=True)
class Finding:
    """One line that a captured step may not have; `breaks` is False where capture only freezes a value."""

    what: str  # the call, operator or optimizer: "item", "nonzero", "torch.tensor", "AdamW"
    file: str  # "" where no Python line is to blame
    line: int
    code: str
    why: str
    remedy: str
    breaks: bool = True

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "the backward pass"

    def __str__(self) -> str:
        code = f" `{self.code}`" if self.code else ""
        return f"{self.where}{code}: {self.what} {self.why}; {self.remedy}"


@dataclass(frozen=True)
class _Rule:
    why: str
    remedy: str
    breaks: bool = True


_READ = _Rule("reads a tensor on the host", "keep the value on the device, or read it after the step")
_SHAPE = _Rule(
    "gives a shape that depends on values",
    "use torch.where or a multiplied mask of fixed shape, or leave this part out of the captured step",
)
_UPLOAD = _Rule("copies host memory to the device", "make the tensor on the device once, outside the step")
_MADE = _Rule("makes a tensor from Python values", "make it once outside the step, or with torch.full(…, device=…)")
_FROZEN = _Rule(
    "makes a constant, which a graph keeps as it was at capture", "pass it in with the batch if it ever changes", False
)

_COMPILE_STEP = "capture the step with ridgeline.compile_step, which needs neither"
_NOT_CAPTURABLE = _Rule(
    "has capturable=False, with which PyTorch refuses to capture it",
    f"pass capturable=True and a tensor on the device as lr, or {_COMPILE_STEP}",
)
_HOST_RATE = _Rule(
    "has a Python number as lr, which a graph keeps as it was at capture, whatever a scheduler says",
    f"pass a tensor on the device, with capturable=True or fused=True, or {_COMPILE_STEP}",
    False,
)

_READERS = {"cpu", "numpy", "tolist", "__array__", "__repr__", "__str__", "__format__"}
_MAKERS = {"tensor", "as_tensor", "asarray"}
_FACTORIES = {
    "arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm", "zeros",
}  # fmt: skip
_MASKED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
# value-dependent operators that carry no tag
_UNTAGGED = {"torchvision::nms": _SHAPE, "aten::_linalg_check_errors": _READ}
_NAMES = {"_local_scalar_dense": "item", "index": "indexing with a mask", "__repr__": "print", "__format__": "print"}


def preflight(fn: Callable[..., object], *inputs: Any, device: torch.device | str | None = None) -> list[Finding]:
    """Run `fn(*inputs)` once and list the lines that would synchronise with the host or break capture, in order.

    device   whose tensors count as the GPU's; default: the device of the first tensor in `inputs` or, for a module, of
             its parameters
    What the call changes (gradients, buffers, random state) stays changed; `compile_step` puts it back.
    """
    watch = _Watch(_device_type(fn, inputs, device))
    with _Calls(watch), _Operators(watch), _optimizers(watch):
        fn(*inputs)
    return list(watch.findings.values())


def _device_type(fn: Callable[..., object], inputs: tuple, device: torch.device | str | None) -> str:
    if device is not None:
        return torch.device(device).type
    given = [*_tensors(inputs), *(fn.parameters() if isinstance(fn, nn.Module) else ())]
    return given[0].device.type if given else "cpu"


class _Watch:
    """What both watchers share: the findings, and which tensors stand for host memory."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.findings: dict[tuple, Finding] = {}
        self.host = WeakIdKeyDictionary()

    def on_device(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device_type and tensor not in self.host

    def note(self, what: str, rule: _Rule) -> None:
        frame = _blamed(sys._getframe(1))
        file, line = (frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)
        code = linecache.getline(file, line).strip() if file else ""
        name = _NAMES.get(what, what)
        # one line, one finding: x.tolist() is also seen as the copy that it makes; what breaks capture is told first
        before = self.findings.get((file, line))
        if before is None or (rule.breaks and not before.breaks):
            self.findings[file, line] = Finding(name, file, line, code, rule.why, rule.remedy, rule.breaks)


class _Calls(TorchFunctionMode):
    """Python calls of torch, as the caller wrote them."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = list(_tensors((args, kwargs)))
        asked = _asked_device(args, kwargs)
        if name in _READERS and given and self._watch.on_device(given[0]):
            self._watch.note(name, _READ)
        elif name == "to" and asked is not None and given and given[0] in self._watch.host:
            self._watch.note(name, _UPLOAD)
        elif name == "to" and asked == "cpu" != self._watch.device_type and self._watch.on_device(given[0]):
            self._watch.note(name, _READ)
        elif name == "new_tensor":
            self._watch.note(name, _MADE)
        elif name == "tensor" or (name in _MAKERS and not given):  # as_tensor of a tensor makes nothing
            self._watch.note(f"torch.{name}", _MADE if asked == self._watch.device_type else _FROZEN)
        result = func(*args, **kwargs)
        self._place(name, given, asked, result)
        return result

    def _place(self, name: str, given: list[Tensor], asked: str | None, result: Any) -> None:
        """Remember a result as the host's where all it was made from is."""
        made_here = (name in _FACTORIES or name in _MAKERS) and asked is None
        if made_here if not given else all(tensor in self._watch.host for tensor in given) and asked is None:
            for tensor in _tensors(result):
                self._watch.host[tensor] = True


class _Operators(TorchDispatchMode):
    """Operators below Python and autograd, whoever called them."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and PyTorch's guard would import its compiler, which takes seconds

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not hasattr(func, "_schema"):  # flex_attention and its like
            return func(*args, **kwargs)
        given = list(_tensors((args, kwargs)))
        rule = self._rule(func, args, kwargs, given)
        if rule is not None:
            self._watch.note(func._schema.name.rpartition("::")[2], rule)
        result = func(*args, **kwargs)
        # a view or a copy inside an operator of a host tensor is the host's too
        if given and all(tensor in self._watch.host for tensor in given):
            for tensor in _tensors(result):
                self._watch.host[tensor] = True
        return result

    def _rule(self, func: Any, args: tuple, kwargs: dict, given: list[Tensor]) -> _Rule | None:
        name = func._schema.name
        if name in ("aten::_to_copy", "aten::copy_"):
            return self._copy_rule(name, args, kwargs)
        if not any(self._watch.on_device(tensor) for tensor in given):
            return None
        if name in _UNTAGGED:
            return _UNTAGGED[name]
        if name in _MASKED:
            return _SHAPE if _is_masked(name, args) else None
        if torch.Tag.dynamic_output_shape in func.tags:
            return _SHAPE
        return _READ if torch.Tag.data_dependent_output in func.tags else None

    def _copy_rule(self, name: str, args: tuple, kwargs: dict) -> _Rule | None:
        if name == "aten::copy_":
            target, source = args[0].device.type, args[1].device.type
        else:
            source = args[0].device.type
            target = torch.device(kwargs.get("device") or source).type
        if source == target:
            return None
        return _UPLOAD if source == "cpu" else _READ


@contextmanager
def _optimizers(watch: _Watch) -> Iterator[None]:
    """Note every optimizer that steps and takes from the host what changes from step to step."""

    def stepping(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        name, groups = type(optimizer).__name__, optimizer.param_groups
        for group in groups:
            for parameter in () if group.get("capturable") or group.get("fused") else group["params"]:
                for count in _tensors(optimizer.state.get(parameter, {}).get("step")):
                    watch.host[count] = True
        if any(group.get("capturable") is False for group in groups):
            watch.note(name, _NOT_CAPTURABLE)
        elif not all(isinstance(group.get("lr", 0.0), Tensor) for group in groups):
            watch.note(name, _HOST_RATE)

    handle = register_optimizer_step_pre_hook(stepping)
    try:
        yield
    finally:
        handle.remove()


def _is_masked(name: str, args: tuple) -> bool:
    """Indexing with a mask, whose shape must be known; assigning one value becomes a masked fill, which is not."""
    masked = any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    fills = "index_put" in name and args[2].numel() == 1
    return masked and not fills


def _asked_device(args: tuple, kwargs: dict) -> str | None:
    """The device type named in a call, if one is."""
    for value in (kwargs.get("device"), *args):
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda"):
            return torch.device(value).type
    return None


def _blamed(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the caller's code inside the run; else of ours; None where only PyTorch is running."""
    ours = None
    while frame is not None and frame.f_code is not preflight.__code__:
        file = frame.f_code.co_filename
        if file.startswith(_HERE):
            if ours is None and file != __file__:
                ours = frame
        elif not file.startswith((_TORCH, "<")) and Path(file).name != "contextlib.py":
            return frame
        frame = frame.f_back
    return ours


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
