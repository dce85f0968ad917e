"""Run by torchrun in test_team.py: what each process of a shared training sees and does."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import ClassVar

import torch
from torch import Tensor, nn

from bsam import BsamError
from bsam.tasks.classification import Classification
from bsam.tasks.task import TaskBatch
from bsam.training.config import Run
from bsam.training.loop import fit

SAME = {"lr": 0.1, "batch": 64, "label_smoothing": 0.1, "epochs": 2, "limit_train": 256, "limit_test": 200, "seed": 4}
RUNS = {
    "bsam": Run("bsam", {"rho_max": 0.1, "rho_min": 0.1, "rho_min_floor": 0.02}, probe=3, **SAME),
    "sgd": Run("sgd", **SAME),
    "mesa": Run("mesa", {"start_epoch": 1, "decay": 0.9}, **SAME),
}
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
        result = fit(run, folder / name, device="cpu", task=Without, each_epoch=each)
        notes[name] = [epoch.metrics["train_loss"] for epoch in result.epochs]
    seen = list(SEEN)
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


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2] == "stop")
