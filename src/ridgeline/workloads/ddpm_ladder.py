"""The ladder of a DDPM training step: the write-up's rungs 0 to 7, then this project's own, each changing one thing.

A step is everything from asking the loader to the averaged weights: batch, forward, loss, backward, clip, AdamW, EMA.
CIFAR-10 network (32 M parameters), bf16 autocast, fp32 weights. What is compiled is compiled on a GPU only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ridgeline.ema import Ema
from ridgeline.errors import EnvironmentUnusable, NotEngaged, UsageError
from ridgeline.models.ddpm_unet import UNet, UNetConfig
from ridgeline.step_recipe import NAMED, StepRecipe
from ridgeline.train_rewrites.convolution_calls import Convolution
from ridgeline.train_rewrites.fp8_passes import PASSES
from ridgeline.train_step import TrainStep, compile_step
from ridgeline.train_tuning import convolutions, tune_step
from ridgeline.tuned import Row
from ridgeline.workloads.diffusion import Loss, linear_schedule, noise_loss
from ridgeline.workloads.image_sets import Images, load_images
from ridgeline.workloads.loader import Batches
from ridgeline.workloads.sampling import channels_last
from ridgeline.workloads.settings import PRESETS

RANDOM_IMAGES = 50_000  # as many as CIFAR-10 has to train on
CLIP = 1.0
WRITEUP_GPU = "RTX 4070"

Step = Callable[[], object]


@dataclass(frozen=True)
class Rung:
    """One step of the ladder; each changes one thing of the rung before."""

    name: str
    change: str
    writeup_s: float | None = None  # the write-up's own mean of 50 steps, on an RTX 4070 at locked clocks
    channels_last: bool = True
    reads_loss: bool = False
    fused: bool = True
    compiled: str = "loss"  # "model", or "loss": the noising and the loss with it
    graph: str = "none"  # "inductor": one for each of forward and backward; "step": one over everything
    one_pass: bool = False  # clip, AdamW and average in one kernel
    rewrites: tuple[str, ...] = ()  # of the compiled graph
    weight_copies: bool = False  # in bf16, written by the one pass
    side_stream: bool = False  # for weight gradients
    fp8: tuple[str, ...] = ()  # passes of convolutions in FP8, where they pay


_NORMS = ("expand_upsample", "fuse_group_norm_silu")
_DENSE = ("merge_linears", "keep_channels_last")
_UPSAMPLED = ("fuse_upsample_conv", "fuse_group_norm_silu", "fuse_attention", *_DENSE, "use_convolutions")
_OWN = (*_UPSAMPLED, "read_concats")

RUNGS = (
    Rung(
        "writeup-0",
        "compiled model, bf16 autocast",
        0.15148,
        channels_last=False,
        reads_loss=True,
        fused=False,
        compiled="model",
    ),
    Rung("writeup-1", "channels-last weights and images", 0.14250, reads_loss=True, fused=False, compiled="model"),
    Rung("writeup-2", "the loss is summed on the device, not read every step", 0.14087, fused=False, compiled="model"),
    Rung("writeup-3", "fused AdamW", 0.13745, compiled="model"),
    Rung("writeup-4", "noising and loss compiled too, reduce-overhead", 0.13593, graph="inductor"),
    Rung("writeup-5", "one CUDA graph over the whole step (compile_step)", 0.13360, graph="step"),
    Rung(
        "writeup-6",
        "convolutions forward, and gradients of maps, in FP8 where it pays",
        0.11082,
        graph="step",
        fp8=("fprop", "dgrad"),
    ),
    Rung(
        "writeup-7",
        "gradients of weights in FP8 too, from transposed copies",
        0.10328,
        graph="step",
        fp8=("fprop", "dgrad", "wgrad"),
    ),
    Rung("one-pass", "clip, AdamW and average in one kernel", graph="step", one_pass=True),
    Rung("nchw", "weights and images stay NCHW", graph="step", one_pass=True, channels_last=False),
    Rung(
        "fused-norms",
        "GroupNorm, scale, shift, SiLU and dropout in one kernel each way",
        graph="step",
        one_pass=True,
        rewrites=_NORMS,
    ),
    Rung(
        "own-attention",
        "attention on packed q, k and v in one kernel each way",
        graph="step",
        one_pass=True,
        rewrites=(*_NORMS, "fuse_attention"),
    ),
    Rung(
        "dense-gradients",
        "gradients reach convolutions dense, linears of one input merge, norms add residual gradients",
        graph="step",
        one_pass=True,
        rewrites=(*_NORMS, "fuse_attention", *_DENSE),
    ),
    Rung(
        "weight-copies",
        "bf16 copies of weights, written by the optimizer's pass, instead of casts",
        graph="step",
        one_pass=True,
        rewrites=(*_NORMS, "fuse_attention", *_DENSE),
        weight_copies=True,
    ),
    Rung(
        "own-convolutions",
        "convolutions and linear layers by wgmma kernels of this project, where tuning found them faster",
        graph="step",
        one_pass=True,
        rewrites=(*_NORMS, "fuse_attention", *_DENSE, "use_convolutions"),
        weight_copies=True,
    ),
    Rung(
        "own-upsample",
        "upsampling and its convolution as four small ones, where tuning found them faster",
        graph="step",
        one_pass=True,
        rewrites=_UPSAMPLED,
        weight_copies=True,
    ),
    Rung(
        "read-concats",
        "norms and 1x1 convolutions read the two maps of a concatenation, and write their gradients apart",
        graph="step",
        one_pass=True,
        rewrites=_OWN,
        weight_copies=True,
    ),
    Rung(
        "side-stream",
        "weight gradients beside the rest of the backward",
        graph="step",
        one_pass=True,
        rewrites=_OWN,
        weight_copies=True,
        side_stream=True,
    ),
    Rung(
        "own-fp8",
        "convolutions in FP8 where it pays, quantised by the norms",
        graph="step",
        one_pass=True,
        rewrites=_OWN,
        weight_copies=True,
        side_stream=True,
        fp8=("fprop", "dgrad", "wgrad"),
    ),
)
BY_NAME = {rung.name: rung for rung in RUNGS}


@dataclass(frozen=True)
class Conditions:
    """What all rungs of a run share. Refuses with UsageError what cannot be.

    data    images of any kind `load_images` reads, cropped and resized where need be; None: random ones
    preset  network: "cifar10", or "tiny" to try the ladder on a CPU
    """

    batch: int = 128
    data: Path | None = None
    device: str = "cuda"
    preset: str = "cifar10"

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise UsageError(f"batch must be at least 1, got {self.batch}")
        if self.preset not in PRESETS:
            raise UsageError(f"preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")

    @property
    def network(self) -> UNetConfig:
        return PRESETS[self.preset]


@dataclass(frozen=True)
class Built:
    """`step()` takes one training step; the rest is what `compile_step` reports of it, empty on other rungs."""

    step: Step
    findings: tuple[str, ...] = ()
    rewrites: dict[str, int] = field(default_factory=dict)  # sites changed, by name


def chosen(names: Sequence[str]) -> tuple[Rung, ...]:
    """The rungs of these names, in their order. Raises UsageError for a name that is none."""
    for name in names:
        if name not in BY_NAME:
            raise UsageError(f"rung must be one of {', '.join(BY_NAME)}, got {name!r}")
    return tuple(BY_NAME[name] for name in names)


def images_of(conditions: Conditions) -> Images:
    """The images of a run, uint8 [N, side, side, channels] as its network takes them."""
    side, channels = conditions.network.image_size, conditions.network.in_channels
    if conditions.data is None:
        return np.random.default_rng(0).integers(0, 256, (RANDOM_IMAGES, side, side, channels), dtype=np.uint8)
    images = load_images(conditions.data, size=side)
    if images.shape[3] != channels:
        raise UsageError(
            f"'{conditions.data}' holds images of {images.shape[3]} channels, and the network takes {channels}: "
            f"give colour images, or no --data for random ones"
        )
    return images


def build(rung: Rung, conditions: Conditions, *, operators: bool = False) -> Built:
    """The training step of a rung, from seed 0. Lets this process multiply fp32 in TF32, as the write-up does.

    `operators`: launch what a captured step holds one by one, which is how a trace learns which kernel is whose.
    Raises EnvironmentUnusable for a rung of CUDA graphs on another device, NotEngaged where the graph, the kernel or a
    rewrite of the rung comes to nothing.
    """
    device = torch.device(conditions.device)
    if rung.graph != "none" and device.type != "cuda":
        raise EnvironmentUnusable(
            f"rung {rung.name} is made of CUDA graphs, and the device is {device.type}: run it on a GPU, or name other "
            f"rungs"
        )
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    loader = Batches(images_of(conditions), conditions.batch, device=device)
    model = UNet(conditions.network).to(device)
    model = channels_last(model) if rung.channels_last else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True if rung.fused else None)
    ema, loss = Ema(model), noise_loss(linear_schedule().to(device))
    if rung.graph != "step":
        return Built(_plain_step(rung, loader, model, loss, optimizer, ema))
    captured = _captured(rung, model, loss, optimizer, next(loader), ema)
    one = captured.launch_operators if operators else captured
    running = torch.zeros((), device=device)
    report = captured.report
    return Built(lambda: running.add_(one(next(loader))), tuple(map(str, report.findings)), report.rewrites)


def tune(conditions: Conditions, dtype: str, **choices: Any) -> tuple[Row, ...]:
    """Tune what the recipe of a dtype's name runs of this workload; `choices` are those of `train_tuning.tune_step`."""
    return tune_step(*_example(conditions), NAMED[dtype], **choices)


