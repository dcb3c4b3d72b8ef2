"""Programmatic dependent launch changes when a kernel starts, and nothing else.

Without a GPU the source is read: in every kernel the wait stands above all that depends on it, on every path. On one,
the results with and without it are compared bit by bit, over many replays that leave no time between two kernels.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import ridgeline.kernels as kernels_package
from ridgeline import compiler
from ridgeline.cudagraph import capture
from ridgeline.kernels import (
    attention_position,
    conv2d_act,
    depthwise_conv2d_act,
    max_pool_chain,
    upsample_concat_conv_act,
)
from ridgeline.kernels._nhwc import random_nhwc, round_operand, wait_for_predecessor
from ridgeline.models import YOLO26, fuse, randomise_
from ridgeline.recipe import Recipe

WAITS = "wait_for_predecessor", "wait_holding_dependent"
# what no kernel of a graph writes: weights, biases, and the tables that place a frame on its canvas
CONSTANT = ("weight", "bias", "rows", "columns")
READS, WRITES = ("load", "async_copy_global_to_shared"), ("store", "async_copy_shared_to_global")
READ_NOTHING = ("_fetch_maps",)  # copies of boxes that lie beyond their maps


def jit_functions() -> dict[str, Any]:
    """Every kernel that may start early, by its name: @triton.jit functions called …_kernel that take PDL."""
    names = [f"ridgeline.kernels.{module.name}" for module in pkgutil.iter_modules(kernels_package.__path__)]
    values = [item for name in names for item in vars(importlib.import_module(name)).items()]
    return {
        name: value for name, value in values if name.endswith("_kernel") and "PDL" in getattr(value, "arg_names", ())
    }


@dataclass
class Reader:
    """Follows one kernel's statements in order; `waited` is whether the wait lies on every path to this point."""

    scope: dict[str, Any]
    dependent: set[str]  # names made from pointers to what another kernel wrote
    waited: bool = False
    violations: list[str] = field(default_factory=list)
    within: tuple[Any, ...] = ()  # helpers, the outermost first

    def block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.If():
                self.calls(node.test)
                self.branches(node.body, node.orelse)
            case ast.For() | ast.While():
                self.calls(node.iter if isinstance(node, ast.For) else node.test)
                self.branches(node.body, [])  # it may run no time at all
            case ast.Return():
                self.calls(node)
                if not self.waited:
                    self.report(node, "returns before the wait: its dependent would take it for finished")
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                self.calls(node)
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                loaded = isinstance(node.value, ast.Call) and _called(node.value) == "load"
                if node.value is not None and not loaded and self.dependent & _names(node.value):
                    self.dependent |= set().union(*map(_names, targets))
            case _:
                self.calls(node)

    def branches(self, *bodies: list[ast.stmt]) -> None:
        before, after = self.waited, []
        for body in bodies:
            self.waited = before
            self.block(body)
            after.append(self.waited)
        self.waited = all(after)

    def calls(self, node: ast.AST) -> None:
        """All calls in an expression, innermost first."""
        for child in ast.iter_child_nodes(node):
            self.calls(child)
        if not isinstance(node, ast.Call):
            return
        name = _called(node)
        if name in WAITS:
            self.waited = True
        elif name == "warp_specialize":
            # partitions run beside each other, so each of them must wait
            pairs = (partition.elts for partition in node.args[0].elts)  # pyright: ignore[reportAttributeAccessIssue]
            self.branches(*([ast.Expr(ast.Call(function, given.elts, []))] for function, given in pairs))
        elif not self.waited and (name in WRITES or name.startswith("atomic")):
            self.report(node, "writes before the wait: its predecessor may still read what is there")
        elif not self.waited and name in READS and self.dependent & _names(_source(node)):
            self.report(node, "reads what its predecessor writes before the wait")
        elif hasattr(self.scope.get(name), "fn") and name not in READ_NOTHING and self.scope[name] not in self.within:
            self.follow(node, self.scope[name])

    def follow(self, call: ast.Call, helper: Any) -> None:
        """A helper is read with this call's arguments: what it loads is judged by where they come from."""
        function = parsed(helper)
        names = [argument.arg for argument in function.args.args]
        given = {**dict(zip(names, call.args, strict=False)), **{k.arg: k.value for k in call.keywords if k.arg}}
        dependent = {name for name, value in given.items() if self.dependent & _names(value)}
        inner = Reader(helper.fn.__globals__, dependent, self.waited, within=(*self.within, helper))
        # a helper may return before the wait: that is not the kernel's end
        inner.block([s for s in function.body if not isinstance(s, ast.Return)])
        for last in function.body:
            if isinstance(last, ast.Return):
                inner.calls(last)
        self.violations += [f"{helper.fn.__name__} {text}" for text in inner.violations]
        self.waited = self.waited or inner.waited

    def report(self, node: ast.AST, text: str) -> None:
        self.violations.append(f"line {node.lineno} {text}: {ast.unparse(node)[:60]}")


