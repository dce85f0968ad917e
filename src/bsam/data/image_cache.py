"""Image files as a data set: decoded once, into one file that is mapped into memory."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..core.errors import BsamRuntimeError, BsamValueError
from ..core.extras import require_package
from ..host.processes import check_main_guard, cores
from .examples import Dataset, Examples
from .image_blocks import Block, BlockTask, decode_blocks, sha256
from .image_decoding import Crop, Decoding, Resize, read_image
from .image_files import ImageFiles

DECODER = 1  # to be raised with every change of image_decoding.py that changes pixels
BLOCK = 64  # images that are decoded, recorded and verified together
NAMED = 5  # images that cannot be decoded which an error message names
Progress = Callable[[int, int], None]
_Pixels = np.memmap[tuple[int, ...], np.dtype[np.uint8]]


def load_images(
    files: ImageFiles,
    resize: Resize,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    cache_dir: str | Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    skip_corrupt: bool = False,
) -> tuple[Dataset, list[str]]:
    """Return a data set of decoded images, which are read from a cache file and written to it first if needed.

    The cache belongs to the content and the order of the files, to ``resize`` and to the version of Pillow: for
    anything else another file is made, and old ones may be removed at any time. What an interrupted call has decoded
    is used by the next one; of two processes, one decodes and the other waits. The file is verified by SHA-256 each
    time, and damaged parts of it are decoded again.

    Args:
        files: of :func:`bsam.data.image_files.read_folder` or of ``bsam.data.image_layouts``.
        resize: size of the images.
        mean: for normalisation; see :class:`~bsam.data.examples.Dataset`.
        std: likewise.
        cache_dir: folder of the cache file; by default ``.bsam-cache`` in the folder of the images.
        workers: processes that decode; by default as many as there are cores, but none for a few images. A script that
            uses them needs the ``if __name__ == "__main__"`` of ``multiprocessing``.
        progress: is called with the number of decoded images and that of all images.
        skip_corrupt: leave out files that cannot be decoded, rather than raise an error that names them.

    Returns:
        The data set, whose images are mapped into memory in the channels_last format (a set with images that were left
        out is a copy in memory), and one sentence for each file that was left out.
    """
    files.check()
    names = [name for part in files.sets.values() for name in part.names]
    images, corrupt, digest = decode_files(
        files.folder, names, resize, cache_dir=cache_dir, workers=workers, progress=progress, skip_corrupt=skip_corrupt
    )
    sets, kept = {}, []
    begin = 0
    for title, part in files.sets.items():
        end = begin + len(part.names)
        rows = [row for row in range(begin, end) if row not in corrupt]
        labels = [part.labels[row - begin] for row in rows]
        for label in sorted({*part.labels} - {*labels}):
            raise BsamValueError(
                f"no image of the class {files.class_names[label]} in the {title} set can be decoded: replace them, "
                "or remove the class"
            )
        x = images[begin:end] if len(rows) == end - begin else images[rows]
        sets[title] = Examples(x, torch.tensor(labels, dtype=torch.int64))
        kept.append((rows, labels))
        begin = end
    data = Dataset(
        files.name,
        len(files.class_names),
        sets["training"],
        sets.get("validation"),
        sets["test"],
        mean,
        std,
        files.class_names,
        files.split,
        digest=sha256(json.dumps([*digest, kept]).encode()),
    )
    return data, list(corrupt.values())


def decode_files(
    folder: Path,
    names: Sequence[str],
    decoding: Resize | Sequence[Crop],
    *,
    cache_dir: str | Path | None,
    workers: int | None,
    progress: Progress | None,
    skip_corrupt: bool,
) -> tuple[Tensor, dict[int, str], tuple[int, list[str]]]:
    """Return image files decoded, as :func:`load_images` does and with its cache.

    Args:
        folder: all names are relative to it.
        names: of the files; one may be there several times.
        decoding: one for all, or one crop for each name, all of the same size.
        cache_dir: see :func:`load_images`, as for the other arguments.
        workers: likewise.
        progress: likewise.
        skip_corrupt: return what cannot be decoded as zeros, rather than raise an error that names it.

    Returns:
        The images (n, 3, size, size) in the channels_last format, mapped into memory; the row and an error message of
        each that cannot be decoded; and what identifies the pixels, as JSON values.
    """
    require_package("PIL", "images")
    if workers is not None and workers < 1:
        raise BsamValueError(f"workers must be at least 1, got {workers!r}")
    place = folder / ".bsam-cache" if cache_dir is None else Path(cache_dir)
    cache = _Cache(folder, names, decoding, place)
    pixels, blocks = cache.load(workers, progress)
    corrupt = {BLOCK * number + row: reason for number in sorted(blocks) for row, reason in blocks[number].corrupt}
    if corrupt and not skip_corrupt:
        listed = "".join(f"\n  {reason}" for reason in list(corrupt.values())[:NAMED])
        more = f"\n  and {len(corrupt) - NAMED} others" if len(corrupt) > NAMED else ""
        raise BsamValueError(
            f"{len(corrupt)} of {len(names)} files in {folder} cannot be used; correct, replace or remove them, or "
            f"leave them out with --skip-corrupt:{listed}{more}"
        )
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    return images, corrupt, (cache.size, [blocks[number].sha256 for number in sorted(blocks)])


class _Cache:
    """The file of decoded images, an array (n, size, size, 3) in the format of ``numpy.save``, and its journal.

    The journal has one line of JSON for each block that is complete. A block counts only if its digest is the recorded
    one and the line has the key of this data, so that files may be damaged, cut short or of other data.
    """

    def __init__(self, folder: Path, names: Sequence[str], decoding: Resize | Sequence[Crop], place: Path) -> None:
        from PIL import __version__

        self.folder, self.names, self.place = folder, names, place
        self.decodings: Sequence[Decoding] = [decoding] * len(names) if isinstance(decoding, Resize) else decoding
        self.size = self.decodings[0].size
        self.shape = (len(names), self.size, self.size, 3)
        self.blocks = range(-(-len(names) // BLOCK))
        with ThreadPoolExecutor(cores()) as threads:
            files = dict.fromkeys(names)
            found = dict(zip(files, threads.map(lambda name: sha256(read_image(folder / name)), files), strict=True))
        self.digests = [found[name] for name in names]
        how = asdict(decoding) if isinstance(decoding, Resize) else [asdict(crop) for crop in decoding]
        content = [DECODER, BLOCK, __version__, how, list(zip(names, self.digests, strict=True))]
        self.key = sha256(json.dumps(content).encode())
        self.path, self.journal = place / f"{self.key}.npy", place / f"{self.key}.jsonl"

    def load(self, workers: int | None, progress: Progress | None) -> tuple[_Pixels, dict[int, Block]]:
        """Return the pixels and the record of each block, after decoding what is not there."""
        pixels, blocks = self._read()
        if pixels is None or len(blocks) < len(self.blocks):
            check_main_guard()  # the parent holds the lock
            with self._locked():
                self._complete(workers, progress)
            pixels, blocks = self._read()
        if pixels is None or len(blocks) < len(self.blocks):
            raise BsamRuntimeError(
                f"{self.path} is damaged although it was written just now: choose another folder (--cache-dir)"
            )
        return pixels, blocks

    def _read(self) -> tuple[_Pixels | None, dict[int, Block]]:
        """Return the pixels, if the file has the right size, and the records of the blocks that are intact."""
        try:
            pixels: _Pixels = np.load(self.path, mmap_mode="c")  # torch warns of read-only arrays
        except (OSError, ValueError, EOFError):
            return None, {}
        if pixels.shape != self.shape or pixels.dtype != np.uint8 or not pixels.flags.c_contiguous:
            return None, {}
        recorded = self._recorded()
        with ThreadPoolExecutor(cores()) as threads:
            found = threads.map(lambda n: Block.of(pixels[self._rows(n)], recorded[n].corrupt), recorded)
            return pixels, {n: block for n, block in zip(recorded, found, strict=True) if block == recorded[n]}

    def _recorded(self) -> dict[int, Block]:
        blocks = {}
        with contextlib.suppress(OSError):
            for line in self.journal.read_bytes().splitlines():
                with contextlib.suppress(ValueError, TypeError, RecursionError):  # a line may be cut short
                    key, number, digest, corrupt = json.loads(line)
                    if key == self.key and number in self.blocks:
                        blocks[number] = Block(digest, [(row, reason) for row, reason in corrupt])
        return blocks

    def _rows(self, number: int) -> slice:
        return slice(BLOCK * number, min(BLOCK * (number + 1), len(self.names)))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Wait for other processes that write this cache; what cannot be written is a BsamRuntimeError."""
        try:
            self.place.mkdir(parents=True, exist_ok=True)
            with self.path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise BsamRuntimeError(
                f"the decoded images cannot be written to {self.place} ({error.strerror}): make room, or choose "
                "another folder (--cache-dir)"
            ) from error

    def _complete(self, workers: int | None, progress: Progress | None) -> None:
        pixels, blocks = self._read()  # the process that held the lock may have decoded everything
        if pixels is None:
            pixels = np.lib.format.open_memmap(self.path, "w+", np.uint8, self.shape)
        todo = [number for number in self.blocks if number not in blocks]
        draft = self.journal.with_suffix(".draft")
        draft.write_text("".join(self._line(number, block) for number, block in blocks.items()))
        draft.replace(self.journal)  # without lines that were cut short, and without damaged blocks
        done = len(self.names) - sum(len(self.names[self._rows(number)]) for number in todo)
        tasks = {number: self._task(number, pixels.offset) for number in todo}
        with self.journal.open("a") as journal, contextlib.closing(decode_blocks(tasks, workers)) as results:
            for number, block in results:
                journal.write(self._line(number, block))
                journal.flush()
                done += len(self.names[self._rows(number)])
                if progress is not None:
                    progress(done, len(self.names))

    def _line(self, number: int, block: Block) -> str:
        return json.dumps([self.key, number, block.sha256, block.corrupt]) + "\n"

    def _task(self, number: int, offset: int) -> BlockTask:
        rows = self._rows(number)
        offset += rows.start * self.size**2 * 3
        return BlockTask(self.path, offset, self.folder, self.names[rows], self.digests[rows], self.decodings[rows])
