"""bf16 on a CPU that has no instructions for it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

WARNING = "mkldnn_matmul failed, switching to"  # BLAS gemm, or baddbmm; the stack of C++ follows, in over 20 lines


def is_emulated(device: torch.device) -> bool:
    """Whether bf16 is computed without instructions for it: by torch's plain loops, many times slower than fp32."""
    if device.type != "cpu":
        return False
    return not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported()


@contextlib.contextmanager
def emulated(on: bool = True) -> Iterator[None]:
    """In here torch does not warn that oneDNN cannot multiply in bf16; where ``on`` is false nothing changes.

    On aarch64 torch tries oneDNN all the same, warns, and turns oneDNN off for the whole process, for fp32 as well.
    Afterwards it is as it was before: what is computed later does not depend on it.
    """
    if not on:
        yield
        return
    before = torch.backends.mkldnn.enabled
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=WARNING)
            yield
    finally:
        torch.backends.mkldnn.enabled = before
