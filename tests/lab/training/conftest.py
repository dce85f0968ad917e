"""Train runs, stop them after an epoch, and compare their files."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bsam.lab.config import Run
from bsam.lab.training import Machine, RunCallbacks, fit
from bsam.lab.training.run_dir import CHECKPOINT, RunDir
from bsam.lab.training.trainer import Trainer
from helpers import trained_as


class Stop(Exception):
    """Ends a run after an epoch."""


def train(
    run: Run,
    folder: Path | None,
    stop: int | None = None,
    *,
    task: Any = None,
    checkpoint_every: float = 0,
    data_dir: Path | None = None,
    until: int | None = None,
    **callbacks: Any,
) -> Any:
    """Train on the CPU to the end, or stop after an epoch; by default with a checkpoint after every epoch."""

    def on_epoch(epoch: int, metrics: object) -> None:
        if epoch == stop:
            torch.manual_seed(epoch)  # another process would also start with other random numbers
            raise Stop

    machine = Machine("cpu", checkpoint_every=checkpoint_every, data_dir=data_dir)
    with contextlib.nullcontext() if task is None else trained_as(task):
        if stop is None:
            return fit(run, folder, machine, until=until, callbacks=RunCallbacks(**callbacks))
        with pytest.raises(Stop):
            fit(run, folder, machine, callbacks=RunCallbacks(on_epoch=on_epoch, **callbacks))
    return None


def same(a: Any, b: Any) -> bool:
    """Return whether two nested structures of plain values and tensors are equal bit for bit; NaN equals NaN."""
    if isinstance(a, torch.Tensor):
        alike = isinstance(b, torch.Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape)
        return alike and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def load(folder: Path) -> dict[str, Any]:
    return torch.load(folder / CHECKPOINT, weights_only=True)


def end(folder: Path) -> list[Any]:
    """Return the checkpoint, the probe's readings and the network of a finished run, without times."""
    state = load(folder)
    rows = [{**epoch, "seconds": 0} for epoch in RunDir(folder).metrics()]
    assert [{**epoch, "seconds": 0} for epoch in state["epochs"]] == rows
    probe = folder / "probe.jsonl"
    readings = probe.read_text() if probe.exists() else ""
    return [{**state, "epochs": rows}, readings, (folder / "model.safetensors").read_bytes()]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test fail that trains."""
    monkeypatch.setattr(Trainer, "train_epoch", lambda *_: pytest.fail("it trains"))


@pytest.fixture(scope="session")
def runs() -> SimpleNamespace:
    """Functions that train and compare: ``train``, ``end``, ``same``, ``load``, ``contents``, ``Stop``."""
    return SimpleNamespace(train=train, end=end, same=same, load=load, contents=contents, Stop=Stop)
