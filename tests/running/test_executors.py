import contextlib
import ctypes
import os
import signal
import time
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
import torch

import bsam
from bsam.recipes import executors, mps, run_job, runner
from bsam.recipes.executors import LocalProcesses, spread
from bsam.recipes.mps import nvidia_mps
from bsam.recipes.run_job import RunJob, state_of, train_in_worker
from bsam.recipes.runner import Callbacks, RunsFailed, run_all
from bsam.training.config import Run
from bsam.training.run_dir import run_dir_name
from processes import PRELOAD  # the workers are forked from a process that has imported all of this

RUN = Run("sgd", lr=0.1, batch=64, limit_train=128, limit_test=64, label_smoothing=0.0, epochs=1)


def same_end(one, other):
    assert one.finished
    assert [{**a, "seconds": 0} for a in one.epochs] == [{**b, "seconds": 0} for b in other.epochs]
    assert (one.path / "model.safetensors").read_bytes() == (other.path / "model.safetensors").read_bytes()


def test_two_processes_end_as_one_does_and_one_that_is_killed_goes_on(tmp_path, monkeypatch):
    """One run fails and one diverges, one begins with another one, and a process is killed after an epoch."""
    assert "bsam.cli" in PRELOAD
    good = [replace(RUN, seed=1, radius=0.05), replace(RUN, method="bsam", epochs=12), replace(RUN, seed=3)]
    begun = replace(RUN, seed=4, init=run_dir_name(good[0]))
    wild, wrong = replace(RUN, lr=1e30), replace(RUN, method="sam", arguments={"rho": -1.0})
    runs, killed, progress, told = [begun, wrong, wild, *good], [], [], []
    monkeypatch.setattr(runner, "LOOK", 0.05)

    def kill(found):
        progress.append(found)
        long = state_of(good[1], tmp_path / "there")
        if 0 < len(long.epochs) < 12 and not killed:
            killed.append(int((long.path / "log.txt").read_text().split("process ")[1].split()[0]))
            os.kill(killed[0], signal.SIGKILL)

    callbacks = Callbacks(on_progress=kill, on_end=lambda state, found: kill(found))
    pool = LocalProcesses(2, "cpu", 1, told.append)
    with pool, pytest.raises(RunsFailed, match="rho must be") as failure:
        run_all(runs, tmp_path / "there", callbacks, pool)
    assert told == [f"The process of {run_dir_name(good[1])} was killed: perhaps memory ran out."]
    assert list(failure.value.failed) == [run_dir_name(wrong)]
    there = [state_of(run, tmp_path / "there") for run in runs]
    assert [str(state) for state in there] == ["done", "missing", "diverged", "done", "done", "done"]
    log = (there[4].path / "log.txt").read_text()
    assert log.count("process ") == 2
    assert killed
    assert killed[0] != os.getpid()
    assert "epoch 12 of 12: train_loss" in log
    assert max(found.running for found in progress) == 2
    assert (progress[-1].done, progress[-1].failed, progress[-1].left) == (4, 2, (0.0, 0))
    here = run_all([*good, begun], tmp_path / "here", device="cpu")
    for one, other in zip([*there[3:], there[0]], here, strict=True):
        same_end(one, other)
    monkeypatch.setattr(executors, "Workers", None)
    with LocalProcesses(2, "cpu") as pool:  # nothing is left to do, and no process is started
        run_all(good, tmp_path / "there", executor=pool)


def test_a_run_whose_process_ends_each_time_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "train_in_worker", die)
    monkeypatch.setattr(executors, "RETRIES", 1)
    with LocalProcesses(1, "cpu", threads=1) as pool, pytest.raises(RunsFailed, match="its process ended 2 times"):
        run_all([RUN], tmp_path, executor=pool)


def die(job):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_trains_on_its_own_device(tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "spread", lambda device, slots: ["cpu", "cuda:1"])
    monkeypatch.setattr(executors, "nvidia_mps", lambda tell: contextlib.nullcontext({}))
    monkeypatch.setattr(executors, "train_in_worker", device_of)
    with LocalProcesses(2, threads=1) as pool:
        asked = [pool.submit(RunJob(RUN, tmp_path, {"device": "auto"}), print, print) for _ in range(2)]
        assert {future.result(60) for future in asked} == {"cpu", "cuda:1"}


def device_of(job):
    time.sleep(0.3)  # so that the other process takes the other run
    return job.options["device"]


def test_processes_are_killed_when_the_block_ends_by_an_exception(tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "train_in_worker", wait)
    told = []
    with contextlib.suppress(KeyboardInterrupt), LocalProcesses(1, "cpu", 1, told.append) as pool:
        future = pool.submit(RunJob(RUN, tmp_path), print, print)
        interrupt()
    assert isinstance(future.exception(), (BrokenProcessPool, CancelledError))  # as the process had begun, or not
    assert told == []  # and it is not started again


def wait(job):
    time.sleep(30)


