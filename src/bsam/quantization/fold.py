"""Folding batch norm into the convolution before it."""

from __future__ import annotations

from collections import Counter

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ..common.errors import BsamValueError
from .modules import replace

NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (nn.Conv2d, _BatchNorm)) or super().is_leaf_module(m, module_qualified_name)


def fold_batch_norm(model: nn.Module) -> None:
    """Fold each batch norm that follows a convolution into it, and put ``nn.Identity`` in its place.

    The running statistics become part of weight and bias, so that the outputs in eval mode stay the same up to
    rounding, and no batch is normalized by its own statistics any more. Pairs are found by tracing the forward pass
    (``torch.fx``): nothing but the norm uses the convolution's output, and each of the two runs once. Other batch norms
    stay.

    Args:
        model: the network; it is changed in place.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        >>> fold_batch_norm(model)
        >>> model
        Sequential(
          (0): Conv2d(3, 4, kernel_size=(1, 1), stride=(1, 1))
          (1): Identity()
          (2): ReLU()
        )
    """
    try:
        graph = _Tracer().trace(model)
    except Exception as error:  # whatever the model's code raises on symbolic values
        reason = str(error).partition("\n")[0].rstrip(".")
        raise BsamValueError(
            f"fold_batch_norm cannot follow the forward pass of {type(model).__name__} by torch.fx ({reason}): fold it "
            "yourself by torch.nn.utils.fusion, or leave fold_batch_norm out"
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
        # types of their own may do more, as timm's batch norm with an activation
        if not isinstance(norm, _BatchNorm) or type(norm) not in NORMS or type(conv) is not nn.Conv2d:
            continue
        if times[norm] != 1 or times[conv] != 1 or norm.running_mean is None:
            continue
        fused = fuse_conv_bn_eval(conv.eval(), norm.eval()).train(model.training)
        if fused.bias is not None:  # it never is; that of a convolution without bias is frozen
            fused.bias.requires_grad_(conv.weight.requires_grad)
        new[conv] = fused
        new[norm] = nn.Identity().train(model.training)
    if not new:
        raise BsamValueError(
            f"{type(model).__name__} has no batch norm right after a convolution: leave fold_batch_norm out"
        )
    replace(model, new)