def parsed(function: Any) -> ast.FunctionDef:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function.fn))).body
    assert isinstance(tree, ast.FunctionDef)
    return tree


def violations(kernel: Any) -> list[str]:
    """What in a kernel's source breaks the rule: below the wait all reads of others' results, all writes, all ends."""
    function = parsed(kernel)
    pointers = {argument.arg for argument in function.args.args if argument.arg.endswith(("_ptr", "_desc"))}
    reader = Reader(kernel.fn.__globals__, {name for name in pointers if not name.startswith(CONSTANT)})
    reader.block(function.body)
    missing = [] if reader.waited else ["a path through it does not wait at all"]
    return reader.violations + missing


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _source(load: ast.Call) -> ast.AST:
    """What a load reads from: tl.load(pointer), tma.async_copy...(map), or map.load(offsets) of a tensor map."""
    owner = load.func.value if isinstance(load.func, ast.Attribute) else None
    module = isinstance(owner, ast.Name) and owner.id in ("tl", "gl", "tma")
    return load.args[0] if owner is None or module else owner


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


@pytest.mark.parametrize("name", jit_functions())
def test_every_kernel_waits_before_what_depends_on_it(name: str):
    assert violations(jit_functions()[name]) == []


def test_all_kernels_are_read():
    launched = {"conv2d_act_kernel", "depthwise_conv2d_act_kernel", "upsample_concat_conv_act_kernel"}
    launched |= {"max_pool_chain_kernel", "attention_position_kernel", "collect_kernel", "rank_kernel"}
    launched |= {"conv2d_act_gluon_kernel"}
    assert launched <= set(jit_functions())


@triton.jit
def _read(ptr, i):
    return tl.load(ptr + i)


@triton.jit
def _right(x_ptr, weight_ptr, y_ptr, n, PDL: tl.constexpr):
    i = tl.arange(0, 16)
    x_row = x_ptr + i
    w = _read(weight_ptr, i)
    if n > 3:
        wait_for_predecessor(PDL)
        x = tl.load(x_row)
    else:
        wait_for_predecessor(PDL)
        x = round_operand(tl.load(x_row), "")
    tl.store(y_ptr + i, x * w)


@triton.jit
def _reads_an_alias(x_ptr, weight_ptr, y_ptr, n, PDL: tl.constexpr):
    i = tl.arange(0, 16)
    x_row = x_ptr + i
    shifted = x_row + n
    x = tl.load(shifted)
    wait_for_predecessor(PDL)
    tl.store(y_ptr + i, x)


@triton.jit
def _reads_a_tensor_map(x_desc, weight_desc, y_ptr, n, PDL: tl.constexpr):
    i = tl.arange(0, 16)
    w = weight_desc.load([n, 0])
    x = x_desc.load([n, 0])
    wait_for_predecessor(PDL)
    tl.store(y_ptr + i, x * w)


