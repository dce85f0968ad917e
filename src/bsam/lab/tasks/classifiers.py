"""The networks that classification trains, and their mistakes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ...common.errors import BsamTypeError, BsamValueError
from ..config import ClassificationSettings, Run
from ..models import build, model_entry
from ..quantization import quantize
from .image_inputs import Inputs
from .image_task import freeze_backbone

MISTAKES = 16  # mistakes that are kept


def build_network(run: Run, inputs: Inputs, classes: int) -> nn.Module:
    """Return a run's network with random weights, in eval mode; raise if it cannot take the inputs."""
    network = build_float_network(run, inputs, classes)
    settings = run.task_settings(ClassificationSettings)
    return network if settings.weight_bits is None else quantize_network(network, settings)


def build_float_network(run: Run, inputs: Inputs, classes: int) -> nn.Module:
    """Return the network of :func:`build_network` before quantization.

    Some networks take images of a single size, and are built for another one if the images have it.
    """
    size = {"image_size": inputs.size} if model_entry(run.model).needs_size else {}
    network = build(run.model, classes, inputs.channels, run.seed, **size).eval()
    error = why_refused(network, inputs)
    if error is not None and model_entry(run.model).resizable:
        network = build(run.model, classes, inputs.channels, run.seed, image_size=inputs.size).eval()
        error = why_refused(network, inputs) or _why_cut(network, inputs.size)
    if error is not None:
        shape = "x".join(map(str, (inputs.channels, inputs.size, inputs.size)))
        fits = "set another --image-size, for transformers a multiple of the side of their patches, or "
        other = fits if model_entry(run.model).resizable else ""
        raise BsamValueError(
            f"{run.model} does not take images of {shape} ({run.data}): {other}choose another network from `bsam list "
            "models`"
        ) from error
    check_outputs(network, run.model, inputs, classes)
    if run.freeze_backbone:
        freeze_backbone(network)
    return network


def check_outputs(network: nn.Module, name: str, inputs: Inputs, classes: int) -> None:
    """Raise unless a network returns one logit per class."""
    with torch.no_grad():
        outputs = network(torch.zeros(2, inputs.channels, inputs.size, inputs.size))
    if not isinstance(outputs, Tensor):
        raise BsamTypeError(f"{name} must return a tensor of logits, got {type(outputs).__name__}")
    if outputs.shape != (2, classes):
        raise BsamValueError(
            f"{name} returns outputs of shape {tuple(outputs.shape)} for 2 samples and {classes} classes: use its "
            "argument classes for the last layer"
        )


def why_refused(network: nn.Module, inputs: Inputs) -> Exception | None:
    """Return the error if a network does not take images of this size."""
    try:
        with torch.no_grad():
            network(torch.zeros(1, inputs.channels, inputs.size, inputs.size))
    except (RuntimeError, AssertionError) as error:  # networks of timm assert the size of an image
        return error
    return None


def _why_cut(network: nn.Module, size: int) -> Exception | None:
    """Return an error if the patches of a vision transformer do not cover the image."""
    patch = getattr(getattr(network, "patch_embed", None), "patch_size", (1,))[0]
    return ValueError(f"{size} is not a multiple of the patches' side, {patch}") if size % patch else None


def quantize_network(network: nn.Module, settings: ClassificationSettings) -> nn.Module:
    """Return a quantized copy of a network, with the settings of classification.

    Example:
        >>> settings = ClassificationSettings(weight_bits=4)
        >>> [
        ...     type(layer).__name__
        ...     for layer in quantize_network(build("digits_net"), settings)
        ... ][::3]
        ['QuantConv2d', 'QuantConv2d', 'Flatten']
    """
    assert settings.weight_bits is not None
    return quantize(
        network,
        settings.weight_bits,
        settings.activation_bits or settings.weight_bits,
        scheme=settings.quantizer,
        first_last_bits=settings.first_last_bits,
        fold_batch_norm=settings.fold_batch_norm,
    )


def confusion_matrix(truth: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """Return how many samples of each class (row) were classified as each class (column).

    Example:
        >>> confusion_matrix(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), classes=2)
        tensor([[1, 1],
                [0, 1]])
    """
    return torch.bincount(truth * classes + predicted, minlength=classes**2).view(classes, classes)


@torch.no_grad()
def class_predictions(network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> dict[str, Tensor]:
    """Return the confusion matrix and the :data:`MISTAKES` most confident mistakes of a network.

    Args:
        network: returns logits; in eval mode.
        batches: inputs and classes.
        classes: number of classes.

    Returns:
        ``confusion`` (classes, classes), and for the mistakes, the most confident first, ``inputs``, ``truth``,
        ``found`` (the predicted class) and ``confidence`` (its probability).
    """
    total: Tensor | int = 0
    worst: list[Tensor] = []
    for x, truth in batches:
        confidence, predicted = network(x).float().softmax(1).max(1)
        total = total + confusion_matrix(truth, predicted, classes)
        wrong = predicted != truth
        mistakes = [tensor[wrong] for tensor in (x, truth, predicted, confidence)]
        merged = [torch.cat(pair) for pair in zip(worst, mistakes, strict=True)] if worst else mistakes
        first = merged[-1].argsort(descending=True, stable=True)[:MISTAKES]
        worst = [tensor[first] for tensor in merged]
    arrays = dict(zip(("inputs", "truth", "found", "confidence"), worst, strict=True))
    return {"confusion": torch.as_tensor(total), **arrays}
