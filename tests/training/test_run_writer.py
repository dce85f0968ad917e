"""What a run writes, and how it continues after interruptions, full disks and divergence."""

import errno
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch

import bsam
from bsam.models.digits_net import DigitsNet
from bsam.tasks.classification import Classification
from bsam.training import run_writer, trainer
from bsam.training.config import Run
from bsam.training.files import LOCK, RunLocked
from bsam.training.loop import Diverged, fit
from bsam.training.run_dir import CHECKPOINT, RunDir

CPU = torch.device("cpu")
SAME = {"lr": 0.1, "batch": 8, "label_smoothing": 0.0, "limit_train": 24, "limit_test": 20}
RUN = Run("bsam", {"rho_max": 0.1, "rho_min": 0.1, "rho_min_floor": 0.02}, epochs=3, seed=2, probe=2, **SAME)
FILES = {"config.json", "environment.json", "metrics.jsonl", "probe.jsonl", "model.safetensors", "identity.json"}
FILES |= {CHECKPOINT, LOCK, "predictions.npz", "tensorboard"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, runs):
    """A run that was not interrupted."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    runs.train(RUN, folder)
    return folder


@pytest.fixture
def ends_like_whole(whole, runs):
    """Trains a run directory to its end, and compares it with the run that was not interrupted."""

    def check(folder, **options):
        runs.train(RUN, folder, **options)
        assert runs.same(runs.end(folder), runs.end(whole))

    return check


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory, runs):
    folder = tmp_path_factory.mktemp("stopped") / "run"
    runs.train(RUN, folder, stop=2)
    return folder


@pytest.fixture
def stopped(stopped_once, tmp_path):
    """A run directory with two finished epochs of three."""
    return shutil.copytree(stopped_once, tmp_path / "run")


def test_the_directory_has_settings_metrics_machine_and_network(whole):
    assert {path.name for path in whole.iterdir()} == FILES
    assert json.loads((whole / "config.json").read_text()) == RUN.settings()
    (machine,) = RunDir(whole).machines()
    assert {"bsam", "torch", "python", "machine", "device", "date", "threads"} <= set(machine)
    assert (machine["torch"], machine["device"]) == (torch.__version__, "cpu")
    assert [machine[name] for name in ("processes", "compiled", "captured")] == [1, False, False]
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    names = {"epoch", "train_loss", "test_loss", "test_accuracy", "lr", "rho_min", "seconds"}
    assert all(set(row) == names for row in rows)
    readings = RunDir(whole).probe()
    assert [reading["step"] for reading in readings] == [0, 2, 4, 6, 8]
    for reading in readings:
        assert reading["bilateral"] == pytest.approx(reading["max_sharpness"] + reading["min_sharpness"], abs=1e-6)


def test_the_saved_network_gives_the_last_accuracy(whole):
    network, last = RunDir(whole).load_into(DigitsNet()).eval(), RunDir(whole).metrics()[-1]
    found = Classification(RUN, CPU).evaluate(network)
    assert found == {name: last[name] for name in ("test_loss", "test_accuracy")}
    from safetensors import safe_open

    with safe_open(whole / "model.safetensors", "pt") as file:
        assert Run(**json.loads(file.metadata()["run"])) == RUN


def test_a_run_without_directory_gives_the_same_numbers(whole):
    here = [{**epoch.metrics, "seconds": 0} for epoch in fit(RUN, device="cpu").epochs]
    assert here == [{**epoch, "seconds": 0} for epoch in RunDir(whole).metrics()]


def test_a_finished_run_is_not_trained_again(tmp_path, monkeypatch, runs):
    first, before = runs.train(RUN, tmp_path), runs.contents(tmp_path)
    monkeypatch.setattr(trainer.Trainer, "train_epoch", lambda *_: pytest.fail("it trains"))
    assert runs.train(RUN, tmp_path) == first
    after = runs.contents(tmp_path)
    changed = {name for name in after if before.get(name) != after[name] and not name.startswith("tensorboard")}
    assert changed == {"environment.json"}
    assert len(json.loads(after["environment.json"])) == 2


def test_what_a_killed_process_did_not_write_is_written(stopped, ends_like_whole):
    """The checkpoint is on the disk, and the process was killed before it wrote anything else."""
    (stopped / "metrics.jsonl").unlink()
    (stopped / "probe.jsonl").unlink()
    (stopped / "metrics.jsonl.draft").write_bytes(b'{"epo')
    (stopped / f"{CHECKPOINT}.draft").write_bytes(b"half of it")
    ends_like_whole(stopped)
    assert len(RunDir(stopped).machines()) == 2


@pytest.mark.parametrize("at", ["config", "environment"])
def test_killed_while_the_first_files_were_written(tmp_path, at, ends_like_whole):
    (tmp_path / LOCK).touch()
    if at == "environment":
        (tmp_path / "config.json").write_text(json.dumps(RUN.settings()))
    (tmp_path / f"{at}.json.draft").write_text('[{"bs')
    ends_like_whole(tmp_path)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"seed": 3}, "seed 2 there, 3 here"),
        ({"method": "sam", "arguments": {}}, "method bsam there, sam here"),
    ],
)
def test_a_directory_with_other_settings_is_refused_and_not_changed(whole, other, words, runs):
    before, times = runs.contents(whole), {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    with pytest.raises(bsam.BsamError, match=rf"other settings .*{words}.*choose another folder"):
        runs.train(replace(RUN, **other), whole)
    assert runs.contents(whole) == before
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == times


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("thesis.tex", "precious", r"files of something else \(thesis\.tex\)"),
        (CHECKPOINT, "precious", "files of something else"),
        ("config.json", "not json", r"config.json cannot be read \(JSONDecodeError\): choose another folder"),
        ("config.json", "[1, 2]", r"config.json cannot be read \(TypeError\): choose another folder"),
        ("config.json", '{"architectures": ["BertModel"]}', r"not describe a run .*architectures.*: choose another"),
    ],
)
def test_a_folder_of_something_else_is_refused_and_not_changed(tmp_path, name, content, words, runs):
    (tmp_path / name).write_text(content)
    with pytest.raises(bsam.BsamError, match=words):
        runs.train(RUN, tmp_path)
    assert runs.contents(tmp_path) == {name: content.encode()}
    for path in (tmp_path / name, tmp_path / name / "below"):
        with pytest.raises(bsam.BsamError, match="cannot be used as a folder for a run"):
            runs.train(RUN, path)


def test_a_missing_package_is_named_before_the_first_epoch(tmp_path, monkeypatch, runs):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(bsam.BsamError, match=r"safetensors.*pip install -c constraints.txt '\.\[train\]'"):
        runs.train(RUN, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    fit(replace(RUN, epochs=1, probe=None), device="cpu")  # without a directory nothing is missing


HOLDER = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print('held', flush=True)
    sys.stdin.read()
"""


