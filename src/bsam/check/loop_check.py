"""Find silent mistakes in a training loop."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ..common.errors import BsamError, BsamTypeError
from ..common.method_info import Need
from ..core.calls import observe_calls
from ..core.objective import Closure, Objective
from ..core.optimizer import SharpnessAware
from ..core.ranks import Ranks, find_ddp, several_ranks
from ..core.schedule import START, WARMUP
from ..core.tensors import Memory, clear_weight_caches, sharding
from ..core.undo import Undo
from ..core.vector import TINY, Vector
from .recorder import GraphCheck, Recorder

# Non-deterministic kernels cause smaller differences than these, even in bfloat16; another batch causes larger ones.
LOSS_RTOL, GRADIENT_RTOL = 1e-4, 1e-2
# A perturbation of this share of the weights' length that multiplies the loss by this factor says nothing about the
# loss around w. With the usual radii, the share is below 0.01 for networks, and up to 0.1 for a few weights.
MAX_SHARE, MAX_FACTOR = 0.1, 2.0
# In wide networks, smaller shares do harm: whatever the share, the loss must not rise by more than this many times the
# loss at w. The loss of a fitted network is near 0, and the usual radii multiply it by more: it counts as this floor,
# which is the cross entropy of samples whose classes have a probability of 90%.
MAX_RISE, LOSS_FLOOR = 5.0, 0.1


def check_loop(optimizer: SharpnessAware, closure: Closure) -> list[str]:
    """Find silent mistakes in a training loop. Call this once, before training.

    The closure is evaluated twice at ``w``, with the same random draws, and then at the points of a step with the full
    radii. The check reports

    - a closure that does not compute the same loss twice (it takes a new batch, or draws from NumPy);
    - a loss, or a part of it, that was computed outside the closure;
    - batch norm and other buffers of modules that are not in ``model``;
    - parameters that get a gradient but are not in ``base``, and parameters of ``base`` that get none;
    - parameters that share memory without being the same;
    - a model in eval mode, gradients that were not cleared after a step, and a loss that is already scaled;
    - a DDP wrapper that the closure does not call;
    - for Functional SAM, a loss that is not computed from the outputs alone;
    - a radius that is far too large for these weights, whether or not there is a warm-up.

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
    optimizer = optimizer.unwrapped()
    if not callable(closure):
        raise BsamTypeError(f"closure must be a function that computes the loss, got {type(closure).__name__}")
    recorder = Recorder(optimizer.called_modules)
    graph_check = partial(GraphCheck, recorder)
    with Undo() as undo, undo:
        undo.set_grad_enabled(torch.is_grad_enabled())  # an interrupt may leave a function without gradients too early
        undo.callback(random.setstate, random.getstate())
        undo.callback(np.random.set_state, np.random.get_state())
        undo.restore_random_states({p.device for group in optimizer.param_groups for p in group["params"]})
        undo.callback(recorder.restore)
        L = optimizer.trial(closure, graph_check, undo)
        earlier = _find_before_passes(optimizer, recorder)
        recorder.save(optimizer.params)
        observe_calls(undo, recorder.record_module)
        findings, differences = _evaluate_twice(L, optimizer.needs)
        if not findings:
            sharded = any(sharding(p) is not None for p in optimizer.params)
            if sharded:
                recorder.leaves.clear()  # FSDP's gathered parameters
            findings = recorder.find_changes() or differences
            findings += _find_parameters(optimizer, L.gradients.has_grad, recorder)
            findings += _find_wrappers(optimizer.ranks, sharded, recorder.modules)
            findings += earlier + recorder.find_scale()
            findings += [] if differences else _find_radius(optimizer, L, undo)
    print(*(f"{optimizer.method()}.check: {finding}" for finding in findings or ["nothing found"]), sep="\n")
    return findings


def _find_before_passes(optimizer: SharpnessAware, recorder: Recorder) -> list[str]:
    """Find mistakes in the model, the parameters and their gradients, before the closure runs."""
    findings = []
    if optimizer.model is not None and not optimizer.model.training:
        findings.append("model is in eval mode: call model.train() before training, unless that is intended")
    if optimizer.stale_gradients:
        findings.append(
            "backward has added its direction to that of the last step: call optimizer.zero_grad() after each step"
        )
    memory = Memory(())
    shared = []
    for p in optimizer.params:
        if memory.overlaps(p):
            shared.append(p)
        memory.add(p)
    if shared:
        findings.append(
            f"{len(shared)} parameter(s) share memory with others ({recorder.names(shared)}) and are perturbed once "
            "for each: to tie weights, assign the parameter, as in head.weight = embedding.weight"
        )
    return findings


