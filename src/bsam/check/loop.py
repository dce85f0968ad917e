"""Find silent mistakes in a training loop."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..common.errors import BsamError, BsamTypeError
from ..common.method_info import Need
from ..core.ddp import find_ddp, several_ranks
from ..core.graph_check import GraphCheck
from ..core.layout import sharding
from ..core.module_calls import calls_seen
from ..core.tensors import clear_weight_caches
from .before import before_the_passes
from .seen import Seen

# Non-deterministic kernels cause smaller differences than these, even in bfloat16; another batch causes larger ones.
LOSS_RTOL, GRADIENT_RTOL = 1e-4, 1e-2


def check_loop(optimizer: Any, closure: Callable[..., Any]) -> list[str]:
    """Find silent mistakes in a training loop. Call this once, before training.

    The closure is evaluated twice at ``w``, with the same random draws. The check reports

    - a closure that does not compute the same loss twice (it takes a new batch, or draws from NumPy);
    - a loss, or a part of it, that was computed outside the closure;
    - batch norm and other buffers of modules that are not in ``model``;
    - parameters that get a gradient but are not in ``base``, and parameters of ``base`` that get none;
    - parameters that share memory without being the same;
    - a model in eval mode, gradients that were not cleared after a step, and a loss that is already scaled;
    - a DDP wrapper that the closure does not call.

    Weights, buffers, gradients and random generators are unchanged afterwards.

    Args:
        closure: as in :meth:`step`, for one batch. With several ranks, all of them must call this.

    Returns:
        One sentence per finding, which says what to do. The sentences are also printed.

    Example:
        >>> import bsam
        >>> model, batches = nn.Linear(4, 1), iter(torch.randn(8, 16, 4))
        >>> optimizer = bsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> x = next(batches)
        >>> optimizer.check(lambda: model(x).square().mean())
        SAM.check: nothing found
        []
        >>> len(
        ...     optimizer.check(lambda: model(next(batches)).square().mean())
        ... )  # doctest: +ELLIPSIS
        SAM.check: two evaluations of the closure ... change nothing but buffers
        1
    """
    optimizer = optimizer.itself()
    if not callable(closure):
        raise BsamTypeError(f"closure must be a function that computes the loss, got {type(closure).__name__}")
    groups, seen = optimizer.param_groups, Seen(optimizer.called_modules)
    graph_check = partial(_Graphs, seen)
    with _generators_restored(groups), seen.restored(), optimizer.trial(closure, graph_check) as L:
        earlier = before_the_passes(optimizer, seen.names)
        seen.save(optimizer.params)
        with calls_seen(seen.note):
            findings, differences = _evaluate_twice(L, Need.PER_SAMPLE_LOSSES in optimizer.needs)
        if not findings:
            sharded = any(sharding(p) is not None for p in optimizer.params)
            if sharded:
                seen.leaves.clear()  # FSDP's gathered parameters
            findings = seen.moved() or differences
            findings += _parameters(seen, groups, zip(optimizer.params, L.has_grad, strict=True))
            findings += _wrappers(optimizer.ranks, sharded, seen.modules) + earlier + seen.scaled()
    print(*(f"{optimizer.method()}.check: {finding}" for finding in findings or ["nothing found"]), sep="\n")
    return findings


class _Graphs(GraphCheck):
    """Compare all nodes of the graphs, and record the losses and the parameters that they depend on."""

    def __init__(self, seen: Seen, params: Sequence[Tensor]) -> None:
        super().__init__(params, on_leaf=seen.note_parameter)
        self._seen = seen

    def check(self, loss: Tensor, moved: bool) -> None:
        self._seen.note_loss(loss)
        super().check(loss, moved)


@contextlib.contextmanager
def _generators_restored(groups: list[dict[str, Any]]) -> Iterator[None]:
    cuda = sorted({p.device.index for group in groups for p in group["params"] if p.is_cuda})
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _evaluate_twice(L: Any, per_sample: bool) -> tuple[list[str], list[str]]:
    """Evaluate the closure twice at ``w``. Return errors, and differences between the evaluations."""
    try:
        loss, g = L.value_and_grad()
        if per_sample:
            L.value(subset=torch.arange(len(L.sample_losses), device=loss.device))
        clear_weight_caches()  # as between the passes of a step
        again, g_again = L.value_and_grad()
    except BsamError as error:
        return [str(error)], []
    except StopIteration:
        return ["the closure takes a batch from an iterator, which has ended: take the batch before the step"], []
    except RuntimeError as error:  # a closure that runs backward itself fails before GraphCheck can raise
        if "backward through the graph a second time" not in str(error):
            raise
        return [
            "a part of the loss was computed outside the closure, and therefore not at the perturbed weights: compute "
            "the whole loss inside the closure, or detach the parts that are meant to stay constant"
        ], []
    first, second = float(loss), float(again)
    if not (math.isfinite(first) and math.isfinite(second)):
        return [f"the loss is not finite ({first:g}): look for NaN or inf in the batch and in the weights"], []
    gap = _distance(g, g_again)
    if abs(first - second) <= LOSS_RTOL * abs(first) and not gap > GRADIENT_RTOL:  # NaN if the loss scale overflows
        return [], []
    return [], [
        f"two evaluations of the closure at the same weights give the losses {first:.6g} and {second:.6g}, and "
        f"gradients that differ by {gap:.1%}: take the batch, and draw from NumPy or Python's random, before the step; "
        "the closure may change nothing but buffers"
    ]


def _distance(a: Any, b: Any) -> float:
    norm, difference = float(a.norm()), float((a - b).norm())
    return difference / norm if norm else math.inf if difference else 0.0


def _parameters(seen: Seen, groups: list[dict[str, Any]], has_grad: Iterable[tuple[Tensor, bool]]) -> list[str]:
    """Compare the parameters that get a gradient with those of ``base``."""
    known = {p for group in groups for p in group["params"]}
    foreign = [p for p in seen.leaves if p not in known]
    without = [p for p, has in has_grad if not has]
    findings = []
    if foreign:
        findings.append(
            f"{len(foreign)} parameter(s) get a gradient in every pass but are not in base ({seen.names(foreign)}): "
            "pass them to base, call requires_grad_(False) on them, or, if another optimizer trains them, pass "
            "model=[network, other]"
        )
    if without:
        findings.append(
            f"{len(without)} parameter(s) of base get no gradient ({seen.names(without)}): in the closure, call the "
            "network that base was built on, unless this batch skips them on purpose"
        )
    return findings


def _wrappers(ranks: Any, sharded: bool, called: Iterable[nn.Module]) -> list[str]:
    if ranks.ddp is not None:
        if ranks.inside_ddp_forward or any(find_ddp(module) is ranks.ddp for module in called):
            return []
        return [
            "the closure does not call the DistributedDataParallel wrapper, so gradients are not averaged over ranks: "
            "call the wrapper instead of the network inside"
        ]
    if several_ranks() and not sharded:
        return [
            "there are several ranks, but the closure calls no DistributedDataParallel or FSDP wrapper, so the ranks' "
            "weights will diverge: wrap the network, and call the wrapper in the closure"
        ]
    return []
