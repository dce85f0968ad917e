"""What every benchmark says about where and when it was run, and the arguments that they share."""

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
    """Where to run, and where to write."""
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto takes CUDA where there is one (default)"
    )
    parser.add_argument(
        "--out", type=Path, help=f"the JSON file to write (default: benchmarks/results/{benchmark}_<device>.json)"
    )


def pick_device(parser: argparse.ArgumentParser, asked: str) -> torch.device:
    """The device that ``--device`` names; an error of the parser if this machine has none."""
    if asked == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device on this machine")
    return torch.device("cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu")


def description(device: torch.device) -> dict[str, Any]:
    """Machine, versions and date: a number never travels without them."""
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
    """The installed version of a package, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write(content: dict[str, Any], path: Path | None, benchmark: str) -> Path:
    """Write ``content`` as JSON to ``path``, or where the results of ``benchmark`` on this device live."""
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