def convolutions_of(conditions: Conditions, recipe: StepRecipe) -> tuple[Convolution, ...]:
    """The distinct convolutions of the network that kernels of ours could compute."""
    return convolutions(*_example(conditions), recipe)


def _example(conditions: Conditions) -> tuple[nn.Module, Loss, Tensor]:
    """Network, loss and a batch of black images, to look at what a step would run."""
    device = torch.device(conditions.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EnvironmentUnusable("this needs a CUDA GPU, and torch sees none: run `ridgeline doctor`")
    network = conditions.network
    batch = torch.zeros((conditions.batch, network.in_channels, network.image_size, network.image_size), device=device)
    batch = batch.contiguous(memory_format=torch.channels_last)
    return channels_last(UNet(network).to(device)), noise_loss(linear_schedule().to(device)), batch


def _captured(
    rung: Rung, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, batch: Tensor, ema: Ema
) -> TrainStep:
    """The whole step as one graph. A rung that would be another one under its name is an error."""
    recipe = StepRecipe(
        compile=rung.compiled,
        channels_last=rung.channels_last,
        rewrites=rung.rewrites,
        side_stream=rung.side_stream,
        optimizer_kernel="always" if rung.one_pass else "never",
        weight_copies="always" if rung.weight_copies else "never",
        fp8="auto" if rung.fp8 else "never",
        fp8_passes=rung.fp8 or PASSES,
        require=True,
    )
    step = compile_step(model, loss, optimizer, batch, ema=ema, clip=CLIP, recipe=recipe)
    for name in rung.rewrites:
        if not step.report.rewrites.get(name):
            raise NotEngaged(f"rung {rung.name}: the rewrite {name} found nothing to change in the step")
    if rung.side_stream and not step.report.rewrites.get("overlap_weight_gradients"):
        raise NotEngaged(f"rung {rung.name}: no weight gradient could run beside the rest of the backward")
    if rung.fp8 and not step.report.rewrites.get("use_fp8"):
        raise NotEngaged(f"rung {rung.name}: {'; '.join(step.report.fp8)}")
    return step


def _plain_step(
    rung: Rung, loader: Batches, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, ema: Ema
) -> Step:
    """The write-up's loop."""
    parameters = list(model.parameters())
    device = parameters[0].device
    layout = torch.channels_last if rung.channels_last else torch.contiguous_format
    running = torch.zeros((), device=device)
    read = 0.0
    called: Any = model
    forward = loss
    # as in compile_step, a CPU's step stays uncompiled: it is there to show that the ladder works
    if device.type == "cuda" and rung.compiled == "model":
        called = torch.compile(model)
    elif device.type == "cuda":
        forward = torch.compile(loss, mode="reduce-overhead" if rung.graph == "inductor" else None)

    def step() -> None:
        nonlocal read
        x0 = next(loader).contiguous(memory_format=layout)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            value = forward(called, x0)
        value.backward()
        if rung.reads_loss:
            read += value.item()
        else:
            running.add_(value.detach())
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ema.update_(model)

    return step
