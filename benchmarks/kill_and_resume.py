"""Kill a training run with SIGKILL at random moments, resume it each time, and compare the end with an undisturbed run.

The moments are drawn uniformly over the whole training run. Processes are killed at any point: while they import or
load data, in the middle of an epoch, while they evaluate, while they write. Some of them write a checkpoint after every
epoch, others only after two or three, so that the metrics are ahead of the checkpoint. Weights, optimizer state and all
metrics except seconds must be equal bit for bit.

    python benchmarks/kill_and_resume.py --data-dir DIR               # CIFAR-10: DIR has cifar-10-batches-bin
    python benchmarks/kill_and_resume.py --data digits --kills 3      # no files needed
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import bsam
from bsam.lab.config import Run
from bsam.lab.training.run_dir import CHECKPOINT, RunDir

CHILD = """
import json, sys, torch
torch.set_num_threads(1)
from bsam.lab.config import Run
from bsam.lab.training import Machine, fit
settings, folder, data_dir, checkpoint_every = sys.argv[1:]
run = Run.of(**json.loads(settings))
machine = Machine("cpu", data_dir=data_dir or None, checkpoint_every=float(checkpoint_every))
fit(run, folder, machine)
"""
LIMIT = 300  # seconds allowed per process
EVERY = (0.0, 2.5)  # the time between checkpoints, in epochs: one after every epoch, or after two or three
LAST = 0.9  # of the last epoch: later, the process may already have ended


@dataclass(frozen=True)
class Outcome:
    """Whether the two runs ended equal, the number of kills, and the epochs in metrics and checkpoint at each kill."""

    equal: bool
    kills: int
    epochs: list[tuple[int, int]]


def kill_and_resume(
    run: Run, data_dir: Path | None, folder: Path, kills: int, seed: int, say: Callable[[str], None] = print
) -> Outcome:
    """Train once undisturbed and once with ``kills`` kills, in two folders inside ``folder``."""
    whole, killed = folder / "whole", folder / "killed"
    begin = time.monotonic()
    process = start(run, whole, data_dir)
    wait_for(process, lambda: len(RunDir(whole).metrics()) > 0)
    first = time.monotonic() - begin
    finish(process)
    epoch = RunDir(whole).metrics()[0]["seconds"]
    say(f"undisturbed: {time.monotonic() - begin:.1f} s, {first - epoch:.1f} s to start and {epoch:.1f} s per epoch")
    dice = random.Random(seed)
    moments = sorted(dice.uniform(0, run.epochs - 1 + LAST) for _ in range(kills))
    at: list[tuple[int, int]] = []
    for moment in moments:
        target, share = int(moment), moment % 1
        there = len(RunDir(killed).metrics()) >= target
        process = start(run, killed, data_dir, dice.choice(EVERY) * epoch)
        wait_for(process, lambda: len(RunDir(killed).metrics()) >= target)
        if there:  # no epoch left to wait for: kill half of them at any time from the start, the others in training
            pause(process, share * first if dice.random() < 0.5 else first - epoch + share * epoch)
        else:
            pause(process, share * epoch)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        if process.returncode == -signal.SIGKILL:
            at.append((len(RunDir(killed).metrics()), saved_epochs(killed)))
            say(
                f"kill {len(at)} at {moment:.2f} epochs: {at[-1][0]} in the metrics, {at[-1][1]} in the checkpoint, "
                f"{sorted(path.name for path in killed.glob('*')) if killed.exists() else []}"
            )
    finish(start(run, killed, data_dir))
    return Outcome(same_end(whole, killed), len(at), at)


def start(run: Run, folder: Path, data_dir: Path | None, checkpoint_every: float = 0.0) -> subprocess.Popen[bytes]:
    """Start a process that trains or resumes a run."""
    environment = {**os.environ, "PYTHONPATH": str(Path(bsam.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    arguments = [json.dumps(run.settings()), str(folder), str(data_dir or ""), str(checkpoint_every)]
    return subprocess.Popen([sys.executable, "-c", CHILD, *arguments], env=environment)


def wait_for(process: subprocess.Popen[bytes], done: Callable[[], bool]) -> None:
    """Wait until ``done`` returns True or the process ends."""
    deadline = time.monotonic() + LIMIT
    while not done() and process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
            raise TimeoutError(f"the process did not end within {LIMIT} s")
        time.sleep(0.01)


def pause(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Let the process run for some seconds."""
    until = time.monotonic() + seconds
    wait_for(process, lambda: time.monotonic() >= until)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process to end."""
    wait_for(process, lambda: False)
    if process.returncode:
        raise RuntimeError(f"the training ended with status {process.returncode}")


def saved_epochs(folder: Path) -> int:
    """Return the number of epochs in the checkpoint; 0 if there is none."""
    file = folder / CHECKPOINT
    return len(torch.load(file, "cpu", weights_only=True)["epochs"]) if file.exists() else 0


def same_end(a: Path, b: Path) -> bool:
    """Return whether two finished runs agree bit for bit in network, optimizer state and metrics except seconds."""
    cpu = torch.device("cpu")
    networks = (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    return networks and same(
        *({**torch.load(folder / CHECKPOINT, cpu, weights_only=True), "epochs": timeless(folder)} for folder in (a, b))
    )


def timeless(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of each epoch without the seconds."""
    return [{name: value for name, value in epoch.items() if name != "seconds"} for epoch in RunDir(folder).metrics()]


def same(a: Any, b: Any) -> bool:
    """Return whether two nested structures of plain values and tensors agree bit for bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def main(arguments: list[str] | None = None) -> bool:
    """Run the comparison and print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["cifar10", "digits"], default="cifar10", help="data set (default cifar10)")
    parser.add_argument("--data-dir", type=Path, help="folder with cifar-10-batches-bin")
    parser.add_argument("--method", default="bsam", help="sgd, or a name from METHODS (default bsam)")
    parser.add_argument("--kills", type=int, default=10, help="number of kills (default 10)")
    parser.add_argument("--epochs", type=int, default=3, help="number of epochs (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (default 0)")
    args = parser.parse_args(arguments)
    sizes = {"limit_train": 2000, "batch": 128} if args.data == "cifar10" else {"batch": 64, "augment": "crop-flip"}
    run = Run.of(args.method, model="resnet8", data=args.data, epochs=args.epochs, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        outcome = kill_and_resume(run, args.data_dir, Path(folder), args.kills, args.seed)
    print(
        f"{outcome.kills} of {args.kills} kills; weights, optimizer state and metrics "
        f"{'are equal bit for bit' if outcome.equal else 'DIFFER'}"
    )
    return outcome.equal and outcome.kills == args.kills


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
