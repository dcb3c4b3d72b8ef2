"""What `ridgeline profile` puts into the processes that a command starts: it waits for a loop that trains, and watches.

A `sitecustomize` calls `start` in each Python process, before its script. Nothing is loaded then: torch's optimizers
are hooked when the process imports them, and the first process that steps one (of a distributed group: rank 0) is
watched. The script runs unmodified; when enough is seen it is ended as by `sys.exit()`, so that its own clean-up runs.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ridgeline import step_marks
from ridgeline.profile_plan import Plan, read_plan

STARTED = "started"  # a file of this name says that at least one process was reached
CLAIMED = "watched"  # whose process is watched
_OPTIMIZERS = "torch.optim.optimizer"
_LOADERS = "torch.utils.data.dataloader"
_OPTIMIZER, _STEP, _MARK = range(3)  # what tells of steps, the best last


class Finished(SystemExit):
    """Enough steps were seen: ends the script as `sys.exit(0)` would."""

    def __init__(self) -> None:
        super().__init__(0)


def start(plan_path: Path) -> None:
    """Watch this process by the plan at `plan_path`, once it makes steps."""
    plan = read_plan(plan_path)
    (Path(plan.folder) / STARTED).touch()
    Watch(plan).install()


class Watch:
    """Tells a recorder of this process's steps: the loop's marks, else those of a `TrainStep`, else of an optimizer.

    Of several optimizers it is the one that stepped first.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._process = os.getpid()
        self._recorder: Any = None
        self._done = False
        self._told_by = _OPTIMIZER  # what tells steps apart, as far as is known by now
        self._validation: Any = None  # watched as long as steps are timed; None else
        self._batches: Any = None  # likewise
        self._optimizer: int | None = None  # id of the one whose steps count: a loop may have several

    def install(self) -> None:
        """Listen for marks now, and for optimizers as soon as torch has them."""
        step_marks.listen(self.marked, steps=self.taken)
        if _OPTIMIZERS in sys.modules:
            self.hook(sys.modules[_OPTIMIZERS])
        else:
            sys.meta_path.insert(0, _AfterImport(_OPTIMIZERS, self.hook))

    def hook(self, optimizers: ModuleType) -> None:
        """Listen to every optimizer's step. `optimizers` is the module `torch.optim.optimizer`."""
        optimizers.register_optimizer_step_post_hook(self.stepped)

    def marked(self) -> None:
        """`mark_step()` was called: who sets marks knows the loop."""
        self._tell(_MARK)

    def taken(self) -> None:
        """A `TrainStep` took a step. While it was made its optimizer stepped, later it may do so inside a graph."""
        self._tell(_STEP)

    def stepped(self, optimizer: Any, _args: object, _kwargs: object) -> None:
        """An optimizer stepped."""
        if self._optimizer is None:
            self._optimizer = id(optimizer)
        if id(optimizer) == self._optimizer:
            self._tell(_OPTIMIZER, optimizer)

    def at_exit(self) -> None:
        """Keep what was seen of a loop that ended by itself, and of a run that was seen to its end."""
        if self._recorder is None or os.getpid() != self._process:
            return
        to_end = self._plan.to_end or not self._done
        if not self._done:
            self._done = True
            self._recorder.finish()
        if to_end and self._validation is not None:
            self._recorder.saw_end(self._validation)

    def _tell(self, source: int, optimizer: Any = None) -> None:
        """A step ended, as `source` says; it is heard unless a better one was heard before."""
        if source < self._told_by:
            return
        first, self._told_by = source > self._told_by, source
        # where a lesser source told of a step already, this is the same step of the loop
        if not (first and self._recorder is not None):
            self._step(optimizer)

    def _step(self, optimizer: Any = None) -> None:
        # a forked child, such as a loader's worker, has this object and no steps of its own to show
        if os.getpid() != self._process:
            return
        if self._validation is not None:
            self._validation.stepped()
            self._batches.stepped()
        if self._done:
            return
        if self._recorder is None:
            self._recorder = self._make(optimizer)
            if self._recorder is None:
                self._done = True
                return
        if self._recorder.step():
            self._done = True
            self._recorder.finish()
            if not self._plan.to_end:
                _end()

    def _make(self, optimizer: Any) -> Any:
        """The recorder; None where another process is watched."""
        steps = import_module("ridgeline.profile_steps")  # loads torch, which this process has by now or is to have
        torch = import_module("torch")
        distributed = torch.distributed
        grouped = distributed.is_available() and distributed.is_initialized()
        rank, world = (distributed.get_rank(), distributed.get_world_size()) if grouped else (0, 1)
        if rank == 0 and not self._claim():
            return None
        recorder = steps.recorder_for(self._plan, on_gpu=torch.cuda.is_available(), rank=rank, world=world)
        if optimizer is not None and hasattr(recorder, "parameters"):
            tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
            recorder.parameters = steps.parameters_of(tensors)
            recorder.device = next((tensor.device.index for tensor in tensors if tensor.is_cuda), None)
        if self._plan.kind == "time" and not rank:
            self._validation = steps.ValidationTime()
            self._validation.watch_(torch.nn.Module)
            self._batches = recorder.batches
            self._batches.watch_(import_module(_LOADERS)._BaseDataLoaderIter)  # no public name tells of each batch
        atexit.register(self.at_exit)
        return recorder

    def _claim(self) -> bool:
        """Whether this is the first process to make a step, which is the one that is watched."""
        path = Path(self._plan.folder) / CLAIMED
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


class _AfterImport:
    """A finder for `sys.meta_path` that calls `then` with the module `name` right after it was imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            # the loader stays the one it was, so that the module's source is found as ever
            _extend(spec.loader, self._then)
        return spec


def _extend(loader: Any, then: Callable[[ModuleType], None]) -> None:
    execute = loader.exec_module

    def execute_and_tell(module: ModuleType) -> None:
        execute(module)
        then(module)

    loader.exec_module = execute_and_tell


def _end() -> None:
    if threading.current_thread() is not threading.main_thread():
        # SystemExit would end this thread alone
        _thread.interrupt_main()
        return
    raise Finished
