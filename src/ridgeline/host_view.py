"""What the host did around a launch: operators, module, source line, phase; forward operators of backward ones.

Modules are known by Python frames "nn.Module: Conv2d_0" (`with_stack`), by ranges "module: backbone.0.conv", and else
by the user's own record_function ranges. Lines come from frames: the innermost that lies outside installed packages.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from functools import cache

from ridgeline.nesting import Nesting
from ridgeline.step_span import Span
from ridgeline.trace import Call, Launch, Range, Trace
from ridgeline.trace_steps import MARK

MODULE_PREFIXES = ("nn.Module: ", "module: ")
BACKWARD = "autograd::engine::evaluate_function: "

# ranges that PyTorch, Inductor and this project open by themselves: no names of the user's
_SYSTEM_RANGE = re.compile(
    rf"ProfilerStep#|Optimizer\.|enumerate\(DataLoader\)|Torch-Compiled Region|CompiledFx|CUDAGraph|Pregraph|"
    rf"{re.escape(MARK)}|DistributedDataParallel|nccl:|PyTorch Profiler|## |Inductor|TorchDynamo|\[memory\]"
)
_FRAME = re.compile(r"(?P<file>[^<].*\.pyx?)\((?P<line>\d+)\): (?P<function>.*)")
_INSTALLED = re.compile(r"(^|/)(site-packages|dist-packages|lib/python3[.\d]*)/")
# packages that Kineto names from where they are installed, and the standard library's files in the way of a call
_PACKAGES = {
    "torch", "torchvision", "torchaudio", "triton", "ridgeline", "numpy", "tqdm", "accelerate", "lightning", "timm",
    "pytorch_lightning", "importlib", "concurrent", "multiprocessing", "collections", "asyncio", "logging", "unittest",
}  # fmt: skip
_OWN_MODELS = ["ridgeline", "models"]  # of this project only the nets are code that a user would look at
_LIBRARY = {
    "abc.py", "ast.py", "bdb.py", "contextlib.py", "contextvars.py", "copy.py", "dataclasses.py", "enum.py",
    "functools.py", "inspect.py", "linecache.py", "os.py", "pickle.py", "queue.py", "random.py", "re.py", "runpy.py",
    "selectors.py", "socket.py", "string.py", "subprocess.py", "tempfile.py", "threading.py", "traceback.py",
    "types.py", "typing.py", "warnings.py", "weakref.py",
}  # fmt: skip


class HostView:
    """Operators, ranges and frames of a trace around one step."""

    def __init__(self, trace: Trace, span: Span, launches: Sequence[Launch]) -> None:
        begin_s = min([span.host[0], span.start_s, *(launch.start_s for launch in launches)])
        end_s = max([span.host[1], span.end_s, *(launch.end_s for launch in launches)])
        near_calls = [call for call in trace.calls if call.start_s <= end_s and call.end_s >= begin_s]
        self.calls = Nesting(near_calls)
        self.ranges = Nesting(r for r in trace.ranges if r.start_s <= end_s and r.end_s >= begin_s)
        self.frames = Nesting(f for f in trace.frames if f.start_s <= end_s and f.end_s >= begin_s)
        self._by_external_id = {call.external_id: call for call in near_calls if call.external_id}
        self._forward: defaultdict[int, list[Call]] = defaultdict(list)
        self._first_backward_s = float("inf")
        for call in near_calls:
            if call.name.startswith(BACKWARD):
                self._first_backward_s = min(self._first_backward_s, call.start_s)
            elif call.sequence >= 0 and not call.forward_thread:
                self._forward[call.sequence].append(call)

    def chain(self, launch: Launch) -> tuple[Call, ...]:
        """The operators around a launch, the innermost first."""
        call = self._by_external_id.get(launch.external_id) if launch.external_id else None
        if call is not None:
            return tuple(self.calls.enclosing(call))
        return tuple(self.calls.around(launch.thread, launch.start_s))

    def forward_of(self, chain: Sequence[Call]) -> Call | None:
        """The forward operator whose gradient the chain computes: of those of its number, the last before it.

        An operator's number is that of the next node of the graph, so the last to bear it is the one that made it.
        """
        for call in chain:
            if call.sequence >= 0 and call.forward_thread:
                made = self._forward.get(call.sequence, [])
                before = bisect_left(made, call.start_s, key=lambda each: each.start_s)
                return made[before - 1] if before else None
        return None

    def module(self, thread: int, moment_s: float) -> str:
        """The innermost module open at a moment, "" where none is known."""
        for prefix in MODULE_PREFIXES:
            for named in (*self.frames.around(thread, moment_s), *self.ranges.around(thread, moment_s)):
                if named.name.startswith(prefix):
                    return named.name.removeprefix(prefix)
        return next((r.name for r in self.ranges.around(thread, moment_s) if not _SYSTEM_RANGE.match(r.name)), "")

    def source(self, thread: int, moment_s: float) -> str:
        """ "net.py:42", the innermost line outside installed packages."""
        return next(filter(None, (_line(frame.name) for frame in self.frames.around(thread, moment_s))), "")

    def under(self, thread: int, moment_s: float) -> str:
        """The outermost named range or known function around a moment: "Optimizer.step#AdamW.step"."""
        open_ranges = self.ranges.around(thread, moment_s)
        ranges = [r.name for r in open_ranges if not r.name.startswith("ProfilerStep#") and r.name != MARK]
        functions = [_function(frame) for frame in self.frames.around(thread, moment_s)]
        known = [name for name in functions if name in ("clip_grad_norm_", "clip_grad_value_")]
        known += [f"GradScaler.{name}" for name in functions if name in ("unscale_", "_maybe_opt_step")]
        return next(iter(known + ranges[::-1]), "")

    def phase(self, launch: Launch, chain: Sequence[Call], *, trained: bool) -> str:
        """One of step_view.PHASES. What is neither forward, backward nor optimizer (clipping, averages) is "other"."""
        if any(call.name.startswith(BACKWARD) for call in chain):
            return "backward"
        names = [r.name for r in self.ranges.around(launch.thread, launch.start_s)]
        if any(name.startswith("Optimizer.step#") for name in names):
            return "optimizer"
        if any(name.startswith("Optimizer.zero_grad#") for name in names) or not chain:
            return "other"
        if not trained or any(call.sequence >= 0 for call in chain) or launch.start_s < self._first_backward_s:
            return "forward"
        return "other"


@cache
def _line(name: str) -> str:
    """Where a frame of the user's own code stands, "" for others: "net.py(42): forward" -> "net.py:42"."""
    found = _FRAME.fullmatch(name)
    if not found:
        return ""
    file, parts = found["file"], found["file"].split("/")
    if _INSTALLED.search(file) or file in _LIBRARY or (parts[0] in _PACKAGES and parts[:2] != _OWN_MODELS):
        return ""
    return f"{parts[-1] if file.startswith('/') else file}:{found['line']}"


def _function(frame: Range) -> str:
    found = _FRAME.fullmatch(frame.name)
    return found["function"] if found else ""
