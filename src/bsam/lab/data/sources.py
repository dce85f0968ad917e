"""Download the files of data sets, whose SHA-256 digests are compared before anything is unpacked, and read them."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import socket
import tarfile
import tempfile
import urllib.error
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from ...common.errors import BsamRuntimeError
from ..common.stored_files import WrongContent, read_bytes

TIMEOUT = 60.0  # seconds without receiving anything


@dataclass(frozen=True)
class Source:
    """A file to download.

    Args:
        url: its address.
        sha256: SHA-256 of its content.
        makes: name of the resulting directory (from the archive) or file.
    """

    url: str
    sha256: str
    makes: str

    @property
    def is_archive(self) -> bool:
        """Whether it is unpacked."""
        return self.url.endswith(".tar.gz")


def fetch(source: Source, folder: Path, progress: bool = False) -> Path:
    """Download a file into a folder, and unpack it if it is an archive, unless it is already there.

    The work is done in a temporary directory: the result appears under its name once it is complete, and an error or an
    interruption leaves nothing behind.

    Args:
        source: the file.
        folder: created if it does not exist.
        progress: whether to show a progress bar on the error stream.

    Returns:
        The path of the file or of the unpacked directory.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "labels.gz").write_bytes(b"there already")
        ...     fetch(
        ...         Source("https://example.org/labels.gz", "0" * 64, "labels.gz"),
        ...         Path(folder),
        ...     ).name
        'labels.gz'
    """
    target = folder / source.makes
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
            file = Path(temporary, PurePosixPath(source.url).name)
            _receive(source, file, target, progress)
            if source.is_archive:
                with tarfile.open(file, "r:gz") as tar:  # safe: its SHA-256 was compared
                    tar.extractall(file.parent / "unpacked", filter="data")
                file = file.parent / "unpacked" / source.makes
            if not target.exists():  # another process may have been faster, with the same content
                os.replace(file, target)
    except OSError as error:
        reason = error.strerror or error
        raise BsamRuntimeError(
            f"{target} could not be written: {reason}; choose another folder or free some space"
        ) from error
    return target


def _receive(source: Source, file: Path, target: Path, progress: bool) -> None:
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)  # torch.hub has no argument for it
    try:
        torch.hub.download_url_to_file(source.url, str(file), source.sha256, progress)
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, RuntimeError) as error:
        is_other_file = isinstance(error, RuntimeError)  # torch raises it if the SHA-256 differs
        reason = f"{'it is incomplete or not the file that its authors published: ' if is_other_file else ''}{error}"
        verb = "unpack" if source.is_archive else "put"
        raise BsamRuntimeError(
            f"{source.url} could not be downloaded ({reason}): try again, or get it on a machine with internet and "
            f"{verb} it in {target.parent}, so that {target} exists"
        ) from error
    finally:
        socket.setdefaulttimeout(timeout)


def sha256(content: bytes) -> str:
    """Return the SHA-256 of the content, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def read_file(path: Path) -> bytes:
    """Return the content of a file, unpacked if its name ends in ``.gz``.

    Example:
        >>> read_file(Path("nowhere/train.bin"))
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamRuntimeError: nowhere/train.bin cannot be read: No such file or directory; get it again
    """
    try:
        content = read_bytes(path)
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error, WrongContent) as error:
        reason = getattr(error, "strerror", None) or error
        raise BsamRuntimeError(f"{path} cannot be read: {reason}; get it again") from error


def read_exactly(path: Path, size: int, layout: str) -> bytes:
    """Return the content of a file that must have ``size`` bytes; ``layout`` describes them in the error message."""
    content = read_file(path)
    if len(content) != size:
        raise BsamRuntimeError(f"{path} must have {size:,} bytes, {layout}, and has {len(content):,}; get it again")
    return content
