"""Prepare a float network for quantization-aware training."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ...common.errors import BsamValueError
from ...core.wrapper import PERTURB
from ..common.names import first_line
from .quant_layers import IntLayer, QuantConv2d, QuantLayer, QuantLinear, quant_layers, replace

FOLDABLE_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)


def quantize(
    model: nn.Module,
    weight_bits: int = 4,
    activation_bits: int = 4,
    *,
    scheme: str = "lsq",
    first_last_bits: int | None = 8,
    fold_batch_norm: bool = False,
) -> nn.Module:
    """Return a copy of a network whose convolutions and linear layers fake-quantize their weights and inputs.

    Weights are quantized symmetrically with one scale per output channel, inputs affinely with one scale and zero
    point. Everything else stays in floating point. Training updates latent floating-point weights, which have the same
    names as in the float network.

    Args:
        model: the float network, which is not changed.
        weight_bits, activation_bits: numbers of bits of the weights and of the layer inputs, 2 to 8.
        scheme: with ``"lsq"`` (learned step size), scales are parameters, initialized from the weights and from the
            first batch in training mode. With ``"minmax"``, they come from the range of the weights and from moving
            averages of the range of the inputs.
        first_last_bits: number of bits of weights and inputs in the first and the last layer, in the order of
            ``model.modules()``. Quantizing these layers costs the most accuracy, and they hold few of the weights; LSQ
            and most papers on 4 bits and fewer keep them at 8. None treats them like the others.
        fold_batch_norm: whether to fold batch norm with its running statistics into the preceding convolution, as
            inference engines do. Fine-tuning then runs without batch norm.

    Example:
        >>> model = nn.Sequential(
        ...     nn.Conv2d(1, 4, 3),
        ...     nn.ReLU(),
        ...     nn.Conv2d(4, 8, 3),
        ...     nn.Flatten(),
        ...     nn.Linear(8, 2),
        ... )
        >>> quantized = quantize(model)
        >>> [
        ...     layer.weight_quantizer.bits
        ...     for layer in quantized
        ...     if hasattr(layer, "weight_quantizer")
        ... ]
        [8, 4, 8]
        >>> quantized(torch.rand(16, 1, 5, 5)).shape
        torch.Size([16, 2])
    """
    _check_layers(model)
    model = copy.deepcopy(model)
    if fold_batch_norm:
        fold_norms(model)
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    new: dict[nn.Module, nn.Module] = {}
    for layer in layers:
        bits = {"weight_bits": weight_bits, "activation_bits": activation_bits}
        if first_last_bits is not None and layer in (layers[0], layers[-1]):
            bits = dict.fromkeys(bits, first_last_bits)
        make: Any = QuantConv2d if isinstance(layer, nn.Conv2d) else QuantLinear
        new[layer] = make(layer, **bits, scheme=scheme)
    return replace(model, new)


def _check_layers(model: nn.Module) -> None:
    """Raise if the model has no layers to quantize, or any that cannot be quantized."""
    modules = {name or "the model": module for name, module in model.named_modules()}
    for name, module in modules.items():
        kind = type(module)
        if issubclass(kind, (QuantLayer, IntLayer)):
            raise BsamValueError(f"{name} is already quantized ({kind.__name__}): pass the float model")
        weighted = (_ConvNd, nn.Linear, nn.Bilinear, nn.RNNBase, nn.RNNCellBase)
        if issubclass(kind, weighted) and kind not in (nn.Conv2d, nn.Linear):
            raise BsamValueError(
                f"{name} cannot be quantized ({kind.__name__}): only torch.nn.Conv2d and torch.nn.Linear are supported"
            )
    if not any(isinstance(module, (nn.Conv2d, nn.Linear)) for module in modules.values()):
        raise BsamValueError(f"{type(model).__name__} has no convolutions or linear layers to quantize")


def calibrate(model: nn.Module, *inputs: Any) -> None:
    """Initialize the input scales from a batch, as the first training batch would.

    Nothing else changes: only the quantized layers run in training mode. With ``scheme="minmax"`` further batches
    update the averages; with ``"lsq"`` they have no effect.

    Args:
        model: a network from :func:`quantize`.
        inputs: the arguments of one forward pass.

    Example:
        >>> model = quantize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))).eval()
        >>> calibrate(model, torch.rand(32, 4))
        >>> model(torch.rand(1, 4)).shape
        torch.Size([1, 2])
    """
    layers = quant_layers(model)
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        for layer in layers:
            layer.train()
        with torch.no_grad():
            model(*inputs)
    finally:
        for module, training in modes:
            module.training = training


def parameter_groups(model: nn.Module, *, perturb_scales: bool = False, **settings: Any) -> list[dict[str, Any]]:
    """Return parameter groups of a quantized network for the base optimizer: weights, then learned scales.

    A sharpness-aware step perturbs the latent weights but not the scales, unless ``perturb_scales`` is set. Either way
    the gradients of the scales count towards the gradient norm, but are a small part of it. With ``scheme="minmax"``
    there are no learned scales and no second group.

    Args:
        model: a network from :func:`quantize`.
        perturb_scales: whether to perturb the scales.
        settings: settings of the second group, such as ``lr`` and ``weight_decay``.

    Example:
        >>> import bsam
        >>> model = quantize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        >>> base = torch.optim.SGD(
        ...     parameter_groups(model, weight_decay=0.0), lr=0.1, weight_decay=1e-3
        ... )
        >>> optimizer = bsam.BSAM(base, model)
        >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
        [(4, 0.001), (4, 0.0)]
    """
    scales = _learned_scales(model)
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if p not in scales]}]
    if scales:
        ordered = [p for p in model.parameters() if p in scales]
        groups.append({"params": ordered, PERTURB: perturb_scales, **settings})
    return groups


def freeze_scales(model: nn.Module) -> None:
    r"""Make the learned scales of a quantized network constant, as its Hessian requires.

    The loss is piecewise constant in the latent weights :math:`w`, and its Hessian is 0 wherever it exists. Therefore
    :class:`bsam.flatness.HessianOperator` uses the derivative of the straight-through gradient,

    .. math::
        H = M\, \nabla^2 L(\hat w)\, M,

    with the quantized weights :math:`\hat w` and a diagonal matrix :math:`M` that is 0 for latent weights whose codes
    are clipped and 1 for the others. In :math:`L`, quantizing a layer input has the derivative 1, or 0 where the input
    is clipped. This is the curvature that training sees, and it is symmetric. The gradient with respect to learned
    scales is not the derivative of any function, and its derivative is not symmetric, so ``HessianOperator`` raises an
    error if scales are trainable. Sharpness and landscapes need no second derivative: they evaluate the quantized loss
    at displaced latent weights, and displace trainable scales too.

    Args:
        model: a network from :func:`quantize`. With ``scheme="minmax"`` there is nothing to freeze.

    Example:
        >>> from bsam.flatness import HessianOperator
        >>> model, x, y = (
        ...     quantize(nn.Sequential(nn.Linear(4, 2))),
        ...     torch.rand(8, 4),
        ...     torch.rand(8, 2),
        ... )
        >>> calibrate(model, x)
        >>> freeze_scales(model)
        >>> HessianOperator(model, nn.functional.mse_loss, [(x, y)]).shape
        (10, 10)
    """
    for scale in _learned_scales(model):
        scale.requires_grad_(False)


def _learned_scales(model: nn.Module) -> set[nn.Parameter]:
    quantizers = [q for layer in quant_layers(model) for q in (layer.weight_quantizer, layer.input_quantizer)]
    return {scale for q in quantizers if q.learned for scale in q.parameters()}


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (nn.Conv2d, _BatchNorm)) or super().is_leaf_module(m, module_qualified_name)


def fold_norms(model: nn.Module) -> None:
    """Fold each batch norm that follows a convolution into that convolution, and replace it with ``nn.Identity``.

    Weight and bias absorb the running statistics, so the outputs in eval mode stay the same up to rounding, and batches
    are no longer normalized with their own statistics. Pairs are identified by tracing the forward pass with
    ``torch.fx``: each of the two modules must run once, and only the norm may use the convolution's output. Other batch
    norms are kept.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        >>> fold_norms(model)
        >>> model
        Sequential(
          (0): Conv2d(3, 4, kernel_size=(1, 1), stride=(1, 1))
          (1): Identity()
          (2): ReLU()
        )
    """
    try:
        graph = _Tracer().trace(model)
    except Exception as error:  # the model's code may raise anything on symbolic values
        raise BsamValueError(
            f"fold_batch_norm: torch.fx cannot trace the forward pass of {type(model).__name__} ({first_line(error)}). "
            "Fold batch norm with torch.nn.utils.fusion, or omit fold_batch_norm"
        ) from error
    calls = [(node, model.get_submodule(str(node.target))) for node in graph.nodes if node.op == "call_module"]
    times = Counter(module for _, module in calls)
    called = dict(calls)
    new: dict[nn.Module, nn.Module] = {}
    for node, norm in calls:
        before = node.args[0] if node.args else None
        if not isinstance(before, fx.Node) or len(before.users) != 1:
            continue
        conv = called.get(before)
        # subclasses may do more, such as timm's batch norm with an activation
        if not isinstance(norm, _BatchNorm) or type(norm) not in FOLDABLE_NORMS or type(conv) is not nn.Conv2d:
            continue
        if times[norm] != 1 or times[conv] != 1 or norm.running_mean is None:
            continue
        fused = fuse_conv_bn_eval(conv.eval(), norm.eval()).train(model.training)
        if fused.bias is not None:  # always true; the type checker needs it
            # if the convolution had no bias, fuse_conv_bn_eval adds one that does not require grad
            fused.bias.requires_grad_(conv.weight.requires_grad)
        new[conv] = fused
        new[norm] = nn.Identity().train(model.training)
    if not new:
        raise BsamValueError(
            f"{type(model).__name__} has no batch norm directly after a convolution: omit fold_batch_norm"
        )
    replace(model, new)