def _evaluate_twice(L: Objective, needs: Collection[Need]) -> tuple[list[str], list[str]]:
    """Evaluate the closure twice at ``w``. Return errors, and differences between the evaluations."""
    try:
        loss, g = L.value_and_grad()
        if Need.PER_SAMPLE_LOSSES in needs:
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
        try:
            left_out = _distance(g, L.pull_back(L.grad_and_signals()[1])) if Need.OUTPUTS in needs else 0.0
        except BsamError as error:
            return [str(error)], []
        if left_out > GRADIENT_RTOL:
            return [], [
                f"the gradient through the outputs differs by {left_out:.1%} from that of the loss, so a part of it "
                "is not trained: compute it from the outputs alone, and set weight_decay instead of adding a penalty"
            ]
        return [], []
    return [], [
        f"two evaluations of the closure at the same weights give the losses {first:.6g} and {second:.6g}, and "
        f"gradients that differ by {gap:.1%}: take the batch, and draw from NumPy or Python's random, before the step; "
        "the closure may change nothing but buffers"
    ]


def _distance(a: Vector, b: Vector) -> float:
    norm, difference = float(a.norm()), float((a - b).norm())
    return difference / norm if norm else math.inf if difference else 0.0


def _find_radius(optimizer: SharpnessAware, L: Objective, undo: Undo) -> list[str]:
    """Run a first step with the full radii, and compare the loss at each perturbation with that at ``w``.

    A step may perturb nothing (RST drew a plain one), or in a direction that has little effect (ESAM drew some biases).
    So the direction of the gradient is tried, too, at the same distance. MSAM perturbs against its momentum, which
    begins as the gradient.
    """
    loss = float(L.loss)  # type: ignore[arg-type]
    size = float(optimizer.vector(p.detach() for p in optimizer.params).norm())
    findings: dict[str, str] = {}  # by radius
    distances: dict[str, float] = {}  # of the farthest perturbation, by radius

    def epsilon(v: Vector, radius: str, length: Tensor | None = None) -> Vector:
        e = type(optimizer).epsilon(optimizer, v, radius, length)
        far = float(e.norm())
        if 0.0 < far < math.inf:  # it is NaN if the loss scale overflows
            distances[radius] = max(far, distances.get(radius, 0.0))
            _try_radius(optimizer, L, radius, e, loss, size, findings)
        return e

    for group in optimizer.param_groups:
        full = {WARMUP: 0, START: 0, "steps_taken": 0}
        undo.callback(group.update, {name: group[name] for name in full})
        group.update(full)
    undo.callback(vars(optimizer).pop, "epsilon", None)
    vars(optimizer)["epsilon"] = epsilon
    against = Need.MOMENTUM in optimizer.needs
    try:
        optimizer.direction(L)
        if not (against and distances):
            g = -L.grad() if against else L.grad()
            for name in list(distances) or optimizer.radius_names:
                e = type(optimizer).epsilon(optimizer, g, name)
                if name in distances:
                    e = e * (distances[name] / (e.norm() + TINY))
                if math.isfinite(float(e.norm())):
                    _try_radius(optimizer, L, name, e, loss, size, findings)
    except BsamError as error:
        return [*findings.values(), str(error)]
    except Exception:
        if not findings:  # otherwise the loss raises at the weights of a finding
            raise
    return [*findings.values()]


def _try_radius(
    optimizer: SharpnessAware,
    L: Objective,
    name: str,
    e: Vector,
    loss: float,
    size: float,
    findings: dict[str, str],
) -> None:
    """Evaluate the loss at ``w + e``, and add a finding if the radius of ``e`` is far too large.

    Args:
        loss: the loss at ``w``.
        size: the length of ``w``.
    """
    far = float(e.norm())
    values = {float(group[name]) for group in optimizer.param_groups}
    setting = f"{name}={values.pop():g}" if len(values) == 1 else name
    start = (
        f"the radius {setting} is too large: it perturbs weights of length {size:.3g} by {far:.3g}, and the loss there"
    )
    try:
        there = float(L.value_and_grad(e)[0])  # with the gradient, since the closure may run backward itself
    except (BsamError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        findings.setdefault(name, f"{start} raises {type(error).__name__} ({first_line}). Try a smaller {name}")
        return
    rise = there - loss
    far_and_high = far > MAX_SHARE * size and rise > (MAX_FACTOR - 1) * abs(loss)
    if far_and_high or not math.isfinite(there) or rise > MAX_RISE * max(abs(loss), LOSS_FLOOR):
        findings.setdefault(name, f"{start} is {there:.4g} instead of {loss:.4g}. Try a smaller {name}")


def _find_parameters(optimizer: SharpnessAware, has_grad: list[bool], recorder: Recorder) -> list[str]:
    """Compare the parameters that get a gradient with those of ``base``."""
    known = {p for group in optimizer.param_groups for p in group["params"]}
    foreign = [p for p in recorder.leaves if p not in known]
    without = [p for p, has in zip(optimizer.params, has_grad, strict=True) if not has]
    findings = []
    if foreign:
        findings.append(
            f"{len(foreign)} parameter(s) get a gradient in every pass but are not in base "
            f"({recorder.names(foreign)}): pass them to base, call requires_grad_(False) on them, or, if another "
            "optimizer trains them, pass model=[network, other]"
        )
    if without:
        findings.append(
            f"{len(without)} parameter(s) of base get no gradient ({recorder.names(without)}): in the closure, call "
            "the network that base was built on, unless this batch skips them on purpose"
        )
    return findings


def _find_wrappers(ranks: Ranks, sharded: bool, called: Iterable[nn.Module]) -> list[str]:
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
