import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bsam.lab.config import Run
from bsam.lab.recipes.plan import state_of
from bsam.lab.running import executors
from bsam.lab.running.executors import default_slots, local_processes
from bsam.lab.running.job import Job, Outcome, train_in_worker, train_run
from bsam.lab.running.runner import RunsFailed, StudyCallbacks, run_all
from bsam.lab.training import Machine
from bsam.lab.training.machine import devices_of
from bsam.lab.training.run_dir import run_dir_name
from fake_fit import train_by
from processes import Process

RUN = Run.of("sgd", lr=0.1, batch=64, limit_train=128, limit_test=64, label_smoothing=0.0, epochs=1)


@pytest.mark.usefixtures("at_once")
def test_two_processes_give_the_results_of_one_and_a_killed_one_continues(tmp_path):
    """One run fails, one diverges, one starts from another one, and a process is killed after an epoch."""
    good = [replace(RUN, seed=1, sharpness_rho=0.05), replace(RUN, method="bsam", epochs=12), replace(RUN, seed=3)]
    next_run = replace(RUN, seed=4, init=run_dir_name(good[0]))
    diverging, failing = replace(RUN, lr=1e30), replace(RUN, method="sam", arguments={"rho": -1.0})
    runs, killed, running, messages = [next_run, failing, diverging, *good], [], [], []

    def kill(progress):
        running.append(progress.running)
        long = state_of(good[1], tmp_path / "there")
        if 0 < len(long.epochs) < 12 and not killed:
            killed.append(int((long.path / "log.txt").read_text().split("process ")[1].split()[0]))
            os.kill(killed[0], signal.SIGKILL)

    callbacks = StudyCallbacks(on_progress=kill, on_message=messages.append)
    with local_processes(2, "cpu", 1) as executor, pytest.raises(RunsFailed, match="rho") as failure:
        run_all(runs, tmp_path / "there", Machine(checkpoint_every=0), callbacks, executor)
    assert sum(run_dir_name(good[1]) in message and "killed" in message for message in messages) == 1
    assert list(failure.value.failed) == [run_dir_name(failing)]
    there = [state_of(run, tmp_path / "there") for run in runs]
    assert [str(state) for state in there] == ["done", "missing", "diverged", "done", "done", "done"]
    log = (there[4].path / "log.txt").read_text()
    assert log.count("process ") == 2
    assert killed
    assert killed[0] != os.getpid()
    assert "epoch 12 of 12: train_loss" in log
    assert max(running) == 2
    here = run_all([*good, next_run], tmp_path / "here", Machine("cpu"))
    for one, other in zip([*there[3:], there[0]], here, strict=True):
        assert [{**a, "seconds": 0} for a in one.epochs] == [{**b, "seconds": 0} for b in other.epochs]
        assert (one.path / "model.safetensors").read_bytes() == (other.path / "model.safetensors").read_bytes()


def call(job):
    """Call a function instead of training a run."""
    return os.getpid(), job.machine.device, job.run()


def settings():
    time.sleep(0.1)
    return os.environ["CUDA_MPS_PIPE_DIRECTORY"], torch.get_num_threads()


def test_processes_have_devices_threads_and_mps_and_are_replaced(control, gpus, monkeypatch):
    gpus(2)
    monkeypatch.setattr(executors, "train_in_worker", call)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    with pytest.raises(KeyboardInterrupt), local_processes(3) as executor:  # noqa: PT012
        futures = [executor.submit(Job(settings, Path())) for _ in range(3)]
        pids, devices, values = zip(*(future.result() for future in futures), strict=True)
        os.kill(pids[0], signal.SIGINT)  # only the parent handles Ctrl-C
        assert executor.submit(Job(os.getpid, Path())).result()[0] == pids[0]
        os.kill(pids[0], signal.SIGKILL)  # while it is idle
        with contextlib.suppress(BrokenProcessPool):  # perhaps it is noticed only now
            executor.submit(Job(os.getpid, Path())).result()
        again, device, _ = executor.submit(Job(os.getpid, Path())).result()
        pausing = executor.submit(Job(signal.pause, Path()))
        raise KeyboardInterrupt
    assert pausing.done()
    assert (len({*pids, again, os.getpid()}), device) == (5, "cuda:0")
    assert devices == ("cuda:0", "cuda:1", "cuda:0")
    assert {threads for _, threads in values} == {2}
    assert all(Path(folder).name.startswith("bsam-mps-") for folder, _ in values)
    assert not any(map(is_alive, (*pids, again)))
    assert control.read_text().split() == ["get_server_list", "quit"]


