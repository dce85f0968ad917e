"""NVIDIA MPS, which lets several processes use one GPU at the same time instead of taking turns."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping

import torch

CONTROL = "nvidia-cuda-mps-control"


def is_installed() -> bool:
    """Return whether NVIDIA's control program is on the PATH; MPS may still fail to start."""
    return shutil.which(CONTROL) is not None


@contextlib.contextmanager
def nvidia_mps(on_message: Callable[[str], None]) -> Iterator[Mapping[str, str] | None]:
    """Use the running MPS daemon, or start one for this block. If neither works, report it and continue without MPS.

    Args:
        on_message: called with messages for the user.

    Returns:
        the environment variables with which processes find the daemon; None without MPS.
    """
    if _control("get_server_list", {}) is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="bsam-mps-") as folder:  # socket paths must be short
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        try:
            problem = _control("", environment, "-d")
            if problem is not None:
                on_message(f"NVIDIA MPS is off ({problem}): runs on one GPU take turns, which saves little time.")
            yield {**environment, **_renumbered()} if problem is None else None
        finally:
            _control("quit", environment)


def _renumbered() -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES for clients of a daemon started here, which numbers its GPUs from 0."""
    if not re.fullmatch(r"[\d, ]+", os.environ.get("CUDA_VISIBLE_DEVICES", "")):
        return {}  # not set, or UUIDs, which stay valid
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(torch.cuda.device_count())))}


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
