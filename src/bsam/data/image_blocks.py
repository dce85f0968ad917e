"""Blocks of decoded images: decoded into their place in a file, by this process or by several, and recorded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..core.errors import BsamRuntimeError, BsamValueError
from ..host.processes import cores, worker_pool
from .image_decoding import BoxError, Decoding, decode_bytes, read_image


@dataclass(frozen=True)
class Block:
    """Record of a few decoded images.

    Args:
        sha256: digest of the pixels and of ``corrupt``.
        corrupt: row and error message of each image that cannot be decoded, or has no such box; its pixels are 0.
    """

    sha256: str
    corrupt: list[tuple[int, str]]

    @classmethod
    def of(cls, pixels: NDArray[np.uint8], corrupt: list[tuple[int, str]]) -> Block:
        """Return the record of these images."""
        digest = hashlib.sha256(pixels.data)
        digest.update(json.dumps(corrupt).encode())
        return cls(digest.hexdigest(), corrupt)


@dataclass(frozen=True)
class BlockTask:
    """What a process needs to know to decode a block.

    Args:
        path: of the file that the pixels are written to.
        offset: where they begin in it.
        folder: of the images.
        names: of the images in the folder.
        digests: SHA-256 of their contents.
        decodings: how each becomes pixels; all to the same size.
    """

    path: Path
    offset: int
    folder: Path
    names: Sequence[str]
    digests: Sequence[str]
    decodings: Sequence[Decoding]

    def decode(self) -> Block:
        """Decode the images and write the pixels."""
        size = self.decodings[0].size
        pixels = np.zeros((len(self.names), size, size, 3), np.uint8)
        corrupt = []
        rows = zip(self.names, self.digests, self.decodings, strict=True)
        for row, (name, digest, decoding) in enumerate(rows):
            content = read_image(self.folder / name)
            if sha256(content) != digest:
                raise BsamRuntimeError(f"{self.folder / name} changed while the images were read: call again")
            try:
                pixels[row] = decode_bytes(content, name, decoding)
            except BoxError as error:
                corrupt.append((row, f"{error}: correct the person's joints or box"))
            except BsamValueError as error:
                corrupt.append((row, str(error)))
        with self.path.open("r+b") as file:
            file.seek(self.offset)
            file.write(pixels.data)
        return Block.of(pixels, corrupt)


def decode_blocks(tasks: Mapping[int, BlockTask], workers: int | None) -> Generator[tuple[int, Block]]:
    """Yield the number and the record of each block when it is written, in any order.

    Args:
        tasks: by the numbers of the blocks.
        workers: number of processes; by default as many as there are cores, but none where they would not save time.
    """
    count = min(workers, len(tasks)) if workers is not None else min(cores(), len(tasks) // 8)
    if count <= 1:
        for number, task in tasks.items():
            yield number, task.decode()
        return
    try:
        with worker_pool(count) as pool:
            numbers = {pool.submit(task.decode): number for number, task in tasks.items()}
            for future in as_completed(numbers):
                yield numbers[future], future.result()
    except BrokenProcessPool as error:
        raise BsamRuntimeError(
            "a process that decoded images ended: perhaps memory ran out (call again with fewer workers), or the "
            'script has no `if __name__ == "__main__":`'
        ) from error


def sha256(content: bytes) -> str:
    """Return the digest of a file's content."""
    return hashlib.sha256(content).hexdigest()