def is_alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"  # nobody reaps orphans


def die_beside_a_worker(path):
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method: get_context("fork")  # another fork server would import torch
    executors.train_in_worker = call
    with local_processes(1, "cpu") as executor:
        path.write_text(str(executor.submit(Job(os.getpid, Path())).result()[0]))
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_ends_when_its_parent_is_killed(tmp_path):
    assert Process(die_beside_a_worker, tmp_path / "pid").wait() == -signal.SIGKILL
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_output_of_a_worker_goes_to_the_log(tmp_path, monkeypatch, capfd):
    """Also that of C libraries, but not what is printed afterwards."""

    def fit(*_, callbacks, **options):
        print("of Python", flush=True)
        ctypes.CDLL(None).write(1, b"of C\n", 5)
        ctypes.CDLL(None).write(2, b"errors of C\n", 12)
        callbacks.on_message("for the user")

    train_by(fit, monkeypatch)
    assert train_in_worker(Job(RUN, tmp_path / run_dir_name(RUN))) == Outcome(messages=("for the user",))
    os.write(1, b"later\n")
    log = (tmp_path / run_dir_name(RUN) / "log.txt").read_text().splitlines()
    assert {"of Python", "of C", "errors of C"} < set(log)
    assert capfd.readouterr() == ("later\n", "")


@pytest.mark.parametrize("message", ["CUDA out of memory. Tried to allocate 2 GiB.", "CUDA error: out of memory\nMore"])
def test_a_run_that_does_not_fit_on_the_gpu_asks_for_fewer_jobs(message, tmp_path, monkeypatch):
    def fit(*_, **options):
        raise torch.OutOfMemoryError(message)

    train_by(fit, monkeypatch)
    assert "fewer --jobs" in train_run(Job(RUN, tmp_path / run_dir_name(RUN)), print, print).failed
    assert message.partition("\n")[0] in (tmp_path / run_dir_name(RUN) / "log.txt").read_text()


def test_the_devices_of_a_name(gpus):
    gpus(2)
    assert devices_of("auto") == devices_of("cuda") == ["cuda:0", "cuda:1"]
    assert devices_of("cuda:1") == ["cuda:1"]
    assert devices_of("cpu") == ["cpu"]


@pytest.mark.parametrize(
    ("count", "device", "has_mps", "unfinished", "slots"),
    [
        (0, "auto", True, 9, 7),
        (1, "cpu", True, 9, 7),
        (2, "auto", True, 9, 6),
        (2, "cuda:1", True, 9, 3),
        (2, "auto", False, 9, 2),
        (2, "auto", True, 4, 4),
        (1, "auto", True, 0, 1),
    ],
)
def test_by_default_three_runs_share_a_gpu_through_mps(
    count, device, has_mps, unfinished, slots, gpus, control, monkeypatch
):
    gpus(count)
    if not has_mps:
        monkeypatch.setenv("PATH", "")
    assert default_slots(device, unfinished, on_cpu=7) == slots


@pytest.mark.parametrize(
    ("count", "jobs", "is_default", "case", "slots", "words"),
    [
        (1, 3, True, "", 3, ["3 runs", "1 GPU", "MPS", "--jobs"]),
        (2, 6, True, "RUNS_ALREADY", 6, ["6 runs", "2 GPUs", "MPS", "--jobs"]),
        (2, 5, True, "DENIED", 2, ["2 runs", "2 GPUs", "--jobs"]),
        (1, 3, False, "", 3, ["3 runs", "1 GPU", "MPS"]),
        (1, 3, False, "DENIED", 3, []),
        (2, 2, False, "", 2, []),
        (0, 2, True, "", 2, []),
    ],
)
def test_the_number_of_runs_at_a_time_is_reported(
    count, jobs, is_default, case, slots, words, control, gpus, monkeypatch
):
    """Without MPS, the default is one run per GPU; a number that the user chose stays."""
    gpus(count)
    if case:
        monkeypatch.setenv(case, "1")
    messages = []
    with local_processes(jobs, "auto", None, messages.append, is_default) as executor:
        assert executor.slots() == slots
    assert control.exists() == (0 < count < jobs)
    if case == "DENIED":
        assert "denied" in messages.pop(0)
    assert len(messages) == bool(words)
    for word in ("MPS", "--jobs", *words):
        assert all((word in message) == (word in words) for message in messages)
