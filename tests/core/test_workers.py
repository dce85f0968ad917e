import os
import signal

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


def test_a_signal_reaches_no_process_that_starts_and_is_not_lost(monkeypatch):
    """What is blocked here, a child inherits, and so does the process from which others are forked."""
    found = []

    def start(*_):
        signal.raise_signal(signal.SIGTERM)
        found.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))

    pool = Workers(1)
    monkeypatch.setattr(pool._pool, "submit", start)
    before = signal.signal(signal.SIGTERM, lambda *_: found.append("terminated"))
    try:
        pool.submit(os.getpid)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found == [{signal.SIGINT, signal.SIGTERM}, "terminated"]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
