"""The training step of a run: its base optimizer, its method and its precision."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...common.checks import check_count
from ...common.errors import BsamRuntimeError, BsamValueError
from ...core.optimizer import SharpnessAware
from ...methods import METHODS
from .. import quantization
from ..models.parts import head_name, layer_ids
from ..tasks.task import Task
from .bases import BASES, as_tuples, parameters_of
from .config import BASE, Run
from .train_step import TrainStep, build_train_step


def build_run_step(
    run: Run,
    task: Task,
    model: nn.Module,
    steps: int,
    capturable: bool = False,
    processes: int = 1,
    network: nn.Module | None = None,
) -> TrainStep:
    """Return the training step of a run.

    Args:
        run: the settings.
        task: the task.
        model: the network, or its DDP or compiled wrapper.
        steps: the number of steps in the whole run.
        capturable: whether steps will be captured in a CUDA graph.
        processes: the number of processes that share each batch.
        network: the network itself if ``model`` is a wrapper, which changes the parameter names.
    """
    device = next(model.parameters()).device

    def forward(x: Tensor) -> Any:
        with autocast(run, device):
            return model(x)

    known = {
        "seed": run.seed,
        "total_steps": steps,
        "samples": task.samples,
        "classes": task.classes,
        "label_smoothing": task.smoothing,
        "side_by_side": capturable,
    }
    base = build_base(run, network or model, capturable)
    arguments = _arguments(run, processes)
    step = replace(
        build_train_step(run.method, arguments, base, model, forward, task.losses, **known),
        accumulate=run.accumulate,
        clip_norm=run.clip_norm,
        scaler=torch.amp.GradScaler(device.type) if run.precision == "fp16" else None,
        no_sync=getattr(model, "no_sync", contextlib.nullcontext),
    )
    if processes > 1 and isinstance(method := step.optimizer, SharpnessAware) and method.m_sharpness:
        state = (*method.vectors, *method.numbers)
        if state:
            raise BsamRuntimeError(
                f"with m_sharpness, the state of {run.method} ({', '.join(state)}) differs between processes, and a "
                "checkpoint holds only that of the first. Leave m_sharpness out, or choose a method without state"
            )
    return step


def check_method(run: Run, task: Task, processes: int) -> None:
    """Raise if the method cannot train this task, or cannot run in several processes."""
    if run.method == BASE:
        return
    if METHODS[run.method].is_loss and not task.logits:
        raise BsamValueError(f"{run.method} compares logits, but {run.task} has none: choose another method")
    if processes > 1 and (reason := METHODS[run.method].single_process):
        raise BsamValueError(f"{run.method} {reason}")


def _arguments(run: Run, processes: int) -> Mapping[str, Any]:
    """Return the method's arguments for one process: sample counts are divided by the number of processes."""
    if run.method == BASE or processes == 1:
        return run.arguments
    cls, shares = METHODS[run.method], dict(run.arguments)
    for name in cls.counts_of_batch:
        count = check_count(name, shares.get(name, inspect.signature(cls).parameters[name].default))
        if count % processes:
            raise BsamValueError(f"{name} must be a multiple of the number of processes ({processes}), got {count}")
        shares[name] = count // processes
    return shares


def build_base(run: Run, network: nn.Module, capturable: bool = False) -> Optimizer:
    """Return the base optimizer; if ``capturable``, its learning rates are tensors on the device.

    The momentum is the first of the ``betas`` for optimizers that have these; ``run.base_arguments`` take precedence.
    """
    groups = parameter_groups(run, network)
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


def parameter_groups(run: Run, network: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of trained parameters: one group, or one per learning rate. A quantized network has a group of
    weights and a group of learned scales, which have no weight decay.

    With several learning rates, each group has an ``lr_scale``, a factor on the run's learning rate, as in timm.
    """
    if run.weight_bits is not None:
        return quantization.parameter_groups(network, perturb_scales=run.perturb_scales, weight_decay=0.0)
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


def autocast(run: Run, device: torch.device) -> torch.autocast:
    """Return the autocast context for the network.

    The cache of casts is off, since its entries would outlive the CUDA graph that captured them.
    """
    dtype = torch.float16 if run.precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=run.precision != "fp32", cache_enabled=False)
