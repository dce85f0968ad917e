"""The base optimizer of a run, and its parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..config import BASES, Run, as_tuples, parameters_of
from ..models.parts import head_name, layer_ids, undecayed
from ..tasks import task_of


def build_base(run: Run, network: nn.Module, capturable: bool = False) -> Optimizer:
    """Return the base optimizer; if ``capturable``, its learning rates are tensors on the device.

    The momentum is the first of the ``betas`` for optimizers that have these; ``run.base_arguments`` take precedence.
    """
    groups = trained_groups(run, network)
    for group in groups:
        lr = run.lr
        if "lr_scale" in group:
            group["initial_lr"] = lr  # radii follow the learning rate without lr_scale
            lr *= group["lr_scale"]
        group["lr"] = torch.tensor(lr, device=group["params"][0].device) if capturable else lr
    accepted = parameters_of(run.base)
    arguments: dict[str, Any] = {"weight_decay": run.weight_decay}
    if "momentum" in accepted:
        arguments["momentum"] = run.momentum
    if "betas" in accepted:
        arguments["betas"] = (run.momentum, accepted["betas"].default[1])
    if run.nesterov:
        arguments["nesterov"] = True
    if capturable:
        arguments["fused" if run.base == "sgd" else "capturable"] = True
    return BASES[run.base](groups, **{**arguments, **as_tuples(run.base_arguments)})


def trained_groups(run: Run, network: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of trained parameters: one group, one per learning rate, or those of the task.

    With several learning rates, each group has an ``lr_scale``, a factor on the run's learning rate, as in timm. With
    ``decay="weights"``, parameters without weight decay are in groups of their own.
    """
    groups = _groups_by_rate(run, network)
    if run.decay == "all":
        return groups
    bare = undecayed(network)
    parts = [
        {**group, "params": [p for p in group["params"] if (p in bare) == is_bare], **settings}
        for group in groups
        for is_bare, settings in ((False, {}), (True, {"weight_decay": 0.0}))
    ]
    return [part for part in parts if part["params"]]


def _groups_by_rate(run: Run, network: nn.Module) -> list[dict[str, Any]]:
    groups_of_task = task_of(run).parameter_groups(run, network)
    if groups_of_task is not None:
        return groups_of_task
    trained = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    if run.head_lr is None and run.layer_decay == 1:
        return [{"params": [p for _, p in trained]}]
    depths = dict.fromkeys(dict(network.named_parameters()), 0) if run.layer_decay == 1 else layer_ids(network)
    groups: dict[float, list[nn.Parameter]] = {}
    for name, p in trained:
        scale = run.layer_decay ** (max(depths.values()) - depths[name])
        if run.head_lr is not None and name.startswith(f"{head_name(network)}."):
            scale = run.head_lr / run.lr
        groups.setdefault(scale, []).append(p)
    return [{"params": params, "lr_scale": scale} for scale, params in groups.items()]
