"""Files from the places that their authors gave them, checked before they are used."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import shutil
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..core.errors import BsamError, BsamRuntimeError

_CHUNK = 1 << 20
_PATIENCE = 60  # seconds without a byte

Progress = Callable[[int, int], None]
"""Is told the bytes that have come and the bytes that will."""


@dataclass(frozen=True)
class Source:
    """One file to get.

    Args:
        url: where it is.
        md5: its checksum, as its authors publish it.
        size: in bytes.
        makes: what lies in the folder afterwards: the directory that is in the archive, or the file itself where it is
            none.
    """

    url: str
    md5: str
    size: int
    makes: str

    @property
    def is_archive(self) -> bool:
        """Whether a directory comes out of it."""
        return self.url.endswith(".tar.gz")


def fetch(source: Source, folder: Path, progress: Progress | None = None) -> Path:
    """Get a file, and what is in it, into a folder; what is there already stays as it is.

    The checksum is compared before anything is unpacked. Of an archive only plain files directly in the directory that
    it is known for are taken. The result appears under its name when it is whole, and not before.

    Args:
        source: what.
        folder: where to; made if it is not there.
        progress: called with the bytes that have come and the bytes that will.

    Returns:
        The path of what was made.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "labels.gz").write_bytes(b"there already")
        ...     fetch(Source("https://example.org/labels.gz", "0" * 32, 13, "labels.gz"), Path(folder)).name
        'labels.gz'
    """
    target = folder / source.makes
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as room:
            arrived = Path(room) / PurePosixPath(source.url).name
            _receive(source, arrived, target, progress)
            ready = _unpack(arrived, Path(room), source) if source.is_archive else arrived
            try:
                ready.rename(target)
            except OSError:
                if not target.exists():  # else another process was faster, with the same content
                    raise
    except OSError as problem:
        raise BsamRuntimeError(
            f"{target} could not be written: {problem.strerror or problem}; choose another folder or make room"
        ) from problem
    return target


def _receive(source: Source, arrived: Path, target: Path, progress: Progress | None) -> None:
    digest, count = hashlib.md5(usedforsecurity=False), 0
    with arrived.open("wb") as file:
        try:
            response = urllib.request.urlopen(source.url, timeout=_PATIENCE)
        except (OSError, http.client.HTTPException) as problem:
            raise _unreachable(source, target, str(problem)) from problem
        with contextlib.closing(response):
            while count <= source.size:  # a server that never ends does not fill the disk
                try:
                    chunk = response.read(_CHUNK)
                except (OSError, http.client.HTTPException) as problem:
                    raise _unreachable(
                        source, target, f"it stopped after {count:,} of {source.size:,} bytes: {problem}"
                    ) from problem
                if not chunk:
                    break
                file.write(chunk)
                digest.update(chunk)
                count += len(chunk)
                if progress is not None:
                    progress(count, source.size)
    if count < source.size:
        raise _unreachable(source, target, f"it stopped after {count:,} of {source.size:,} bytes")
    if count > source.size or digest.hexdigest() != source.md5:
        raise BsamRuntimeError(
            f"{source.url} is not the file that its authors published: its MD5 is {digest.hexdigest()}, not "
            f"{source.md5}; nothing of it was kept"
        )


def _unreachable(source: Source, target: Path, reason: str) -> BsamError:
    verb = "unpack" if source.is_archive else "put"
    return BsamRuntimeError(
        f"{source.url} could not be had ({reason}): try again, or get it on a machine with internet and {verb} it in "
        f"{target.parent}, so that {target} is there"
    )


def _unpack(archive: Path, room: Path, source: Source) -> Path:
    ready = room / "unpacked"
    ready.mkdir()
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                parts = PurePosixPath(member.name).parts
                content = tar.extractfile(member) if member.isfile() else None
                if content is None or len(parts) != 2 or parts[0] != source.makes or parts[1] == "..":
                    continue  # links, devices and paths that lead elsewhere are never followed
                with content, (ready / parts[1]).open("wb") as file:
                    shutil.copyfileobj(content, file)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as broken:
        raise BsamRuntimeError(f"{source.url} cannot be unpacked: {broken}") from broken
    if not any(ready.iterdir()):
        raise BsamRuntimeError(f"{source.url} holds no {source.makes}")
    return ready
