"""NVIDIA MPS, which lets several processes compute on one GPU at the same time rather than in turn."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping

CONTROL = "nvidia-cuda-mps-control"


@contextlib.contextmanager
def nvidia_mps(on_message: Callable[[str], None]) -> Iterator[Mapping[str, str]]:
    """Use the MPS daemon that runs already, or start one and stop it at the end of the block; say where neither works.

    Args:
        on_message: called with a sentence for the user.

    Returns:
        the environment variables with which processes find the daemon.
    """
    if _control("get_server_list", {}) is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="bsam-mps-") as folder:  # its path is short: a socket's has a limit
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        try:
            problem = _control("", environment, "-d")
            if problem is None:
                on_message("NVIDIA MPS is on for this command: runs that share a GPU compute at the same time.")
            else:
                on_message(f"NVIDIA MPS is not on ({problem}): runs on one GPU take turns, which is hardly faster.")
            yield environment if problem is None else {}
        finally:
            _control("quit", environment)


def _control(command: str, environment: Mapping[str, str], *flags: str) -> str | None:
    """Start the daemon, or send it a command; returns what went wrong."""
    try:
        done = subprocess.run(
            [CONTROL, *flags],
            input=f"{command}\n",
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = " ".join((done.stdout + done.stderr).split())
    return None if done.returncode == 0 else said or f"{CONTROL} ended with status {done.returncode}"
