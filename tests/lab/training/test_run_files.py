"""The files of a run, and how it continues after interruptions, full disks and divergence."""

import errno
import itertools
import json
import os
import pathlib
import shutil
import sys
import warnings
from dataclasses import replace

import pytest
import safetensors.torch
import torch

import bsam
from bsam.lab import Machine, cli
from bsam.lab.common.files import LOCK, DamagedFile, ReadFailed, RunLocked, locked
from bsam.lab.config import Run
from bsam.lab.models.cifar import DigitsNet
from bsam.lab.tasks.classification import Classification
from bsam.lab.training import Diverged, fit, trainer
from bsam.lab.training.run_dir import CHECKPOINT, RunDir

CPU = torch.device("cpu")
SAME = {"lr": 0.1, "batch": 8, "label_smoothing": 0.0, "limit_train": 24, "limit_test": 20}
RUN = Run.of("bsam", {"rho_max": 0.1, "rho_min": 0.1, "rho_min_floor": 0.02}, epochs=2, seed=2, probe=2, **SAME)
FILES = {"config.json", "environment.json", "metrics.jsonl", "probe.jsonl", "model.safetensors", "identity.json"}
FILES |= {CHECKPOINT, LOCK, "predictions.npz", "tensorboard"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, runs):
    """The directory of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    runs.train(RUN, folder)
    return folder


@pytest.fixture
def ends_like_whole(whole, runs):
    """Return a function that trains a run directory to its end and compares it with ``whole``."""

    def check(folder, **options):
        runs.train(RUN, folder, **options)
        assert runs.same(runs.end(folder), runs.end(whole))

    return check


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory, runs):
    folder = tmp_path_factory.mktemp("stopped") / "run"
    runs.train(RUN, folder, stop=1)
    return folder


@pytest.fixture
def stopped(stopped_once, tmp_path):
    """A run directory with one finished epoch of two."""
    return shutil.copytree(stopped_once, tmp_path / "run")


def test_the_directory_has_settings_metrics_machine_and_network(whole):
    assert {path.name for path in whole.iterdir()} == FILES
    assert json.loads((whole / "config.json").read_text()) == RUN.settings()
    (machine,) = RunDir(whole).machines()
    assert {"bsam", "torch", "python", "machine", "device", "date", "threads"} <= set(machine)
    assert (machine["torch"], machine["device"]) == (torch.__version__, "cpu")
    assert [machine[name] for name in ("processes", "compiled", "captured")] == [1, False, False]
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    names = {"epoch", "train_loss", "test_loss", "test_accuracy", "lr", "rho_min", "seconds"}
    assert all(set(row) == names for row in rows)
    readings = RunDir(whole).probe()
    assert [reading["step"] for reading in readings] == [0, 2, 4]
    for reading in readings:
        assert reading["bilateral"] == pytest.approx(reading["max_sharpness"] + reading["min_sharpness"], abs=1e-6)


def test_the_saved_network_gives_the_last_accuracy(whole):
    network, last = RunDir(whole).load_into(DigitsNet()).eval(), RunDir(whole).metrics()[-1]
    metrics = Classification(RUN, CPU).evaluate(network)
    assert metrics == {name: last[name] for name in ("test_loss", "test_accuracy")}
    from safetensors import safe_open

    with safe_open(whole / "model.safetensors", "pt") as file:
        assert Run.of(**json.loads(file.metadata()["run"])) == RUN


def test_a_run_without_a_directory_gives_the_same_numbers(whole):
    here = [{**epoch.metrics, "seconds": 0} for epoch in fit(RUN, machine=Machine("cpu")).epochs]
    assert here == [{**epoch, "seconds": 0} for epoch in RunDir(whole).metrics()]


def test_a_finished_run_is_not_trained_again(tmp_path, request, runs):
    first, before = runs.train(RUN, tmp_path), runs.contents(tmp_path)
    request.getfixturevalue("no_training")
    assert runs.train(RUN, tmp_path) == first
    after = runs.contents(tmp_path)
    changed = {name for name in after if before.get(name) != after[name] and not name.startswith("tensorboard")}
    assert changed == {"environment.json"}
    assert len(json.loads(after["environment.json"])) == 2


def test_a_process_killed_after_it_wrote_the_checkpoint(stopped, ends_like_whole):
    (stopped / "metrics.jsonl").unlink()
    (stopped / "probe.jsonl").unlink()
    (stopped / "metrics.jsonl.draft").write_bytes(b'{"epo')
    (stopped / f"{CHECKPOINT}.draft").write_bytes(b"half of it")
    ends_like_whole(stopped)
    assert len(RunDir(stopped).machines()) == 2


@pytest.mark.parametrize("at", ["config", "environment"])
def test_a_process_killed_while_it_wrote_the_first_files(tmp_path, at, ends_like_whole):
    (tmp_path / LOCK).touch()
    if at == "environment":
        (tmp_path / "config.json").write_text(json.dumps(RUN.settings()))
    (tmp_path / f"{at}.json.draft").write_text('[{"bs')
    ends_like_whole(tmp_path)


def test_a_directory_with_other_settings_is_not_changed(whole, runs):
    before, times = runs.contents(whole), {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    with pytest.raises(bsam.BsamError, match="seed 2"):
        runs.train(replace(RUN, seed=3), whole)
    assert runs.contents(whole) == before
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == times


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("thesis.tex", "precious"),
        (CHECKPOINT, "precious"),
        ("config.json", "not json"),
        ("config.json", '{"architectures": ["BertModel"]}'),
    ],
)
def test_a_folder_with_other_files_is_not_changed(tmp_path, name, content, runs):
    (tmp_path / name).write_text(content)
    for path in (tmp_path, tmp_path / name, tmp_path / name / "below"):
        with pytest.raises(bsam.BsamError, match=name):
            runs.train(RUN, path)
    assert runs.contents(tmp_path) == {name: content.encode()}


def test_a_missing_package_is_reported_before_the_first_epoch(tmp_path, monkeypatch, runs):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(bsam.BsamError, match="safetensors"):
        runs.train(RUN, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    fit(replace(RUN, epochs=1, probe=None), machine=Machine("cpu"))  # not needed without a directory


def test_an_interruption_before_the_first_epoch_is_reported_as_such(tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.Trainer, "train_epoch", interrupt)
    assert cli.main(["train", "--method", "sgd", "--device", "cpu", "--out", str(tmp_path / "run")]) == 130
    assert "No checkpoint.pt was written" in capsys.readouterr().err


def test_a_locked_directory_is_not_changed(stopped, runs):
    with locked(stopped, "training"):
        before = runs.contents(stopped)
        with pytest.raises(RunLocked):
            runs.train(RUN, stopped)
        assert runs.contents(stopped) == before


@pytest.mark.parametrize("write", [0, 5, 7, 11])
def test_after_a_full_disk_the_same_call_continues(write, tmp_path, monkeypatch, runs, ends_like_whole):
    """The disk is full at the first file, after a checkpoint, at a checkpoint, and at the network."""
    calls, flush = itertools.count(), os.fsync

    def fsync(descriptor):
        if next(calls) == write:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(bsam.BsamError, match="space"):
            runs.train(RUN, tmp_path)
    assert not list(tmp_path.glob("*.draft"))
    assert not (tmp_path / "model.safetensors").exists()
    ends_like_whole(tmp_path)


def test_a_non_finite_loss_ends_the_run_without_a_checkpoint(tmp_path, runs):
    run = replace(RUN, lr=1e30, probe=None)
    message = r"training loss is nan in epoch 1: .*lr \(now 1e\+30\).* No checkpoint was written"
    with pytest.raises(Diverged, match=message) as error:
        runs.train(run, tmp_path)
    assert not list(tmp_path.glob("checkpoint*"))
    assert RunDir(tmp_path).metrics() == []
    state = RunDir(tmp_path).state(run)
    assert (state.diverged, str(state), state.ended, state.left) == (str(error.value), "diverged", True, 0)


def test_a_non_finite_loss_in_a_later_epoch_keeps_the_last_good_checkpoint(tmp_path, runs, ends_like_whole):
    class Poisoned(Classification):
        def begin_epoch(self, epoch):
            super().begin_epoch(epoch)
            self.poison = float("nan") if epoch == 1 else 1.0

        def losses(self, outputs, y):
            return super().losses(outputs, y) * self.poison

    Poisoned.__module__, Poisoned.__qualname__ = Classification.__module__, Classification.__qualname__
    with pytest.raises(Diverged, match=rf"epoch 2.*The checkpoint of epoch 1 is kept in {tmp_path}"):
        runs.train(RUN, tmp_path, task=Poisoned)
    state = runs.load(tmp_path)
    assert [epoch["epoch"] for epoch in state["epochs"]] == [1]
    assert all(t.isfinite().all() for t in state["network"].values())
    assert RunDir(tmp_path).state(RUN).diverged is not None
    ends_like_whole(tmp_path)
    assert (RunDir(tmp_path).state(RUN).diverged, (tmp_path / "diverged.json").exists()) == (None, False)


def test_weights_ruined_by_the_last_step_of_an_epoch_are_not_saved(tmp_path, runs):
    """The loss before that step is finite."""
    run = replace(RUN, method="sgd", arguments={}, probe=None, lr=1e30, batch=24)
    with pytest.raises(Diverged, match="test loss"):
        runs.train(run, tmp_path)
    assert not list(tmp_path.glob("checkpoint*"))


class Harmful:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def test_a_crafted_checkpoint_executes_nothing(stopped, tmp_path, runs):
    trap = tmp_path / "executed"
    torch.save({**runs.load(stopped), "epochs": Harmful(trap)}, stopped / CHECKPOINT)
    with pytest.raises(bsam.BsamError, match="UnpicklingError"):
        runs.train(RUN, stopped)
    assert not trap.exists()
    torch.load(stopped / CHECKPOINT, weights_only=False)
    assert trap.exists()  # the trap works


def test_a_checkpoint_that_cannot_be_read_is_kept(stopped, runs, ends_like_whole):
    for content in (None, {}, {"network": {"other": torch.ones(2)}, "epochs": [], "readings": []}):
        if content is None:
            os.truncate(stopped / CHECKPOINT, 1000)
        else:
            torch.save(content, stopped / CHECKPOINT)
        before = runs.contents(stopped)
        with pytest.raises(bsam.BsamError, match=f"{CHECKPOINT}.*read"):
            runs.train(RUN, stopped)
        assert {**runs.contents(stopped), LOCK: b""} == {**before, LOCK: b""}
    (stopped / CHECKPOINT).unlink()
    ends_like_whole(stopped)


def flip(file, at):
    """Flip a bit of a file, at this fraction of its length."""
    content = bytearray(file.read_bytes())
    content[int(at * len(content))] ^= 1
    file.write_bytes(content)


def test_a_checkpoint_with_a_flipped_bit_is_not_loaded(stopped, runs):
    flip(stopped / CHECKPOINT, 0.5)
    assert runs.load(stopped)  # torch itself does not notice
    with pytest.raises(DamagedFile, match=f"{CHECKPOINT} cannot be read .*CRC.*: remove it to train from the start"):
        runs.train(RUN, stopped)


def test_a_network_with_a_flipped_bit_is_not_loaded(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    flip(folder / "model.safetensors", 0.5)
    assert safetensors.torch.load_file(folder / "model.safetensors")  # the package itself does not notice
    with pytest.raises(DamagedFile, match=r"SHA-256.*remove it, then run the training command again"):
        RunDir(folder).weights()


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (pathlib.Path, "read_bytes", OSError(errno.ESTALE, os.strerror(errno.ESTALE))),
        (torch, "load", MemoryError()),
        (trainer.Trainer, "load_state_dict", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")),
    ],
    ids=["stale", "memory", "GPU"],
)
def test_a_good_checkpoint_that_cannot_be_read_now_is_not_called_damaged(
    owner, name, error, stopped, monkeypatch, runs, ends_like_whole
):
    ordinary = getattr(owner, name)

    def fail(*arguments, **named):
        if name == "read_bytes" and arguments[0].name != CHECKPOINT:
            return ordinary(*arguments, **named)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(ReadFailed, match=f"{CHECKPOINT} cannot be read now") as raised:
            runs.train(RUN, stopped)
    assert "remove" not in str(raised.value)
    ends_like_whole(stopped)


@pytest.mark.parametrize("content", ["{}", "[]", '{"task": "x"}', "null"])
def test_an_identity_of_another_type(content, stopped, runs):
    (stopped / "identity.json").write_text(content)
    with pytest.raises(DamagedFile, match=r"identity.json cannot be read \(.*\): remove it to continue"):
        runs.train(RUN, stopped)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_tensorboard_that_is_no_folder(kind, stopped, tmp_path, runs):
    """Events in the folder that a link leads to would be removed."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/events.out.tfevents.mine").write_text("mine")
    shutil.rmtree(stopped / "tensorboard")
    path = stopped / "tensorboard"
    path.write_text("") if kind == "file" else path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(bsam.BsamError, match=r"tensorboard is not a folder.*: remove it to continue"):
        runs.train(RUN, stopped)
    assert (tmp_path / "elsewhere/events.out.tfevents.mine").read_text() == "mine"


