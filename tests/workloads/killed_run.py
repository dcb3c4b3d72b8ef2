"""Run by test_training: kills a training run twenty times with SIGKILL and compares it with one that was left alone.

    python killed_run.py DATA VAL FOLDER

One process imports torch and forks every attempt, because importing takes longer than the whole run. An attempt is
killed at a random moment after a random number of steps, or while it starts: in a step, in a validation, while a
checkpoint is written, synced or renamed. Prints a JSON object with what was seen.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from ridgeline.models.ddpm_unet import UNetConfig
from ridgeline.workloads.run_log import read_log
from ridgeline.workloads.settings import PRESETS, Settings
from ridgeline.workloads.training import LOG, train

KILLS = 20
DELAY_S = 0.04  # a few steps with their checkpoints
SMALL = UNetConfig(image_size=8, channels=(8,), blocks=1, attention_resolutions=(), heads=1, groups=2)


def main(data: str, val: str, folder: Path) -> None:
    torch.set_num_threads(1)  # a forked process has no other threads
    PRESETS["tiny"] = SMALL  # what is tested is the loop
    settings = Settings(
        data, steps=100, val=val, preset="tiny", batch=3, log_every=2, save_every=3, val_every=10, sample_every=0
    )
    train(settings, folder / "whole", device="cpu")  # first, so that forked processes find everything loaded
    draws = random.Random(0)
    first_lines = []
    for attempt in range(KILLS):
        after = None if attempt % 5 == 4 else draws.randint(1, 4)
        first_lines.append(attempt_and_kill(settings, folder / "killed", after, draws.random() * DELAY_S))
    train(settings, folder / "killed", resume=True, device="cpu")
    print(json.dumps({"killed_at": first_lines, "logs": [losses(folder / name) for name in ("killed", "whole")]}))


def attempt_and_kill(settings: Settings, folder: Path, after: int | None, delay_s: float) -> int:
    """Fork a run, kill it `delay_s` after it has reported `after` times (None: has begun); the last step it logged."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        seen = 0

        def report(line: object) -> None:
            nonlocal seen
            seen += 1
            if seen == after:
                os.write(writer, b".")

        if after is None:
            os.write(writer, b".")
        train(settings, folder, resume=True, device="cpu", report=report)
        os._exit(0)
    os.close(writer)
    if os.read(reader, 1) != b".":
        raise SystemExit("an attempt failed by itself")
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(reader)
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        raise SystemExit("an attempt ended before it was killed")
    log = folder / LOG
    return max((line["step"] for line in read_log(log)), default=0) if log.exists() else 0


def losses(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "images_per_s"} for line in read_log(folder / LOG)]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
