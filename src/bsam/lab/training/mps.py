"""NVIDIA MPS, with which several processes use a GPU at the same time instead of taking turns."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping

import torch

MPS_CONTROL = "nvidia-cuda-mps-control"


def is_mps_installed() -> bool:
    """Return whether NVIDIA's control program is on the PATH; MPS may still fail to start."""
    return shutil.which(MPS_CONTROL) is not None


@contextlib.contextmanager
def nvidia_mps(on_message: Callable[[str], None]) -> Iterator[Mapping[str, str] | None]:
    """Use the running MPS daemon or start one for this block, and provide the variables with which processes find it.

    If neither works, ``on_message`` gets the reason, and the variables are None.
    """
    if _control("get_server_list", {}) is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="bsam-mps-") as folder:  # socket paths must be short
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        try:
            problem = _control("", variables, "-d")
            if problem is not None:
                on_message(f"NVIDIA MPS is off ({problem}): runs on one GPU take turns, which saves little time.")
            elif re.fullmatch(r"[\d, ]+", os.environ.get("CUDA_VISIBLE_DEVICES", "")):  # the daemon counts from 0
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(torch.cuda.device_count())))
            yield variables if problem is None else None
        finally:
            _control("quit", variables)


def _control(command: str, variables: Mapping[str, str], *flags: str) -> str | None:
    """Start the daemon or send it a command, and return the error message, or None on success."""
    call = [MPS_CONTROL, *flags]
    environment = {**os.environ, **variables}
    try:
        subprocess.run(
            call, input=f"{command}\n", env=environment, capture_output=True, text=True, timeout=60, check=True
        )
    except subprocess.CalledProcessError as error:
        return " ".join((error.stdout + error.stderr).split()) or str(error)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None