def test_what_a_worker_prints_is_in_the_log(tmp_path, monkeypatch, capfd):
    """Also what libraries in C print; and afterwards it is not."""

    def fit(*_, **options):
        print("of Python", flush=True)
        ctypes.CDLL(None).write(1, b"of C\n", 5)
        ctypes.CDLL(None).write(2, b"errors of C\n", 12)

    monkeypatch.setattr(run_job, "fit", fit)
    job = RunJob(RUN, tmp_path)
    train_in_worker(job)
    os.write(1, b"later\n")
    log = job.log.read_text().splitlines()
    assert {"of Python", "of C", "errors of C"} < set(log)
    assert capfd.readouterr() == ("later\n", "")


def test_processes_are_spread_over_the_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert spread("auto", 3) == spread("cuda", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert spread("cuda:1", 2) == ["cuda:1", "cuda:1"]  # where all are asked for on one
    assert spread("cpu", 2) == ["cpu", "cpu"]
    with pytest.raises(bsam.BsamError, match="jobs must be"):
        LocalProcesses(0)


@pytest.mark.parametrize(("gpus", "is_shared"), [(1, True), (2, False)])
def test_mps_is_used_where_gpus_are_shared(gpus, is_shared, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(executors._Slot, "start", lambda slot: setattr(slot, "pool", contextlib.nullcontext()))
    told = []
    monkeypatch.setattr(LocalProcesses, "_train", lambda pool, job: None)
    with LocalProcesses(2, tell=told.append) as pool:
        pool.submit(None, print, print)
    without = "NVIDIA MPS is not on (there is no program nvidia-cuda-mps-control): runs that share a GPU take turns"
    assert [sentence.startswith(without) for sentence in told] == [True] * is_shared


CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then
    [ -n "$DENIED" ] && echo denied && exit 1
    touch "$CUDA_MPS_PIPE_DIRECTORY/control"
    exit 0
fi
read command
echo "$command" >> "$CALLS"
[ -n "$RUNS_ALREADY" ] || [ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ]
"""


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A program in place of NVIDIA's; the file to which it adds what it is asked."""
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(CONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return tmp_path / "calls"


@pytest.mark.parametrize(
    ("case", "words", "calls"),
    [
        ("", "is on for this command", ["get_server_list", "quit"]),
        ("DENIED", "is not on (denied)", ["get_server_list"]),
        ("RUNS_ALREADY", None, ["get_server_list"]),
    ],
)
def test_mps_is_started_and_stopped_or_it_is_said_that_it_is_not_on(case, words, calls, control, monkeypatch):
    """With a program in place of NVIDIA's."""
    if case:
        monkeypatch.setenv(case, "1")
    told = []
    with nvidia_mps(told.append) as environment:
        assert ("CUDA_MPS_PIPE_DIRECTORY" in environment) == (case == "")
    assert control.read_text().split() == calls
    assert [words in sentence for sentence in told] == ([] if words is None else [True])


def test_processes_find_mps_which_is_stopped_although_stopping_is_interrupted(control, tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "spread", lambda device, slots: ["cuda:0", "cuda:0"])
    monkeypatch.setattr(executors, "train_in_worker", settings_of)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)  # of more
    end = executors.Workers.__exit__
    monkeypatch.setattr(executors.Workers, "__exit__", lambda *a: (end(*a), interrupt()))
    with pytest.raises(KeyboardInterrupt), LocalProcesses(2) as pool:
        folder, threads = pool.submit(RunJob(RUN, tmp_path), print, print).result(60)
    assert folder.rpartition("/")[2].startswith("bsam-mps-")
    assert threads == 3
    assert control.read_text().split() == ["get_server_list", "quit"]


def test_a_process_is_killed_whose_start_is_interrupted(tmp_path, monkeypatch):
    killed = []
    monkeypatch.setattr(executors.Workers, "submit", interrupt)
    monkeypatch.setattr(executors.Workers, "kill", lambda pool: killed.append(pool))
    with pytest.raises(KeyboardInterrupt), LocalProcesses(1, "cpu", 1) as pool:
        pool.submit(RunJob(RUN, tmp_path), None, None)
    assert len(killed) == 1


def settings_of(job):
    return os.environ["CUDA_MPS_PIPE_DIRECTORY"], torch.get_num_threads()


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["_start", "tell"])
def test_mps_is_stopped_where_its_start_is_interrupted(where, control, monkeypatch):
    start = mps._start
    if where == "_start":
        monkeypatch.setattr(mps, "_start", lambda environment: (start(environment), interrupt()))
    with pytest.raises(KeyboardInterrupt), nvidia_mps(interrupt):
        pass
    assert control.read_text().split() == ["get_server_list", "quit"]


def test_a_process_that_starts_again_while_all_stop_is_killed(tmp_path, monkeypatch):
    """As where SIGTERM reaches the processes before their parent has heard of it."""
    made, killed = [], []

    class Pool:
        def __init__(self, *arguments):
            made.append(self)
            executor._stopped = len(made) == 2

        def submit(self, function, *arguments):
            future = Future()
            future.set_exception(BrokenProcessPool())
            return future

        def kill(self):
            killed.append(self)

        __exit__ = kill

    monkeypatch.setattr(executors, "Workers", Pool)
    executor = LocalProcesses(1, "cpu", 1)
    with pytest.raises(BrokenProcessPool):
        executor.submit(RunJob(RUN, tmp_path), None, None).result(10)
    assert len(made) == 2
    assert killed == made[1:]