@triton.jit
def _reads_in_a_helper(x_ptr, weight_ptr, y_ptr, n, PDL: tl.constexpr):
    i = tl.arange(0, 16)
    x = _read(x_ptr, i)
    wait_for_predecessor(PDL)
    tl.store(y_ptr + i, x)


@triton.jit
def _writes_first(x_ptr, weight_ptr, y_ptr, n, PDL: tl.constexpr):
    i = tl.arange(0, 16)
    tl.store(y_ptr + i, tl.load(weight_ptr + i))
    wait_for_predecessor(PDL)


@triton.jit
def _counts_first(x_ptr, weight_ptr, y_ptr, n, PDL: tl.constexpr):
    tl.atomic_add(y_ptr, 1)
    wait_for_predecessor(PDL)


@triton.jit
def _waits_on_one_path(x_ptr, weight_ptr, y_ptr, n, PDL: tl.constexpr):
    i = tl.arange(0, 16)
    if n > 3:
        wait_for_predecessor(PDL)
    tl.store(y_ptr + i, tl.load(x_ptr + i))


@triton.jit
def _waits_in_a_loop(x_ptr, weight_ptr, y_ptr, n, PDL: tl.constexpr):
    i = tl.arange(0, 16)
    for _ in range(n):
        wait_for_predecessor(PDL)
    tl.store(y_ptr + i, 0.0)


@triton.jit
def _leaves_early(x_ptr, weight_ptr, y_ptr, n, PDL: tl.constexpr):
    if n > 3:
        return
    wait_for_predecessor(PDL)
    tl.store(y_ptr, tl.load(x_ptr))


@triton.jit
def _never_waits(x_ptr, weight_ptr, y_ptr, n, PDL: tl.constexpr):
    w = tl.load(weight_ptr)  # noqa: F841


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        (_reads_an_alias, "reads what its predecessor writes before the wait: tl.load(shifted)"),
        (_reads_a_tensor_map, "reads what its predecessor writes before the wait: x_desc.load([n, 0])"),
        (_reads_in_a_helper, "reads what its predecessor writes before the wait: tl.load(ptr + i)"),
        (_writes_first, "writes before the wait"),
        (_counts_first, "writes before the wait"),
        (_waits_on_one_path, "reads what its predecessor writes"),
        (_waits_in_a_loop, "writes before the wait"),
        (_leaves_early, "returns before the wait"),
        (_never_waits, "a path through it does not wait at all"),
    ],
    ids=lambda value: value.fn.__name__ if hasattr(value, "fn") else "",
)
def test_planted_violations_are_found(kernel: Any, complaint: str):
    assert violations(_right) == []
    assert any(complaint in text for text in violations(kernel)), violations(kernel)


needs_pdl = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="programmatic dependent launch needs compute capability 9.0",
)


