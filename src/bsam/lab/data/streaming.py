"""Batches of images from memory-mapped files, copied to the GPU while it works on the previous batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

AHEAD = 3  # batches to read ahead, since the times of a step and of a disk access vary


def stream(images: Tensor, indices: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yield ``images[index]`` on the device for each index, in order. For a GPU, a thread reads the next batches.

    Args:
        images: (n, channels, height, width) in host memory, in the channels_last memory format.
        indices: indices of the images of each batch, in host memory.
        device: where to copy the images to.

    Example:
        >>> images = torch.arange(4, dtype=torch.uint8).view(4, 1, 1, 1)
        >>> [
        ...     batch.flatten().tolist()
        ...     for batch in stream(
        ...         images, torch.tensor([[3, 0], [2, 2]]), torch.device("cpu")
        ...     )
        ... ]
        [[3, 0], [2, 2]]
    """
    rows = images.permute(0, 2, 3, 1)  # contiguous: a row is one copy
    if device.type != "cuda":
        for index in indices:
            yield rows.index_select(0, index).permute(0, 3, 1, 2)
        return
    with ThreadPoolExecutor(1) as reader:
        pending: deque[Future[Tensor]] = deque()
        for index in indices:
            # here, not in the thread: while this thread captures a CUDA graph, no other may allocate pinned memory
            batch = torch.empty((len(index), *rows.shape[1:]), dtype=rows.dtype, pin_memory=True)
            pending.append(reader.submit(partial(torch.index_select, rows, 0, index, out=batch)))
            if len(pending) > AHEAD:
                yield _on_device(pending.popleft().result(), device)
        while pending:
            yield _on_device(pending.popleft().result(), device)


def _on_device(rows: Tensor, device: torch.device) -> Tensor:
    return rows.to(device, non_blocking=True).permute(0, 3, 1, 2)
