"""Small training problems, and the plain loop that a captured step must equal."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, AdamW

from ridgeline.ema import Ema
from ridgeline.step_program import Parts, StepProgram
from ridgeline.step_recipe import StepRecipe
from ridgeline.train_step import TrainStep

CLASSES = 5


class Net(nn.Module):
    """Convolution, BatchNorm, dropout, a frozen layer, and one matrix used twice."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        # no bias before a norm: its gradient is rounding noise, which Adam would blow up
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.frozen = nn.Conv2d(8, 8, 1, bias=False).requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
        self.up = nn.Linear(8, 8, bias=False)
        self.down = nn.Linear(8, 8, bias=False)
        self.down.weight = self.up.weight
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(F.silu(self.norm(self.conv(x)))).mean((2, 3))
        return self.head(self.down(F.silu(self.up(self.dropout(x)))))


def loss(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["label"])


def groups(model):
    """Two groups with their own learning rate and decay; the frozen layer is among them."""
    heads = {id(p) for p in model.head.parameters()}
    rest = [p for p in model.parameters() if id(p) not in heads]
    return [{"params": rest}, {"params": list(model.head.parameters()), "lr": 3e-3, "weight_decay": 0.0}]


OPTIMIZERS = {
    "sgd": lambda m: SGD(groups(m), lr=0.05),
    "sgd nesterov": lambda m: SGD(groups(m), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd maximize": lambda m: SGD(groups(m), lr=0.002, momentum=0.5, maximize=True, weight_decay=0.01),
    "adam": lambda m: Adam(groups(m), lr=1e-3, weight_decay=0.01, amsgrad=True),
    "adamw": lambda m: AdamW(groups(m), lr=1e-3, weight_decay=0.1),
}


def net(seed: int = 0, dropout: float = 0.2) -> Net:
    torch.manual_seed(seed)
    return Net(dropout)


def batches(n: int, rows: int = 6, seed: int = 1, device: str = "cpu"):
    g = torch.Generator().manual_seed(seed)
    made = [
        {"image": torch.randn(rows, 3, 6, 6, generator=g), "label": torch.randint(CLASSES, (rows,), generator=g)}
        for _ in range(n)
    ]
    return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in made]


@dataclass
class Run:
    """A model in training, and all that must be equal at the end."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: nn.Module | None = None
    losses: list[torch.Tensor] = field(default_factory=list)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {"losses": torch.stack(self.losses).float()} if self.losses else {}
        found |= {f"model.{name}": t for name, t in self.model.state_dict().items()}
        if self.average is not None:
            found |= {f"ema.{name}": t for name, t in self.average.state_dict().items()}
        names = {id(p): name for name, p in self.model.named_parameters()}
        for p, state in self.optimizer.state.items():
            found |= {f"{names[id(p)]}.{name}": t for name, t in state.items() if isinstance(t, torch.Tensor)}
        return found


def plain(model, optimizer, data, *, clip=None, accumulate=1, dtype="fp32", ema_decay=None, schedule=None, scaler=None):
    """The loop everyone writes."""
    run = Run(model, optimizer, copy.deepcopy(model).eval() if ema_decay else None)
    device = next(model.parameters()).device.type
    autocast_dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    for n, batch in enumerate(data):
        optimizer.zero_grad()
        total = 0.0
        for part in range(accumulate):
            micro = {name: tensor.chunk(accumulate)[part] for name, tensor in batch.items()}
            with torch.autocast(device, dtype=autocast_dtype, enabled=dtype != "fp32"):
                value = loss(model, micro) / accumulate
            (scaler.scale(value) if scaler else value).backward()
            total = total + value.detach()
        if scaler:
            scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if ema_decay:
            decay = min(ema_decay, (1 + n) / (10 + n))
            with torch.no_grad():
                for average, p in zip(run.average.parameters(), model.parameters(), strict=True):
                    average.lerp_(p, 1 - decay)
                for average, b in zip(run.average.buffers(), model.buffers(), strict=True):
                    average.copy_(b)
        if schedule:
            schedule.step()
        run.losses.append(total)
    return run


def train_step(model, optimizer, example, *, capture=None, ema=None, clip=None, accumulate=1, loss=loss, **recipe):
    """A TrainStep with a capture of one's own; without `capture` every step runs eagerly."""
    recipe = StepRecipe(**{"dtype": "fp32", "compile": "none", **recipe})
    program = StepProgram(Parts(model, loss, optimizer, ema, clip, accumulate), recipe)
    return TrainStep(program, example, capture=capture)


def stepped(model, optimizer, data, *, ema_decay=None, schedule=None, **options):
    """The same training through a TrainStep."""
    ema = Ema(model, ema_decay) if ema_decay else None
    step = train_step(model, optimizer, data[0], ema=ema, **options)
    run = Run(model, optimizer, ema.module if ema else None)
    for batch in data:
        run.losses.append(step(batch))
        if schedule:
            schedule.step()
    return run, step


def assert_close(actual: Run, expected: Run, *, rtol: float, atol: float) -> None:
    a, b = actual.tensors(), expected.tensors()
    assert set(a) >= set(b)
    for name in b:
        torch.testing.assert_close(
            a[name].cpu(), b[name].cpu(), rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
