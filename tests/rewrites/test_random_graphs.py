"""The whole pipeline on random graphs of convolutions, chunks, concats, residuals and views."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs import BY_NAME, check, image, nan_memory, net, rewritten


@dataclass
class Program:
    """Steps over a growing list of maps of one size; map 0 is the input."""

    rng: random.Random
    channels: list[int] = field(default_factory=lambda: [8])
    steps: list[Callable[[nn.Module, list[Tensor]], Tensor]] = field(default_factory=list)
    layers: dict[str, nn.Module] = field(default_factory=dict)

    def add(self, channels: int, step: Callable[[nn.Module, list[Tensor]], Tensor]) -> int:
        self.channels.append(channels)
        self.steps.append(step)
        return len(self.steps)

    def pick(self) -> int:
        """A recent map mostly: chains, with a long memory now and then."""
        count = len(self.channels)
        return self.rng.randrange(max(0, count - 5), count) if self.rng.random() < 0.8 else self.rng.randrange(count)

    def conv(self, source: int, c_out: int, residual: int | None = None) -> int:
        rng, c_in, name = self.rng, self.channels[source], f"conv{len(self.layers)}"
        size = rng.choice((1, 1, 3))
        groups = c_in if c_in == c_out and rng.random() < 0.15 else 1
        bias, act, in_place = rng.random() < 0.7, rng.random() < 0.6, rng.random() < 0.3
        self.layers[name] = nn.Conv2d(c_in, c_out, size, padding=size // 2, groups=groups, bias=bias)

        def step(m: nn.Module, maps: list[Tensor]) -> Tensor:
            y = m.get_submodule(name)(maps[source])
            y = F.silu(y, inplace=in_place) if act else y
            if residual is None:
                return y
            return y.add_(maps[residual]) if in_place else maps[residual] + y

        return self.add(c_out, step)

    def part(self, source: int, low: int, high: int) -> int:
        end = high - self.channels[source] if high < self.channels[source] and self.rng.random() < 0.3 else high
        return self.add(high - low, lambda m, maps: maps[source][:, low:end])

    def cat(self, sources: list[int]) -> int:
        return self.add(
            sum(self.channels[s] for s in sources), lambda m, maps: torch.cat([maps[s] for s in sources], 1)
        )


def grow(program: Program) -> None:
    """One more step, or a few that belong together."""
    rng, source = program.rng, program.pick()
    c = program.channels[source]
    kinds = {"conv": 6, "chunk": 3, "cat": 3, "join": 3, "over": 5, "residual": 3, "slice": 2, "foreign": 3}
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    if kind == "conv":
        program.conv(source, rng.choice((4, 8, c)))
    elif kind == "residual":
        equal = [index for index, channels in enumerate(program.channels) if channels == c]
        program.conv(program.pick(), c, rng.choice(equal))
    elif kind == "chunk" and c % 2 == 0:
        program.part(source, 0, c // 2)
        program.part(source, c // 2, c)
    elif kind == "slice" and c >= 4:
        low = rng.randrange(c - 1)
        program.part(source, low, rng.randint(low + 1, c))
    elif kind == "cat":
        sources = [program.pick() for _ in range(rng.randint(2, 3))]
        if sum(program.channels[s] for s in sources) <= 32:
            program.cat(sources)
    elif kind == "join":
        join_new_maps(program)
    elif kind == "over" and c % 2 == 0:
        write_over_a_half(program, source)
    elif kind == "foreign":
        program.add(c, foreign(rng.choice(("relu", "pool", "pixels", "dropout")), source))


def join_new_maps(program: Program) -> None:
    """A concat whose inputs are all made for it, some of them in one piece: what one new buffer can hold."""
    made = []
    for _ in range(program.rng.randint(2, 3)):
        made.append(program.conv(program.pick(), program.rng.choice((4, 8))))
        if program.rng.random() < 0.3:
            half = program.channels[made[-1]] // 2
            made[-1:] = [program.part(made[-1], 0, half), program.part(made[-1], half, 2 * half)]
    program.cat(made)


def write_over_a_half(program: Program, source: int) -> None:
    """The C3k shape: one half of a map beside something new, of the other half's size, made from anything so far."""
    rng, c = program.rng, program.channels[source]
    first = rng.random() < 0.5
    low, high = (0, c // 2) if first else (c // 2, c)
    lost = program.part(source, low, high)
    kept = program.part(source, c // 2 - low, c + c // 2 - high)
    older = program.add(c // 2, foreign(rng.choice(("pixels", "dropout")), lost)) if rng.random() < 0.3 else None
    made = program.conv(rng.choice((source, kept, lost, program.pick())), c // 2)
    if rng.random() < 0.6:
        made = program.conv(made, c // 2)
    program.cat([made, kept] if first else [kept, made])
    if older is not None:
        program.add(c // 2, foreign("relu", older))


def foreign(kind: str, source: int) -> Callable[[nn.Module, list[Tensor]], Tensor]:
    def step(m: nn.Module, maps: list[Tensor]) -> Tensor:
        x = maps[source]
        if kind == "pool":
            return F.max_pool2d(x, 3, 1, 1)
        if kind == "pixels":
            return x.permute(0, 2, 3, 1).flatten(1, 2).unflatten(1, x.shape[2:]).permute(0, 3, 1, 2)
        return F.dropout(x, 0.5, training=False) if kind == "dropout" else F.relu(x)

    return step


def build(seed: int) -> tuple[nn.Module, tuple[int, ...]]:
    rng = random.Random(seed)
    program = Program(rng)
    program.conv(0, 8)
    for _ in range(rng.randint(6, 14)):
        grow(program)
    results = sorted({len(program.steps), *(rng.randint(1, len(program.steps)) for _ in range(2))})

    def forward(m: nn.Module, x: Tensor) -> list[Tensor]:
        maps = [x]
        for step in program.steps:
            maps.append(step(m, maps))
        return [maps[index] for index in results]

    return net(forward, seed=seed, **program.layers), (rng.choice((1, 2)), 8, rng.choice((1, 4)), 5)


@pytest.mark.parametrize("seed", range(80))
def test_results_do_not_change(seed):
    module, shape = build(seed)
    graph_module, _ = rewritten(module, [image(*shape, seed=seed)], *BY_NAME)
    # again, on other data: whatever the first call left behind must not matter
    check(graph_module, module, [image(*shape, seed=seed + 1000)])


@pytest.mark.parametrize("seed", [14, 30, 35, 48])
def test_the_kernels_themselves_give_the_same(seed):
    """Under the interpreter, or on a GPU: storing calls check that what they write overlaps nothing they read."""
    module, shape = build(seed)
    x = image(*shape, seed=seed)
    graph_module, found = rewritten(module, [x], *BY_NAME)
    assert sum(count for name, count in found.items() if name.endswith("_into")) >= 5
    if torch.cuda.is_available():
        graph_module, module, x = graph_module.cuda(), module.cuda(), x.cuda()
    with torch.no_grad(), nan_memory():
        for actual, expected in zip(graph_module(x), module(x), strict=True):
            torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)
