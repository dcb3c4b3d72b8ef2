"""Checkpoints of a training run: written whole, the last two kept, read without running anything they say.

A run folder holds `step-00001000.pt` and the like. A file gets its name only once all of it is on the disk, and the one
before is removed only after that: at any moment the newest file is good.
"""

from __future__ import annotations

import logging
import pickle
import random
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ridgeline.atomic import remove_partials, write_file
from ridgeline.errors import EnvironmentUnusable, UsageError

_log = logging.getLogger(__name__)

FORMAT = "ridgeline-ddpm-1"
MAX_SEED = 2**63 - 1  # what every generator takes, and a file holds as a number
KEPT = 2  # a damaged disk block in the newest costs one interval, not the run
MAX_STEP = 99_999_999  # what the name has digits for
_NAME = re.compile(r"step-(\d{8})\.pt")

State = dict[str, Any]


def save_checkpoint(folder: Path, step: int, state: Mapping[str, object]) -> Path:
    """Write `state` (tensors and plain values) as the checkpoint of `step`; raises EnvironmentUnusable if it cannot."""
    path = folder / f"step-{step:08d}.pt"
    try:
        write_file(path, lambda file: torch.save({"format": FORMAT, "step": step, **state}, file))
    # RuntimeError: how torch's zip writer reports that its file took no more
    except (OSError, RuntimeError) as error:
        raise EnvironmentUnusable(
            f"cannot write checkpoint '{path}' ({error}): free some space, then go on with --resume"
        ) from error
    for _, old in checkpoints(folder)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Step and file of each checkpoint in a run folder, newest first."""
    found = [(int(name[1]), path) for path in folder.glob("step-*.pt") if (name := _NAME.fullmatch(path.name))]
    return sorted(found, reverse=True)


def load_latest(folder: Path) -> tuple[Path, State] | None:
    """The newest checkpoint that can be read, passing over damaged ones with a warning; None when there is none.

    Raises UsageError when there are some and all of them are damaged. Clears away what a killed writer left behind.
    """
    remove_partials(folder)
    found = checkpoints(folder)
    for _, path in found:
        try:
            return path, load_checkpoint(path)
        except UsageError as refusal:
            _log.warning("%s", refusal)
    if found:
        raise UsageError(f"none of the {len(found)} checkpoints in '{folder}' can be read: begin anew in another --out")
    return None


def load_checkpoint(path: Path) -> State:
    """What `save_checkpoint` wrote, on the CPU. The file is untrusted: tensors and plain values alone are read."""
    if not path.is_file():
        wrong = "is a folder" if path.is_dir() else "does not exist"
        raise UsageError(f"checkpoint '{path}' {wrong}: give the .pt file of a run folder")
    try:
        with zipfile.ZipFile(path) as archive:
            # stored entries cannot hold more than the file: the whole defence against zip bombs
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise UsageError(f"checkpoint '{path}' has compressed entries, which this project never writes")
        state = torch.load(path, map_location="cpu", weights_only=True)
    # what zipfile, torch's reader and its restricted unpickler raise, by kind of damage
    except (
        zipfile.BadZipFile,
        pickle.UnpicklingError,
        EOFError,
        OSError,
        RuntimeError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
    ) as error:
        raise UsageError(
            f"checkpoint '{path}' is damaged or no checkpoint ({type(error).__name__}): use another"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UsageError(f"checkpoint '{path}' was not written by `ridgeline train ddpm`: give the .pt of a run folder")
    return state


def check_seed(seed: object) -> None:
    """Raise UsageError for what is no seed of a run or a sample: a whole number from 0 to MAX_SEED."""
    if not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise UsageError(f"seed must be a whole number from 0 to {MAX_SEED}, got {seed!r}")


def seed_(seed: int) -> None:
    """Seed every global random generator: torch's on all devices, Python's, numpy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state(device: torch.device) -> State:
    """The state of every global random generator: torch's on the CPU and on `device`, Python's, numpy's."""
    name, keys, position, has_normal, normal = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_normal, normal),
    }


def set_random_state_(state: Mapping[str, Any], device: torch.device) -> None:
    """Put every global random generator back. Raises KeyError, TypeError, ValueError or RuntimeError on a bad state."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


def load_optimizer_(optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Restore the moments of `optimizer`; its choices (rates, decay) stay as they were built.

    Raises ValueError unless each tensor has its parameter's shape or is a scalar.
    """
    parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {
        index: {name: _like(parameters[index], value, f"{name} of parameter {index}") for name, value in saved.items()}
        for index, saved in state.items()
    }
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})


def _like(parameter: Tensor, value: Tensor, what: str) -> Tensor:
    """`value` in memory of its own, laid out as its parameter: fused optimizers walk both by their raw addresses."""
    if value.shape == torch.Size():
        return value.clone()
    if value.shape != parameter.shape:
        raise ValueError(f"{what} has shape {list(value.shape)}, not {list(parameter.shape)}")
    return torch.empty_like(parameter, requires_grad=False).copy_(value)
