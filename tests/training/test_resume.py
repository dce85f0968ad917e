"""Interrupted anywhere, a run ends as it would have ended, bit for bit."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import bsam
from bsam.methods import METHODS
from bsam.tasks.classification import Classification
from bsam.training.config import Run
from bsam.training.files import read_checkpoint
from bsam.training.folder import CHECKPOINT, read_metrics
from bsam.training.loop import fit

CPU = torch.device("cpu")
SAME = {"lr": 0.1, "batch": 64, "label_smoothing": 0.1, "epochs": 3, "limit_train": 256, "seed": 4}
ARGUMENTS = {  # so that each method does in three epochs what it does in two hundred
    "looksam": {"k": 3},
    "ksam": {"k": 32},
    "saf": {"start_epoch": 1, "epochs_back": 1},
    "mesa": {"start_epoch": 1, "decay": 0.9},
    "bsam": {"rho_max": 0.1, "rho_min": 0.1, "rho_min_floor": 0.02},
}


class Stop(Exception):
    pass


def interrupted(run, folder, **more):
    """Stopped after every epoch, each time in another process as far as torch's random numbers can tell."""

    def stop(epoch, metrics):
        torch.manual_seed(epoch)
        raise Stop

    for _ in range(run.epochs):
        with pytest.raises(Stop):
            fit(run, folder, device="cpu", each_epoch=stop, **more)
    return fit(run, folder, device="cpu", each_epoch=lambda *_: pytest.fail("an epoch too many"), **more)


def left_alone(run, folder, **more):
    return fit(run, folder, device="cpu", **more)


def end(folder):
    state = read_checkpoint(folder / CHECKPOINT, CPU)
    for epoch in state["epochs"]:
        epoch["seconds"] = 0
    probe = folder / "probe.jsonl"
    lines = [{**epoch, "seconds": 0} for epoch in read_metrics(folder)]
    return [state, lines, (folder / "model.safetensors").read_bytes(), probe.read_text() if probe.exists() else ""]


def timeless(result):
    return [({**epoch.metrics, "seconds": 0}, epoch.sharpness) for epoch in result.epochs]


@pytest.mark.parametrize("method", ["sgd", *METHODS])
def test_every_method_goes_on_as_if_nothing_had_happened(method, tmp_path, agree):
    run = Run(method, ARGUMENTS.get(method, {}), **SAME)
    a, b = left_alone(run, tmp_path / "a"), interrupted(run, tmp_path / "b")
    assert agree(end(tmp_path / "a"), end(tmp_path / "b"))
    assert timeless(a) == timeless(b)
    state = end(tmp_path / "b")[0]
    assert {"network", "optimizer", "loss", "epochs", "readings"} == set(state)
    assert len(state["optimizer"]["state"]) > 0  # there was something to go wrong
    if method not in ("sgd", "saf", "mesa"):
        assert state["optimizer"]["param_groups"][0]["steps_taken"] == 12


@pytest.mark.parametrize(
    "more",
    [{"base": "adamw", "lr": 1e-3}, {"nesterov": True, "warmup": 1.5, "augment": "crop-flip"}, {"precision": "bf16"}],
)
def test_so_do_other_settings(more, tmp_path, agree):
    run = Run("bsam", ARGUMENTS["bsam"], **{**SAME, **more}, radius=0.05, label_noise=0.2)
    a, b = left_alone(run, tmp_path / "a"), interrupted(run, tmp_path / "b")
    assert agree(end(tmp_path / "a"), end(tmp_path / "b"))
    assert timeless(a) == timeless(b)


@pytest.mark.parametrize("method", ["sam", "bsam", "looksam"])
def test_the_probe_goes_on_with_its_rhythm_and_changes_nothing(method, tmp_path, agree):
    arguments = ARGUMENTS.get(method, {})
    run = Run(method, arguments, **SAME, probe=3)
    left_alone(run, tmp_path / "a")
    interrupted(run, tmp_path / "b")
    left_alone(Run(method, arguments, **SAME), tmp_path / "c")
    assert agree(end(tmp_path / "a"), end(tmp_path / "b"))
    assert [reading["step"] for reading in end(tmp_path / "b")[0]["readings"]] == [0, 3, 6, 9]
    a, c = (end(tmp_path / name)[0] for name in "ac")
    assert agree([a["network"], a["optimizer"]], [c["network"], c["optimizer"]])


class Dropping(Classification):
    """Digits by a network whose passes draw random numbers."""

    def network(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.run.seed)
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.4), nn.Linear(48, 10))


@pytest.mark.parametrize("method", ["sgd", "sam", "bsam"])
def test_dropout_is_a_function_of_seed_and_epoch(method, tmp_path, agree):
    run = Run(method, {}, **SAME)
    left_alone(run, tmp_path / "a", task=Dropping)
    interrupted(run, tmp_path / "b", task=Dropping)
    assert agree(end(tmp_path / "a"), end(tmp_path / "b"))


def test_dropout_draws_anew_in_each_epoch_and_for_each_seed():
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


def test_a_checkpoint_of_another_machine_does_not_say_how_steps_are_computed(tmp_path, agree):
    """A GPU keeps the learning rate in a tensor and takes fused steps: what it wrote must not make this machine do so,
    nor the other way round.
    """
    run = Run("bsam", ARGUMENTS["bsam"], **SAME)
    left_alone(run, tmp_path / "a")

    def stop(epoch, metrics):
        raise Stop

    with pytest.raises(Stop):
        fit(run, tmp_path / "b", device="cpu", each_epoch=stop)
    state = read_checkpoint(tmp_path / "b" / CHECKPOINT, CPU)
    (group,) = state["optimizer"]["param_groups"]
    group.update(lr=torch.tensor(0.123), fused=True, foreach=None)
    bsam.training.files.write_checkpoint(tmp_path / "b" / CHECKPOINT, state)
    fit(run, tmp_path / "b", device="cpu")
    assert agree(end(tmp_path / "a"), end(tmp_path / "b"))


def test_a_killed_process_goes_on_bit_for_bit(tmp_path, monkeypatch):
    """SIGKILL at three random moments of a process of its own, and the same again each time: the bar of
    benchmarks/kill_and_resume.py, in small.
    """
    script = Path(bsam.__file__).parents[2] / "benchmarks" / "kill_and_resume.py"
    spec = importlib.util.spec_from_file_location("kill_and_resume", script)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kill_and_resume", module)  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    run = Run("bsam", model="resnet8", epochs=3, batch=64, augment="crop-flip", limit_test=200)
    outcome = module.kill_and_resume(run, None, tmp_path, kills=3, seed=1)
    assert (outcome.equal, outcome.kills) == (True, 3)
    assert len(read_metrics(tmp_path / "killed")) == 3
    a, b = (read_checkpoint(tmp_path / name / CHECKPOINT, CPU) for name in ("whole", "killed"))
    assert module.same(a["network"], b["network"])
    next(iter(b["network"].values())).flatten()[0] += 1e-6
    assert not module.same(a["network"], b["network"])  # it would have noticed
