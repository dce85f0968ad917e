"""Train in two processes, for test_distributed.py.

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

from bsam import BsamError
from bsam.lab.config import Run
from bsam.lab.tasks import TASKS
from bsam.lab.tasks.classification import SMALL_IMAGE_BATCHES, Classification
from bsam.lab.tasks.task import TaskBatch
from bsam.lab.training import Machine, RunCallbacks, fit, trainer
from bsam.lab.training.run_dir import RunDir

SAME = {"lr": 0.1, "batch": 64, "label_smoothing": 0.1, "epochs": 2, "limit_train": 192, "limit_test": 50, "seed": 4}
RUNS = {
    "bsam": Run.of(
        "bsam", {"rho_max": 0.1, "rho_min": 0.1, "rho_min_floor": 0.02}, probe=2, accumulate=2, ema=0.9, **SAME
    ),
    "mesa": Run.of("mesa", {"start_epoch": 0, "decay": 0.9}, accumulate=4, clip_norm=0.5, **SAME),
}
MEASURED = Run.of(
    "sam", ema=0.9, curvature=True, surface=3, sharpness_rho=0.05, **{**SAME, "epochs": 1, "limit_train": 128}
)
SMALL_BATCH = 20  # for evaluation
SHORT = {**SAME, "epochs": 1, "limit_train": 128}
SIZED = {
    "ksam": Run.of("ksam", {"k": 16}, **SHORT),
    "default k": Run.of("ksam", **{**SHORT, "batch": 128}),
    "m_sharpness": Run.of("sam", {"m_sharpness": True}, **SHORT),
}
REFUSED = {
    "saf": Run.of("saf", **SAME),
    "batch": Run.of("sgd", **{**SAME, "batch": 63}),
    "accumulate": Run.of("sgd", **{**SAME, "batch": 62}, accumulate=2),
    "k": Run.of("ksam", {"k": 33}, **SAME),
    **{name: Run.of(name, {"m_sharpness": True}, **SAME) for name in ("friendly_sam", "looksam", "aesam")},
    "diverged": Run.of("sgd", **{**SAME, "lr": 1e30, "batch": 192}),
}


class WithoutBatchNorm(Classification):
    """Digits without batch norm, which would use the statistics of each process's part of the batch."""

    indices: ClassVar[list[list[int]]] = []  # the indices of the samples in each batch of this process
    sizes: ClassVar[list[int]] = []  # the number of samples in each pass

    def network(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.run.seed)
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)).to(self.device)

    def _batch(self, x: Tensor, index: Tensor, on_host: Tensor) -> TaskBatch:
        self.indices.append(on_host.tolist())
        return super()._batch(x, index, on_host)

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        self.sizes.append(len(outputs))
        return super().losses(outputs, y)


class Evaluated(Classification):
    """Digits that note the numbers of samples in evaluation batches."""

    sizes: ClassVar[list[int]] = []

    def _stored(self, *arguments: object) -> object:
        for x, y in super()._stored(*arguments):  # type: ignore[arg-type]
            self.sizes.append(len(x))
            yield x, y

    def predictions(self, network: nn.Module) -> dict[str, object]:
        return {}


def measured(folder: pathlib.Path) -> dict[str, object]:
    """Train with all measurements; return what this process computed."""
    calls = []

    def counted(module: object, name: str) -> None:
        function = getattr(module, name)
        setattr(module, name, lambda *given, **named: calls.append(name) or function(*given, **named))

    for module, name in ((trainer, "top_eigenvalues"), (trainer, "landscape"), (trainer, "sharpness")):
        counted(module, name)
    SMALL_IMAGE_BATCHES["cpu"] = SMALL_BATCH
    TASKS["classification"] = Evaluated
    result = fit(MEASURED, folder / "measured", Machine("cpu"))
    surface = None if result.surface is None else result.surface.loss.tolist()
    metrics = {**result.last.metrics, "seconds": 0}
    return {"calls": calls, "sizes": Evaluated.sizes[:2], "result": [result.top_eigenvalue, surface, metrics]}


def main(folder: pathlib.Path, stop: bool) -> None:
    """Train all runs, or only the first epoch of the first run."""
    torch.set_num_threads(1)
    rank, ordinary, epochs = int(os.environ["RANK"]), pathlib.Path.open, []
    notes: dict[str, object] = {}

    def guarded(path: pathlib.Path, mode: str = "r", *more: object, **named: object) -> object:
        if rank and mode[0] in "wax":
            raise AssertionError(f"rank {rank} writes {path}")
        return ordinary(path, mode, *more, **named)  # type: ignore[call-overload]

    def on_epoch(epoch: int, metrics: object) -> None:
        epochs.append(epoch)
        if stop:
            raise InterruptedError("stopped by the test")

    pathlib.Path.open = guarded  # type: ignore[method-assign, assignment]
    TASKS["classification"] = WithoutBatchNorm
    for name, run in RUNS.items():
        callbacks = RunCallbacks(on_epoch=on_epoch)
        result = fit(run, folder / name, Machine("cpu", checkpoint_every=0), callbacks=callbacks)
        notes[name] = [epoch.metrics["train_loss"] for epoch in result.epochs]
        assert (folder / name / "model.safetensors").exists()  # fit returns in both processes when it is written
    notes |= {"on_epoch": epochs, "batches": list(WithoutBatchNorm.indices)}
    for name, run in SIZED.items():
        WithoutBatchNorm.sizes.clear()
        fit(run, machine=Machine("cpu"))
        notes[name] = list(WithoutBatchNorm.sizes)
    for name, run in REFUSED.items():
        try:
            fit(run, folder / "refused" / name, Machine("cpu"))
        except BsamError as error:
            notes[name] = str(error)
    notes["measured"] = measured(folder)
    pathlib.Path.open = ordinary  # type: ignore[method-assign]
    (folder / f"rank{rank}.json").write_text(json.dumps(notes))


def two_processes(folder: pathlib.Path, stop: bool) -> int:
    """Fork two processes with the environment variables of torchrun; return the first exit status that is not 0."""
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
    folder, outcomes = pathlib.Path(sys.argv[1]), []
    for stop in (True, False):
        status = two_processes(folder, stop)
        outcomes.append({"status": status, "epochs": [row["epoch"] for row in RunDir(folder / "bsam").metrics()]})
    (folder / "outcomes.json").write_text(json.dumps(outcomes))
