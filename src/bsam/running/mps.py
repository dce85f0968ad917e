"""NVIDIA MPS, which lets several processes use one GPU at the same time instead of taking turns."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping

CONTROL = "nvidia-cuda-mps-control"


@contextlib.contextmanager
def nvidia_mps(on_message: Callable[[str], None]) -> Iterator[Mapping[str, str]]:
    """Use the running MPS daemon, or start one for this block. If neither works, report it and continue without MPS.

    Args:
        on_message: called with messages for the user.

    Returns:
        the environment variables with which processes find the daemon.
    """
    if _control("get_server_list", {}) is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="bsam-mps-") as folder:  # socket paths must be short
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        try:
            problem = _control("", environment, "-d")
            if problem is None:
                on_message("NVIDIA MPS is on for this command: runs that share a GPU compute at the same time.")
            else:
                on_message(f"NVIDIA MPS is off ({problem}): runs on one GPU take turns, which saves little time.")
            yield environment if problem is None else {}
        finally:
            _control("quit", environment)


def _control(command: str, environment: Mapping[str, str], *flags: str) -> str | None:
    """Start the daemon or send it a command, and return the error message, or None on success."""
    try:
        process = subprocess.run(
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
    output = " ".join((process.stdout + process.stderr).split())
    return None if process.returncode == 0 else output or f"{CONTROL} exited with status {process.returncode}"
