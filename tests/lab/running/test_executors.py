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

import bsam
from bsam.lab.recipes.columns import state_of
from bsam.lab.running import executors, job, runner
from bsam.lab.running.executors import LocalProcesses, default_slots, is_mps_installed, nvidia_mps, spread, worker_pool
from bsam.lab.running.job import RunJob, train_in_worker
from bsam.lab.running.runner import Callbacks, RunsFailed, run_all
from bsam.lab.training.config import Run
from bsam.lab.training.run_dir import run_dir_name
from processes import (
    PRELOAD,  # the workers are forked from a process that has imported all of this
    Process,
)

RUN = Run("sgd", lr=0.1, batch=64, limit_train=128, limit_test=64, label_smoothing=0.0, epochs=1)


def test_two_processes_give_the_results_of_one_and_a_killed_one_continues(tmp_path, monkeypatch):
    """One run fails, one diverges, one starts from another one, and a process is killed after an epoch."""
    assert "bsam.lab.cli" in PRELOAD
    good = [replace(RUN, seed=1, radius=0.05), replace(RUN, method="bsam", epochs=12), replace(RUN, seed=3)]
    next_run = replace(RUN, seed=4, init=run_dir_name(good[0]))
    diverging, failing = replace(RUN, lr=1e30), replace(RUN, method="sam", arguments={"rho": -1.0})
    runs, killed, history, messages = [next_run, failing, diverging, *good], [], [], []
    monkeypatch.setattr(runner, "LOOK", 0.05)

    def kill(progress):
        history.append(progress)
        long = state_of(good[1], tmp_path / "there")
        if 0 < len(long.epochs) < 12 and not killed:
            killed.append(int((long.path / "log.txt").read_text().split("process ")[1].split()[0]))
            os.kill(killed[0], signal.SIGKILL)

    callbacks = Callbacks(on_progress=kill, on_end=lambda _, progress, __: kill(progress), on_message=messages.append)
    with LocalProcesses(2, "cpu", 1) as pool, pytest.raises(RunsFailed, match="rho") as failure:
        run_all(runs, tmp_path / "there", callbacks, pool, checkpoint_every=0)
    assert sum(run_dir_name(good[1]) in message and "killed" in message for message in messages) == 1
    assert list(failure.value.failed) == [run_dir_name(failing)]
    there = [state_of(run, tmp_path / "there") for run in runs]
    assert [str(state) for state in there] == ["done", "missing", "diverged", "done", "done", "done"]
    log = (there[4].path / "log.txt").read_text()
    assert log.count("process ") == 2
    assert killed
    assert killed[0] != os.getpid()
    assert "epoch 12 of 12: train_loss" in log
    assert max(progress.running for progress in history) == 2
    assert (history[-1].done, history[-1].failed, history[-1].left) == (4, 2, (0.0, 0))
    here = run_all([*good, next_run], tmp_path / "here", device="cpu")
    for one, other in zip([*there[3:], there[0]], here, strict=True):
        assert one.finished
        assert [{**a, "seconds": 0} for a in one.epochs] == [{**b, "seconds": 0} for b in other.epochs]
        assert (one.path / "model.safetensors").read_bytes() == (other.path / "model.safetensors").read_bytes()
    monkeypatch.setattr(executors, "worker_pool", None)
    with LocalProcesses(2, "cpu") as pool:  # nothing is left to do, so no process is started
        run_all(good, tmp_path / "there", executor=pool)


def settings_of(job):
    time.sleep(0.1)
    return os.getpid(), job.options["device"], os.environ["CUDA_MPS_PIPE_DIRECTORY"], torch.get_num_threads()


def test_processes_have_devices_threads_and_mps_and_are_replaced(control, tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "spread", lambda device, slots: ["cuda:0", "cuda:1", "cuda:0"])
    monkeypatch.setattr(executors, "train_in_worker", settings_of)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    run_job = RunJob(RUN, tmp_path, {"device": "auto"})
    with pytest.raises(KeyboardInterrupt), LocalProcesses(3) as pool:  # noqa: PT012
        pids, devices, folders, threads = zip(
            *[future.result() for future in [pool.submit(run_job, None, None) for _ in range(2)]], strict=True
        )
        os.kill(pids[0], signal.SIGKILL)  # while it is idle
        while pool._slots[0].pool._broken is False:
            time.sleep(0.01)
        again, device, *_ = pool.submit(run_job, None, None).result()
        raise KeyboardInterrupt
    assert (len({*pids, again, os.getpid()}), device) == (4, "cuda:0")
    assert devices == ("cuda:0", "cuda:1")
    assert threads == (2, 2)
    assert all(folder.rpartition("/")[2].startswith("bsam-mps-") for folder in folders)
    assert control.read_text().split() == ["get_server_list", "quit"]


