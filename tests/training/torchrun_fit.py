"""Started by test_distributed.py: what each process of a shared training sees and does.

python torchrun_fit.py FOLDER
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import sys
from typing import ClassVar

import torch
from torch import Tensor, nn

from bsam import BsamError, data
from bsam.tasks.classification import Classification
from bsam.tasks.pose import Pose
from bsam.tasks.task import TaskBatch
from bsam.training.config import Run
from bsam.training.loop import fit
from bsam.training.run_dir import RunDir

SAME = {"lr": 0.1, "batch": 64, "label_smoothing": 0.1, "epochs": 2, "limit_train": 256, "limit_test": 200, "seed": 4}
RUNS = {
    "bsam": Run("bsam", {"rho_max": 0.1, "rho_min": 0.1, "rho_min_floor": 0.02}, probe=3, **SAME),
    "sgd": Run("sgd", **SAME),
    "mesa": Run("mesa", {"start_epoch": 1, "decay": 0.9}, **SAME),
}
FIGURES = 16
PERSONS = {"task": "pose", "data": "stick_figures", "model": "simcc_resnet8", "label_smoothing": 0.0, "image_size": 32}
JOINTS = Run("bsam", base="adam", lr=0.01, batch=8, epochs=2, **PERSONS)
SHORT = {**SAME, "epochs": 1}
SIZED = {
    "ksam": Run("ksam", {"k": 16}, **SHORT),
    "by default": Run("ksam", **{**SHORT, "batch": 128}),
    "alone": Run("sam", {"m_sharpness": True}, **SHORT),
}
REFUSED = {
    "saf": Run("saf", **SAME),
    "odd": Run("sgd", **{**SAME, "batch": 63}),
    "odd k": Run("ksam", {"k": 33}, **SAME),
    **{name: Run(name, {"m_sharpness": True}, **SAME) for name in ("friendly_sam", "looksam", "aesam")},
    "lost at last": Run("sgd", **{**SAME, "lr": 1e30, "batch": 256}),
}


SEEN: list[list[int]] = []  # the places of the samples of each batch in this process


class Without(Classification):
    """Digits by a network without batch norm, where every sample stands for itself: with it, each process would use the
    statistics of its own part.
    """

    def network(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.run.seed)
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)).to(self.device)

    def batch(self, index: Tensor) -> TaskBatch:
        SEEN.append(index.tolist())
        return super().batch(index)


class WithoutJoints(Pose):
    """Likewise the joints of stick figures."""

    def network(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.run.seed)
            layers = nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 14 * 2 * 64), nn.Unflatten(1, (14, 2, 64))
            return nn.Sequential(*layers).to(self.device)


class Sized(Without):
    """Notes how many samples each pass sees."""

    def losses(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        self.sizes.append(len(outputs))
        return super().losses(outputs, batch)

    sizes: ClassVar[list[int]] = []


def main(folder: pathlib.Path, stop: bool) -> None:
    """All cases, or the first one until its first epoch is done."""
    torch.set_num_threads(1)
    rank, ordinary, told = int(os.environ["RANK"]), pathlib.Path.open, []
    notes: dict[str, object] = {}

    def watched(path: pathlib.Path, mode: str = "r", *more: object, **named: object) -> object:
        if rank and mode[0] in "wax":
            raise AssertionError(f"rank {rank} writes {path}")
        return ordinary(path, mode, *more, **named)  # type: ignore[call-overload]

    def each(epoch: int, metrics: object) -> None:
        told.append(epoch)
        if stop:
            raise InterruptedError("as a kill would")

    pathlib.Path.open = watched  # type: ignore[method-assign, assignment]
    for name, run in RUNS.items():
        result = fit(run, folder / name, device="cpu", task=Without, on_epoch=each)
        notes[name] = [epoch.metrics["train_loss"] for epoch in result.epochs]
    seen = list(SEEN)
    data.NUM_FIGURES = FIGURES
    result = fit(JOINTS, folder / "joints", device="cpu", task=WithoutJoints)
    notes["joints"] = [epoch.metrics["train_loss"] for epoch in result.epochs]
    for name, run in SIZED.items():
        Sized.sizes.clear()
        fit(run, device="cpu", task=Sized)
        notes[name] = list(Sized.sizes)
    for name, run in REFUSED.items():
        try:
            fit(run, folder / "refused" / name, device="cpu", task=Without)
        except BsamError as refusal:
            notes[name] = str(refusal)
    pathlib.Path.open = ordinary  # type: ignore[method-assign]
    (folder / f"rank{rank}.json").write_text(json.dumps({**notes, "told": told, "seen": seen}))


def two_processes(folder: pathlib.Path, stop: bool) -> int:
    """Fork two processes, each with the environment that torchrun gives it; the first exit status that is not 0."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in "01":
        if not (pid := os.fork()):
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            main(folder, stop)
            sys.exit()
        ranks.append(pid)
    status = os.waitstatus_to_exitcode(os.waitpid(ranks[0], 0)[1])
    if status:
        os.kill(ranks[1], signal.SIGKILL)  # it waits for the first one
    return status or os.waitstatus_to_exitcode(os.waitpid(ranks[1], 0)[1])


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    found = []
    for stop in (True, False):
        status = two_processes(folder, stop)
        found.append({"status": status, "epochs": [row["epoch"] for row in RunDir(folder / "bsam").metrics()]})
    (folder / "statuses.json").write_text(json.dumps(found))
