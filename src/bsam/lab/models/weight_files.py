"""Read files of weights, in safetensors format or written by ``torch.save``."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...common.errors import BsamValueError
from ...common.extras import require_package

NESTED = ("state_dict", "model")  # keys under which training checkpoints hold the weights
WRAPPER = "module."  # DistributedDataParallel's prefix of every name
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
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise _unreadable(path, error) from error
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
    try:
        if is_safetensors:
            from safetensors.torch import load_file

            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise many different types
        raise _unreadable(path, error) from error
    return unwrapped(content, path)


def unwrapped(content: Any, path: Path) -> dict[str, Tensor]:
    """Return the named tensors inside a checkpoint.

    Example:
        >>> unwrapped(
        ...     {"epoch": 3, "state_dict": {"module.fc.bias": torch.zeros(2)}}, Path("a.pt")
        ... )
        {'fc.bias': tensor([0., 0.])}
    """
    for name in NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not content or not all(map(_is_named_tensor, content.items())):
        raise BsamValueError(
            f"{path} has no weights: it must be a dict of tensors, or have one under {' or '.join(NESTED)}"
        )
    wrapped = all(name.startswith(WRAPPER) for name in content)
    return {name.removeprefix(WRAPPER) if wrapped else name: tensor for name, tensor in content.items()}


def _is_named_tensor(item: tuple[object, object]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], Tensor)


def _is_safetensors(path: Path) -> bool:
    """Return whether a file starts like safetensors: 8 bytes for the header's length, then JSON."""
    if not path.is_file():
        raise BsamValueError(f"weights file {path} does not exist")
    with path.open("rb") as file:
        return path.suffix == ".safetensors" or file.read(9)[8:] == b"{"


def _unreadable(path: Path, error: Exception) -> BsamValueError:
    reason = str(error).partition("\n")[0].rstrip(".")
    return BsamValueError(
        f"{path} cannot be read as a file of weights, with safetensors or torch.load(weights_only=True) ({reason}): is "
        "it incomplete, or does it hold more than tensors?"
    )