def test_two_processes_do_not_train_in_one_directory(stopped, runs, ends_like_whole):
    before, command = {**runs.contents(stopped), LOCK: b""}, [sys.executable, "-c", HOLDER, str(stopped / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        try:
            with pytest.raises(RunLocked, match="another process is training there"):
                runs.train(RUN, stopped)
            assert runs.contents(stopped) == before
        finally:
            other.kill()  # and the lock goes with it
    ends_like_whole(stopped)


def openings(monkeypatch, full=None):
    """The files that are opened to be written, in their order; the one with the number ``full`` is on a full disk."""
    names, ordinary = [], pathlib.Path.open

    def counted(path, mode="r", *more, **named):
        if mode[0] in "wa":
            names.append(path.name)
            if len(names) - 1 == full:
                path = pathlib.Path("/dev/full")
        return ordinary(path, mode, *more, **named)

    def flushed(descriptor):
        if os.path.samestat(os.fstat(descriptor), os.stat("/dev/full")):  # an empty file finds out only here
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pathlib.Path, "open", counted)
    monkeypatch.setattr(os, "fsync", flushed)
    return names


def test_a_full_disk_is_reported_and_the_same_call_continues_later(tmp_path, monkeypatch, runs, ends_like_whole):
    """At each kind of write: a clear message, a checkpoint that loads once there is one, and the same end."""
    monkeypatch.setattr(run_writer, "find_spec", lambda name: None)  # TensorBoard opens its files in its own way
    with pytest.MonkeyPatch.context() as patch:
        names = openings(patch)
        runs.train(RUN, tmp_path / "counted")
    epoch = ["checkpoint", "metrics", "probe"]
    assert [name.split(".")[0] for name in names] == [
        *("config", "identity", "environment", "metrics"),
        *(epoch * 3),
        *("predictions", "model"),
    ]
    for n in (0, 3, 4, 5, 7, len(names) - 2, len(names) - 1):
        run = tmp_path / str(n)
        message = r"could not be written \(No space left on device\); what was there before is kept\. Free some space"
        with pytest.MonkeyPatch.context() as patch:
            openings(patch, full=n)
            with pytest.raises(bsam.BsamError, match=message):
                runs.train(RUN, run)
        finished = sum(name.startswith(CHECKPOINT) for name in names[:n])
        assert (run / CHECKPOINT).exists() == (finished > 0)
        if finished:
            assert len(runs.load(run)["epochs"]) == finished
        assert not list(run.glob("*.draft"))
        ends_like_whole(run)


def test_a_loss_that_is_not_finite_ends_the_run_and_no_checkpoint_is_written(tmp_path, runs):
    run = replace(RUN, lr=1e30, probe=None)
    message = r"training loss is nan in epoch 1: a smaller lr \(now 1e\+30\) or radius may help\. No epoch was finished"
    with pytest.raises(Diverged, match=message) as error:
        runs.train(run, tmp_path)
    assert not list(tmp_path.glob("checkpoint*"))
    assert RunDir(tmp_path).metrics() == []
    state = RunDir(tmp_path).state(run)
    assert (state.diverged, str(state), state.ended, state.left) == (str(error.value), "diverged", True, 0)


def test_a_loss_that_is_not_finite_later_leaves_the_last_good_checkpoint(tmp_path, runs, ends_like_whole):
    class Poisoned(Classification):
        def begin_epoch(self, epoch):
            super().begin_epoch(epoch)
            self.poison = float("nan") if epoch == 2 else 1.0

        def losses(self, outputs, batch):
            return super().losses(outputs, batch) * self.poison

    Poisoned.__module__, Poisoned.__qualname__ = Classification.__module__, Classification.__qualname__
    kept = rf"training loss is nan in epoch 3.*The checkpoint of epoch 2 is kept in {tmp_path}"
    with pytest.raises(bsam.BsamError, match=kept):
        runs.train(RUN, tmp_path, task=Poisoned)
    state = runs.load(tmp_path)
    assert [epoch["epoch"] for epoch in state["epochs"]] == [1, 2]
    assert all(t.isfinite().all() for t in state["network"].values())
    assert RunDir(tmp_path).state(RUN).diverged is not None
    ends_like_whole(tmp_path)
    assert (RunDir(tmp_path).state(RUN).diverged, (tmp_path / "diverged.json").exists()) == (None, False)


def test_weights_that_the_last_step_of_an_epoch_ruined_are_not_saved(tmp_path, runs):
    """The loss before that step is finite; the network after it is not."""
    run = replace(RUN, method="sgd", arguments={}, probe=None, lr=1e30, epochs=2, batch=24)
    with pytest.raises(bsam.BsamError, match=r"test loss is (nan|inf) in epoch 1.*No epoch was finished"):
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
    with pytest.raises(bsam.BsamError, match=r"checkpoint\.pt cannot be read \(UnpicklingError\): remove it"):
        runs.train(RUN, stopped)
    assert not trap.exists()
    torch.load(stopped / CHECKPOINT, weights_only=False)
    assert trap.exists()  # it was a trap indeed


@pytest.mark.parametrize("content", [None, {}, {"network": {"other": torch.ones(2)}, "epochs": [], "readings": []}])
def test_a_checkpoint_that_cannot_be_read_is_named_and_stays(content, stopped, runs, ends_like_whole):
    if content is None:
        os.truncate(stopped / CHECKPOINT, 1000)
    else:
        torch.save(content, stopped / CHECKPOINT)
    before = runs.contents(stopped)
    message = r"checkpoint\.pt cannot be read \(\w+\): remove it to train the run from the start"
    with pytest.raises(bsam.BsamError, match=message):
        runs.train(RUN, stopped)
    assert {**runs.contents(stopped), LOCK: b""} == {**before, LOCK: b""}
    (stopped / CHECKPOINT).unlink()
    ends_like_whole(stopped)


def test_a_network_without_a_checkpoint_is_not_trained_again(whole, tmp_path, runs):
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / CHECKPOINT).unlink()
    with pytest.raises(bsam.BsamError, match=r"no checkpoint\.pt .* remove model\.safetensors"):
        runs.train(RUN, folder)
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def events(folder):
    """(step, tag, value) of every event but the settings, as TensorBoard reads them; and the number of files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = list((folder / "tensorboard").glob("events.out.tfevents.*"))
    found = (event for file in files for event in EventFileLoader(str(file)).Load())
    values = ((e.step, v) for e in found for v in e.summary.value if not v.tag.startswith("_hparams_"))
    return {(step, v.tag, v.tensor.float_val[0]) for step, v in values}, len(files)


def test_tensorboard_reads_each_epoch_once_also_after_interruptions(tmp_path, runs):
    (tmp_path / "tensorboard").mkdir(parents=True)
    (other := tmp_path / "tensorboard" / "notes.txt").write_text("mine")
    (tmp_path / "config.json").write_text(json.dumps(RUN.settings()))
    for stop in (1, 2, None):
        runs.train(RUN, tmp_path, stop=stop)
        found, files = events(tmp_path)
        rows = RunDir(tmp_path).metrics()
        expected = {(row["epoch"], name, value) for row in rows for name, value in row.items() if name != "epoch"}
        assert {(step, tag) for step, tag, _ in found} == {(step, tag) for step, tag, _ in expected}
        assert sorted(value for *_, value in found) == pytest.approx(sorted(value for *_, value in expected), rel=1e-6)
        assert files == 1
        (file,) = (tmp_path / "tensorboard").glob("events*")
        file.write_bytes(file.read_bytes() + b"\x18\x00\x00\x00\x00\x00\x00\x00half")  # as a killed process leaves it
    assert other.read_text() == "mine"


def test_without_tensorboard_no_events_are_written(tmp_path, monkeypatch, runs):
    ordinary = importlib.util.find_spec
    monkeypatch.setattr(run_writer, "find_spec", lambda name: None if name == "tensorboard" else ordinary(name))
    runs.train(replace(RUN, epochs=1, radius=0.05), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES - {"tensorboard"}
