"""Events as TensorBoard itself reads them."""

from __future__ import annotations

import struct
import warnings

import pytest

from bsam.training.config import Run
from bsam.training.events import Events
from bsam.training.folder import read_metrics
from bsam.training.loop import fit

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

RUN = Run("bsam", lr=0.1, batch=64, label_smoothing=0.0, limit_train=128, epochs=3)


def read(folder):
    """(step, tag, value) of every event, in their order; the reader checks lengths and checksums."""
    (file,) = folder.glob("events.out.tfevents.*")
    first, *rest = (Event.FromString(record) for record in RawEventFileLoader(str(file)).Load())
    assert first.file_version == "brain.Event:2"
    assert all(event.wall_time > 1.7e9 for event in rest)
    return [(event.step, value.tag, value.simple_value) for event in rest for value in event.summary.value]


def single(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def expected(folder):
    return [
        (row["epoch"], name, single(value))
        for row in read_metrics(folder)
        for name, value in row.items()
        if name != "epoch"
    ]


def test_tensorboard_reads_what_was_measured(tmp_path):
    fit(RUN, tmp_path, device="cpu")
    found = read(tmp_path / "tensorboard")
    assert found == expected(tmp_path)
    assert {tag for _, tag, _ in found} == {"train_loss", "test_loss", "test_accuracy", "lr", "rho_min", "seconds"}
    assert len(found) == 18


@pytest.mark.parametrize("torn", [b"", b"\x18\x00\x00\x00\x00\x00\x00\x00half"])
def test_after_an_interruption_each_epoch_is_there_once(tmp_path, torn):
    for epoch in (1, 2):

        def stop(number, metrics, last=epoch):
            if number == last:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            fit(RUN, tmp_path, device="cpu", each_epoch=stop)
        assert read(tmp_path / "tensorboard") == expected(tmp_path)
        (file,) = (tmp_path / "tensorboard").iterdir()
        file.write_bytes(file.read_bytes() + torn)  # as a process that was killed would leave it
    fit(RUN, tmp_path, device="cpu")
    found = read(tmp_path / "tensorboard")
    assert found == expected(tmp_path)
    assert [step for step, tag, _ in found if tag == "lr"] == [1, 2, 3]


def test_only_numbers_become_events_and_large_steps_fit(tmp_path):
    rows = [
        {"epoch": 1, "loss": 0.5, "sharpness": {"loss": 1.0}},
        {"epoch": 300, "loss": float("nan"), "name": "x"},
        {"epoch": 70_000, "count": 3},
    ]
    events = Events(tmp_path, rows[:1])
    events.add(rows[1])
    events.add(rows[2])
    found = read(tmp_path)
    assert [(step, tag) for step, tag, _ in found] == [(1, "loss"), (300, "loss"), (70_000, "count")]
    assert found[0][2] == 0.5
    assert found[1][2] != found[1][2]


def test_other_files_of_the_folder_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    Events(tmp_path, [])
    assert (tmp_path / "notes.txt").read_text() == "mine"
