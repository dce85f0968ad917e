"""SAM and BSAM against plain-loop float64 transcriptions of their equations, with momentum, weight decay, batch norm and a cosine schedule."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import bsam

STEPS, LR, MOMENTUM, DECAY, TINY = 50, 0.1, 0.9, 1e-2, 1e-12
Gradient = Callable[[list[Tensor]], list[Tensor]]


def norm(v: list[Tensor]) -> float:
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in v))


def shifted(w: list[Tensor], c: float, v: list[Tensor]) -> list[Tensor]:
    return [a + c * b for a, b in zip(w, v, strict=True)]


def sam(grad: Gradient, w: list[Tensor], lr: float) -> tuple[list[Tensor], list[Tensor]]:
    g = grad(w)
    return w, grad(shifted(w, 0.05 / (norm(g) + TINY), g))


def bsam_direction(passes: int = 3, start_from_min: bool = False, rho_max: float = 0.05, rho_min: float = 0.04, floor: float = 0.01):
    def direction(grad: Gradient, w: list[Tensor], lr: float) -> tuple[list[Tensor], list[Tensor]]:
        rho = floor + (rho_min - floor) * lr / LR
        g = grad(w)
        n = norm(g) + TINY
        g_max = grad(shifted(w, rho_max / n, g))
        extrapolated = [a - rho / rho_max * (b - a) for a, b in zip(g, g_max, strict=True)]
        g_min = grad(shifted(w, -rho / n, g)) if passes == 3 else extrapolated
        r = norm(g_max) / norm(g_min)
        d = [a + b - r * c for a, b, c in zip(g, g_max, g_min, strict=True)]
        return (shifted(w, -rho / n, g) if start_from_min else w), d

    return direction


def transcribed(problem, direction) -> tuple[list[Tensor], list[Tensor]]:
    """SGD with momentum and weight decay on a direction, in plain loops."""
    names = [name for name, _ in problem.model.named_parameters()]
    w = problem.weights()
    momentum: list[Tensor] = []
    for t in range(STEPS):
        lr = LR * (1 + math.cos(math.pi * t / STEPS)) / 2
        buffers = {name: b.clone() for name, b in problem.model.named_buffers()}
        passes = 0

        def grad(at: list[Tensor]) -> list[Tensor]:
            nonlocal passes
            leaves = [t.clone().requires_grad_() for t in at]
            own = buffers if passes == 0 else {name: b.clone() for name, b in buffers.items()}  # statistics move in the first pass only
            out = torch.func.functional_call(problem.model, {**dict(zip(names, leaves, strict=True)), **own}, (problem.x,))
            passes += 1
            return list(torch.autograd.grad(F.cross_entropy(out, problem.y), leaves))

        start, d = direction(grad, w, lr)
        d = [a + DECAY * b for a, b in zip(d, start, strict=True)]
        momentum = [MOMENTUM * m + a for m, a in zip(momentum, d, strict=True)] if momentum else d
        w = shifted(start, -lr, momentum)
        for name, b in problem.model.named_buffers():
            b.copy_(buffers[name])
    return w, problem.buffers()


CASES = {
    "sam": (bsam.SAM, {"rho": 0.05}, sam),
    "bsam": (bsam.BSAM, {"rho_max": 0.05, "rho_min": 0.04, "rho_min_floor": 0.01}, bsam_direction()),
    "bsam-2": (bsam.BSAM, {"rho_max": 0.05, "rho_min": 0.04, "rho_min_floor": 0.01, "passes": 2}, bsam_direction(passes=2)),
    "bsam-released": (bsam.BSAM, {"rho_max": 0.05, "rho_min": 0.04, "rho_min_floor": 0.01, "start_from_min": True}, bsam_direction(start_from_min=True)),
    "bsam-2-released": (
        bsam.BSAM,
        {"rho_max": 0.05, "rho_min": 0.04, "rho_min_floor": 0.01, "passes": 2, "start_from_min": True},
        bsam_direction(passes=2, start_from_min=True),
    ),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_equals_the_transcription(problem, case):
    cls, arguments, direction = CASES[case]
    expected, statistics = transcribed(problem.clone(), direction)
    base = torch.optim.SGD(problem.model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    optimizer = cls(base, problem.model, **arguments)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    for _ in range(STEPS):
        optimizer.step(problem.loss)
        scheduler.step()
    for ours, theirs in zip(problem.weights() + problem.buffers(), expected + statistics, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
    assert max(float((a - b).abs().max()) for a, b in zip(expected, problem.weights(), strict=True)) < 1e-11


def test_the_transcriptions_differ_from_each_other(problem):
    """Else equality above would say little."""
    ends = [transcribed(problem.clone(), direction)[0] for _, _, direction in CASES.values()]
    for i, a in enumerate(ends):
        for b in ends[:i]:
            assert max(float((s - t).abs().max()) for s, t in zip(a, b, strict=True)) > 1e-4
