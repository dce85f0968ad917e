"""Machine, versions and date for the benchmarks' results, and their common arguments."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import bsam

RESULTS = Path(__file__).parent / "results"


def add_arguments(parser: argparse.ArgumentParser, benchmark: str) -> None:
    """Add ``--device`` and ``--out``."""
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto uses CUDA if available (default)"
    )
    parser.add_argument(
        "--out", type=Path, help=f"JSON file to write (default: benchmarks/results/{benchmark}_<device>.json)"
    )


def pick_device(parser: argparse.ArgumentParser, name: str) -> torch.device:
    """Return the device for ``--device``; exit with an error if there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device on this machine")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def description(device: torch.device) -> dict[str, Any]:
    """Return machine, versions and date, which are stored with every result."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device.type,
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "bsam": bsam.__version__,
            "pytorch_optimizer": version_of("pytorch_optimizer"),
        },
    }


def version_of(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write(content: dict[str, Any], path: Path | None, benchmark: str) -> Path:
    """Write ``content`` as JSON to ``path``, by default the results of ``benchmark`` on this device."""
    path = path or RESULTS / f"{benchmark}_{content['device']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
