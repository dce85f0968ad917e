"""Layers of quantized networks: fake-quantized for training, and with integer weights for inference."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...common.errors import BsamValueError
from .arithmetic import Codes, integer_output, product, quantize_codes
from .quantizers import SCHEMES, InputQuantizer, WeightQuantizer

GEOMETRY = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
CODE_FIELDS = tuple(field.name for field in dataclasses.fields(Codes))


class QuantLayer(nn.Module):
    """A layer with fake-quantized weight and input, made from a float layer, with which it shares its parameters.

    In training mode the layer computes in floating point with the values that the codes represent, under autocast if
    that is on. In eval mode it computes with integers, like the converted layer, bit for bit, and has the gradients of
    the floating-point computation.

    ``weight`` and ``bias`` are floating-point parameters under their usual names, so the state dict of the float layer
    loads, even with ``strict=True``; the scales are then initialized again. The bias is not quantized.

    Args:
        layer: the float layer.
        weight_bits, activation_bits, scheme: as in :func:`~bsam.lab.quantization.quantize`.
    """

    weight: Tensor
    bias: Any  # nn.Conv2d and nn.Linear declare it differently
    weight_quantizer: WeightQuantizer
    input_quantizer: InputQuantizer

    def __init__(
        self, layer: nn.Conv2d | nn.Linear, weight_bits: int = 4, activation_bits: int = 4, scheme: str = "lsq"
    ) -> None:
        if scheme not in SCHEMES:
            raise BsamValueError(f"scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}")
        make_weight_quantizer, make_input_quantizer = SCHEMES[scheme]
        init_like(self, layer, bias=layer.bias is not None)
        weight = layer.weight
        self.weight = weight
        self.bias = layer.bias
        self.weight_quantizer = make_weight_quantizer(weight.detach(), weight_bits)
        self.input_quantizer = make_input_quantizer(activation_bits, dtype=weight.dtype, device=weight.device)
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer with quantized weights and inputs."""
        exact = None if self.training else integer_output(self, self.codes(), x)
        if exact is not None and not torch.is_grad_enabled():
            return exact
        out = product(self, self.input_quantizer(x), self.weight_quantizer(self.weight), self.bias)
        return out if exact is None else exact + (out - out.detach())  # the difference is 0, but carries the gradient

    def codes(self) -> Codes:
        """Return the layer's current codes, in floating point, and scales, without gradient."""
        weight = self.weight_quantizer
        inputs = self.input_quantizer
        with torch.no_grad():
            weight_scale = weight.current_scale(self.weight)
            (input_scale, zero_point) = inputs.current_scale()
            return Codes(
                weight=quantize_codes(self.weight, weight_scale, None, weight.qmin, weight.qmax),
                weight_scale=weight_scale.flatten(),
                input_scale=input_scale.flatten(),
                input_zero_point=zero_point.flatten(),
                bias=None if self.bias is None else self.bias.detach(),
                weight_bits=weight.bits,
                activation_bits=inputs.bits,
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if not any(name.startswith((f"{prefix}weight_quantizer.", f"{prefix}input_quantizer.")) for name in state_dict):
            self.weight_quantizer.reset(self.weight.detach())
            self.input_quantizer.reset()
            for child in ("weight_quantizer", "input_quantizer"):  # they load next and would report missing keys
                getattr(self, child).state_dict(destination=state_dict, prefix=f"{prefix}{child}.")


class QuantConv2d(QuantLayer, nn.Conv2d):
    """A quantized convolution, see :class:`~bsam.lab.quantization.quant_layers.QuantLayer`.

    Example:
        >>> import torch
        >>> layer = QuantConv2d(nn.Conv2d(3, 8, 3), weight_bits=4, activation_bits=8)
        >>> layer(torch.rand(2, 3, 5, 5)).shape
        torch.Size([2, 8, 3, 3])
        >>> [name for name, _ in layer.named_parameters()]
        ['weight', 'bias', 'weight_quantizer.scale', 'input_quantizer.scale']
    """


class QuantLinear(QuantLayer, nn.Linear):
    """A quantized linear layer, see :class:`~bsam.lab.quantization.quant_layers.QuantLayer`.

    Example:
        >>> import torch
        >>> QuantLinear(nn.Linear(6, 2), scheme="minmax")(torch.rand(4, 6)).shape
        torch.Size([4, 2])
    """


def init_like(new: Any, layer: nn.Module, bias: bool) -> None:
    """Initialize a subclass of ``nn.Conv2d`` or ``nn.Linear`` with the shape of a layer, on the meta device."""
    if isinstance(layer, nn.Conv2d):
        geometry: dict[str, Any] = {name: getattr(layer, name) for name in GEOMETRY}
        nn.Conv2d.__init__(new, **geometry, bias=bias, device="meta")
    else:
        sizes: dict[str, Any] = {name: getattr(layer, name) for name in ("in_features", "out_features")}
        nn.Linear.__init__(new, **sizes, bias=bias, device="meta")


def quant_layers(model: nn.Module) -> list[QuantLayer]:
    """Return the quantized layers of a network; raise if it has none."""
    layers = [module for module in model.modules() if isinstance(module, QuantLayer)]
    if not layers:
        raise BsamValueError(
            f"{type(model).__name__} has no quantized layers: call bsam.lab.quantization.quantize first"
        )
    return layers


def replace(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace modules under all their names. Return the model, or its replacement."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children skips second names
            if child is not None and child in new:
                setattr(parent, name, new[child])
    return new.get(model, model)


class IntLayer(nn.Module):
    """A layer with integer weights; codes and scales are buffers.

    Args:
        layer: a layer with the same shape.
        codes: the weights and scales.
    """

    weight: Tensor
    bias: Any  # nn.Conv2d and nn.Linear declare it differently
    weight_scale: Tensor
    input_scale: Tensor
    input_zero_point: Tensor

    def __init__(self, layer: nn.Module, codes: Codes) -> None:
        init_like(self, layer, bias=codes.bias is not None)
        del self.weight, self.bias
        for name in ("weight", "weight_scale", "input_scale", "input_zero_point", "bias"):
            self.register_buffer(name, getattr(codes, name))
        self.weight_bits = codes.weight_bits
        self.activation_bits = codes.activation_bits
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer with integers. The result has the dtype of ``x``."""
        return integer_output(self, Codes(**{name: getattr(self, name) for name in CODE_FIELDS}), x)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight_bits={self.weight_bits}, activation_bits={self.activation_bits}"


class IntConv2d(IntLayer, nn.Conv2d):
    """A convolution with integer weights."""


class IntLinear(IntLayer, nn.Linear):
    """A linear layer with integer weights."""


def int_layer(layer: nn.Module, codes: Codes) -> IntLayer:
    """Return an integer layer in place of a convolution or linear layer."""
    return IntConv2d(layer, codes) if isinstance(layer, nn.Conv2d) else IntLinear(layer, codes)


def convert(model: nn.Module) -> nn.Module:
    """Return a copy of a quantized network with integer weights, in eval mode, for inference.

    The outputs equal those of the quantized network in eval mode bit for bit: both sum products of integers, see
    :func:`bsam.lab.quantization.arithmetic.integer_output`. Parts that are not quantized, such as batch norm, are kept.

    Args:
        model: a network from :func:`~bsam.lab.quantization.quantize`, trained or calibrated. It is not changed.

    Example:
        >>> from bsam.lab.quantization import calibrate, quantize
        >>> model, x = (
        ...     quantize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))),
        ...     torch.rand(32, 4),
        ... )
        >>> calibrate(model, x)
        >>> converted = convert(model)
        >>> converted[0].weight.dtype
        torch.int8
        >>> torch.equal(converted(x), model.eval()(x))
        True
    """
    model = copy.deepcopy(model).eval()
    new: dict[nn.Module, nn.Module] = {}
    for layer in quant_layers(model):
        codes = layer.codes()
        new[layer] = int_layer(layer, dataclasses.replace(codes, weight=codes.weight.to(torch.int8)))
    return replace(model, new)