def test_the_output_of_a_worker_goes_to_the_log(tmp_path, monkeypatch, capfd):
    """Also that of C libraries, but not what is printed afterwards."""

    def fit(*_, on_message, **options):
        print("of Python", flush=True)
        ctypes.CDLL(None).write(1, b"of C\n", 5)
        ctypes.CDLL(None).write(2, b"errors of C\n", 12)
        on_message("for the user")

    monkeypatch.setattr(job, "fit", fit)
    run_job = RunJob(RUN, tmp_path)
    assert train_in_worker(run_job).messages == ("for the user",)
    os.write(1, b"later\n")
    log = run_job.log.read_text().splitlines()
    assert {"of Python", "of C", "errors of C"} < set(log)
    assert capfd.readouterr() == ("later\n", "")


def test_a_closed_output_ends_all_runs(tmp_path):
    def close(*_):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_all([RUN, replace(RUN, seed=1)], tmp_path, Callbacks(on_progress=close))


@pytest.mark.parametrize("message", ["CUDA out of memory. Tried to allocate 2 GiB.", "CUDA error: out of memory\nMore"])
def test_a_run_that_does_not_fit_on_the_gpu_asks_for_fewer_jobs(message, tmp_path, monkeypatch):
    def fit(*_, **options):
        raise torch.OutOfMemoryError(message)

    monkeypatch.setattr(job, "fit", fit)
    run_job = RunJob(RUN, tmp_path)
    assert "fewer --jobs" in train_in_worker(run_job).failed
    assert message.partition("\n")[0] in run_job.log.read_text()


