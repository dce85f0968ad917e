"""Two processes on gloo, with the environment variables of torchrun, against one process on whole batches."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bsam.lab.common.termination import Terminated, terminable
from bsam.lab.tasks.classification import SMALL_IMAGE_BATCHES, Classification
from bsam.lab.training import Machine, fit
from bsam.lab.training.machine import distributed_context
from bsam.lab.training.run_dir import RunDir
from helpers import trained_as
from processes import Process, Script

SCRIPT = Path(__file__).with_name("torchrun_fit.py")
spec = importlib.util.spec_from_file_location("torchrun_fit", SCRIPT)
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The folder of a training that was stopped after an epoch and continued, and the notes of both ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    log = folder / "log"
    process = Script(SCRIPT, folder, output=log)
    try:
        assert process.wait(timeout=200) == 0, log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    stopped, ended = json.loads((folder / "outcomes.json").read_text())
    assert stopped["status"] != 0
    assert "stopped by the test" in log.read_text()
    assert stopped["epochs"] == [1]
    assert ended["status"] == 0, log.read_text()
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", cases.RUNS)
def test_two_processes_give_the_result_of_one(name, ranks, tmp_path, runs):
    folder, notes = ranks
    with trained_as(cases.WithoutBatchNorm):
        fit(cases.RUNS[name], tmp_path / "one", Machine("cpu"))
    one, two = (runs.load(path) for path in (tmp_path / "one", folder / name))
    start = cases.WithoutBatchNorm(cases.RUNS[name], torch.device("cpu")).network().state_dict()
    for key, value in one["network"].items():
        assert torch.allclose(value, two["network"][key], rtol=1e-5, atol=1e-5), key
        assert (value - start[key]).abs().max() > 5e-3  # the weights have moved
    for a, b in zip(one["epochs"], two["epochs"], strict=True):
        assert list(a) == list(b)
        assert {**b, "seconds": 0} == pytest.approx({**a, "seconds": 0}, rel=1e-4)
    assert notes[0][name] == notes[1][name] == pytest.approx([epoch["train_loss"] for epoch in one["epochs"]], rel=1e-5)


def test_only_the_first_process_writes_and_calls_back(ranks):
    """In the second one, opening a file for writing raises an error."""
    folder, notes = ranks
    assert [note["on_epoch"] for note in notes] == [[2, 1, 2], []]
    for name, starts in (("bsam", 2), ("mesa", 1)):
        assert len(json.loads((folder / name / "environment.json").read_text())) == starts
        assert len(list((folder / name / "tensorboard").iterdir())) == 1
        assert (folder / name / "model.safetensors").exists()
    readings = (folder / "bsam" / "probe.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in readings] == [0, 2, 4]


def test_all_processes_evaluate_and_one_measures(ranks, monkeypatch):
    """The metrics are those of the saved network, evaluated by one process: also with batch norm, bit for bit."""
    folder, (first, second) = ranks[0], (note["measured"] for note in ranks[1])
    assert first["calls"] == ["sharpness", "top_eigenvalues", "landscape"]
    assert second["calls"] == []
    assert (first["sizes"], second["sizes"]) == ([20, 10], [20])
    assert first["result"] == second["result"]
    (entry,) = RunDir(folder / "measured").flatness()
    assert first["result"][:2] == [entry["eigenvalues"]["maximum"], entry["landscape"]["loss"]]
    monkeypatch.setitem(SMALL_IMAGE_BATCHES, "cpu", cases.SMALL_BATCH)
    task = Classification(cases.MEASURED, torch.device("cpu"))
    network = RunDir(folder / "measured").load_into(task.network()).eval()
    assert task.evaluate(network).items() <= RunDir(folder / "measured").last_metrics().items()


def wait_for_slow_process(rank, folder):
    """In a group with a time limit of a second, rank 0 works for longer; then rank 1 is terminated while it waits."""
    init_method, limit = f"file://{folder / 'store'}", timedelta(seconds=1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2, timeout=limit)
    os.environ["WORLD_SIZE"] = "2"
    with distributed_context("cpu") as context, terminable():
        time.sleep(0 if rank else 1.3)
        received = context.broadcast(f"from {rank}")
        gathered = context.gather(rank)
        (folder / str(rank)).write_text(f"{received} {gathered}")
        time.sleep(0 if rank else 0.6)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        try:
            context.barrier()
        except Terminated:
            os._exit(7)


def test_a_process_waits_without_a_time_limit_but_not_for_sigterm(tmp_path):
    ranks = [Process(wait_for_slow_process, rank, tmp_path) for rank in range(2)]
    assert ranks[1].wait() == 7
    assert (tmp_path / "0").exists()
    ranks[0].wait()
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == "from 0 [0, 1]"


def test_refusals(ranks):
    """Both processes raise the same error, also for a loss that only the first one has computed."""
    folder, (first, second) = ranks
    words = {"saf": "mesa", "batch": "63", "accumulate": "62", "k": "33", "diverged": "test loss"}
    words |= dict.fromkeys(("friendly_sam", "looksam", "aesam"), "m_sharpness")
    for name, word in words.items():
        assert first[name] == second[name]
        assert word in first[name]
    assert not list((folder / "refused" / "diverged").glob("checkpoint*"))


def test_the_k_of_ksam_is_for_the_whole_batch(ranks):
    """One pass over a process's part of the batch finds its part of the k hardest, which two passes then use."""
    for note in ranks[1]:
        assert note["ksam"] == [32, 8, 8] * 2
        assert note["default k"] == [64, 32, 32]
        assert note["m_sharpness"] == [32, 32] * 2


def test_each_process_works_on_half_of_every_batch(ranks):
    """If both used the whole batch, the result would be the same, in twice the time."""
    first, second = (note["batches"] for note in ranks[1])
    assert len(first) == len(second) == 3 * (1 + 2)  # the second epoch of BSAM, and two of MESA
    for a, b in zip(first, second, strict=True):
        assert (len(a), len(b), len({*a, *b})) == (32, 32, 64)
