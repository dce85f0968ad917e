"""Save networks with integer weights in safetensors files, with codes of up to 4 bits packed two to a byte."""

from __future__ import annotations

import copy
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ...common.errors import BsamValueError
from ...common.extras import require_package
from ..common.files import load_tensors, read_bytes, reading, save_tensors
from .arithmetic import Codes
from .quant_layers import IntLayer, int_layer, replace

FIELDS = ("weight", "weight_scale", "input_scale", "input_zero_point")  # tensors of every layer
FORMAT = "bsam_quantized"  # metadata key that identifies such a file; the value is the version


def pack(codes: Tensor) -> Tensor:
    """Pack codes between -8 and 7 two to a byte, the first in the low half; an odd number is padded with 0.

    Example:
        >>> pack(torch.tensor([1, -1, 7], dtype=torch.int8))
        tensor([241, 7], dtype=torch.uint8)
    """
    flat = codes.flatten().view(torch.uint8) & 0xF
    pairs = torch.cat([flat, flat.new_zeros(len(flat) % 2)]).view(-1, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4)


def unpack(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the codes packed by :func:`pack`.

    Example:
        >>> unpack(torch.tensor([241, 7], dtype=torch.uint8), (3,))
        tensor([ 1, -1,  7], dtype=torch.int8)
    """
    flat = torch.stack([packed & 0xF, packed >> 4], 1).flatten()[: torch.Size(shape).numel()]
    return ((flat ^ 8).view(torch.int8) - 8).view(shape)


def check_place(path: Path) -> None:
    """Raise if ``path`` is a folder, or its folder is missing."""
    if not path.parent.is_dir() or path.is_dir():
        raise BsamValueError(
            f"{path} is a folder" if path.is_dir() else f"folder {path.parent} does not exist: create it"
        )


def save_quantized(model: nn.Module, path: Path | str, *, metadata: Mapping[str, str] | None = None) -> int:
    """Write a network with integer weights to a safetensors file and return the file's size in bytes.

    Codes of up to 4 bits take half a byte each, others one byte. Scales, biases and everything else, such as batch
    norm, stay as they are: a 4-bit ResNet-18 with batch norm in float32 takes 0.128 times the size of the float one.

    Args:
        model: a network from :func:`~bsam.lab.quantization.convert`.
        path: the file to write; an existing file is overwritten.
        metadata: further entries of the file's metadata, such as the preprocessing of the inputs.
    """
    require_package("safetensors", "train")
    layers = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, IntLayer)}
    if not layers:
        raise BsamValueError(f"{type(model).__name__} has no integer weights: call bsam.lab.quantization.convert first")
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    for name, layer in layers.items():
        if layer.weight_bits <= 4:
            tensors[_join(name, "weight")] = pack(layer.weight)
    bits = {name: [layer.weight_bits, layer.activation_bits] for name, layer in layers.items()}
    identities = [name for name, m in model.named_modules() if type(m) is nn.Identity]
    entries = {FORMAT: "1", "layers": json.dumps(bits), "identities": json.dumps(identities)}
    check_place(Path(path))
    return Path(path).write_bytes(save_tensors(tensors, {**(metadata or {}), **entries}))


def load_quantized(path: Path | str, model: nn.Module) -> nn.Module:
    """Load a network with integer weights from a file of :func:`save_quantized`; it is in eval mode.

    Args:
        path: the file.
        model: a float network with the same architecture; its weights are not used, and it is not changed.
    """
    require_package("safetensors", "train")
    if not Path(path).is_file():
        raise BsamValueError(f"file {path} does not exist")
    with reading(Path(path), "write it again, with save_quantized or `bsam export`"):
        tensors, metadata = load_tensors(read_bytes(Path(path)))
    if metadata.get(FORMAT) != "1":
        raise BsamValueError(f"{path} was not written by bsam.lab.quantization.save_quantized")
    model = copy.deepcopy(model).eval()
    modules = dict(model.named_modules(remove_duplicate=False))
    new = dict[nn.Module, nn.Module]()
    try:
        for name, (weight_bits, activation_bits) in json.loads(metadata["layers"]).items():
            layer = modules[name]
            fields = {field: tensors[_join(name, field)] for field in FIELDS}
            if not isinstance(layer, (nn.Conv2d, nn.Linear)) or isinstance(layer, IntLayer):
                raise RuntimeError(f"{name} is not a float convolution or linear layer")
            shape = layer.weight.shape
            if fields["weight"].shape != (((shape.numel() + 1) // 2,) if weight_bits <= 4 else shape):
                raise RuntimeError(f"the weight of {name} has a different shape")
            if weight_bits <= 4:
                fields["weight"] = tensors[_join(name, "weight")] = unpack(fields["weight"], shape)
            bias = tensors.get(_join(name, "bias"))
            codes = Codes(**fields, bias=bias, weight_bits=weight_bits, activation_bits=activation_bits)
            new[layer] = int_layer(layer, codes)
        new |= {modules[name]: nn.Identity() for name in json.loads(metadata["identities"])}
        model = replace(model, new)
        model.load_state_dict(tensors)
    except (KeyError, RuntimeError) as error:  # missing layers or tensors; different shapes or names
        reason = textwrap.shorten(str(error), 200)
        raise BsamValueError(
            f"{path} does not fit {type(model).__name__} ({reason}): pass the float network it was made from"
        ) from error
    return model


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
