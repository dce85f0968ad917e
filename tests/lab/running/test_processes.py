import multiprocessing
import os
import signal
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch

import bsam
from bsam.lab.running.processes import worker_pool
from processes import Process


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