def test_drafts_of_a_killed_process_are_removed(stopped, ends_like_whole):
    """Except those of run.json, which a report may be writing."""
    for name in (CHECKPOINT, "metrics.jsonl", "run.json"):
        (stopped / f"{name}.0a1b2c3d.draft").write_bytes(b"half of it")
    ends_like_whole(stopped)
    assert [path.name for path in stopped.glob("*.draft")] == ["run.json.0a1b2c3d.draft"]


def test_a_network_without_a_checkpoint_is_kept(whole, tmp_path, runs):
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / CHECKPOINT).unlink()
    with pytest.raises(bsam.BsamError, match=CHECKPOINT):
        runs.train(RUN, folder)
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def events(folder):
    """Return (step, tag, value) of the events as TensorBoard reads them, without the settings, and the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # raised by its imports
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (file,) = (folder / "tensorboard").glob("events.out.tfevents.*")
    loaded = EventFileLoader(str(file)).Load()
    values = ((e.step, v) for e in loaded for v in e.summary.value if not v.tag.startswith("_hparams_"))
    return {(step, v.tag, v.tensor.float_val[0]) for step, v in values}, file


def test_tensorboard_shows_each_epoch_once_after_an_interruption(tmp_path, runs):
    (tmp_path / "tensorboard").mkdir(parents=True)
    (other := tmp_path / "tensorboard" / "notes.txt").write_text("mine")
    (tmp_path / "config.json").write_text(json.dumps(RUN.settings()))
    for stop in (1, None):
        runs.train(RUN, tmp_path, stop=stop)
        shown, file = events(tmp_path)
        rows = RunDir(tmp_path).metrics()
        expected = {(row["epoch"], name, value) for row in rows for name, value in row.items() if name != "epoch"}
        assert {(step, tag) for step, tag, _ in shown} == {(step, tag) for step, tag, _ in expected}
        assert sorted(value for *_, value in shown) == pytest.approx(sorted(value for *_, value in expected), rel=1e-6)
        file.write_bytes(file.read_bytes() + b"\x18\x00\x00\x00\x00\x00\x00\x00half")  # as a killed process leaves it
    assert other.read_text() == "mine"


def test_without_tensorboard_no_events_are_written(tmp_path, monkeypatch, runs):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    runs.train(replace(RUN, epochs=1, sharpness_rho=0.05), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES - {"tensorboard"}
