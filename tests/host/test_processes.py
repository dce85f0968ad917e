import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

import bsam
from bsam.core.workers import Workers


def refuse():
    raise bsam.BsamError("not like this")


def test_calls_in_another_process_with_its_threads_and_variables(monkeypatch):
    with Workers(1, threads=2, environment={"BSAM_OF_THE_TEST": "there"}) as pool:
        pid = pool.submit(os.getpid).result()
        assert pid != os.getpid()
        os.kill(pid, signal.SIGINT)  # as Ctrl-C does
        os.kill(pid, signal.SIGTERM)  # as the end of a job of SLURM does: the parent decides
        assert pool.submit(os.getpid).result() == pid
        assert pool.submit(torch.get_num_threads).result() == 2
        assert pool.submit(os.getenv, "BSAM_OF_THE_TEST").result() == "there"
        with pytest.raises(bsam.BsamError, match="not like this"):
            pool.submit(refuse).result()


@pytest.mark.parametrize("send", [signal.raise_signal, lambda number: os.kill(os.getpid(), number)])
def test_a_signal_reaches_no_process_that_starts_and_is_not_lost(send, monkeypatch):
    """What is blocked here, the process from which others are forked inherits. A signal to the process, and not to its
    main thread, is taken by another one, which waits here.
    """
    found, end = [], threading.Event()
    threading.Thread(target=end.wait, args=(60,)).start()

    def start(*_):
        send(signal.SIGTERM)
        time.sleep(0.05)
        found.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))

    pool = Workers(1)
    monkeypatch.setattr(pool._pool, "submit", start)
    before = signal.signal(signal.SIGTERM, lambda *_: found.append("terminated"))
    try:
        pool.submit(os.getpid)
    finally:
        signal.signal(signal.SIGTERM, before)
        end.set()
    assert found == [{signal.SIGINT, signal.SIGTERM}, "terminated"]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_an_ended_process_does_not_keep_the_others():
    """One that ended may have locked what the others wait for, as they ignore SIGTERM."""
    killed = []
    pool = Workers(2)
    pool.kill = lambda: killed.append(True)
    with pytest.raises(BrokenProcessPool), pool:
        raise BrokenProcessPool
    assert killed == [True]


PROGRAM = """
import multiprocessing, os, signal, sys, time

def exit_with_torch():
    sys.exit("torch" in sys.modules)

if __name__ == "__main__":
    from bsam.core.workers import SIGNALS, Workers
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    for _ in range(2):
        with Workers(1) as pool:
            pid = pool.submit(os.getpid).result()
            for number in SIGNALS:
                os.killpg(0, number)
            assert pool.submit(os.getpid).result() == pid
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=exit_with_torch)
    process.start()
    process.join()
    assert process.exitcode == 1
    process = context.Process(target=time.sleep, args=(60,))
    process.start()
    process.terminate()
    process.join(20)
    assert process.exitcode == -signal.SIGTERM
"""


def test_signals_to_all_end_no_worker_and_other_processes_of_the_program_end_by_them(tmp_path):
    """They are forked from the same process as the workers, which has imported torch and lives on."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, start_new_session=True, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