def images(count: int, shape: tuple[int, ...]) -> Iterator[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(count):
        yield torch.rand(shape, generator=generator, device="cuda")


def assert_equal_bits(a: Tensor, b: Tensor, text: str) -> None:
    # as integers, so that NaN equals itself and -0 differs from 0
    kinds = {2: torch.int16, 4: torch.int32}
    same = torch.equal(*(t.contiguous().view(kinds[t.element_size()]) for t in (a, b)))
    assert same, f"{text}: {(a != b).sum().item()} of {a.numel()} elements differ"


@pytest.mark.gpu
@pytest.mark.slow
@needs_pdl
@pytest.mark.parametrize("side_streams", [0, 3])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_yolo26n_is_the_same_bit_by_bit_over_a_thousand_replays(side_streams: int, dtype: str):
    model = fuse(randomise_(YOLO26("n"))).cuda()
    example = next(images(1, (1, 3, 640, 640)))
    with_pdl, without = (
        compiler.compile(model, example, Recipe(dtype=dtype, pdl=pdl, side_streams=side_streams), verify=False)
        for pdl in (True, False)
    )
    results: list[tuple[Tensor, Tensor]] = []
    for count, image in enumerate(images(1000, (1, 3, 640, 640))):
        # no host wait between replays: the next one's first kernels follow on the last one's
        results.append((with_pdl(image).clone(), without(image).clone()))
        if len(results) == 20:
            for offset, (a, b) in enumerate(results):
                assert_equal_bits(a, b, f"replay {count - 19 + offset}")
            assert not torch.equal(results[0][0], results[1][0]), "another image must give other detections"
            results.clear()


Step = Callable[[Tensor, bool], Tensor]  # (x, pdl) -> a map of the same shape and about the same variance


def conv(c: int, k: int, side: int, dtype: torch.dtype, seed: int, *, stride: int = 1, gain: float = 1.0) -> Step:
    weight = random_nhwc((k, c, side, side), dtype, "cuda", seed=seed) * gain * (c * side**2) ** -0.5
    choices = {"stride": (stride,) * 2, "padding": (side // 2,) * 2, "act": "none"}
    return lambda x, pdl: conv2d_act.OP(x, weight, None, **choices, pdl=pdl)


def taps(c: int, dtype: torch.dtype, seed: int) -> Tensor:
    return depthwise_conv2d_act.pack(random_nhwc((c, 1, 3, 3), dtype, "cuda", seed=seed) / 3)


def depthwise(c: int, dtype: torch.dtype, seed: int) -> Step:
    weight = taps(c, dtype, seed)
    choices = {"stride": (1, 1), "padding": (1, 1), "act": "none"}
    return lambda x, pdl: depthwise_conv2d_act.OP(x, weight, None, **choices, pdl=pdl)


def attention(c: int, dtype: torch.dtype, seed: int) -> Step:
    # two terms of v's variance are added
    qkv, weight = conv(c, 2 * c, 1, dtype, seed, gain=0.7), taps(c, dtype, seed)
    return lambda x, pdl: attention_position.OP(qkv(x, pdl), weight, None, heads=1, key_channels=c // 2, pdl=pdl)


def pools(c: int, dtype: torch.dtype, seed: int) -> Step:
    back = conv(4 * c, c, 1, dtype, seed)
    return lambda x, pdl: back(max_pool_chain.OP(x=x, size=5, count=3, pdl=pdl), pdl)


def upsampled(c: int, dtype: torch.dtype, seed: int) -> Step:
    down = conv(c, c, 3, dtype, seed, stride=2)
    weight = random_nhwc((c, 2 * c, 1, 1), dtype, "cuda", seed=seed + 1) * (2 * c) ** -0.5
    return lambda x, pdl: upsample_concat_conv_act.OP(down(x, pdl), x, weight, None, act="none", pdl=pdl)


LINKS: dict[str, Callable[[int, torch.dtype, int], Step]] = {
    "1x1": lambda c, dtype, seed: conv(c, c, 1, dtype, seed),
    "3x3": lambda c, dtype, seed: conv(c, c, 3, dtype, seed),
    "depthwise": depthwise,
    "attention": attention,
    "pools": pools,
    "upsampled": upsampled,
}


@pytest.mark.gpu
@needs_pdl
@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_chain_of_twenty_is_the_same_bit_by_bit(name: str, dtype: torch.dtype):
    """Of one op on a map so small that a kernel is over before the next one's prologue: waits that are missing show."""
    shape = (1, 32, 20, 20)
    steps = [LINKS[name](shape[1], dtype, seed) for seed in range(20)]

    def chain(pdl: bool) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            for step in steps:
                x = step(x, pdl)
            return x

        return run

    # normal data: products of twenty random layers neither over- nor underflow
    maps = [random_nhwc(shape, dtype, "cuda", seed=seed) for seed in range(100)]
    graphs = [capture(chain(pdl), (maps[0],)) for pdl in (True, False)]
    for count, x in enumerate(maps):
        a, b = (graph.replay(x).clone() for graph in graphs)
        assert_equal_bits(a, b, f"replay {count}")
        assert bool(a.isfinite().all()) and a.float().std() > 0
