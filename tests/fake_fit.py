"""A training that trains nothing, for tests of recipes and of running them."""

import json

import torch
from safetensors.torch import save

from bsam.lab.running import job
from bsam.lab.training import Diverged, RunCallbacks
from bsam.lab.training.run_dir import RunDir, run_dir_name


class FakeFit:
    """Train nothing, write what a run leaves behind, and note every call; may raise instead, or diverge."""

    def __init__(self, score=lambda run: 0.5):
        self.score, self.asked, self.trouble = score, [], {}

    def __call__(self, run, folder, *_, until=None, callbacks=RunCallbacks(), **options):
        self.asked.append(run)
        trouble = self.trouble.pop(run_dir_name(run), None)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(run.settings()))
        if trouble is not None and not isinstance(trouble, str):
            raise trouble
        if trouble is not None:
            (folder / "diverged.json").write_text(json.dumps({"reason": trouble}))
            raise Diverged(trouble)
        until = until or run.epochs
        for epoch in range(len(RunDir(folder).metrics()) + 1, until + 1):
            score = self.score(run) if epoch == until else 0.99
            metrics = {"epoch": epoch, f"{run.eval_split}_accuracy": score, "seconds": 1.0}
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics) + "\n")
            callbacks.on_epoch(epoch, metrics)
        if until == run.epochs:
            write_network(folder)


def write_network(folder):
    """Write a small network as a finished run does."""
    (folder / "model.safetensors").write_bytes(save({"weight": torch.ones(2)}))


def train_by(fit, monkeypatch):
    """Let a function train the runs of studies and queues in place of ``fit``; returns it."""
    monkeypatch.setattr(job, "fit", fit)
    return fit
