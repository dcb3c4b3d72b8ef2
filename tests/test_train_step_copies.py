"""Steps that keep bf16 copies of weights: the same numbers without the casts, and copies that are never stale.

Compiled by AOTAutograd alone, the optimizer's kernel in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.optim import AdamW
from triton.runtime import interpreter

from ridgeline.cudagraph import Captured
from ridgeline.ema import Ema
from ridgeline.errors import NotEngaged, UsageError
from ridgeline.kernels._op import INTERPRETED
from ridgeline.step_program import Parts, StepProgram
from ridgeline.step_recipe import NAMED, StepRecipe
from ridgeline.train_step import TrainStep

pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="a GPU runs these kernels: test_train_step_gpu.py has its tests"
)


class Net(nn.Module):
    """Convolutions and linear layers with a bias and without, a norm, an embedding, a tied and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.down = nn.Conv2d(8, 8, 3, stride=2, bias=False)
        self.frozen = nn.Conv2d(8, 8, 1).requires_grad_(False)
        self.up, self.tied = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.tied.weight = self.up.weight
        self.classes = nn.Embedding(4, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        x = self.down(F.silu(self.norm(self.stem(x))))
        x = self.frozen(x).mean((2, 3)) + self.classes(label)
        return self.head(self.tied(F.silu(self.up(x))))


COPIED = ("stem.weight", "stem.bias", "down.weight", "head.weight", "head.bias")


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(*batch).float(), batch[1])


def batches(n: int, rows: int = 4, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(rows, 3, 6, 6, generator=g), torch.randint(4, (rows,), generator=g)) for _ in range(n)]


@dataclass
class Aot:
    """Compiles by AOTAutograd alone and keeps its graphs: as many kernels as operators, the same for both runs."""

    graphs: list[fx.GraphModule] = field(default_factory=list)

    def __call__(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def keep(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            self.graphs.append(graph)
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph_module, inputs)

    def input_casts(self) -> int:
        """Casts of inputs of the forward, and casts to fp32 of what the backward returns."""
        forward, backward = self.graphs[-2:]
        cast = torch.ops.aten._to_copy.default
        of_inputs = [
            n for n in forward.graph.find_nodes(op="call_function", target=cast) if n.args[0].op == "placeholder"
        ]
        returned = [n for n in backward.graph.output_node().args[0] if n is not None and n.target is cast]
        return len(of_inputs) + len(returned)


@pytest.fixture(scope="module", autouse=True)
def rounding():
    """The interpreter cuts bits off where a GPU rounds to bf16; here it rounds."""
    builder = interpreter.interpreter_builder
    cut = builder.create_fp_trunc

    def rounded(source, kind):
        if kind.scalar != tl.bfloat16:
            return cut(source, kind)
        bits = torch.from_numpy(source.data.copy()).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(bits, kind.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_fp_trunc", rounded, raising=False)
        yield


@dataclass
class Rerun:
    """A CUDA graph's behaviour for a compiled step, which a dispatch mode cannot record: the step is taken again.

    As after a real replay, the host has not seen that weights were written.
    """

    program: StepProgram
    call: Callable[[], tuple[Tensor, Tensor]]
    outputs: tuple[Tensor, Tensor]

    def replay(self) -> None:
        copies = self.program.copies
        known = copies._versions
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.program.parameters())):
            for old, new in zip(self.outputs, self.call(), strict=True):
                old.copy_(new)
        copies._versions = known

    def pool(self) -> Any:
        return (0, 0)


def capture_of(program: StepProgram) -> Callable[..., Captured]:
    def capture(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> Captured:
        buffers = tuple(tensor.clone() for tensor in inputs)
        outputs = fn(*buffers)
        return Captured(buffers, outputs, Rerun(program, lambda: fn(*buffers), outputs), fn)

    return capture


@dataclass
class Training:
    """One net in training."""

    model: Net
    optimizer: AdamW
    ema: Ema
    step: TrainStep
    compiler: Aot
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)

    def run(self, data: Sequence[Any]) -> None:
        for batch in data:
            self.losses.append(self.step(batch))
            self.norms.append(self.step.grad_norm)

    def tensors(self) -> dict[str, Tensor]:
        found = {"losses": torch.stack(self.losses), "norms": torch.stack(self.norms)}
        return found | dict(self.step._program.named_tensors())


def training(
    weight_copies: str,
    *,
    loss: Any = loss,
    make: Any = AdamW,
    accumulate: int = 1,
    model: Net | None = None,
    **recipe: Any,
) -> Training:
    model = model or net()
    optimizer, ema, compiler = make(model.parameters(), lr=1e-2), Ema(model, 0.9), Aot()
    options = {"channels_last": True, "optimizer_kernel": "always", **recipe}
    program = StepProgram(
        Parts(model, loss, optimizer, ema, 0.5, accumulate), StepRecipe(weight_copies=weight_copies, **options)
    )
    program.backend.compiler = compiler
    step = TrainStep(program, batches(1)[0], capture=capture_of(program))
    return Training(model, optimizer, ema, step, compiler)


def assert_same(ours: Training, theirs: Training) -> None:
    a, b = ours.tensors(), theirs.tensors()
    assert a.keys() == b.keys()
    for name, tensor in b.items():
        assert torch.equal(a[name], tensor), name


