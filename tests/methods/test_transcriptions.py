"""Every method against a plain-loop float64 transcription of its equations, with momentum, weight decay, batch norm and
a cosine schedule.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import bsam
from helpers import assert_close, distance

LR, MOMENTUM, DECAY, TINY, STEPS = 0.1, 0.9, 1e-2, 1e-12, 18
Tensors = list[Tensor]


def dot(u: Tensors, v: Tensors) -> float:
    return sum(float((a * b).sum()) for a, b in zip(u, v, strict=True))


def norm(v: Tensors) -> float:
    return math.sqrt(dot(v, v))


def ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def mix(*terms: tuple[float, Tensors]) -> Tensors:
    """The sum of c v over the terms (c, v)."""
    return [sum(c * v[i] for c, v in terms) for i in range(len(terms[0][1]))]


def ball(rho: float, v: Tensors) -> Tensors:
    """The perturbation of length rho along v."""
    return mix((rho / (norm(v) + TINY), v))


def projected(v: Tensors, onto: Tensors) -> Tensors:
    return mix((ratio(dot(v, onto), dot(onto, onto)), onto))


def largest(values: Tensor, k: int) -> list[int]:
    return sorted(sorted(range(len(values)), key=lambda i: -float(values[i]))[:k])


def bernoulli(seed: int, t: int, p: float, n: int) -> list[bool]:
    return [float(number) < p for number in np.random.default_rng((seed, t)).random(n)]


def following(lr: float, top: float, floor: float, lr_max: float | None, lr_min: float) -> float:
    lr_max = LR if lr_max is None else lr_max
    return min(max(floor + (top - floor) * (lr - lr_min) / (lr_max - lr_min), floor), top)


@dataclass
class Step:
    """One step: the mini-batch loss around w, and whatever else a method looks at."""

    problem: Any
    w: Tensors  # where the base optimizer will step from
    v: Tensors  # its momentum, empty in the first step
    t: int
    lr: float
    memory: dict[str, Any] = field(default_factory=dict)
    evaluations: int = 0

    def names(self) -> list[str]:
        return [name for name, _ in self.problem.model.named_parameters()]

    def outputs(self, w: Tensors, indices: list[int] | None = None) -> Tensor:
        """The first evaluation of a step moves the batch-norm statistics, later ones move a copy."""
        model, kept = self.problem.model, slice(None) if indices is None else indices
        buffers = {name: b.clone() for name, b in model.named_buffers()} if self.evaluations else {}
        self.evaluations += 1
        return torch.func.functional_call(
            model, {**dict(zip(self.names(), w, strict=True)), **buffers}, (self.problem.x[kept],)
        )

    def evaluated(self, w: Tensors, indices: list[int] | None = None) -> Tensor:
        """Per-sample losses."""
        y = self.problem.y if indices is None else self.problem.y[indices]
        return F.cross_entropy(self.outputs(w, indices), y, reduction="none")

    def at(self, e: Tensors | None) -> Tensors:
        return [p.clone().requires_grad_() for p in (self.w if e is None else mix((1, self.w), (1, e)))]

    def losses(self, e: Tensors | None = None) -> Tensor:
        with torch.no_grad():
            return self.evaluated(self.at(e))

    def losses_and_grad(self, e: Tensors | None = None, indices: list[int] | None = None) -> tuple[Tensor, Tensors]:
        w = self.at(e)
        losses = self.evaluated(w, indices)
        return losses.detach(), list(torch.autograd.grad(losses.mean(), w))

    def grad(self, e: Tensors | None = None, indices: list[int] | None = None) -> Tensors:
        return self.losses_and_grad(e, indices)[1]

    def hessian_times(self, u: Tensors, e: Tensors | None = None) -> Tensors:
        w = self.at(e)
        g = torch.autograd.grad(self.evaluated(w).mean(), w, create_graph=True)
        return list(torch.autograd.grad(sum((a * b).sum() for a, b in zip(g, u, strict=True)), w))


def adaptive_ball(L: Step, rho: float, g: Tensors, eta: float) -> Tensors:
    scales = [p.ndim >= 2 or name.split(".")[-1] == "weight" for name, p in zip(L.names(), L.w, strict=True)]
    T = [p.abs() + eta if scale else torch.ones_like(p) for p, scale in zip(L.w, scales, strict=True)]
    n = norm([a * b for a, b in zip(T, g, strict=True)]) + TINY
    return [rho * a**2 * b / n for a, b in zip(T, g, strict=True)]


def bsam_(
    L: Step,
    rho_max=0.05,
    rho_min=0.05,
    rho_min_floor=0.0,
    lr_max=None,
    lr_min=0.0,
    passes=3,
    start_from_min=False,
    adaptive=False,
    eta=0.01,
):
    rho_min = following(L.lr, rho_min, rho_min_floor, lr_max, lr_min)
    g = L.grad()
    e_max, e_min = (adaptive_ball(L, rho, g, eta) if adaptive else ball(rho, g) for rho in (rho_max, rho_min))
    g_max = L.grad(e_max)
    extrapolated = mix((1, g), (-rho_min / rho_max, mix((1, g_max), (-1, g))))
    g_min = L.grad(mix((-1, e_min))) if passes == 3 else extrapolated
    if start_from_min:
        L.w = mix((1, L.w), (-1, e_min))
    return mix((1, g), (1, g_max), (-ratio(norm(g_max), norm(g_min)), g_min))


def radius(L: Step, rho: float, rho_floor=None, lr_max=None, lr_min=0.0) -> float:
    return rho if rho_floor is None else following(L.lr, rho, rho_floor, lr_max, lr_min)


def sam(L: Step, rho=0.05, **schedule) -> Tensors:
    return L.grad(ball(radius(L, rho, **schedule), L.grad()))


def asam(L: Step, rho=0.5, eta=0.01, **schedule) -> Tensors:
    return L.grad(adaptive_ball(L, radius(L, rho, **schedule), L.grad(), eta))


def gsam(L: Step, rho=0.05, alpha=0.4, **schedule) -> Tensors:
    g = L.grad()
    g_p = L.grad(ball(radius(L, rho, **schedule), g))
    return mix((1, g_p), (-alpha, g), (alpha, projected(g, g_p)))


def fisher_sam(L: Step, rho=0.1, eta=0.2) -> Tensors:
    g = L.grad()
    natural = [a / (1 + eta * a**2) for a in g]  # F^-1 g
    return L.grad(mix((rho / (math.sqrt(dot(g, natural)) + TINY), natural)))


def friendly_sam(L: Step, rho=0.05, sigma=1.0, decay=0.9, **schedule) -> Tensors:
    g = L.grad()
    m = L.memory.get("m")
    d = L.grad(ball(radius(L, rho, **schedule), g if m is None else mix((1, g), (-sigma, m))))
    L.memory["m"] = g if m is None else mix((decay, m), (1 - decay, g))
    return d


def pgn(L: Step, rho=0.1, alpha=0.8) -> Tensors:
    g = L.grad()
    return mix((1 - alpha, g), (alpha, L.grad(ball(rho, g))))


def gam(L: Step, rho=0.02, rho_norm=0.2, beta=(1, 1, 1), gamma=0.03, form="released") -> Tensors:
    g = L.grad()
    if form == "paper":
        e = ball(rho_norm, L.hessian_times(mix((1 / norm(g), g))))
        g_e = L.grad(e)
        return mix((1, g), (gamma * rho_norm, L.hessian_times(mix((1 / norm(g_e), g_e)), e)))
    b1, b2, b3 = beta
    g1 = L.grad(ball(rho, g))
    e = ball(rho_norm, mix((1, g1), (-1, g)))
    g2 = L.grad(e)
    g3 = L.grad(mix((1, e), (1, ball(rho, g2))))
    n = mix((b1, g1), (b3, g3))
    p = mix((1, g), (b2, g2))
    return mix((1, n), (-gamma, p), (gamma, projected(p, n)))


def look_sam(L: Step, rho=0.05, k=5, alpha=0.2) -> Tensors:
    g = L.grad()
    if L.t % k == 0:
        g_s = L.grad(ball(rho, g))
        L.memory["g_v"] = mix((1, g_s), (-1, projected(g_s, g)))
        return g_s
    g_v = L.memory["g_v"]
    return mix((1, g), (alpha * norm(g) / (norm(g_v) + TINY), g_v))


def esam(L: Step, rho=0.05, beta=0.6, gamma=0.5, seed=0) -> Tensors:
    before, g = L.losses_and_grad()
    g_S = [a if kept else torch.zeros_like(a) for a, kept in zip(g, bernoulli(seed, L.t, beta, len(g)), strict=True)]
    e = ball(rho / beta, g_S)
    rise = L.losses(e) - before
    return L.grad(e, largest(rise, max(1, int(gamma * len(rise)))))


def ksam(L: Step, rho=0.05, k=64) -> Tensors:
    hard = largest(L.losses(), k)
    return L.grad(ball(rho, L.grad(indices=hard)), hard)


def msam(L: Step, rho=3.0) -> Tensors:
    return L.grad(ball(-rho, L.v) if L.v else None)


def aesam(L: Step, total_steps: int, rho=0.05, decay=0.9, lambda_1=-1.0, lambda_2=1.0, alpha=0.0) -> Tensors:
    g = L.grad()
    s = dot(g, g)
    mu, var = s, 0.0
    if L.t > 0:
        mu = decay * L.memory["mu"] + (1 - decay) * s
        var = decay * L.memory["var"] + (1 - decay) * (s - mu) ** 2
    L.memory.update(mu=mu, var=var)
    c = L.t / total_steps * lambda_1 + (1 - L.t / total_steps) * lambda_2
    if s >= mu + c * math.sqrt(var):
        g_s = L.grad(ball(rho, g))
        L.memory["g_v"] = mix((1, g_s), (-1, projected(g_s, g)))
        return g_s
    g_v = L.memory["g_v"]
    return mix((1, g), (alpha * norm(g) / (norm(g_v) + TINY), g_v))


def rst(L: Step, rho=0.05, p=0.5, gamma=1.0, seed=0) -> Tensors:
    g = L.grad()
    (chosen,) = bernoulli(seed, L.t, p, 1)
    return mix((1 - gamma, g), (gamma, L.grad(ball(rho, g)))) if chosen else g


def functional_sam(L: Step, rho=0.05, **schedule) -> Tensors:
    w = L.at(None)
    outputs = L.outputs(w)
    loss = F.cross_entropy(outputs, L.problem.y)
    (s,) = torch.autograd.grad(loss, outputs, retain_graph=True)
    there = L.at(ball(radius(L, rho, **schedule), list(torch.autograd.grad(loss, w))))
    return list(torch.autograd.grad((L.outputs(there) * s).sum(), there))


def saner(L: Step, rho=0.05, alpha=0.5, ramp=0, **schedule) -> Tensors:
    g = L.grad()
    g_hat = L.grad(ball(radius(L, rho, **schedule), g))
    a = alpha if L.t >= ramp else 1 - (1 - alpha) * L.t / ramp
    quotients = [b / a for a, b in zip(g, g_hat, strict=True)]
    masks = [((q > 0) & (q < 1)).double() for q in quotients]
    return [(a * m + 1 - m) * b for m, b in zip(masks, g_hat, strict=True)]


def vasso(L: Step, rho=0.05, theta=0.9, **schedule) -> Tensors:
    g = L.grad()
    L.memory["v"] = mix((1 - theta, L.memory["v"]), (theta, g)) if "v" in L.memory else g
    return L.grad(ball(radius(L, rho, **schedule), L.memory["v"]))


def crsam(L: Step, rho=0.1, gamma=0.1, beta=0.1, **schedule) -> Tensors:
    g = L.grad()
    e = ball(radius(L, rho, **schedule), g)
    up, down = L.grad(e), L.grad(mix((-1, e)))
    curvature, slope = mix((1, up), (1, down), (-2, g)), mix((1, up), (-1, down))
    return mix((1, up), (gamma, curvature), (beta, slope))


def sam_on_a_share(L: Step, rho=0.05, ascent=1.0) -> Tensors:
    n = len(L.problem.x)
    if L.t == 0:
        L.losses()  # finds out how large the batch is
    return L.grad(ball(rho, L.grad(indices=list(range(math.ceil(ascent * n))))))


def warmed_up(direction):
    """The method with all radii, and floors, times the share that the warm-up has reached."""

    def warm(L: Step, warmup=0, start=0, **arguments) -> Tensors:
        if L.t < start:
            return L.grad()
        share = min(1.0, (L.t - start + 1) / warmup) if warmup else 1.0
        defaults = {name: p.default for name, p in inspect.signature(direction).parameters.items()}
        radii = {name: value for name, value in {**defaults, **arguments}.items() if name.startswith("rho")}
        L.t -= start  # the cycles of a method begin with it
        d = direction(L, **{**arguments, **{name: share * rho for name, rho in radii.items()}})
        L.t += start
        return d

    return warm


RADII = {"rho_max": 0.05, "rho_min": 0.04, "rho_min_floor": 0.01}
WIDE = {"rho_max": 0.5, "rho_min": 0.4, "rho_min_floor": 0.1, "adaptive": True, "eta": 0.01}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "sam": ("SAM", sam, {}),
    "sam-schedule": ("SAM", sam, {"rho": 0.1, "rho_floor": 0.05}),
    "sam-clamped": ("SAM", sam, {"rho": 0.2, "rho_floor": 0.01, "lr_max": 0.08, "lr_min": 0.02}),
    "bsam": ("BSAM", bsam_, RADII),
    "bsam-defaults": ("BSAM", bsam_, {}),
    "bsam-2": ("BSAM", bsam_, {**RADII, "passes": 2}),
    "bsam-released": ("BSAM", bsam_, {**RADII, "start_from_min": True}),
    "bsam-2-released": ("BSAM", bsam_, {**RADII, "passes": 2, "start_from_min": True}),
    "bsam-adaptive": ("BSAM", bsam_, WIDE),
    "bsam-adaptive-2": ("BSAM", bsam_, {**WIDE, "passes": 2}),
    "asam": ("ASAM", asam, {}),
    "asam-eta": ("ASAM", asam, {"rho": 0.3, "eta": 0.2}),
    "asam-schedule": ("ASAM", asam, {"rho": 0.8, "rho_floor": 0.2}),
    "gsam": ("GSAM", gsam, {}),
    "gsam-schedule": ("GSAM", gsam, {"rho": 0.2, "rho_floor": 0.01}),
    "gsam-clamped": ("GSAM", gsam, {"rho": 0.2, "rho_floor": 0.01, "lr_max": 0.08, "lr_min": 0.02, "alpha": 0.7}),
    "fisher": ("FisherSAM", fisher_sam, {}),
    "fisher-strong": ("FisherSAM", fisher_sam, {"rho": 0.2, "eta": 100.0}),
    "friendly": ("FriendlySAM", friendly_sam, {}),
    "friendly-schedule": ("FriendlySAM", friendly_sam, {"rho": 0.3, "rho_floor": 0.1}),
    "friendly-0.5": ("FriendlySAM", friendly_sam, {"rho": 0.2, "sigma": 0.5, "decay": 0.6}),
    "pgn": ("PGN", pgn, {}),
    "gam": ("GAM", gam, {}),
    "gam-beta": ("GAM", gam, {"rho": 0.1, "beta": (0.9, 0.8, 0.7), "gamma": 0.3}),
    "gam-paper": ("GAM", gam, {"form": "paper"}),
    "gam-paper-strong": ("GAM", gam, {"form": "paper", "rho_norm": 0.1, "gamma": 0.7}),
    "looksam": ("LookSAM", look_sam, {}),
    "looksam-3": ("LookSAM", look_sam, {"rho": 0.1, "k": 3, "alpha": 0.5}),
    "esam": ("ESAM", esam, {}),
    "esam-seed": ("ESAM", esam, {"rho": 0.1, "beta": 0.8, "gamma": 0.7, "seed": 3}),
    "ksam": ("KSAM", ksam, {"k": 10}),
    "msam": ("MSAM", msam, {"rho": 0.3}),
    "aesam": ("AESAM", aesam, {"total_steps": STEPS}),
    "aesam-lambda": (
        "AESAM",
        aesam,
        {"total_steps": STEPS, "rho": 0.2, "decay": 0.8, "lambda_1": -2.0, "lambda_2": 0.5},
    ),
    "aesam-reuse": ("AESAM", aesam, {"total_steps": STEPS, "alpha": 0.4}),
    "rst": ("RST", rst, {}),
    "rst-seed": ("RST", rst, {"rho": 0.2, "p": 0.3, "seed": 3}),
    "g-rst": ("RST", rst, {"gamma": 2.0}),
    "functional": ("FunctionalSAM", functional_sam, {}),
    "functional-schedule": ("FunctionalSAM", functional_sam, {"rho": 0.3, "rho_floor": 0.1}),
    "saner": ("SANER", saner, {}),
    "saner-ramp": ("SANER", saner, {"rho": 0.2, "alpha": 0.2, "ramp": 10}),
    "vasso": ("VaSSO", vasso, {}),
    "vasso-0.4": ("VaSSO", vasso, {"rho": 0.2, "theta": 0.4}),
    "crsam": ("CRSAM", crsam, {}),
    "crsam-strong": ("CRSAM", crsam, {"rho": 0.2, "gamma": 0.5, "beta": 0.3}),
    "sam-share": ("SAM", sam_on_a_share, {"ascent": 0.3}),
    "sam-warmup": ("SAM", warmed_up(sam), {"rho": 0.2, "warmup": 10}),
    "sam-late": ("SAM", warmed_up(sam), {"rho": 0.2, "rho_floor": 0.05, "warmup": 8, "start": 6}),
    "bsam-warmup": ("BSAM", warmed_up(bsam_), {**RADII, "warmup": 12}),
    "bsam-2-late": ("BSAM", warmed_up(bsam_), {**RADII, "passes": 2, "start": 9}),
    "saner-late": ("SANER", warmed_up(saner), {"rho": 0.1, "ramp": 8, "start": 4}),
    "looksam-late": ("LookSAM", warmed_up(look_sam), {"rho": 0.1, "warmup": 6, "start": 5}),
    "msam-warmup": ("MSAM", warmed_up(msam), {"rho": 0.3, "warmup": 9}),
}


def transcribed(problem, case: str) -> tuple[Tensors, list[int]]:
    """SGD with momentum and weight decay on a method's direction: the weights and buffers at the end, and the
    evaluations of every step.
    """
    _, direction, arguments = CASES[case]
    w, v, memory, evaluations = problem.weights(), [], {}, []
    for t in range(STEPS):
        L = Step(problem, w, v, t, LR * (1 + math.cos(math.pi * t / STEPS)) / 2, memory)
        d = direction(L, **arguments)
        d = mix((1, d), (DECAY, L.w))
        v = mix((MOMENTUM, v), (1, d)) if v else d
        w = mix((1, L.w), (-L.lr, v))
        evaluations.append(L.evaluations)
    return w + problem.buffers(), evaluations


@pytest.fixture(scope="module")
def ends() -> Callable[..., tuple[Tensors, list[int]]]:
    """Where each transcription ends from the same start, computed once."""
    found: dict[str, tuple[Tensors, list[int]]] = {}

    def end(problem, case):
        if case not in found:
            found[case] = transcribed(problem.clone(), case)
        return found[case]

    return end


def closure_for(problem, name: str, arguments: dict[str, Any]) -> Callable[..., Any]:
    if name == "FunctionalSAM":
        return problem.loss_and_outputs
    return problem.losses if name in ("ESAM", "KSAM") or "ascent" in arguments else problem.loss


@pytest.mark.parametrize("case", CASES)
def test_equals_the_transcription(problem, case, ends):
    name, _, arguments = CASES[case]
    expected, _ = ends(problem, case)
    base = torch.optim.SGD(problem.model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    optimizer = getattr(bsam, name)(base, problem.model, **arguments)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    for _ in range(STEPS):
        optimizer.step(closure_for(problem, name, arguments))
        scheduler.step()
    assert_close(problem.weights() + problem.buffers(), expected, atol=1e-11)


def test_the_transcriptions_differ_from_each_other(problem, ends):
    """Else equality above would say little."""
    n = len(problem.weights())
    weights = {case: ends(problem, case)[0][:n] for case in CASES}
    pairs = itertools.combinations(CASES, 2)
    assert not [pair for pair in pairs if distance(*(weights[case] for case in pair)) <= 1e-4]


@pytest.mark.parametrize("case", ["aesam", "aesam-lambda", "rst", "rst-seed", "g-rst", "looksam", "looksam-3"])
def test_both_branches_are_taken(problem, case, ends):
    _, evaluations = ends(problem, case)
    assert min(evaluations.count(1), evaluations.count(2)) >= 3


@pytest.mark.parametrize("case", ["gsam", "gam", "gam-beta", "looksam"])
def test_a_wrong_sign_of_the_projection_would_show(problem, monkeypatch, case, ends):
    right, _ = ends(problem, case)
    monkeypatch.setitem(globals(), "projected", lambda v, onto: mix((-ratio(dot(v, onto), dot(onto, onto)), onto)))
    assert distance(right, transcribed(problem, case)[0]) > 1e-6
