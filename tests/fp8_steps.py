"""A small training problem for steps in FP8, compiled by AOTAutograd alone, its operators run by their references."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch._functorch.aot_autograd import make_boxed_func
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch.optim import AdamW

from graphs import by_reference
from ridgeline import fp8_scaling
from ridgeline.cudagraph import Captured
from ridgeline.fp8_step import Fp8Step
from ridgeline.kernels import (
    attention_packed_backward,
    group_norm_silu_backward,
    group_norm_silu_backward_concat,
    group_norm_silu_backward_fp8,
    group_norm_silu_fp8,
    quantize_fp8,
    quantize_weights_fp8,
    scale_fp8,
)
from ridgeline.kernels._op import INTERPRETED, Op
from ridgeline.step_program import Parts, StepProgram
from ridgeline.step_recipe import NAMED, StepRecipe
from ridgeline.train_backend import TrainBackend, fuse
from ridgeline.train_step import TrainStep

CLASSES = 4
RECIPE = NAMED["fp8"]
_ON_CPU = {
    attention_packed_backward.SUMMED_OP: attention_packed_backward.summed_on_cpu,
    quantize_fp8.OP: quantize_fp8.on_cpu,
    group_norm_silu_backward.OP: group_norm_silu_backward._on_cpu,
    group_norm_silu_backward.SUMMED_OP: group_norm_silu_backward._summed_on_cpu,
    group_norm_silu_backward_concat.OP: group_norm_silu_backward_concat.gradients,
    group_norm_silu_backward_concat.SUMMED_OP: group_norm_silu_backward_concat.summed_on_cpu,
    group_norm_silu_fp8.OP: group_norm_silu_fp8.on_cpu,
    group_norm_silu_backward_fp8.OP: group_norm_silu_backward_fp8.on_cpu,
    group_norm_silu_backward_fp8.SUMMED_OP: group_norm_silu_backward_fp8.summed_on_cpu,
}
_ASKING = (fp8_scaling, quantize_weights_fp8, scale_fp8)  # whether the interpreter is on


def _definition(op: Op) -> CustomOpDef:
    """The operator's own, where `call` is that of another form."""
    return OPDEFS[f"ridgeline::{op.name}"]


# under the interpreter these have no CPU kernels of their own: they stay off outside `fp8_by_reference`
_OFF = ExitStack()
if INTERPRETED:
    for op, on_cpu in _ON_CPU.items():
        _definition(op).register_kernel("cpu")(on_cpu)
        _OFF.enter_context(_definition(op).set_kernel_enabled("cpu", enabled=False))


@contextmanager
def fp8_by_reference() -> Iterator[None]:
    """As on a machine without GPU and interpreter; what kernels compute is tested in tests/kernels."""
    with ExitStack() as stack:
        stack.enter_context(by_reference())
        for op in _ON_CPU if INTERPRETED else ():
            stack.enter_context(_definition(op).set_kernel_enabled("cpu", enabled=True))
        for module in _ASKING:
            stack.enter_context(patch.object(module, "INTERPRETED", False))
        yield


@contextmanager
def steps_by_reference() -> Iterator[None]:
    """The same for many steps: dynamo gives up on a function that it compiled eight times, if not told otherwise."""
    torch._dynamo.reset()
    with fp8_by_reference(), torch._dynamo.config.patch(recompile_limit=1000):
        yield


class Net(nn.Module):
    """Convolutions that FP8 takes, after a norm, after an activation and beside a skip, and four that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm1, self.conv1 = nn.GroupNorm(4, 16), nn.Conv2d(16, 32, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, 32), nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.frozen = nn.Conv2d(32, 32, 1).requires_grad_(False)
        self.down = nn.Conv2d(32, 32, 3, stride=2, padding=1)
        self.last = nn.Conv2d(32, 16, 1)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(F.silu(self.norm1(self.stem(x))))
        x = x + self.conv2(F.silu(self.norm2(x)))
        x = self.last(F.silu(self.down(self.frozen(x))))
        return self.head(x.mean((2, 3)))


IN_FP8 = ("conv1.weight", "conv2.weight", "last.weight")


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def batches(n: int, rows: int = 8, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Noise about a pattern of each class."""
    patterns = torch.randn(CLASSES, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    labels = [torch.randint(CLASSES, (rows,), generator=g) for _ in range(n)]
    return [(patterns[label] + torch.randn(rows, 3, 16, 16, generator=g), label) for label in labels]


class Uses(nn.Module):
    """A net of some layers that a function calls."""

    def __init__(self, use: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.use = use
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def backend_of(module: nn.Module, compiler: Any = aot_eager, **choices: Any) -> TrainBackend:
    """For torch.compile on the CPU: no rewrites but FP8."""
    layers = Fp8Step(torch.device("cpu"), **choices)
    layers.open_(module.named_parameters())
    return TrainBackend((), compiler, fp8=layers)


@dataclass
class Aot:
    """Compiles by AOTAutograd, fuses as the step's own compiler does, and keeps the graphs."""

    see: Callable[[fx.GraphModule], None]
    graphs: list[fx.GraphModule] = field(default_factory=list)

    def __call__(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def keep(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            fuse(graph)
            self.see(graph)
            self.graphs.append(graph)
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph_module, inputs)


@dataclass
class Rerun:
    """A CUDA graph's behaviour for a compiled step: it is taken again, and what it returns is written in place."""

    call: Callable[[], tuple[Tensor, Tensor | None]]
    outputs: tuple[Tensor, Tensor | None]

    def replay(self) -> None:
        for old, new in zip(self.outputs, self.call(), strict=True):
            if old is not None and new is not None:
                old.copy_(new)

    def pool(self) -> Any:
        return (0, 0)


def capture(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> Captured:
    """Runs the step once before, as a capture does to warm up."""
    buffers = tuple(tensor.clone() for tensor in inputs)
    fn(*buffers)
    outputs = fn(*buffers)
    return Captured(buffers, outputs, Rerun(lambda: fn(*buffers), outputs), fn)


@dataclass
class Training:
    """One net in training."""

    model: nn.Module
    step: TrainStep
    compiler: Aot

    @property
    def program(self) -> StepProgram:
        return self.step._program

    def run(self, data: Sequence[Any]) -> list[float]:
        return [self.step(batch).item() for batch in data]


def training(
    recipe: StepRecipe = RECIPE,
    *,
    model: nn.Module | None = None,
    accumulate: int = 1,
    captured: bool = True,
    **changed: Any,
) -> Training:
    """Every step but the first of a shape is `compiled`, as on a GPU; without `captured` all run eagerly."""
    model = model or net()
    parts = Parts(model, loss, AdamW(model.parameters(), lr=3e-3), accumulate=accumulate)
    program = StepProgram(parts, replace(recipe, **changed))
    program.backend.compiler = compiler = Aot(program._see)
    step = TrainStep(program, batches(1)[0], capture=capture if captured else None)
    return Training(model, step, compiler)
