"""Tasks on images, which may be in memory-mapped files, with networks that can start from pretrained weights."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...common.errors import BsamValueError
from ..config import Run
from ..data.arrays import Examples
from ..data.persons import Persons
from ..models.parts import head
from ..models.weights import WeightsReport, load_weights
from .image_inputs import find_weights
from .task import BaseTask, TaskBatch

SamplesT = TypeVar("SamplesT", Examples, Persons)
AHEAD = 3  # batches to read ahead, since the times of a step and of a disk access vary


class ImageTask(BaseTask):
    """A task on stored images. It loads the weights named by the run, and may train only the last layers.

    Args:
        run: settings of the run.
        device: where to train.
        data_dir: folder with the data, and perhaps the weights.
        left_out: a sentence for each image or person that is left out.
        in_files: whether the images are in files.
    """

    _x: Tensor  # the stored training images, on the device _host

    @abstractmethod
    def __init__(
        self,
        run: Run,
        device: torch.device,
        data_dir: Path | None = None,
        left_out: Sequence[str] = (),
        in_files: bool = False,
    ) -> None:
        self.run = run
        self.device = device
        self.left_out = list(left_out)
        self._data_dir, self._in_files = data_dir, in_files
        self._host = torch.device("cpu") if in_files else device  # images from files stay memory-mapped
        self._weights: WeightsReport | None = None

    @abstractmethod
    def _batch(self, x: Tensor, index: Tensor, on_host: Tensor) -> TaskBatch:
        """Return the batch with these indices, which are also in host memory; ``x`` are its stored images, on the
        device.
        """

    def batch(self, index: Tensor) -> TaskBatch:
        """Return the training samples with these indices, augmented."""
        return next(self.batches(index[None]))

    def batches(self, indices: Tensor) -> Iterator[TaskBatch]:
        """Return a batch for each row of indices; images on the host are read ahead."""
        on_host = indices.cpu()  # once: each copy waits until the device has finished its work
        images = self._read(self._x, indices if self._host == self.device else on_host)
        return map(self._batch, images, indices, on_host)

    def _read(self, images: Tensor, rows: Iterable[Tensor]) -> Iterator[Tensor]:
        """Return stored images on the device, for each row of indices, which are where the stored images are."""
        if self._host == self.device:
            return (images[index] for index in rows)
        return stream(images, rows, self.device)

    def initialise(self, network: nn.Module, init: Path | None = None) -> Sequence[str]:
        """Load pretrained weights into all layers except the last ones, or the weights of another run into all
        layers, if the run has either.
        """
        messages = [f"Samples left out: {len(self.left_out)}; data.json says why."] if self.left_out else []
        if self.run.weights is None and init is None and self._in_files:
            messages.append("The initial weights are random; to load pretrained ones, use --weights.")
        if self.run.weights is not None:
            source = find_weights(self.run.weights, self._data_dir)
            self._weights = load_weights(network, self.run.model, source)
            messages.append(str(self._weights))
        if init is not None:
            self._weights = load_weights(network, self.run.model, init, keep_head=True)
            messages.append(f"Training begins with the network of {self.run.init}.")
        return messages

    def set_train_mode(self, network: nn.Module) -> None:
        """Set the network to training mode, except the batch norm of a frozen backbone."""
        network.train()
        if self.run.freeze_backbone:
            trained = set(head(network).modules())
            for module in network.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm) and module not in trained:
                    module.eval()

    def notes(self) -> Mapping[str, Any]:
        """Return ``weights``, where the initial weights came from."""
        return {} if self._weights is None else {"weights": asdict(self._weights)}


def limit_samples(samples: SamplesT, name: str, n: int | None) -> SamplesT:
    """Return ``n`` of the samples, or all of them; ``name`` is the setting's, for the error message."""
    if n is not None and n > len(samples):
        raise BsamValueError(f"{name} must be at most {len(samples)}, the size of the set; got {n}")
    return samples if n is None else samples.some(n)


def freeze_backbone(network: nn.Module) -> None:
    """Freeze all layers except the last ones."""
    network.requires_grad_(False)
    head(network).requires_grad_(True)


def stream(images: Tensor, indices: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yield ``images[index]`` on the device for each index, in order.

    For a GPU, a thread reads the next batches. An error in it is raised where its batch would be yielded.

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
    reader = ThreadPoolExecutor(1)
    pending: deque[Future[Tensor]] = deque()
    try:
        for index in indices:
            # here, not in the thread: while this thread captures a CUDA graph, no other may allocate pinned memory
            batch = torch.empty((len(index), *rows.shape[1:]), dtype=rows.dtype, pin_memory=True)
            pending.append(reader.submit(torch.index_select, rows, 0, index, out=batch))
            if len(pending) > AHEAD:
                yield _on_device(pending.popleft(), device)
        while pending:
            yield _on_device(pending.popleft(), device)
    finally:  # also after an interruption, or if the caller takes no more batches
        reader.shutdown(cancel_futures=True)


def _on_device(rows: Future[Tensor], device: torch.device) -> Tensor:
    return rows.result().to(device, non_blocking=True).permute(0, 3, 1, 2)
