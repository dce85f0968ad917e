"""The machine: devices, package versions, and support for bf16 and ``torch.compile``."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from ... import __version__
from ...common.errors import BsamRuntimeError, BsamValueError

# The warning continues with the name of the fallback (BLAS gemm, or baddbmm) and more than 20 lines of a C++ stack.
BF16_WARNING = "mkldnn_matmul failed, switching to"


def check_device(name: str | None) -> torch.device | None:
    """Return the device with this name, whether or not this machine has it; None for ``"auto"`` and None."""
    if name in (None, "auto"):
        return None
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise BsamValueError(f"device must be cpu, cuda or cuda:N, got {name!r}")
    return device


def pick_device(name: str | None = None) -> torch.device:
    """Return the device with this name; ``"auto"`` and None take a GPU if there is one."""
    device = check_device(name)
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BsamRuntimeError(f"device is {name}, but torch sees {torch.cuda.device_count()} GPU(s): choose cpu")
    return device


def devices_of(device: str | None) -> list[str]:
    """Return all GPUs for ``"cuda"`` without an index, otherwise the device of :func:`pick_device`."""
    picked = pick_device(device)
    if picked.type == "cpu" or picked.index is not None:
        return [str(picked)]
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def environment_info(device: torch.device | None = None) -> dict[str, Any]:
    """Return versions, machine and date as plain values; with a device, also its description."""
    return {
        "bsam": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numpy", "scikit-learn", "timm", "pillow")},
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        **({} if device is None else _device(device)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"device": device.type, "threads": torch.get_num_threads()}
    name, cudnn = torch.cuda.get_device_name(device), torch.backends.cudnn.version()
    return {"device": name, "cuda": torch.version.cuda, "cudnn": cudnn}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def is_bf16_emulated(device: torch.device) -> bool:
    """Return whether the device is a CPU without bf16 instructions, where bf16 is many times slower than fp32."""
    if device.type != "cpu":
        return False
    return not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported()


@contextlib.contextmanager
def emulated_bf16(on: bool = True) -> Iterator[None]:
    """Silence torch's warning that oneDNN cannot multiply in bf16; does nothing if ``on`` is false.

    On aarch64, torch tries oneDNN anyway, warns, and disables oneDNN for the whole process, even for fp32. The setting
    is restored on exit.
    """
    if not on:
        yield
        return
    before = torch.backends.mkldnn.enabled
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=BF16_WARNING)
            yield
    finally:
        torch.backends.mkldnn.enabled = before


@functools.cache
def why_compile_fails(device: torch.device) -> str | None:
    """Return why ``torch.compile`` fails on a device, or None if it works; tried once, on a small layer."""

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).relu().sum()

    ones = functools.partial(torch.ones, 2, 2, device=device)
    try:
        torch.compile(layer)(ones(), ones(requires_grad=True)).backward()
    except (RuntimeError, OSError) as error:  # torch._dynamo's errors are RuntimeErrors, its cache raises OSErrors
        inner = getattr(error, "inner_exception", error)
        return str(inner).strip().partition("\n")[0] or type(inner).__name__
    return None
