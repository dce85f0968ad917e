"""Fold batch norm into the preceding convolution."""

from __future__ import annotations

from collections import Counter

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ...common.errors import BsamValueError
from ..common.names import first_line
from .quant_layers import replace

NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (nn.Conv2d, _BatchNorm)) or super().is_leaf_module(m, module_qualified_name)


def fold_batch_norm(model: nn.Module) -> None:
    """Fold each batch norm that follows a convolution into that convolution, and replace it with ``nn.Identity``.

    Weight and bias absorb the running statistics, so the outputs in eval mode stay the same up to rounding, and batches
    are no longer normalized with their own statistics. Pairs are identified by tracing the forward pass with
    ``torch.fx``: each of the two modules must run once, and only the norm may use the convolution's output. Other batch
    norms are kept.

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
        if not isinstance(norm, _BatchNorm) or type(norm) not in NORMS or type(conv) is not nn.Conv2d:
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
