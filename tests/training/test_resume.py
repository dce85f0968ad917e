"""Interrupted anywhere, a run ends as it would have ended, bit for bit."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import bsam
from bsam.tasks.classification import Classification
from bsam.training.config import Run
from bsam.training.loop import fit
from bsam.training.run_dir import CHECKPOINT, RunDir
from processes import Process, Script

SAME = {"lr": 0.1, "batch": 16, "label_smoothing": 0.1, "epochs": 3, "seed": 4}
SAME |= {"limit_train": 64, "limit_test": 20}
BSAM = {"rho_max": 0.1, "rho_min": 0.1, "rho_min_floor": 0.02}
METHODS = {  # whose memory differs in kind; arguments so that each does in three epochs what it does in two hundred
    "base": {},
    "sam": {},
    "bsam": BSAM,
    "looksam": {"k": 3},
    "esam": {},
    "rst": {},
    "saf": {"start_epoch": 1, "epochs_back": 1},
    "mesa": {"start_epoch": 1, "decay": 0.9},
}


class Dropping(Classification):
    """Digits by a network whose passes draw random numbers."""

    def network(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.run.seed)
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.4), nn.Linear(48, 10))


@pytest.fixture
def check(tmp_path, runs):
    """Trains a run without interruptions, and once more stopped after every epoch; the end of both, which is one."""

    def timeless(result):
        return [({**epoch.metrics, "seconds": 0}, epoch.sharpness) for epoch in result.epochs]

    def compare(run, **options):
        whole = runs.train(run, tmp_path / "whole", **options)
        for epoch in range(run.epochs):
            runs.train(run, tmp_path / "stopped", stop=epoch + 1, **options)
        last = fit(run, tmp_path / "stopped", device="cpu", on_epoch=lambda *_: pytest.fail("one too many"), **options)
        assert runs.same(runs.end(tmp_path / "whole"), runs.end(tmp_path / "stopped"))
        assert timeless(whole) == timeless(last)
        return runs.load(tmp_path / "stopped")

    return compare


@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_method_goes_on_as_if_nothing_had_happened(method, check):
    state = check(Run(method, METHODS[method], **SAME))
    assert len(state["optimizer"]["state"]) > 0
    if method not in ("base", "saf", "mesa"):
        assert state["optimizer"]["param_groups"][0]["steps_taken"] == 12


@pytest.mark.parametrize(
    "more",
    [
        {"base": "adamw", "lr": 1e-3},
        {"nesterov": True, "warmup": 1.5, "augment": "crop-flip"},
        {"precision": "bf16", "limit_train": 16, "batch": 8},
    ],
)
def test_so_do_other_settings(more, check):
    check(Run("bsam", BSAM, **{**SAME, **more}, radius=0.05, label_noise=0.2))


@pytest.mark.parametrize("method", ["sam", "bsam", "looksam"])
def test_the_probe_goes_on_with_its_rhythm_and_changes_nothing(method, check, tmp_path, runs):
    state = check(Run(method, METHODS[method], **SAME, probe=3))
    assert [reading["step"] for reading in state["readings"]] == [0, 3, 6, 9]
    runs.train(Run(method, METHODS[method], **SAME), tmp_path / "without")
    without = runs.load(tmp_path / "without")
    assert all(runs.same(state[name], without[name]) for name in ("network", "optimizer"))


@pytest.mark.parametrize("method", ["sgd", "bsam"])
def test_dropout_is_a_function_of_seed_and_epoch(method, check):
    check(Run(method, **SAME), task=Dropping)


def test_dropout_draws_again_in_each_epoch_and_for_each_seed():
    masks = []

    class Looking(nn.Module):
        def forward(self, x):
            out = nn.functional.dropout(torch.ones(64), 0.5, self.training)
            if self.training:
                masks.append(tuple(out.tolist()))
            return x

    class Looked(Dropping):
        def network(self):
            return nn.Sequential(Looking(), super().network())

    for seed in (4, 5):
        fit(Run("sgd", **{**SAME, "seed": seed}), device="cpu", task=Looked)
    assert len(set(masks)) == len(masks) == 2 * 3 * 4


def test_a_checkpoint_of_another_machine_does_not_say_how_steps_are_computed(tmp_path, runs):
    """A GPU has the learning rate in a tensor and takes fused steps; this machine must not, nor the other way round."""
    run = Run("bsam", BSAM, **SAME)
    runs.train(run, tmp_path / "a")
    runs.train(run, tmp_path / "b", stop=1)
    state = runs.load(tmp_path / "b")
    (group,) = state["optimizer"]["param_groups"]
    group.update(lr=torch.tensor(0.123), fused=True, foreach=None)
    torch.save(state, tmp_path / "b" / CHECKPOINT)
    runs.train(run, tmp_path / "b")
    assert runs.same(runs.end(tmp_path / "a"), runs.end(tmp_path / "b"))


def test_a_killed_process_goes_on_bit_for_bit(tmp_path, monkeypatch, runs):
    """SIGKILL at two random moments of a process: the bar of benchmarks/kill_and_resume.py, in small."""
    script = Path(bsam.__file__).parents[2] / "benchmarks" / "kill_and_resume.py"
    spec = importlib.util.spec_from_file_location("kill_and_resume", script)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kill_and_resume", module)  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    Process(int).wait()  # starts the process that imports torch: the first one is timed

    def forked(command, env):
        """The command that the benchmark starts, in a process that is forked: importing torch takes seconds."""
        program, option, code, *arguments = command
        assert (program, option) == (sys.executable, "-c")
        (tmp_path / "child.py").write_text(code)
        return Script(tmp_path / "child.py", *arguments, output=tmp_path / "log", env=env)

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=forked))
    run = Run("bsam", model="resnet8", epochs=3, batch=64, augment="crop-flip", limit_train=192, limit_test=100)
    for seed in range(1, 5):  # on a machine whose load changes, a process may have ended before its moment
        folder = tmp_path / str(seed)
        outcome = module.kill_and_resume(run, None, folder, kills=2, seed=seed)
        assert outcome.equal
        assert len(RunDir(folder / "killed").metrics()) == 3
        if outcome.kills == 2:
            break
    assert outcome.kills == 2
    a, b = (runs.load(folder / name) for name in ("whole", "killed"))
    assert module.same(a["network"], b["network"])
    next(iter(b["network"].values())).flatten()[0] += 1e-6
    assert not module.same(a["network"], b["network"])  # it would have noticed
