"""Files of weights: safetensors, and what ``torch.save`` writes."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.errors import BsamValueError
from ..common.extras import require_package

NESTED = ("state_dict", "model")  # where the tensors lie in a checkpoint of a training
WRAPPER = "module."  # what DistributedDataParallel puts before every name
MODEL = "bsam_model"  # the entry of a safetensors file's metadata that names the network


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_of_file(path: Path) -> str | None:
    """Return the network that a file of ``tools/convert_weights.py`` or of a run is for; None for others."""
    if not _is_safetensors(path):
        return None
    require_package("safetensors", "timm")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            found = file.metadata() or {}
    except SafetensorError as error:
        raise _unreadable(path, error) from error
    if MODEL not in found and "run" in found:  # the network of a run
        with contextlib.suppress(ValueError, AttributeError):
            return json.loads(found["run"]).get("model")
    return found.get(MODEL)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name, on the CPU; wrappers around them and around their names are removed.

    Args:
        path: a safetensors file, or what ``torch.save`` wrote, of which only tensors are read and no code is run.
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
    except Exception as error:  # damaged files were seen to raise twelve kinds
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
            f"{path} holds no weights: it must hold a dict of tensors, itself or as its entry {' or '.join(NESTED)}"
        )
    wrapped = all(name.startswith(WRAPPER) for name in content)
    return {name.removeprefix(WRAPPER) if wrapped else name: tensor for name, tensor in content.items()}


def _is_named_tensor(item: tuple[object, object]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], Tensor)


def _is_safetensors(path: Path) -> bool:
    """Whether a file begins as safetensors files do: 8 bytes with the length of a header in JSON."""
    if not path.is_file():
        raise BsamValueError(f"there is no file of weights {path}")
    with path.open("rb") as file:
        return path.suffix == ".safetensors" or file.read(9)[8:] == b"{"


def _unreadable(path: Path, error: Exception) -> BsamValueError:
    reason = str(error).partition("\n")[0].rstrip(".")
    return BsamValueError(
        f"{path} cannot be read as a file of weights, by safetensors or by torch.load(weights_only=True) ({reason}): "
        "is it cut short, or does it hold more than tensors?"
    )