@pytest.fixture
def gpus(monkeypatch):
    """A function that sets the number of GPUs that torch sees."""

    def see(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return see


def test_processes_are_spread_over_the_gpus(gpus):
    gpus(2)
    assert spread("auto", 3) == spread("cuda", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert spread("cuda:1", 2) == ["cuda:1", "cuda:1"]
    assert spread("cpu", 2) == ["cpu", "cpu"]
    with pytest.raises(bsam.BsamError, match="jobs"):
        LocalProcesses(0)


@pytest.mark.parametrize(
    ("count", "device", "has_mps", "unfinished", "slots"),
    [
        (0, "auto", True, 9, 7),
        (1, "cpu", True, 9, 7),
        (1, "auto", True, 9, 3),
        (2, "auto", True, 9, 6),
        (2, "cuda", True, 9, 6),
        (2, "cuda:1", True, 9, 3),
        (1, "auto", False, 9, 1),
        (2, "auto", False, 9, 2),
        (2, "auto", True, 4, 4),
        (2, "auto", False, 1, 1),
        (1, "auto", True, 1, 1),
        (1, "auto", True, 0, 1),
    ],
)
def test_by_default_three_runs_share_a_gpu_through_mps(count, device, has_mps, unfinished, slots, gpus, monkeypatch):
    gpus(count)
    monkeypatch.setattr(executors, "is_mps_installed", lambda: has_mps)
    assert default_slots(device, unfinished, on_cpu=7) == slots


def test_mps_is_installed_if_its_program_is_on_the_path(control, monkeypatch):
    assert is_mps_installed()
    assert not control.exists()  # nothing was started
    monkeypatch.setenv("PATH", "")
    assert not is_mps_installed()


@pytest.mark.parametrize(
    ("count", "jobs", "is_default", "case", "slots", "sentence"),
    [
        (1, 3, True, "", 3, "Training 3 runs at a time on one GPU (NVIDIA MPS); choose another number with --jobs."),
        (2, 6, True, "RUNS_ALREADY", 6, "Training 6 runs at a time on 2 GPUs (NVIDIA MPS); "),
        (1, 3, True, "DENIED", 1, "Training one run at a time on one GPU; choose another number with --jobs."),
        (2, 5, True, "DENIED", 2, "Training 2 runs at a time on 2 GPUs; choose another number with --jobs."),
        (2, 2, True, "PATH", 2, "Training 2 runs at a time on 2 GPUs; choose another number with --jobs."),
        (1, 3, False, "", 3, "Training 3 runs at a time on one GPU (NVIDIA MPS)."),
        (1, 3, False, "DENIED", 3, None),
        (2, 2, False, "", 2, None),
        (0, 2, True, "", 2, None),
    ],
)
def test_the_number_of_runs_at_a_time_is_reported(
    count, jobs, is_default, case, slots, sentence, control, gpus, monkeypatch
):
    """Without MPS, the default is one run per GPU; a number that the user chose stays."""
    gpus(count)
    if case:
        monkeypatch.setenv(case, "" if case == "PATH" else "1")
    messages = []
    with LocalProcesses(jobs, "auto", None, messages.append, is_default) as pool:
        assert pool.slots == slots == len(pool._slots)
        assert {slot.device for slot in pool._slots} == ({f"cuda:{i}" for i in range(count)} or {"cpu"})
    assert control.exists() == (0 < count < jobs)
    if case == "DENIED":
        assert "NVIDIA MPS is off (denied)" in messages.pop(0)
    assert len(messages) == (sentence is not None)
    assert all(message.startswith(sentence) for message in messages)


@pytest.mark.parametrize(
    ("case", "visible", "renumbered"),
    [("", "2,5", "0,1"), ("", "GPU-1b,GPU-7", None), ("", "", None), ("RUNS_ALREADY", "2,5", None)],
)
@pytest.mark.usefixtures("control")
def test_a_daemon_started_here_numbers_the_visible_gpus_from_0(case, visible, renumbered, gpus, monkeypatch):
    gpus(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if case:
        monkeypatch.setenv(case, "1")
    with nvidia_mps(print) as environment:
        assert environment.get("CUDA_VISIBLE_DEVICES") == renumbered


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
    """Install a stand-in for NVIDIA's program, and return the file to which it appends its commands."""
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
        ("", None, ["get_server_list", "quit"]),
        ("DENIED", "denied", ["get_server_list", "quit"]),
        ("RUNS_ALREADY", None, ["get_server_list"]),
        ("PATH", "No such file", []),
    ],
)
def test_mps_is_started_and_stopped_or_reported_as_off(case, words, calls, control, monkeypatch):
    control.touch()
    if case:
        monkeypatch.setenv(case, "" if case == "PATH" else "1")
    messages = []
    with pytest.raises(KeyboardInterrupt), nvidia_mps(messages.append) as environment:  # noqa: PT012
        assert (environment is None) == (words is not None)
        assert ("CUDA_MPS_PIPE_DIRECTORY" in (environment or {})) == (case == "")
        raise KeyboardInterrupt
    assert control.read_text().split() == calls
    assert [words in message for message in messages] == ([] if words is None else [True])


def fail():
    raise bsam.BsamError("in the worker")


def test_a_worker_has_its_threads_and_variables_and_ignores_ctrl_c():
    with worker_pool(1, threads=2, environment={"BSAM_OF_THE_TEST": "there"}) as pool:
        pid = pool.submit(os.getpid).result()
        assert pid != os.getpid()
        os.kill(pid, signal.SIGINT)
        assert pool.submit(os.getpid).result() == pid
        assert pool.submit(torch.get_num_threads).result() == 2
        assert pool.submit(os.getenv, "BSAM_OF_THE_TEST").result() == "there"
        with pytest.raises(bsam.BsamError, match="worker"):
            pool.submit(fail).result()
    assert not is_alive(pid)


def is_alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"  # nobody reaps orphans


def test_an_exception_in_the_block_kills_the_workers():
    with pytest.raises(KeyboardInterrupt), worker_pool(1) as pool:  # noqa: PT012
        pid = pool.submit(os.getpid).result()
        future = pool.submit(signal.pause)
        raise KeyboardInterrupt
    assert future.done()
    assert not is_alive(pid)
    with pytest.raises(BrokenProcessPool), worker_pool(1) as pool:
        pool.submit(os._exit, 1).result()


def die_beside_a_worker(path):
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method: get_context("fork")  # another fork server would import torch
    with worker_pool(1) as pool:
        path.write_text(str(pool.submit(os.getpid).result()))
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_ends_when_its_parent_is_killed(tmp_path):
    assert Process(die_beside_a_worker, tmp_path / "pid").wait() == -signal.SIGKILL
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
