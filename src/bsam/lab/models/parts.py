"""Parts of networks: the head, the depth of every parameter, and the parameters without weight decay."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from ...common.errors import BsamValueError
from ...common.norm_groups import is_norm
from ...common.timm_import import import_timm
from .simcc import SimCC

BACKBONE = "backbone."  # prefix of the parameters in the backbone of SimCC


def head(network: nn.Module, classes: int | None = None) -> nn.Module:
    """Return the classifier of a network, as ``head_name`` finds it.

    For a pose network, it is everything except the backbone.

    Example:
        >>> from bsam.lab.models import build
        >>> head(build("resnet8"))
        Linear(in_features=64, out_features=10, bias=True)
    """
    return network.get_submodule(head_name(network, classes))


def head_name(network: nn.Module, classes: int | None = None) -> str:
    """Return the name of the classifier, which is the prefix of its parameters' names: that of what the network's
    ``get_classifier()`` returns, as in timm, or else of its only linear layer with ``classes`` outputs.

    Args:
        network: the network.
        classes: the number of outputs; None if the network has a single linear layer.

    Example:
        >>> from bsam.lab.models import build
        >>> head_name(build("resnet8")), head_name(build("timm:test_efficientnet"))
        ('linear', 'classifier')
    """
    get_classifier = getattr(network, "get_classifier", None)  # timm's networks and SimCC have it
    if get_classifier is not None:
        classifier = get_classifier()
        names = [name for name, module in network.named_modules() if module is classifier]
        if not names:
            raise BsamValueError(f"{type(network).__name__} has no single classifier: choose another network")
        return names[-1]
    linear = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    names = [name for name, module in linear.items() if classes in (None, module.out_features)]
    if len(names) != 1:
        outputs = "" if classes is None else f" with {classes} outputs"
        found = f" ({', '.join(names)})" if names else ""
        raise BsamValueError(
            f"the classifier of {type(network).__name__} is not known: it has {len(names)} linear layers{outputs}"
            f"{found}; give the network get_classifier(), a method that returns the layer"
        )
    return names[0]


def layer_ids(network: nn.Module) -> dict[str, int]:
    """Return the depth of every parameter by name: 0 for the stem, the largest for the classifier.

    Parameters are grouped as in timm, one group per block; the head of a pose network is the last group.

    Example:
        >>> from bsam.lab.models import build
        >>> depth = layer_ids(build("timm:test_resnet"))
        >>> depth["conv1.0.weight"], depth["layer1.0.conv1.weight"], depth["fc.weight"]
        (0, 1, 5)
    """
    backbone = network.backbone if isinstance(network, SimCC) else network
    matcher = getattr(backbone, "group_matcher", None)
    if matcher is None:
        raise BsamValueError(
            f"layer decay needs a timm network, got {type(network).__name__}: choose a model timm:NAME, resnet50 or "
            "simcc_resnet50"
        )
    groups: dict[str, int] = import_timm().models.group_parameters(backbone, matcher(coarse=False), reverse=True)
    if not isinstance(network, SimCC):
        return groups
    joints = dict.fromkeys((f"head.{name}" for name, _ in network.head.named_parameters()), max(groups.values()) + 1)
    return {f"{BACKBONE}{name}": depth for name, depth in groups.items()} | joints


def undecayed(network: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that AdamW usually trains without weight decay, as timm chooses them: biases and other
    vectors, normalization layers, embeddings, and what a network of timm names in ``no_weight_decay()``.

    Example:
        >>> from bsam.lab.models import build
        >>> network = build("resnet8")
        >>> no_decay = undecayed(network)
        >>> network.conv.weight in no_decay, network.linear.bias in no_decay
        (False, True)
    """
    no_decay = {p for name, p in network.named_parameters() if p.ndim <= 1 or name.endswith(".bias")}
    for module in network.modules():
        if is_norm(module) or isinstance(module, nn.Embedding):
            no_decay |= set(module.parameters(recurse=False))
    backbone = network.backbone if isinstance(network, SimCC) else network
    listed = getattr(backbone, "no_weight_decay", None)
    if listed is not None:
        for pattern in listed():
            no_decay |= {p for name, p in backbone.named_parameters() if fnmatchcase(name, pattern)}
    return no_decay
