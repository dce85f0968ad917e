"""Parameter groups of normalization layers and of all others, for SAM-ON."""

from __future__ import annotations

from typing import Any

from torch import nn

from .errors import BsamTypeError, BsamValueError

# torch's batch, instance, group, layer and RMS norm; others, such as timm's and transformers', by the names of classes
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def norm_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Return two parameter groups: the normalization layers, and all other parameters, which are not perturbed.

    With them, any method perturbs only the normalization layers, as SAM-ON does (Mueller et al., NeurIPS 2023), and
    only their gradients count in the length of a perturbation. Their radii are larger: about 0.5 for SAM, and 10 for
    ASAM. The base optimizer trains all parameters.

    Args:
        model: the network. A layer counts as normalization if its class is one of torch's, or if the name of its class
            ends with ``Norm``, ``Norm1d``, ``Norm2d`` or ``Norm3d``.
        options: settings of the group of normalization layers, such as ``weight_decay=0.0``.

    Example:
        >>> import torch, bsam
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
        >>> base = torch.optim.SGD(bsam.norm_groups(model), lr=0.1)
        >>> optimizer = bsam.SAM(base, model, rho=0.5)
        >>> [(len(group["params"]), group["perturb"]) for group in optimizer.param_groups]
        [(2, True), (2, False)]
    """
    if not isinstance(model, nn.Module):
        raise BsamTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    norms = {p for module in model.modules() if is_norm(module) for p in module.parameters(recurse=False)}
    if not any(p.requires_grad for p in norms):
        raise BsamValueError("model has no normalization layer that is trained: perturb all parameters instead")
    others = [p for p in model.parameters() if p not in norms]
    return [
        {"params": [p for p in model.parameters() if p in norms], "perturb": True, **options},
        {"params": others, "perturb": False, "in_norm": False},
    ]


def is_norm(module: nn.Module) -> bool:
    """Return whether a layer is a normalization layer."""
    return isinstance(module, NORMS) or type(module).__name__.rstrip("123d").endswith("Norm")
