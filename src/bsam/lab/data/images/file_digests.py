"""SHA-256 of image files; files that have not changed since the last call are not read."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...common.stored_files import DAMAGE, MAX_TEXT, draft_of, read_bytes
from ..sources import sha256
from .decoding import read_image

# Two changes within the resolution of a file system's clock have the same time. The coarsest, FAT's, is two seconds.
SETTLED = 2 * 10**9  # nanoseconds after a change from which the digest is stored
_Known = dict[str, list[int | str]]  # size, times of the last changes of content and of the file, SHA-256; by name


def file_digests(folder: Path, names: Iterable[str], cache_folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file by name.

    Digests are stored in the cache folder, and valid while size, time of modification and time of change are the same.

    Args:
        folder: all names are relative to it.
        names: file names, which may repeat.
        cache_folder: if it cannot be written, nothing is stored.
    """
    index = cache_folder / f"files-{sha256(str(folder.resolve()).encode())[:16]}.index"
    known = _read(index)

    def entry(name: str) -> list[int | str]:
        path = folder / name
        now = time.time_ns()
        try:
            status = path.stat()
        except OSError:
            return [0, 0, 0, sha256(read_image(path))]  # raises an error that names the file
        state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        before = known.get(name)
        if before is not None and before[:3] == state:
            return before
        digest = sha256(read_image(path))
        has_settled = max(state[1:]) + SETTLED <= now
        return [*(state if has_settled else [0, 0, 0]), digest]

    unique = list(dict.fromkeys(names))
    with ThreadPoolExecutor() as threads:
        entries = dict(zip(unique, threads.map(entry, unique), strict=True))
    settled = {name: values for name, values in entries.items() if values[1]}
    if any(known.get(name) != values for name, values in settled.items()):
        with contextlib.suppress(OSError):  # the cache may be in a read-only folder
            cache_folder.mkdir(parents=True, exist_ok=True)
            _write(index, {**known, **settled})
    return {name: str(values[3]) for name, values in entries.items()}


def _read(index: Path) -> _Known:
    """Return the stored digests; none if the file is missing or damaged."""
    try:
        digest, _, content = read_bytes(index, MAX_TEXT).partition(b"\n")
        if digest.decode() != sha256(content):
            return {}
        known: _Known = {name: [int(n) for n in state] + [str(last)] for name, (*state, last) in json.loads(content)}
    except DAMAGE:
        return {}
    return known


def _write(index: Path, known: _Known) -> None:
    content = json.dumps(list(known.items())).encode()
    with draft_of(index) as draft:
        draft.write_bytes(sha256(content).encode() + b"\n" + content)
