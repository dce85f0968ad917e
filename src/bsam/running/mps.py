"""NVIDIA MPS, by which several processes compute on one GPU at the same time rather than in turn."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping

CONTROL = "nvidia-cuda-mps-control"
TURNS = "runs that share a GPU take turns, which is hardly faster"


@contextlib.contextmanager
def nvidia_mps(tell: Callable[[str], None]) -> Iterator[Mapping[str, str]]:
    """Use the MPS daemon that runs already, or start one and stop it at the end of the block; say where neither works.

    Args:
        tell: called with a sentence for the user.

    Returns:
        the environment variables by which processes find the daemon.
    """
    if mps_runs():
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="bsam-mps-") as folder:  # its path is short: a socket's has a limit
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        reason = None
        try:
            reason = _start(environment)
            if reason is None:
                tell("NVIDIA MPS is on for this command: runs that share a GPU compute at the same time.")
            else:
                tell(f"NVIDIA MPS is not on ({reason}): {TURNS}.")
            yield environment if reason is None else {}
        finally:
            if reason is None:  # also where Ctrl-C came while it started
                _answers("quit", environment)


def mps_runs() -> bool:
    """Return whether this machine has an MPS daemon that processes of this one find."""
    return _answers("get_server_list", {})


def _start(environment: Mapping[str, str]) -> str | None:
    """Start the daemon; returns why it could not be started."""
    if shutil.which(CONTROL) is None:
        return f"there is no program {CONTROL}"
    try:
        found = subprocess.run(
            [CONTROL, "-d"], env={**os.environ, **environment}, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if found.returncode:
        return " ".join((found.stdout + found.stderr).split()) or f"{CONTROL} ended with status {found.returncode}"
    return None


def _answers(command: str, environment: Mapping[str, str]) -> bool:
    """Send a command to the daemon; returns whether there is one."""
    try:
        found = subprocess.run(
            [CONTROL],
            input=f"{command}\n",
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0
