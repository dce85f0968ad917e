"""Versions, machine and date: a number never travels without them."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from .. import __version__
from ..core.errors import BsamRuntimeError, BsamValueError


def environment_info(device: torch.device | None = None) -> dict[str, Any]:
    """As plain values; with a device also what it is.

    Example:
        >>> environment_info(torch.device("cpu"))["device"]
        'cpu'
    """
    return {
        "bsam": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numpy", "scikit-learn")},
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        **({} if device is None else _device(device)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"device": device.type, "threads": torch.get_num_threads()}
    return {
        "device": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # not everything needs all of them
        return None


def pick_device(name: str | None = None) -> torch.device:
    """Return a device by its name; None and "auto" take a GPU if there is one."""
    if name in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(str(name))
    except RuntimeError as error:
        raise BsamValueError(f"device must be cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise BsamValueError(f"device must be cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BsamRuntimeError(f"device is {name}, and torch sees no such GPU here: take cpu")
    return device
