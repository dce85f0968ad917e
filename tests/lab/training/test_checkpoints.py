"""Checkpoints at intervals: when they are written, and how a run continues if its metrics are ahead of them."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace

import numpy as np
import pytest

from bsam.lab.config import Run
from bsam.lab.tasks.classification import Classification
from bsam.lab.training import Diverged, Machine, RunCallbacks, fit, run_dir
from bsam.lab.training.run_dir import CHECKPOINT, RunDir
from bsam.lab.training.trainer import Trainer

SAME = {"lr": 0.1, "batch": 8, "label_smoothing": 0.0, "limit_train": 24, "limit_test": 20, "label_noise": 0.25}
RUN = Run.of("bsam", {"rho_max": 0.1, "rho_min": 0.1, "rho_min_floor": 0.02}, epochs=5, seed=2, probe=2, **SAME)
READINGS = [0, 2, 4, 6, 8, 10, 12, 14]  # the steps that the probe reads, of 3 per epoch


@pytest.fixture(scope="module")
def whole(tmp_path_factory, runs):
    """The directory of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    runs.train(RUN, folder)
    return folder


@pytest.fixture
def slow(monkeypatch):
    """Let an epoch take 25 s."""
    now, train_epoch = [1000.0], Trainer.train_epoch

    def train(*given):
        now[0] += 25
        return train_epoch(*given)

    monkeypatch.setattr(run_dir, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Trainer, "train_epoch", train)


def saved(folder, runs):
    """Return the number of epochs in metrics and checkpoint."""
    return len(RunDir(folder).metrics()), len(runs.load(folder)["epochs"]) if (folder / CHECKPOINT).exists() else 0


@pytest.mark.parametrize(
    ("options", "checkpoints"),
    [
        ({}, [0, 0, 3, 3, 3, 6, 6, 8]),  # every 60 s
        ({"checkpoint_every": 50}, [0, 2, 2, 4, 4, 6, 6, 8]),
        ({"checkpoint_every": 0}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"checkpoint_every": 1e6}, [0] * 7 + [8]),
    ],
)
def test_a_checkpoint_is_written_when_it_is_due_and_after_the_last_epoch(
    options, checkpoints, slow, monkeypatch, tmp_path, runs
):
    seen, waits, flush = [], [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: waits.append(descriptor) or flush(descriptor))

    def on_epoch(epoch, metrics):
        seen.append((*saved(tmp_path, runs), len(waits)))
        waits.clear()

    callbacks = RunCallbacks(at_start=lambda *_: waits.clear(), on_epoch=on_epoch)
    fit(Run.of("sgd", epochs=8, **SAME), tmp_path, Machine("cpu", **options), callbacks=callbacks)
    assert [metrics for metrics, *_ in seen] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [epochs for _, epochs, _ in seen] == checkpoints
    # the metrics and the checkpoint are flushed to disk before they are renamed
    assert [count for *_, count in seen] == [1 + (b > a) for a, b in itertools.pairwise([0, *checkpoints])]


def test_the_time_since_a_resume_counts(slow, tmp_path, runs):
    run = Run.of("sgd", epochs=8, **SAME)
    runs.train(run, tmp_path, stop=4, checkpoint_every=60)
    assert saved(tmp_path, runs) == (4, 3)
    runs.train(run, tmp_path, stop=5, checkpoint_every=60)  # from 3, after 50 s
    assert saved(tmp_path, runs) == (5, 3)
    runs.train(run, tmp_path, stop=6, checkpoint_every=60)
    assert saved(tmp_path, runs) == (6, 6)


@pytest.mark.parametrize("checkpoint", [0, 1, 3])
def test_metrics_ahead_of_the_checkpoint_are_cut_back_and_repeated(checkpoint, whole, tmp_path, runs):
    """Also if the process was killed before its first checkpoint."""
    if checkpoint:
        runs.train(RUN, tmp_path, stop=checkpoint)
    runs.train(RUN, tmp_path, stop=4, checkpoint_every=60)
    assert saved(tmp_path, runs) == (4, checkpoint)
    assert [reading["step"] for reading in RunDir(tmp_path).probe()] == READINGS[:6]
    assert str(RunDir(tmp_path).state(RUN)) == "epoch 4 of 5"
    started = []

    def at_start(trainer, done):
        probe = tmp_path / "probe.jsonl"
        readings = len(RunDir(tmp_path).probe()) if probe.exists() else 0
        started.append((done, len(RunDir(tmp_path).metrics()), readings))

    runs.train(RUN, tmp_path, checkpoint_every=60, at_start=at_start)
    assert started == [(checkpoint, checkpoint, {0: 0, 1: 2, 3: 5}[checkpoint])]
    assert [reading["step"] for reading in RunDir(tmp_path).probe()] == READINGS
    assert runs.same(runs.end(tmp_path), runs.end(whole))
    ours, theirs = runs.contents(tmp_path), runs.contents(whole)
    timed = {"environment.json", "metrics.jsonl", CHECKPOINT, "predictions.npz"}  # runs.end compares two of them
    untimed = {name for name in theirs if name not in timed and not name.startswith("tensorboard")}
    assert {name for name in ours if not name.startswith("tensorboard")} == untimed | timed
    assert all(ours[name] == theirs[name] for name in untimed)
    found, expected = RunDir(tmp_path).predictions(), RunDir(whole).predictions()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("checkpoint", "kept"), [(0, "No checkpoint was written"), (1, "checkpoint of epoch 1 is kept")]
)
def test_a_run_that_diverges_names_the_checkpoint_that_it_has(checkpoint, kept, tmp_path, runs):
    class Poisoned(Classification):
        def losses(self, outputs, y):
            return super().losses(outputs, y) * self.poison

        def begin_epoch(self, epoch):
            super().begin_epoch(epoch)
            self.poison = float("nan") if epoch == 3 else 1.0

    if checkpoint:
        runs.train(RUN, tmp_path, stop=1, task=Poisoned)
    with pytest.raises(Diverged, match=f"in epoch 4: .*{kept}"):
        runs.train(RUN, tmp_path, task=Poisoned, checkpoint_every=60)
    assert saved(tmp_path, runs) == (3, checkpoint)
