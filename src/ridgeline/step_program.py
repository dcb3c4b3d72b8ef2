"""One training step as a function of its batch: forward, loss, backward, unscale, clip, optimizer, average.

Everything it keeps from step to step is written in place, and nothing is read on the host: the same function runs
eagerly, on any device, and inside a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from sys import maxsize
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import increment_version
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ridgeline.device_optimizer import DeviceOptimizer, PlainOptimizer, load_state_, portable_state, refusal
from ridgeline.errors import NotEngaged, UsageError
from ridgeline.fp8_step import Fp8Step, chooser
from ridgeline.layout_copies import LayoutWatch
from ridgeline.loss_scale import LossScaler
from ridgeline.optimizer_kernel import OnePass, one_pass
from ridgeline.step_parts import Loss
from ridgeline.step_parts import Parts as Parts
from ridgeline.step_recipe import DTYPES, StepRecipe
from ridgeline.step_state import Snapshot, Structure, Watched, micro_batches, rebuild
from ridgeline.train_backend import TrainBackend, inductor
from ridgeline.train_rewrites import fuse_residual_add
from ridgeline.weight_copies import WeightCopies, norm_in_fp32


class StepProgram:
    """The step, and all tensors it writes."""

    def __init__(self, parts: Parts, recipe: StepRecipe) -> None:
        self.parts = parts
        self.recipe = recipe
        self.device = parts.device
        self.refusal = refusal(parts.optimizer)
        if self.refusal is None:
            self._update: DeviceOptimizer | PlainOptimizer = DeviceOptimizer(parts.optimizer, self.device)
        else:
            self._update = PlainOptimizer(parts.optimizer)
        self.scaler = LossScaler(recipe.scale, self.device) if recipe.dtype == "fp16" else None
        if self.scaler is not None and self.refusal is not None:
            raise UsageError(f"compile_step: fp16 skips steps on the device, but {self.refusal}: use bf16 or fp32")
        for generator in recipe.generators:
            if generator.device.type != self.device.type:
                raise UsageError(
                    f"compile_step: generators must be on the model's device {self.device}, got one on "
                    f"{generator.device}: make it with torch.Generator({self.device.type!r})"
                )
        self.copies = WeightCopies()
        self.layouts = LayoutWatch()
        self.fp8 = Fp8Step(
            self.device,
            wanted=recipe.fp8 != "never",
            rule=recipe.fp8_scaling,
            limits=recipe.fp8_limits,
            choose=chooser(recipe.fp8),
            passes=recipe.fp8_passes,
        )
        self.compile_anew_(side_stream=recipe.side_stream)
        self.settle_()

    def compile_anew_(self, *, side_stream: bool) -> None:
        """Compile at the next compiled step, by a backend whose graphs dynamo has not yet."""

        def moved(gradients: int) -> None:
            self.backend.sites["overlap_weight_gradients"] += gradients

        compiler = inductor(self.recipe.compile_mode, self._see, moved if side_stream else None)
        fp8 = None if self.recipe.fp8 == "never" else self.fp8
        self.backend = TrainBackend(self.recipe.rewrites, compiler, self.copies, fp8)
        self._compiled: tuple[Any, Loss] | None = None

    def run(self, leaves: Sequence[Tensor], structure: Structure, *, compiled: bool) -> tuple[Tensor, Tensor | None]:
        """One step: (loss, norm of the gradients before clipping, None without clip), both on the device."""
        if compiled:
            self.fp8.begin_()
        loss = self.accumulate_(leaves, structure, compiled=compiled)
        if compiled and self.copies.close_():
            # the first compiled step has shown which weights have copies, and the pass is to write them
            self.one_pass, self.why_not_one_pass = self._one_pass()
        if compiled:
            self.fp8.end_(self.copies.of)
        # betas that have changed stand in no table yet: such a step is one of PyTorch's kernels
        one_pass = self.one_pass if self._is_current(self.one_pass) else None
        if one_pass is None:
            self.copies.widen_gradients_()
        gradients = [(p, g) for p in self.parameters() if (g := self.copies.gradient(p)) is not None]
        trained = [p for p, _ in gradients]
        found_inf = self.scaler.unscale_(trained) if self.scaler else None
        if one_pass is not None:
            norm = one_pass.step_(found_inf=found_inf)
        else:
            norm = None
            if self.parts.clip is not None:
                norm = self._norm([gradient for _, gradient in gradients])
                # multiplies by 1 where nothing is clipped: cheaper than asking the device
                clip_grads_with_norm_(trained, self.parts.clip, norm, foreach=True)
            self._update.step_(found_inf)
            self.copies.refresh_()
            if self.parts.ema is not None:
                self.parts.ema.update_(self.parts.model)
        if self.scaler:
            self.scaler.update_()
        self.drop_gradients_()
        return loss, norm

    def accumulate_(self, leaves: Sequence[Tensor], structure: Structure, *, compiled: bool) -> Tensor:
        """Forward and backward of every micro-batch; leaves gradients (scaled, in fp16), returns the mean loss."""
        model, loss = self._callables() if compiled else (self.parts.model, self.parts.loss)
        # no gradients: the first backward then writes them, instead of adding to zeros
        self.drop_gradients_()
        total: Tensor | None = None
        for share, part in micro_batches(leaves, self.parts.accumulate):
            # a loop around us may have switched gradients off, or autocast on, which would reach the backward pass
            with torch.enable_grad(), torch.autocast(self.device.type, enabled=False):
                with self._autocast(), _compiled_however_often() if compiled else nullcontext():
                    value = loss(model, rebuild(structure, iter(part)))
                _check_loss(value)
                weighted = value if share == 1.0 else value * share
                (weighted if self.scaler is None else weighted.float() * self.scaler.scale).backward()
            total = weighted.detach() if total is None else total + weighted.detach()
        self.copies.merge_gradients_()
        self._check_gradients_()
        assert total is not None
        return total

    def place(self, leaf: Tensor) -> Tensor:
        """A batch tensor on the device, in the recipe's layout."""
        leaf = leaf.to(self.device, non_blocking=True)
        return _channels_last(leaf) if self.recipe.channels_last else leaf

    @torch.no_grad()
    def settle_(self) -> None:
        """Bring weights and optimizer state into the form that steps keep; again whenever the caller replaced some."""
        if self.recipe.channels_last:
            for tensor in (*self.parts.model.parameters(), *self.parts.model.buffers()):
                tensor.data = _channels_last(tensor.data)
            if self.parts.ema is not None:
                for tensor in self.parts.ema.tensors():
                    tensor.data = _channels_last(tensor.data)
        self._update.settle_()
        self.watched = Watched([module for _, module in self._named_modules()], self.parts.optimizer)
        self.copies.open_(())
        self.one_pass, self.why_not_one_pass = self._one_pass()
        self.why_not_copies = self._why_not_copies()
        if self.why_not_copies is None:
            self.copies.open_(self.parameters())
        self.fp8.open_(self.parts.model.named_parameters())

    def moved(self) -> bool:
        """Whether graphs so far are of other tensors, or of other layers in FP8, than this program's now."""
        return self.fp8.review_() or self.watched.moved()

    def prepare_(self) -> None:
        """Before a capture: what cannot be made during it. Graphs that were captured before keep what they had."""
        if not self._is_current(self.one_pass):
            self.one_pass, self.why_not_one_pass = self._one_pass()
        self.refresh()

    def refresh(self) -> None:
        """Before a step: send schedules that moved, and weights that were written where they have copies.

        Steps of schedulers then know that the optimizer has stepped.
        """
        self._update.refresh()
        self.copies.refresh_where_changed_()
        self.parts.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]

    def note_replay(self) -> None:
        """After a step that a graph took: weights were written, which their versions do not show by themselves."""
        increment_version([p for p in self.parameters() if p.requires_grad])
        self.copies.written()
        self.fp8.note_step()

    def drop_copies_(self, reason: str) -> None:
        """Keep no copies of weights from now on, bf16 or FP8: no graph reads them."""
        self.fp8.drop_(reason)
        if len(self.copies):
            self.copies.open_(())
            self.one_pass, self.why_not_one_pass = self._one_pass()
        self.copies.open_(())
        self.why_not_copies = self.why_not_copies or reason

    def check_copies(self) -> None:
        """Raise NotEngaged where the recipe asks for copies of weights, or for FP8, and there are none."""
        if self.recipe.fp8 == "always":
            self.fp8.check()
        if self.recipe.weight_copies == "always" and not len(self.copies):
            raise NotEngaged(f"compile_step: weight_copies='always', but {self.why_no_copies()}")

    def why_no_copies(self) -> str:
        return self.why_not_copies or "no compiled step so far has a weight that it would only cast"

    def settings(self) -> tuple:
        return self._update.settings()

    def parameters(self) -> list[Tensor]:
        """What the optimizer steps, in its order."""
        return [p for group in self.parts.optimizer.param_groups for p in group["params"]]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything a step writes and the next one reads, by its owner's name; a tensor may come twice."""
        groups = self.parts.optimizer.param_groups
        owners = {id(p): f"group {n}.{i}" for n, group in enumerate(groups) for i, p in enumerate(group["params"])}
        for prefix, module in self._named_modules():
            for name, parameter in module.named_parameters():
                owners[id(parameter)] = f"{prefix}.{name}"
                yield f"{prefix}.{name}", parameter
            for name, buffer in module.named_buffers():
                yield f"{prefix}.{name}", buffer
        for parameter in self.parameters():
            yield owners[id(parameter)], parameter
        for parameter, state in self.parts.optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    yield f"optimizer.{owners.get(id(parameter), 'left out')}.{name}", value
        if self.parts.ema is not None:
            yield "ema.updates", self.parts.ema.updates
        if self.scaler is not None:
            for name, value in self.scaler.named_tensors():
                yield f"scaler.{name}", value

    def tensors(self) -> Iterator[Tensor]:
        return (tensor for _, tensor in self.named_tensors())

    def snapshot(self) -> Snapshot:
        return Snapshot(chain(self.tensors(), self.fp8.tensors()), self.device, self.recipe.generators)

    def drop_gradients_(self) -> None:
        for parameter in (*self.parts.model.parameters(), *self.parameters()):
            parameter.grad = None
        self.copies.drop_gradients_()

    @contextmanager
    def gradients_kept(self) -> Iterator[None]:
        """Gradients are afterwards what they were before."""
        parameters = [*self.parts.model.parameters(), *self.parameters()]
        before = [parameter.grad for parameter in parameters]
        try:
            yield
        finally:
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad

    def state_dict(self) -> dict[str, Any]:
        parts = self.parts
        return {
            "model": parts.model.state_dict(),
            "optimizer": portable_state(parts.optimizer),
            "ema": None if parts.ema is None else parts.ema.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "fp8": self.fp8.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parts.model.load_state_dict(state["model"])
        load_state_(self.parts.optimizer, state["optimizer"])
        if self.parts.ema is not None and state.get("ema") is not None:
            self.parts.ema.load_state_dict(state["ema"])
        if self.scaler is not None and state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])
        self.fp8.load_state_dict(state.get("fp8"))

    def optimizer_in_words(self) -> str:
        """Whose kernels step it, for a report."""
        words = "clip, AdamW and the average of the weights are one pass"
        if self.one_pass is None:
            words = f"{type(self.parts.optimizer).__name__} steps by PyTorch's kernels: {self.why_not_one_pass}"
        if len(self.copies):
            return f"{words}, which keeps bf16 copies of {len(self.copies)} weights"
        if self.recipe.weight_copies == "never":
            return words
        return f"{words}; weights are cast at every use: {self.why_no_copies()}"

    def _one_pass(self) -> tuple[OnePass | None, str]:
        """The kernel for the optimizer as it is now, or None and why PyTorch's are used instead."""
        choice = self.recipe.optimizer_kernel
        if choice == "never":
            return None, "the recipe has optimizer_kernel='never'"
        if choice == "auto" and self.device.type != "cuda":
            return None, f"the one-pass kernel is for a GPU, and the model is on the {self.device.type}"
        try:
            if isinstance(self._update, PlainOptimizer):
                raise NotEngaged(f"{self.refusal}")
            parts = self.parts
            return one_pass(self._update, model=parts.model, ema=parts.ema, clip=parts.clip, copies=self.copies), ""
        except NotEngaged as error:
            if choice == "always":
                raise NotEngaged(f"compile_step: optimizer_kernel='always', but {error}") from error
            return None, str(error)

    def _is_current(self, one_pass: OnePass | None) -> bool:
        return one_pass is not None and one_pass.settings == self._update.settings()

    def _why_not_copies(self) -> str | None:
        """Why weights get no bf16 copies, or None where they may."""
        recipe = self.recipe
        if recipe.weight_copies == "never":
            return "the recipe has weight_copies='never'"
        if recipe.dtype != "bf16":
            return f"copies are bf16, and the recipe has dtype={recipe.dtype!r}"
        if recipe.compile == "none":
            return "only compiled steps read copies, and the recipe has compile='none'"
        if self.parts.accumulate > 1:
            return f"the gradients of {self.parts.accumulate} micro-batches are summed in fp32"
        return "only the one pass of the optimizer writes copies" if self.one_pass is None else None

    def _see(self, graph_module: fx.GraphModule) -> None:
        """Look at a graph that a compiler is given."""
        self.layouts.see(graph_module)
        self.fp8.see(graph_module)
        self.backend.sites["fuse_residual_add"] += fuse_residual_add.residuals(graph_module)

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        return norm_in_fp32(gradients) if len(self.copies) else get_total_norm(gradients, foreach=True)

    def _callables(self) -> tuple[Any, Loss]:
        if self._compiled is None:
            model, loss = self.parts.model, self.parts.loss
            if self.recipe.compile == "loss":
                self._compiled = model, torch.compile(loss, dynamic=False, backend=self.backend)
            elif self.recipe.compile == "model":
                self._compiled = torch.compile(model, dynamic=False, backend=self.backend), loss
            else:
                self._compiled = model, loss
        return self._compiled

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        dtype = DTYPES[self.recipe.dtype]
        # An autocast around us keeps cast weights until it ends: old weights from the second step on. Ours are dropped
        # too, since after a capture they lie in the graph's memory.
        torch.clear_autocast_cache()
        with torch.autocast(self.device.type, dtype=dtype, enabled=self.recipe.dtype != "fp32"):
            yield
        torch.clear_autocast_cache()

    def _named_modules(self) -> list[tuple[str, nn.Module]]:
        loss = [("loss", self.parts.loss)] if isinstance(self.parts.loss, nn.Module) else []
        ema = [] if self.parts.ema is None else [("ema", self.parts.ema.module)]
        return [("model", self.parts.model), *loss, *ema]

    def _check_gradients_(self) -> None:
        """Refuse parameters without a gradient; give gradients the strides that fused kernels compare."""
        lacking = [p for p in self.parameters() if p.requires_grad and self.copies.gradient(p) is None]
        if lacking:
            names = {id(p): name for name, p in self.parts.model.named_parameters()}
            known = ", ".join(names.get(id(p), "one that is not the model's") for p in lacking[:3])
            raise UsageError(
                f"compile_step: {len(lacking)} parameters of the optimizer get no gradient from the loss ({known}): "
                f"freeze them with requires_grad_(False), or make the optimizer from the model's present parameters"
            )
        leaves = [leaf for p in self.parameters() for leaf in (p, self.copies.of(p)) if leaf is not None]
        for p in leaves:
            if p.grad is not None and p.grad.stride() != p.stride() and _differs_in_ones(p.grad, p):
                p.grad = p.grad.as_strided(p.shape, p.stride())


def _check_loss(value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        got = f"{type(value).__name__}" if not isinstance(value, Tensor) else f"shape {list(value.shape)}"
        if isinstance(value, Tensor) and value.numel() == 1:
            got = "one without a gradient"
        raise UsageError(f"compile_step: the loss must be a scalar tensor that depends on the model, got {got}")


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _differs_in_ones(a: Tensor, b: Tensor) -> bool:
    """Strides that differ only where a dimension has one element address the same memory."""
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True))


def _compiled_however_often() -> AbstractContextManager[Any]:
    """Dynamo runs a function uncompiled, and only warns, when it has been compiled for eight steps in one process."""
    return torch._dynamo.config.patch(recompile_limit=maxsize, accumulated_recompile_limit=maxsize)
