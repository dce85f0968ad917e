"""Tasks on images, which may be in memory-mapped files: their inputs, batches and pretrained weights."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ...common.errors import BsamRuntimeError, BsamValueError
from ..common.names import find_function
from ..common.progress import ProgressLine
from ..config import Run
from ..data import FOLDER, ArrayData, DatasetEntry, FunctionData, ImageData, dataset_entry
from ..data.arrays import Dataset, Examples
from ..data.augment import RESIZED_CROP, normalise
from ..data.images import Resize, load_images
from ..data.persons import Persons
from ..models import input_config, model_entry
from ..models.parts import head
from ..models.timm_networks import InputConfig
from ..models.weights import PRETRAINED, WeightsReport, check_download, check_model, load_weights, model_of_file
from .task import Task, TaskBatch

SamplesT = TypeVar("SamplesT", Examples, Persons)
AHEAD = 3  # batches to read ahead, since the times of a step and of a disk access vary
LARGE_IMAGE = 96  # the side, in pixels, from which photographs are cropped and resized at random in fine-tuning
RANDOM = "random"  # as the initial weights: do not load pretrained ones
IMAGENET = InputConfig(224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bilinear", 0.875)


@dataclass(frozen=True)
class Inputs:
    """Normalisation of stored images, and their interpolation to the network's input size.

    Args:
        side: side of the stored images.
        size: side of the network's inputs.
        channels: channels of the images.
        mean, std: mean and standard deviation per channel, of bytes divided by 255.
        interpolation: Pillow's filter to decode files; stored images are resized with ``"bilinear"`` if it is that,
            otherwise with ``"bicubic"``, with antialiasing if they become smaller.
        crop: share of the shorter side that is kept when a file is decoded.
        class_names: in the order of the network's outputs.
        in_bytes: whether stored images are bytes, as in image files.

    Example:
        >>> import torch
        >>> inputs = Inputs(8, 16, 3, (0.5,) * 3, (0.5,) * 3, "bilinear", 1.0, ("cat", "dog"))
        >>> inputs(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)).shape
        torch.Size([2, 3, 16, 16])
    """

    side: int
    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop: float
    class_names: tuple[str, ...]
    in_bytes: bool = True

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Inputs:
        """Return the inputs from JSON values of ``dataclasses.asdict``; raise if one has another type."""
        plain: dict[str, Any] = {name: int(values[name]) for name in ("side", "size", "channels")}
        plain |= {name: tuple(map(float, values[name])) for name in ("mean", "std")}
        if not all(isinstance(name, str) for name in (*values["class_names"], values["interpolation"])):
            raise TypeError
        return cls(**{**values, **plain, "crop": float(values["crop"]), "class_names": tuple(values["class_names"])})

    def __call__(self, x: Tensor) -> Tensor:
        """Return stored images as inputs: normalised, at the network's input size."""
        return self.resize(normalise(x, self.mean, self.std), self.size)

    def resize(self, x: Tensor, side: int) -> Tensor:
        """Return floating-point images (n, channels, height, width) with this many pixels a side.

        Without antialiasing, an image that becomes smaller would be sampled: of fine patterns, some pixels would
        remain.

        Example:
            >>> import torch
            >>> inputs = Inputs(8, 8, 1, (0.5,), (0.5,), "bilinear", 1.0, ())
            >>> stripes = torch.tensor([1.0, 0.0]).repeat(4).expand(1, 1, 8, 8)
            >>> inputs.resize(stripes, 2)[0, 0, 0]
            tensor([0.5357, 0.4643])
        """
        if x.shape[-1] == side:
            return x
        mode = self.interpolation if self.interpolation == "bilinear" else "bicubic"  # the best that torch has
        return F.interpolate(x, size=(side, side), mode=mode, align_corners=False, antialias=side < x.shape[-1])

    def centre(self, x: Tensor) -> Tensor:
        """Return stored images as those that are evaluated; images for random crops are larger."""
        if x.shape[-1] == self.side:
            return x
        side = round(x.shape[-1] * self.side / self.decoding.shorter_side)
        begin = round((x.shape[-1] - side) / 2)
        x = x[:, :, begin : begin + side, begin : begin + side]
        return x if side == self.side else self.resize(x.float(), self.side).round().clamp(0, 255).to(x.dtype)

    @property
    def decoding(self) -> Resize:
        """How a file becomes a stored image."""
        return Resize(self.side, self.crop, self.interpolation)

    @property
    def takes_files(self) -> bool:
        """Whether stored images are like those in image files: bytes, grey or RGB."""
        return self.in_bytes and self.channels in (1, 3)

    def stored(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return decoded RGB pixels (side, side, 3) with the channels of stored images, grey as Pillow computes it."""
        if self.channels == 3:
            return pixels
        grey = (pixels.astype(np.int64) @ (19595, 38470, 7471) + 0x8000) >> 16
        return grey.astype(np.uint8)[:, :, None]


def augmentation_of(entry: DatasetEntry, model: str, image_size: int | None = None) -> str | None:
    """Return the default augmentation of fine-tuning; None stands for that of the data set.

    Image files are cropped and resized at random if the inputs of the network have at least :data:`LARGE_IMAGE` pixels
    a side.

    Example:
        >>> augmentation_of(dataset_entry("folder:photos"), "resnet50")
        'resized-crop-flip'
        >>> augmentation_of(dataset_entry("cifar10"), "resnet50") is None
        True
    """
    # the size that a timm network expects is known only after importing timm; only small test networks take less
    side = image_size or model_entry(model).images or LARGE_IMAGE
    return RESIZED_CROP if isinstance(entry, ImageData) and side >= LARGE_IMAGE else None


def load_data(run: Run, data_dir: Path | None = None, cache_dir: Path | None = None) -> tuple[Dataset, list[str]]:
    """Return the data of a run, and a sentence for each corrupt file that was left out.

    Image files are decoded once, at the network's input size, and kept in a cache; training images for random crops are
    larger.
    """
    entry = dataset_entry(run.data).resolve(data_dir)
    if isinstance(entry, ArrayData):
        return _load_arrays(entry, data_dir), []
    assert isinstance(entry, ImageData), entry
    config = input_config(run.model) or replace(IMAGENET, size=model_entry(run.model).images)
    size = run.image_size or config.size
    files = entry.image_files(data_dir)
    resize = Resize(size, config.crop, config.interpolation)
    crops_are_resized = (run.augment or entry.augmentation) == RESIZED_CROP
    with ProgressLine() as line:
        return load_images(
            files,
            resize,
            train=resize.for_random_crops if crops_are_resized else None,
            mean=config.mean,
            std=config.std,
            cache_dir=cache_dir,
            skip_corrupt=run.skip_corrupt,
            progress=functools.partial(line.reach, f"Decoding the images of {files.name}"),
        )


_load_arrays = functools.lru_cache(maxsize=1)(ArrayData.load)  # consecutive runs share a data set


def inputs_of(run: Run, data: Dataset) -> Inputs:
    """Return how the images of a data set become inputs of the run's network.

    Mean and standard deviation are those of the network's pretraining if it has one and the pixels are bytes; otherwise
    those of the data.
    """
    in_bytes = not data.train.x.is_floating_point()
    config = input_config(run.model)
    channels, side = data.test.x.shape[1:3]  # training images may be larger
    if config is None or channels != len(config.mean):  # timm networks also take images with one channel
        config = InputConfig(run.image_size or side, data.mean, data.std, IMAGENET.interpolation, IMAGENET.crop)
    elif not in_bytes:
        config = replace(config, mean=data.mean, std=data.std)
    crop = 1.0 if data.digest is None else config.crop  # images in arrays are not cropped
    size = run.image_size or config.size
    names = data.class_names
    return Inputs(side, size, channels, config.mean, config.std, config.interpolation, crop, names, in_bytes)


def find_weights(weights: str, data_dir: Path | None) -> str | Path:
    """Return the file with a run's initial weights, which may be in the data folder, or ``"pretrained"``."""
    if weights == PRETRAINED:
        return weights
    paths = [Path(weights), *([] if data_dir is None else [data_dir / weights])]
    if found := next(filter(Path.is_file, paths), None):
        return found
    tried = " and no ".join(map(str, paths))
    raise BsamRuntimeError(
        f"there is no {tried}: set --weights to a file, or to `{PRETRAINED}` for the weights that timm downloads"
    )


class ImageTask(Task):
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
        self._data_dir = data_dir
        self._in_files = in_files
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
        images: Iterable[Tensor] = (self._x[index] for index in indices)
        if self._host != self.device:
            images = stream(self._x, on_host, self.device)
        return map(self._batch, images, indices, on_host)

    def batch_losses(self, outputs: Any, batch: TaskBatch) -> Tensor:
        """Return the training loss of each sample in a batch; the loss converts outputs itself."""
        return self.losses(outputs, *batch[1:-1])

    def initialise(self, network: nn.Module, init: Path | None = None) -> Sequence[str]:
        """Load pretrained weights into all layers except the last ones, or the weights of another run into all
        layers, if the run has either.
        """
        messages = [f"Samples left out: {len(self.left_out)}; data.json says why."] if self.left_out else []
        if self.run.weights is None and init is None and self._in_files:
            messages.append("The initial weights are random; to load pretrained ones, use --weights.")
        if self.run.weights is not None:
            source = find_weights(self.run.weights, self._data_dir)
            self._weights = load_weights(network, self.run.model, source, classes=self.classes)
            messages.append(str(self._weights))
        if init is not None:
            self._weights = load_weights(network, self.run.model, init, keep_head=True)
            messages.append(f"Training begins with the network of {self.run.init}.")
        return messages

    def set_train_mode(self, network: nn.Module) -> None:
        """Set the network to training mode, except the batch norm of a frozen backbone."""
        network.train()
        if self.run.freeze_backbone:
            trained = set(head(network, self.classes).modules())
            for module in network.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm) and module not in trained:
                    module.eval()

    def notes(self) -> Mapping[str, Any]:
        """Return ``weights``, where the initial weights came from."""
        return {} if self._weights is None else {"weights": asdict(self._weights)}

    # ---- what others ask about a run

    @classmethod
    def titles(cls, run: Run) -> tuple[str, str]:
        """Return the titles of network and data, or their names if this version does not know them."""
        try:
            return model_entry(run.model).title, dataset_entry(run.data).title
        except BsamValueError:
            return run.model, run.data

    @classmethod
    def complete(cls, given: Mapping[str, Any], data_dir: Path | None = None) -> dict[str, Any]:
        """Return given settings with the defaults that depend on files.

        The default network is that of the weights, or of the data set. Without ``init``, networks of timm default to
        the pretrained weights that timm downloads. With pretrained weights, large photographs are cropped and resized
        at random (:func:`augmentation_of`).
        """
        settings = dict(given)
        if "model" not in settings:
            source = settings.get("data", Run.data)
            entry = dataset_entry(source).resolve(data_dir)
            model = entry.model
            weights = settings.get("weights", RANDOM)
            if weights not in (RANDOM, PRETRAINED):
                source = find_weights(weights, data_dir)
                model = cls._model_of_weights(Path(source), model)
            if model is None:
                if isinstance(entry, ImageData) and entry.name.startswith(FOLDER):
                    entry.image_files(data_dir)  # raises if the path is wrong, the likelier mistake
                raise BsamValueError(
                    f"{source} does not determine the network to train: set --model, for example timm:resnet50, or "
                    "give --weights a file from tools/convert_weights.py"
                )
            settings["model"] = model
        if settings["model"].startswith("timm:") and settings.get("init") is None:
            settings.setdefault("weights", PRETRAINED)
        if settings.get("weights") == RANDOM:
            settings["weights"] = None
        if settings.get("weights") is not None and settings.get("weight_bits") is None:
            entry = dataset_entry(settings.get("data", Run.data)).resolve(data_dir)
            name = augmentation_of(entry, settings["model"], settings.get("image_size"))
            if name is not None:
                settings.setdefault("augment", name)
        return settings

    @classmethod
    def _model_of_weights(cls, file: Path, default: str | None) -> str | None:
        """Return the network to train with the weights in a file; None if the file does not say which it is."""
        in_file = model_of_file(file)
        if in_file is not None and model_entry(in_file).needs_size:  # a function, which only the user may name
            raise BsamValueError(
                f"{file} holds weights of the function {in_file}, which is called only if you name it, too: if you "
                f"trust it, add --model {in_file}"
            )
        return cls._model_with(in_file, default)

    @classmethod
    def _model_with(cls, in_file: str | None, default: str | None) -> str | None:
        """Return the network to train with weights of a network; None if the file does not say which it is."""
        return in_file

    @classmethod
    def check_start(cls, run: Run, data_dir: Path | None = None) -> None:
        """Raise if the network cannot be imported, or if initial weights are missing or belong to another network."""
        if model_entry(run.model).needs_size:  # a function of the user
            find_function(run.model, "model")
        if run.weights == PRETRAINED:
            check_download(run.model)
        elif run.weights is not None:
            check_model(Path(find_weights(run.weights, data_dir)), run.model)

    @classmethod
    def data_entry(cls, run: Run) -> DatasetEntry:
        """Return the entry of a run's data."""
        return dataset_entry(run.data)

    @classmethod
    def has_validation(cls, run: Run, data_dir: Path | None = None) -> bool:
        """Return whether a run's data has a validation set; image files are listed for this, but not decoded."""
        return dataset_entry(run.data).resolve(data_dir).has_validation(data_dir)

    @classmethod
    def functions(cls, run: Run) -> set[str]:
        """Return which of ``data`` and ``model`` are functions of the user."""
        found = {"data": isinstance(dataset_entry(run.data), FunctionData), "model": model_entry(run.model).needs_size}
        return {name for name, is_function in found.items() if is_function}


def limit_samples(samples: SamplesT, name: str, n: int | None) -> SamplesT:
    """Return ``n`` of the samples, or all of them; ``name`` is the setting's, for the error message."""
    if n is not None and n > len(samples):
        raise BsamValueError(f"{name} must be at most {len(samples)}, the size of the set; got {n}")
    return samples if n is None else samples.some(n)


def freeze_backbone(network: nn.Module, classes: int) -> None:
    """Freeze all layers except the last ones."""
    network.requires_grad_(False)
    head(network, classes).requires_grad_(True)


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
