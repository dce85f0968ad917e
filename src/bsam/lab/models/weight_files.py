"""Read files of weights, in safetensors format or written by ``torch.save``."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...common.errors import BsamValueError
from ...common.extras import require_package
from ..common.stored_files import load_tensors, load_torch, read_bytes, reading

NESTED = ("state_dict", "model")  # keys under which training checkpoints hold the weights
WRAPPER = "module."  # DistributedDataParallel's prefix of every name
HINT = "give a complete file of safetensors or torch.save that holds only tensors"
MODEL = "bsam_model"  # metadata key for the network's name in a safetensors file


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_of_file(path: Path) -> str | None:
    """Return the network's name from a file written by ``tools/convert_weights.py`` or a run; None for other files."""
    if not _is_safetensors(path):
        return None
    require_package("safetensors", "timm")
    from safetensors import safe_open

    with reading(path, HINT), safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    if MODEL not in metadata and "run" in metadata:  # written by a run
        with contextlib.suppress(ValueError, AttributeError):
            return json.loads(metadata["run"]).get("model")
    return metadata.get(MODEL)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file by name, on the CPU; checkpoint entries and DDP's prefixes are unwrapped.

    Args:
        path: a safetensors file, or one written by ``torch.save``, which is read without running code from it.
    """
    is_safetensors = _is_safetensors(path)
    if is_safetensors:
        require_package("safetensors", "timm")
    with reading(path, HINT):
        content = read_bytes(path)
        tensors = load_tensors(content)[0] if is_safetensors else load_torch(content)
    return unwrap(tensors, path)


def unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    """Return the named tensors inside a checkpoint.

    Example:
        >>> import torch
        >>> unwrap(
        ...     {"epoch": 3, "state_dict": {"module.fc.bias": torch.zeros(2)}}, Path("a.pt")
        ... )
        {'fc.bias': tensor([0., 0.])}
    """
    for name in NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    tensors = content.items() if isinstance(content, Mapping) else ()
    if not tensors or not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in tensors):
        raise BsamValueError(
            f"{path} has no weights: it must be a dict of tensors, or have one under {' or '.join(NESTED)}"
        )
    prefix = WRAPPER if all(name.startswith(WRAPPER) for name in content) else ""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors}


def _is_safetensors(path: Path) -> bool:
    """Return whether a file starts like safetensors: 8 bytes for the header's length, then JSON."""
    if not path.is_file():
        raise BsamValueError(f"weights file {path} does not exist")
    with path.open("rb") as file:
        return path.suffix == ".safetensors" or file.read(9)[8:] == b"{"
