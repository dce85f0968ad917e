import errno
import fcntl
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import bsam
from bsam.models.digits_net import DigitsNet
from bsam.training import folder as folder_module
from bsam.training import training
from bsam.training.classification import Classification
from bsam.training.config import Run
from bsam.training.files import read_checkpoint, write, write_checkpoint
from bsam.training.folder import BEFORE, CHECKPOINT, last_metrics, read_metrics, read_network, read_run
from bsam.training.lock import LOCK
from bsam.training.loop import fit

CPU = torch.device("cpu")
SAME = {"lr": 0.1, "batch": 64, "label_smoothing": 0.0, "limit_train": 192}
RUN = Run("bsam", {"rho_max": 0.1, "rho_min": 0.1, "rho_min_floor": 0.02}, epochs=3, seed=2, probe=2, **SAME)
FILES = {
    "config.json",
    "environment.json",
    "metrics.jsonl",
    "probe.jsonl",
    "model.safetensors",
    CHECKPOINT,
    "identity.json",
    "tensorboard",
}


class Stop(Exception):
    """What ends a run from outside."""


def train(folder, run=RUN, stop=None, **more):
    """To the end, or for so many epochs."""

    def each(epoch, metrics):
        if epoch == stop:
            raise Stop

    if stop is None:
        return fit(run, folder, device="cpu", **more)
    with pytest.raises(Stop):
        fit(run, folder, device="cpu", each_epoch=each, **more)
    return None


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def end(folder):
    """All that a finished run leaves behind, but for the clock."""
    state = read_checkpoint(folder / CHECKPOINT, CPU)
    for epoch in state["epochs"]:
        epoch["seconds"] = 0
    lines = [{**epoch, "seconds": 0} for epoch in read_metrics(folder)]
    return [state, lines, (folder / "probe.jsonl").read_text(), (folder / "model.safetensors").read_bytes()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    train(folder)
    return folder


def test_the_folder_has_settings_numbers_machine_and_network(whole):
    assert {path.name for path in whole.iterdir()} == FILES
    assert json.loads((whole / "config.json").read_text()) == RUN.settings()
    assert read_run(whole) == RUN
    (machine,) = json.loads((whole / "environment.json").read_text())
    assert {"bsam", "torch", "python", "machine", "device", "date", "threads"} <= set(machine)
    assert (machine["torch"], machine["device"]) == (torch.__version__, "cpu")
    assert [machine[name] for name in ("processes", "compiled", "captured")] == [1, False, False]
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert all(
        set(row) == {"epoch", "train_loss", "test_loss", "test_accuracy", "lr", "rho_min", "seconds"} for row in rows
    )
    readings = [json.loads(line) for line in (whole / "probe.jsonl").read_text().splitlines()]
    assert [reading["step"] for reading in readings] == [0, 2, 4, 6, 8]
    assert all(
        reading["bilateral"] == pytest.approx(reading["max_sharpness"] + reading["min_sharpness"], abs=1e-6)
        for reading in readings
    )


def test_the_saved_network_gives_the_last_accuracy(whole):
    network = read_network(whole, DigitsNet()).eval()
    found, last = Classification(RUN, CPU).evaluate(network), read_metrics(whole)[-1]
    assert found["test_accuracy"] == last["test_accuracy"]
    assert found["test_loss"] == last["test_loss"]
    from safetensors import safe_open

    with safe_open(whole / "model.safetensors", "pt") as file:
        assert Run(**json.loads(file.metadata()["run"])) == RUN


def test_a_run_without_folder_gives_the_same_numbers(whole):
    here = [{**epoch.metrics, "seconds": 0} for epoch in fit(RUN, device="cpu").epochs]
    assert here == [{**epoch, "seconds": 0} for epoch in read_metrics(whole)]


def test_a_finished_run_is_not_trained_again(whole, tmp_path, monkeypatch, agree):
    first = train(tmp_path / "run")
    before = contents(tmp_path / "run")
    monkeypatch.setattr(training.Training, "epoch", lambda *_: pytest.fail("it trains"))
    again = train(tmp_path / "run")
    assert again == first
    after = contents(tmp_path / "run")
    changed = {name for name in after if before.get(name) != after[name] and not name.startswith("tensorboard")}
    assert changed == {"environment.json"}
    assert len(json.loads(after["environment.json"])) == 2


def test_what_a_killed_process_did_not_write_is_written(whole, tmp_path, agree):
    """The state is on disk, and the process died before anything else was."""
    run = tmp_path / "run"
    train(run, stop=2)
    (run / "metrics.jsonl").unlink()
    (run / "probe.jsonl").unlink()
    (run / "metrics.jsonl.draft").write_bytes(b'{"epo')
    (run / f"{CHECKPOINT}.draft").write_bytes(b"half of it")
    train(run)
    assert agree(end(run), end(whole))


@pytest.mark.parametrize("at", ["config", "environment"])
def test_killed_while_the_first_files_were_written(whole, tmp_path, at, agree):
    run = tmp_path / "run"
    run.mkdir()
    (run / LOCK).touch()
    if at == "environment":
        (run / "config.json").write_text(json.dumps(RUN.settings()))
    (run / f"{at}.json.draft").write_text('[{"bs')
    train(run)
    assert agree(end(run), end(whole))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"seed": 3}, "seed 2 there, 3 here"),
        ({"epochs": 4}, "epochs 3 there, 4 here"),
        ({"arguments": {"rho_max": 0.2}}, "arguments"),
        ({"method": "sam", "arguments": {}}, "method bsam there, sam here"),
    ],
)
def test_a_folder_with_another_configuration_is_refused_and_not_touched(whole, other, words):
    before = contents(whole)
    times = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    with pytest.raises(bsam.BsamError, match=rf"other settings .*{words}.*choose another folder"):
        train(whole, replace(RUN, **other))
    assert contents(whole) == before
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == times


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("thesis.tex", "precious", r"files of something else \(thesis\.tex\)"),
        (CHECKPOINT, "precious", "files of something else"),
        ("config.json", "not json", "not the configuration of a run"),
        ("config.json", "[1, 2]", "not the configuration of a run"),
        ("config.json", '{"architectures": ["BertModel"]}', "other settings"),
    ],
)
def test_a_folder_of_something_else_is_refused_and_not_touched(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(bsam.BsamError, match=words):
        train(tmp_path)
    assert contents(tmp_path) == {name: content.encode()}


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("precious")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(bsam.BsamError, match="cannot be used as a folder for a run"):
            train(path)


def test_what_is_missing_is_said_before_the_first_epoch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(bsam.BsamError, match=r"safetensors.*pip install 'bsam\[train\]'"):
        train(tmp_path / "run")
    assert not (tmp_path / "run").exists()


HOLDER = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"


def test_two_processes_do_not_train_in_one_folder(whole, tmp_path, agree):
    run = tmp_path / "run"
    train(run, stop=1)
    before = {**contents(run), LOCK: b""}
    command = [sys.executable, "-c", HOLDER, str(run / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        try:
            with pytest.raises(bsam.BsamError, match="another process is training there"):
                train(run)
            assert contents(run) == before
        finally:
            other.kill()  # and the lock goes with it
    train(run)
    assert agree(end(run), end(whole))


def test_a_run_holds_its_folder_to_the_end_and_not_longer(tmp_path):
    held = []

    def each(epoch, metrics):
        with (tmp_path / "run" / LOCK).open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(epoch)

    fit(replace(RUN, epochs=2), tmp_path / "run", device="cpu", each_epoch=each)
    assert held == [1, 2]
    assert not (tmp_path / "run" / LOCK).exists()


def test_somebody_who_came_and_went_before_the_lock_is_noticed(tmp_path, monkeypatch):
    """Between the look at the folder and the lock another process may have trained something else there."""
    theirs = json.dumps(replace(RUN, seed=9).settings())
    monkeypatch.setattr(fcntl, "flock", lambda *_: (tmp_path / "config.json").write_text(theirs))
    with pytest.raises(bsam.BsamError, match="seed 9 there, 2 here"):
        train(tmp_path)


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a bit of the header": lambda path: flip(path, 0.0),
    "a bit of the digest": lambda path: flip(path, 40 / path.stat().st_size),
    "a bit in the middle": lambda path: flip(path, 0.5),
    "the last bit": lambda path: flip(path, 1.0),
    "half of it gone": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte gone": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_told_of_and_the_one_before_is_used(whole, tmp_path, damage, agree):
    run, told = tmp_path / "run", []
    train(run, stop=2)
    damage(run / CHECKPOINT)
    train(run, tell=told.append)
    assert told == [
        f"{run / CHECKPOINT} is damaged: its content is not what was written. Going on from the one before it."
    ]
    assert agree(end(run), end(whole))


def test_two_damaged_checkpoints_are_refused_with_what_to_remove(whole, tmp_path, agree):
    run, told = tmp_path / "run", []
    train(run, stop=2)
    for name in (CHECKPOINT, BEFORE):
        flip(run / name, 0.7)
    before = contents(run)
    with pytest.raises(
        bsam.BsamError, match=rf"no checkpoint that is whole: remove {CHECKPOINT} and {BEFORE} there to start anew"
    ):
        train(run, tell=told.append)
    assert len(told) == 2
    assert contents(run) == before
    (run / CHECKPOINT).unlink()
    (run / BEFORE).unlink()
    train(run)
    assert agree(end(run), end(whole))


def test_a_damaged_checkpoint_never_takes_the_place_of_the_one_before(whole, tmp_path, monkeypatch, agree):
    """Damaged, then resumed, then killed or out of space in the middle of the next checkpoint."""
    run = tmp_path / "run"
    train(run, stop=2)
    good = (run / BEFORE).read_bytes()
    flip(run / CHECKPOINT, 0.5)
    with monkeypatch.context() as context:
        context.setattr(folder_module, "write_checkpoint", lambda *_: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            train(run)
    assert (run / BEFORE).read_bytes() == good
    train(run)
    assert agree(end(run), end(whole))


def openings(monkeypatch, full=None):
    """The files that are opened to be written, in their order; the one with the number ``full`` is on a disk without
    space: Linux has one.
    """
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


def test_a_full_disk_is_said_and_the_same_call_goes_on_later(whole, tmp_path, agree):
    """At every single write of a run: a clear message, a checkpoint that loads as soon as there is one, and the same
    end.
    """
    with pytest.MonkeyPatch.context() as patch:
        names = openings(patch)
        train(tmp_path / "counted")
    assert (
        len(names) == 5 + 4 * 3 + 1
    )  # config, identity, machine, events, metrics; three epochs of state, events, metrics, probe; the network
    assert [name.split(".")[0] for name in names[-5:]] == ["checkpoint", "events", "metrics", "probe", "model"]
    for n in range(len(names)):
        run = tmp_path / str(n)
        with pytest.MonkeyPatch.context() as patch:
            openings(patch, full=n)
            with pytest.raises(
                bsam.BsamError,
                match=r"written \(No space left on device\); what was there before is kept\. Free some space and call again",
            ):
                train(run)
        kept = [path for name in (CHECKPOINT, BEFORE) if (path := run / name).exists()]
        finished = sum(name.startswith(CHECKPOINT) for name in names[:n])
        assert bool(kept) == (finished > 0)
        if kept:
            assert len(read_checkpoint(kept[0], CPU)["epochs"]) == finished
        assert not list(run.glob("*.draft"))
        train(run)
        assert agree(end(run), end(whole)), names[n]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EROFS, "Make the folder writable"),
        (errno.EDQUOT, "Free some space"),
        (errno.EIO, "Once that is mended, call again"),
    ],
)
def test_other_troubles_of_a_disk_are_named(tmp_path, monkeypatch, number, words):
    write(tmp_path / "file", b"old")

    def failing(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(bsam.BsamError, match=rf"{os.strerror(number)}.*{words}"):
        write(tmp_path / "file", b"new")
    assert contents(tmp_path) == {"file": b"old"}


def test_a_loss_that_is_not_finite_ends_the_run_with_a_message_and_nothing_is_kept(tmp_path):
    run = replace(RUN, lr=1e30, probe=None)
    with pytest.raises(
        bsam.BsamError,
        match=r"training loss is nan in epoch 1: a smaller lr \(now 1e\+30\) or radius may help\. No epoch was finished",
    ):
        train(tmp_path / "run", run)
    assert not list((tmp_path / "run").glob("checkpoint*"))
    assert read_metrics(tmp_path / "run") == []


def test_a_loss_that_is_not_finite_later_leaves_the_last_good_checkpoint(whole, tmp_path, agree):
    class Poisoned(Classification):
        def begin_epoch(self, epoch):
            super().begin_epoch(epoch)
            self.poison = float("nan") if epoch == 2 else 1.0

        def losses(self, outputs, batch):
            return super().losses(outputs, batch) * self.poison

    Poisoned.__module__, Poisoned.__qualname__ = (
        Classification.__module__,
        Classification.__qualname__,
    )  # it passes for the other one
    run = tmp_path / "run"
    with pytest.raises(
        bsam.BsamError, match=rf"training loss is nan in epoch 3.*The checkpoint of epoch 2 is kept in {run}"
    ):
        train(run, task=Poisoned)
    state = read_checkpoint(run / CHECKPOINT, CPU)
    assert [epoch["epoch"] for epoch in state["epochs"]] == [1, 2]
    assert all(t.isfinite().all() for t in state["network"].values())
    train(run)
    assert agree(end(run), end(whole))


def test_weights_that_the_last_step_of_an_epoch_ruined_are_not_kept(tmp_path):
    """The loss before that step is fine; the network after it is not."""
    run = replace(RUN, method="sgd", arguments={}, probe=None, lr=1e30, epochs=2, batch=192)
    with pytest.raises(bsam.BsamError, match=r"test loss is (nan|inf) in epoch 1.*No epoch was finished"):
        train(tmp_path / "run", run)
    assert not list((tmp_path / "run").glob("checkpoint*"))


class Harmful:
    """Unpickled by somebody careless, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_crafted_checkpoint_executes_nothing(whole, tmp_path, sealed, agree):
    run, trap, told = tmp_path / "run", tmp_path / "executed", []
    train(run, stop=2)
    crafted = {**read_checkpoint(run / CHECKPOINT, CPU), "epochs": Harmful(trap)}
    if sealed:  # with the digest that such a file should have
        write_checkpoint(run / CHECKPOINT, crafted)
    else:
        torch.save(crafted, run / CHECKPOINT)
    train(run, tell=told.append)
    assert not trap.exists()
    assert len(told) == 1
    assert ("was refused: it holds more than tensors and plain values" if sealed else "is damaged") in told[0]
    assert agree(end(run), end(whole))
    torch.load(io.BytesIO(_content(crafted)), weights_only=False)
    assert trap.exists()  # it was a trap indeed


def _content(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def test_a_checkpoint_says_what_it_is(whole):
    first, content = (whole / CHECKPOINT).read_bytes().split(b"\n", 1)
    assert first == b"bsam checkpoint 1 " + hashlib.sha256(content).hexdigest().encode()


def test_reading_a_run_that_is_not_there_or_not_finished_is_refused(whole, tmp_path):
    with pytest.raises(bsam.BsamError, match="is no folder of a run"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": 1}')
    with pytest.raises(bsam.BsamError, match="is no folder of a run"):
        read_run(tmp_path)
    assert read_metrics(tmp_path) == []
    train(tmp_path / "run", stop=1)
    with pytest.raises(bsam.BsamError, match=r"no model\.safetensors: the run is not finished"):
        read_network(tmp_path / "run", DigitsNet())


LOSS = r'"train_loss": [^,]*'
BROKEN = {
    "half a line": lambda file: file.write_text('{"epoch": 1\n'),
    "no entries": lambda file: file.write_text("1\n2\n3\n"),
    "no text": lambda file: file.write_bytes(b"\xff\xfe\n"),
    "empty": lambda file: file.write_text(""),
    "texts": lambda file: file.write_text(re.sub(r'"train_loss": [^,]*', '"train_loss": "low"', file.read_text())),
    "a list as a loss": lambda file: file.write_text(re.sub(LOSS, '"train_loss": []', file.read_text())),
    "a list as time": lambda file: file.write_text(re.sub(r'"seconds": [^,}]*', '"seconds": []', file.read_text())),
    "an object as a loss": lambda file: file.write_text(re.sub(LOSS, '"train_loss": {}', file.read_text())),
    "a huge number": lambda file: file.write_text(re.sub(LOSS, f'"train_loss": {10**400}', file.read_text())),
    "no time": lambda file: file.write_text(re.sub(r'"seconds": [^,}]*', '"seconds": null', file.read_text())),
    "another name": lambda file: file.write_text(file.read_text().replace("test_accuracy", "tezt_accuracy", 1)),
    "an epoch twice": lambda file: file.write_text(file.read_text().replace('"epoch": 3', '"epoch": 2')),
    "without end": lambda file: file.write_text("[" * 100_000),
    "an epoch gone": lambda file: file.write_text("".join(file.read_text().splitlines(keepends=True)[:2])),
    "gone": lambda file: file.unlink(),
}


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_metrics_are_refused_and_written_anew_from_the_checkpoint(name, whole, tmp_path, monkeypatch, agree):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    assert last_metrics(run) == read_metrics(run)[2]
    BROKEN[name](run / "metrics.jsonl")
    short = {"empty": 0, "an epoch gone": 2, "gone": 0}
    if name in short:
        assert len(read_metrics(run)) == short[name]
        message = r"run/metrics\.jsonl does not hold the run's 3 epochs; .* writes it anew, from the checkpoint"
    else:
        message = r"run/metrics\.jsonl is damaged: .* writes it anew, from the checkpoint"
        with pytest.raises(bsam.BsamError, match=message):
            read_metrics(run)
    with pytest.raises(bsam.BsamError, match=message):
        last_metrics(run)
    monkeypatch.setattr(training.Training, "epoch", lambda *_: pytest.fail("it trains"))
    train(run)
    assert agree(end(run), end(whole))


def test_a_machine_list_that_is_no_json_costs_nothing_but_itself(whole, tmp_path, agree):
    run = tmp_path / "run"
    train(run, stop=1)
    (run / "environment.json").write_text("{half a")
    train(run)
    assert len(json.loads((run / "environment.json").read_text())) == 1
    assert agree(end(run), end(whole))


@pytest.mark.parametrize(
    "state", [{"epochs": [], "readings": []}, {"network": {"other": torch.ones(2)}, "epochs": [], "readings": []}]
)
def test_a_whole_checkpoint_of_something_else_is_refused_in_a_sentence(tmp_path, state):
    run = tmp_path / "run"
    train(run, stop=1)
    write_checkpoint(run / CHECKPOINT, state)
    with pytest.raises(bsam.BsamError, match=r"is not of this run: remove the folder"):
        train(run)


def test_a_checkpoint_that_is_a_folder_counts_as_damaged(whole, tmp_path, agree):
    run = tmp_path / "run"
    train(run, stop=2)
    (run / CHECKPOINT).unlink()
    (run / CHECKPOINT).mkdir()
    told = []
    with pytest.raises(bsam.BsamError, match="could not be written"):
        train(run, tell=told.append)
    assert "cannot be read" in told[0]
    (run / CHECKPOINT).rmdir()
    train(run)
    assert agree(end(run), end(whole))
