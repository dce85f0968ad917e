"""How much memory may be taken unasked."""

from __future__ import annotations

from pathlib import Path

import torch

ON_CPU = 3 << 30  # a container may have less than its machine says


def room_on(device: torch.device) -> int:
    """Bytes on a device: a quarter of a GPU's memory, 3 GB of a CPU's, and never more than half of what is free.

    Example:
        >>> 0 < room_on(torch.device("cpu")) <= ON_CPU
        True
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(total // 4, free // 2)
    return min(ON_CPU, _free() // 2)


def _free() -> int:
    """Of the machine's memory, where it says so (on Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return ON_CPU
