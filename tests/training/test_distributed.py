"""Two processes, started as torchrun starts them, on gloo, against one process on whole batches."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from bsam.training.loop import fit
from bsam.training.run_dir import RunDir
from processes import Script

SCRIPT = Path(__file__).with_name("torchrun_fit.py")
spec = importlib.util.spec_from_file_location("torchrun_fit", SCRIPT)
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """A training that broke off after its first epoch, and went on; and others that did not break off: the folder, and
    what both ranks noted.
    """
    folder = tmp_path_factory.mktemp("ranks")
    log = folder / "log"
    process = Script(SCRIPT, folder, output=log)
    try:
        assert process.wait(timeout=200) == 0, log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    stopped, ended = json.loads((folder / "statuses.json").read_text())
    assert stopped["status"] != 0
    assert "as a kill would" in log.read_text()
    assert stopped["epochs"] == [1]
    assert ended["status"] == 0, log.read_text()
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", cases.RUNS)
def test_two_processes_end_where_one_does(name, ranks, tmp_path, runs):
    """In a network without batch norm; BSAM also after it broke off."""
    folder, notes = ranks
    fit(cases.RUNS[name], tmp_path / "one", device="cpu", task=cases.Without)
    one, two = (runs.load(path) for path in (tmp_path / "one", folder / name))
    for key, value in one["network"].items():
        assert torch.allclose(value, two["network"][key], rtol=1e-5, atol=1e-5), key
    start = cases.Without(cases.RUNS[name], torch.device("cpu")).network().state_dict()
    assert all(
        (value - start[key]).abs().max() > 1e-2 for key, value in one["network"].items()
    )  # there was something to get wrong
    for a, b in zip(one["epochs"], two["epochs"], strict=True):
        assert list(a) == list(b)
        assert {**b, "seconds": 0} == pytest.approx({**a, "seconds": 0}, rel=1e-4)
    assert notes[0][name] == notes[1][name] == pytest.approx([epoch["train_loss"] for epoch in one["epochs"]], rel=1e-5)


def test_two_processes_find_joints_as_one_does(ranks, tmp_path, runs, monkeypatch):
    """Also a network without batch norm. What it finds at the end is written once."""
    folder, notes = ranks
    monkeypatch.setattr("bsam.data.NUM_FIGURES", cases.FIGURES)
    fit(cases.JOINTS, tmp_path / "one", device="cpu", task=cases.WithoutJoints)
    one, two = (runs.load(path) for path in (tmp_path / "one", folder / "joints"))
    for key, value in one["network"].items():
        assert torch.allclose(value, two["network"][key], rtol=1e-4, atol=1e-4), key
    start = cases.WithoutJoints(cases.JOINTS, torch.device("cpu")).network().state_dict()
    assert all((value - start[key]).abs().max() > 1e-2 for key, value in one["network"].items())
    for a, b in zip(one["epochs"], two["epochs"], strict=True):
        assert {**a, "seconds": 0} == pytest.approx({**b, "seconds": 0}, rel=1e-4)
    assert notes[0]["joints"] == notes[1]["joints"]
    expected, found = (RunDir(path).predictions() for path in (tmp_path / "one", folder / "joints"))
    for name in expected:
        assert np.allclose(found[name], expected[name], atol=1e-2), name


def test_only_the_first_process_writes_and_tells(ranks):
    """The other one would have raised on the first file that it opened to write."""
    folder, notes = ranks
    assert [note["told"] for note in notes] == [[2, 1, 2, 1, 2], []]
    assert (
        len(json.loads((folder / "bsam" / "environment.json").read_text())) == 2
    )  # one for each start, not for each process
    assert len(json.loads((folder / "sgd" / "environment.json").read_text())) == 1
    assert [json.loads(line)["step"] for line in (folder / "bsam" / "probe.jsonl").read_text().splitlines()] == [
        0,
        3,
        6,
    ]
    for name in cases.RUNS:
        assert len(list((folder / name / "tensorboard").iterdir())) == 1
        assert (folder / name / "model.safetensors").exists()


def test_what_two_processes_cannot_do_is_refused_by_both(ranks):
    for note in ranks[1]:
        assert "single process: use mesa" in note["saf"]
        assert note["odd"] == "batch must be a multiple of the number of processes (2), got 63"
        assert (
            note["odd k"]
            == "k must be a multiple of the 2 processes, each of which chooses among its share of the batch; got 33"
        )
        for name, remembered in (("friendly_sam", "gradient_mean"), ("looksam", "g_v"), ("aesam", "g_v")):
            assert note[name].startswith(f"{name} remembers something between steps ({remembered}")
            assert note[name].endswith("leave m_sharpness out, or take a method that remembers nothing")


def test_the_k_of_ksam_is_of_the_whole_batch(ranks):
    """One pass over a process' share of the batch finds its part of the k hardest, and two passes see those."""
    for note in ranks[1]:
        assert note["ksam"] == [32, 8, 8] * 4
        assert note["by default"] == [64, 32, 32] * 2
        assert note["alone"] == [32, 32] * 4


def test_both_processes_are_told_of_a_loss_that_one_has_seen(ranks):
    """The first one alone judges the network."""
    folder, notes = ranks
    assert notes[0]["lost at last"] == notes[1]["lost at last"]
    assert re.match(r"the test loss is (nan|inf) in epoch 1: .* No epoch was finished", notes[0]["lost at last"])
    assert not list((folder / "refused" / "lost at last").glob("checkpoint*"))


def test_each_process_works_on_its_half_of_every_batch(ranks):
    """Both on the whole of it would end in the same place, in twice the time."""
    _, notes = ranks
    steps = 4 * (2 - 1) + 4 * 2 * 2  # BSAM's second epoch, and two of SGD and of MESA
    assert len(notes[0]["seen"]) == len(notes[1]["seen"]) == steps
    for a, b in zip(notes[0]["seen"], notes[1]["seen"], strict=True):
        assert (len(a), len(b), len({*a, *b})) == (32, 32, 64)
