"""A run that was interrupted ends exactly like one that was not."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

import bsam
from bsam.lab.common.termination import SIGNALS, Terminated, terminable
from bsam.lab.config import Run
from bsam.lab.tasks.classification import Classification
from bsam.lab.training import Machine, fit
from bsam.lab.training.run_dir import CHECKPOINT, RunDir, run_dir_name
from helpers import trained_as
from processes import Process, Script

SAME = {"lr": 0.1, "batch": 16, "label_smoothing": 0.1, "epochs": 2, "seed": 4, "limit_train": 48, "limit_test": 20}
BSAM = {"rho_max": 0.1, "rho_min": 0.1, "rho_min_floor": 0.02}


class Dropping(Classification):
    """Digits with a network that draws random numbers in every pass."""

    def network(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.run.seed)
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.4), nn.Linear(48, 10))


RUNS = {  # methods with different kinds of state, and settings that a checkpoint could forget
    "base": Run.of("base", **SAME),
    "bsam": Run.of("bsam", BSAM, **SAME, probe=2, sharpness_rho=0.05, label_noise=0.2),
    "looksam": Run.of("looksam", {"k": 2}, **SAME, probe=2),
    "rst": Run.of("rst", **SAME),
    "saf": Run.of("saf", {"start_epoch": 0, "epochs_back": 1}, **SAME),
    "mesa": Run.of("mesa", {"start_epoch": 0, "decay": 0.9}, **SAME),
    "adamw": Run.of("bsam", BSAM, **{**SAME, "lr": 1e-3}, base="adamw"),
    "warm-up": Run.of("bsam", BSAM, **SAME, nesterov=True, warmup=1.5, augment="crop-flip"),
    "dropout": Run.of("bsam", BSAM, **SAME),
    "ema": Run.of("sam", **{**SAME, "lr": 1e-3}, base="rmsprop", clip_norm=0.3, accumulate=2, ema=0.9),
    "fp16": Run.of("sam", **SAME, precision="fp16"),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_stopped_run_continues_bit_for_bit(case, tmp_path, runs):
    run, task = RUNS[case], Dropping if case in ("dropout", "fp16") else None
    runs.train(run, tmp_path / "whole", task=task)
    runs.train(run, tmp_path / "stopped", stop=1, task=task)
    runs.train(run, tmp_path / "stopped", task=task)
    assert runs.same(runs.end(tmp_path / "whole"), runs.end(tmp_path / "stopped"))
    state = runs.load(tmp_path / "stopped")
    assert len(state["optimizer"]["state"]) > 0
    assert state.get("scaler", {}).get("_growth_tracker") == (6 if case == "fp16" else None)  # steps of both epochs
    assert [reading["step"] for reading in state["readings"]] == ([0, 2, 4] if run.probe else [])


class Signalled(Dropping):
    """Digits with a network that draws random numbers. A signal arrives while a batch is read."""

    batches_left: ClassVar[int] = -1

    def _batch(self, x, index, on_host):
        Signalled.batches_left -= 1
        if Signalled.batches_left == 0:
            os.kill(os.getpid(), SIGNALS[-1])
        return super()._batch(x, index, on_host)


def train_to_a_signal(runs, run, folder, batches):
    """Train a few steps, until a signal ends the run."""
    Signalled.batches_left = batches
    with terminable(), pytest.raises(Terminated) as end:
        runs.train(run, folder, task=Signalled, checkpoint_every=1000)
    assert end.value.number == signal.SIGUSR1
    torch.manual_seed(batches)  # another process would also start with other random numbers


@pytest.mark.parametrize("case", RUNS)
def test_a_run_stopped_by_signals_in_its_epochs_continues_bit_for_bit(case, tmp_path, runs):
    run = RUNS[case]
    runs.train(run, tmp_path / "whole", task=Signalled)
    for batches, (epoch, step) in ((1, (0, 1)), (2, (0, 3)), (2, (1, 2))):  # an epoch has three steps
        train_to_a_signal(runs, run, tmp_path / "stopped", batches)
        state = runs.load(tmp_path / "stopped")
        assert (len(state["epochs"]), state["begun"]["steps"]) == (epoch, step)
    done = []
    runs.train(
        run, tmp_path / "stopped", task=Signalled, at_start=lambda trainer, _: done.append(trainer.begun["steps"])
    )
    assert done == [2]
    assert runs.same(runs.end(tmp_path / "whole"), runs.end(tmp_path / "stopped"))
    assert "begun" not in runs.load(tmp_path / "stopped")


def test_a_signal_after_a_loss_that_is_not_finite_keeps_the_last_checkpoint(tmp_path, runs):
    run = RUNS["base"]
    train_to_a_signal(runs, run, tmp_path, 2)
    before = (tmp_path / CHECKPOINT).read_bytes()

    class Infinite(Signalled):
        def losses(self, outputs, y):
            return super().losses(outputs, y) / 0

    Infinite.__module__, Infinite.__qualname__ = Signalled.__module__, Signalled.__qualname__
    Signalled.batches_left = 1
    with terminable(), pytest.raises(Terminated):
        runs.train(run, tmp_path, task=Infinite)
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def test_a_run_continued_with_another_number_of_processes_says_so(tmp_path, runs):
    """In the middle of an epoch, each process has its generators and its sum of losses."""
    train_to_a_signal(runs, RUNS["dropout"], tmp_path, 2)
    machines = RunDir(tmp_path).machines()
    (tmp_path / "environment.json").write_text(json.dumps([{**machines[0], "processes": 3}]))
    state = runs.load(tmp_path)
    (share,) = state["begun"]["shares"]
    totals = [share["total"] + change for change in (0.5, -1.0, 0.5)]
    state["begun"]["shares"] = [{**share, "total": total} for total in totals]
    torch.save(state, tmp_path / CHECKPOINT)
    messages = []
    for _ in range(2):  # the second call trains nothing, with the number of processes of the first one
        runs.train(RUNS["dropout"], tmp_path, task=Signalled, on_message=messages.append)
    (warning,) = messages
    assert "was 3 and is now 1" in warning
    first_epoch = RunDir(tmp_path).metrics()[0]
    assert first_epoch["train_loss"] == pytest.approx(share["total"] / 2, rel=0.2)  # two of its three steps


def test_the_data_are_compared_also_in_the_first_epoch(tmp_path, runs):
    train_to_a_signal(runs, RUNS["base"], tmp_path, 1)
    identity = json.loads((tmp_path / "identity.json").read_text())
    (tmp_path / "identity.json").write_text(json.dumps({**identity, "data": "other"}))
    with pytest.raises(bsam.BsamError, match="data has changed"):
        runs.train(RUNS["base"], tmp_path, task=Signalled)


def test_a_run_stops_after_an_epoch_with_a_checkpoint_and_goes_on(tmp_path, runs):
    """Also if no checkpoint is due, and without the files of a finished run."""
    run = Run.of("bsam", BSAM, **{**SAME, "epochs": 3})
    runs.train(run, tmp_path / "whole")
    for until in (1, 2, 1):  # the last call trains nothing
        runs.train(run, tmp_path / "parts", until=until, checkpoint_every=1000)
        state = RunDir(tmp_path / "parts").state(run, until)
        assert (state.stopped, state.finished, state.left) == (True, False, 0)
        assert len(runs.load(tmp_path / "parts")["epochs"]) == len(state.epochs)
    assert len(state.epochs) == 2
    runs.train(run, tmp_path / "parts", checkpoint_every=1000)
    assert runs.same(runs.end(tmp_path / "whole"), runs.end(tmp_path / "parts"))


def test_a_run_of_an_older_version_continues_bit_for_bit(tmp_path, runs):
    """Its config.json and its checkpoint do not have the settings and the state that came later."""
    run, added = RUNS["base"], ("base_arguments", "accumulate", "clip_norm", "ema")
    runs.train(run, tmp_path / "whole")
    runs.train(run, tmp_path / "older", stop=1)
    config = tmp_path / "older" / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({name: value for name, value in settings.items() if name not in added}))
    identity = json.loads((tmp_path / "older" / "identity.json").read_text())
    assert identity["task"] == "bsam.tasks.classification.Classification"  # as before the laboratory was bsam.lab
    assert set(runs.load(tmp_path / "older")) == {"network", "optimizer", "loss", "epochs", "readings"}
    runs.train(run, tmp_path / "older")
    assert runs.same(runs.end(tmp_path / "whole"), runs.end(tmp_path / "older"))
    assert run_dir_name(run).endswith("-seed4-c33cc411")  # as before these settings


def test_the_probe_changes_nothing(tmp_path, runs):
    for probe in (None, 2):
        runs.train(Run.of("bsam", BSAM, **SAME, probe=probe), tmp_path / str(probe))
    probed, plain = (runs.load(tmp_path / name) for name in ("2", "None"))
    assert all(runs.same(probed[name], plain[name]) for name in ("network", "optimizer"))


def test_dropout_differs_in_each_step_epoch_and_seed():
    masks = []

    class Recording(nn.Module):
        def forward(self, x):
            mask = nn.functional.dropout(torch.ones(64), 0.5, self.training)
            if self.training:
                masks.append(tuple(mask.tolist()))
            return x

    class Recorded(Dropping):
        def network(self):
            return nn.Sequential(Recording(), super().network())

    for seed in (4, 5):
        with trained_as(Recorded):
            fit(Run.of("sgd", **{**SAME, "seed": seed}), machine=Machine("cpu"))
    assert len(set(masks)) == len(masks) == 2 * 2 * 3


def test_settings_of_the_machine_are_not_loaded_from_a_checkpoint(tmp_path, runs):
    """On a GPU the learning rate is a tensor and steps are fused."""
    run = Run.of("bsam", BSAM, **SAME)
    runs.train(run, tmp_path / "a")
    runs.train(run, tmp_path / "b", stop=1)
    state = runs.load(tmp_path / "b")
    (group,) = state["optimizer"]["param_groups"]
    group.update(lr=torch.tensor(0.123), fused=True, foreach=None)
    torch.save(state, tmp_path / "b" / CHECKPOINT)
    runs.train(run, tmp_path / "b")
    assert runs.same(runs.end(tmp_path / "a"), runs.end(tmp_path / "b"))


def test_a_killed_process_continues_bit_for_bit(tmp_path, monkeypatch, runs):
    """SIGKILL at two random moments of a process, as in benchmarks/kill_and_resume.py but smaller."""
    script = Path(bsam.__file__).parents[2] / "benchmarks" / "kill_and_resume.py"
    spec = importlib.util.spec_from_file_location("kill_and_resume", script)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kill_and_resume", module)  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    Process(int).wait()  # starts the fork server, which imports torch: the first process is timed

    def forked(command, env):
        """Fork the process that the benchmark would start: importing torch takes seconds."""
        program, option, code, *arguments = command
        assert (program, option) == (sys.executable, "-c")
        (tmp_path / "child.py").write_text(code)
        return Script(tmp_path / "child.py", *arguments, output=tmp_path / "log", env=env)

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=forked))
    run = Run("bsam", model="resnet8", epochs=3, batch=64, augment="crop-flip", limit_train=192, limit_test=100)
    for seed in range(1, 5):  # if the load of the machine changes, a process may end before its moment
        folder = tmp_path / str(seed)
        outcome = module.kill_and_resume(run, None, folder, kills=2, seed=seed)
        assert outcome.equal
        assert len(RunDir(folder / "killed").metrics()) == 3
        if outcome.kills == 2:
            break
    assert outcome.kills == 2
    whole, killed = (runs.load(folder / name) for name in ("whole", "killed"))
    assert module.same(whole["network"], killed["network"])
    next(iter(killed["network"].values())).flatten()[0] += 1e-6
    assert not module.same(whole["network"], killed["network"])  # the comparison notices a difference