@pytest.fixture(scope="module")
def both(rounding) -> tuple[Training, Training]:
    """With copies and without, after the same steps: graphs of two shapes, and an eager step."""
    torch._dynamo.reset()
    made = training("always"), training("never")
    for each in made:
        each.run([*batches(2), *batches(2, rows=3)])
        assert (each.step.report.replays, each.step.report.eager_steps) == (3, 1)
    return made


def test_the_same_numbers_without_casts(both):
    """Losses, norms, weights, moments and averages to the bit."""
    ours, theirs = both
    assert_same(ours, theirs)
    # left are the images, the tied matrix twice, and weight and bias of the frozen layer
    assert (ours.compiler.input_casts(), theirs.compiler.input_casts()) == (5, 5 + 2 * len(COPIED))
    assert ours.step.report.optimizer.endswith("are one pass, which keeps bf16 copies of 5 weights")
    names = {id(p): name for name, p in ours.model.named_parameters()}
    copies = ours.step._program.copies
    assert tuple(names[id(p)] for p in ours.model.parameters() if copies.of(p) is not None) == COPIED
    assert ours.step.state_dict()["model"].keys() == ours.model.state_dict().keys()


def load(each: Training) -> None:
    each.model.load_state_dict(net(seed=9).state_dict())


@torch.no_grad()
def clamp(each: Training) -> None:
    for parameter in each.model.parameters():
        parameter.clamp_(-0.2, 0.2)


@torch.no_grad()
def swap_with_average(each: Training) -> None:
    for average, weight in each.ema.pairs(each.model):
        weight.copy_(average)


def replace_memory(each: Training) -> None:
    for parameter in each.model.parameters():
        parameter.data = parameter.data * 0.9


def freeze_and_evaluate(each: Training) -> None:
    each.model.down.weight.requires_grad_(False)
    each.model.eval()


def other_betas(each: Training) -> None:
    """The next step is one of PyTorch's optimizer, compiled, which leaves bf16 gradients for it."""
    each.optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    each.losses.append(each.step.launch_operators(batches(1)[0]))
    assert not each.step._program._is_current(each.step._program.one_pass)


def verify(each: Training) -> None:
    assert each.step.verify(batches(2)).steps == 2


# and the rows of the batches of the steps that follow; a graph that is no longer right takes two of a size
CHANGES = {
    load: (4, 3),
    clamp: (4,),
    swap_with_average: (3,),
    replace_memory: (4, 4),
    verify: (4,),
    other_betas: (4,),
    freeze_and_evaluate: (4, 4),
}


def test_copies_follow_whoever_writes_weights(both):
    """To the bit, as a step without copies; two shapes, each with a graph of its own."""
    before = both[0].step.report.replays
    for each in both:
        for change, sizes in CHANGES.items():
            change(each)
            each.run([batches(1, rows=rows)[0] for rows in sizes])
    ours, theirs = both
    assert_same(ours, theirs)
    assert ours.step.report.replays == theirs.step.report.replays == before + 7
    assert ours.step.report.optimizer.endswith("which keeps bf16 copies of 4 weights")  # one is frozen


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "fp32"}, "copies are bf16, and the recipe has dtype='fp32'"),
        ({"compile": "none"}, "only compiled steps read copies, and the recipe has compile='none'"),
        ({"accumulate": 2}, "the gradients of 2 micro-batches are summed in fp32"),
        ({"optimizer_kernel": "never"}, "only the one pass of the optimizer writes copies"),
        ({}, "steps are not compiled"),
    ],
)
def test_where_there_are_none_the_report_says_why(options, words):
    model = net()
    accumulate = options.pop("accumulate", 1)
    parts = Parts(model, loss, AdamW(model.parameters()), accumulate=accumulate)
    options = {"optimizer_kernel": "always", **options}
    step = TrainStep(StepProgram(parts, StepRecipe(weight_copies="auto", **options)), batches(1)[0], capture=None)
    step(batches(1)[0])
    assert step.report.optimizer.endswith(f"; weights are cast at every use: {words}")
    with pytest.raises(NotEngaged, match=f"compile_step: weight_copies='always', but {words}"):
        TrainStep(StepProgram(parts, StepRecipe(weight_copies="always", **options)), batches(1)[0], capture=None)


def test_a_step_that_will_not_compile_has_none():
    def refuse(graph_module, inputs):
        raise NotImplementedError("no compiler here")

    model = net()
    parts = Parts(model, loss, AdamW(model.parameters()), clip=1.0)
    program = StepProgram(parts, StepRecipe(weight_copies="auto", optimizer_kernel="always"))
    program.backend.compiler = refuse
    with pytest.warns(RuntimeWarning, match=r"torch\.compile refused"):
        step = TrainStep(program, batches(1)[0], capture=capture_of(program))
    step(batches(1)[0])
    assert step.report.optimizer.endswith("weights are cast at every use: torch.compile refused the step")


def test_chosen_by_the_recipe():
    assert StepRecipe().weight_copies == NAMED["writeup-5"].weight_copies == "never"
    assert NAMED["bf16"].weight_copies == "auto"
    with pytest.raises(UsageError, match="weight_copies must be one of auto, always, never, got 'yes'"):
        StepRecipe(weight_copies="yes")
