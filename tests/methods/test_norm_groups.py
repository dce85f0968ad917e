"""SAM-ON: a perturbation of the normalization layers alone, with their radius."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bsam
from helpers import assert_close


class RootMeanSquareNorm(nn.Module):
    """A normalization layer of another package."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.scale * x / x.square().mean(-1, keepdim=True).sqrt()


def network():
    torch.manual_seed(0)
    layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), RootMeanSquareNorm(), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def batch():
    return torch.randn(16, 5, dtype=torch.float64), torch.randint(0, 3, (16,))


@torch.enable_grad()
def gradient(model, x, y):
    return list(torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters())))


def by_hand(method, rho, model, x, y):
    """The direction; perturbations have the length ``rho`` on the normalization layers, and are 0 elsewhere."""
    named, g = dict(model.named_parameters()), gradient(model, x, y)
    norms = [name.startswith(("1.", "4.")) for name in named]
    sizes = [torch.ones_like(p) for p in model.parameters()]
    if method == "ASAM":
        sizes = [
            p.detach().abs() + 0.01 if name.endswith("weight") else torch.ones_like(p)
            for name, p in model.named_parameters()
        ]
    scaled = [t * part for t, part, chosen in zip(sizes, g, norms, strict=True) if chosen]
    length = torch.cat([part.flatten() for part in scaled]).norm()

    def at(sign):
        with torch.no_grad():
            moves = [
                sign * rho * t * t * part / length * chosen for t, part, chosen in zip(sizes, g, norms, strict=True)
            ]
            for p, move in zip(model.parameters(), moves, strict=True):
                p += move
            there = gradient(model, x, y)
            for p, move in zip(model.parameters(), moves, strict=True):
                p -= move
        return there

    up = at(1)
    if method != "BSAM":
        return up
    down = at(-1)
    a, b = (torch.cat([part.flatten() for part in parts]).norm() for parts in (up, down))
    return [part + u - a / b * d for part, u, d in zip(g, up, down, strict=True)]


@pytest.mark.parametrize(("method", "rho"), [("SAM", 0.5), ("ASAM", 2.0), ("BSAM", 0.3)])
def test_perturbations_have_the_radius_on_normalization_layers(method, rho):
    model, twin = network(), network()
    radii = {"rho_max": rho, "rho_min": rho} if method == "BSAM" else {"rho": rho}
    base = torch.optim.SGD(bsam.norm_groups(model, weight_decay=0.0), lr=0.1, momentum=0.9, weight_decay=1e-2)
    optimizer = getattr(bsam, method)(base, model, **radii)
    norms = [*twin[1].parameters(), *twin[4].parameters()]
    others = [p for p in twin.parameters() if all(p is not q for q in norms)]
    plain = torch.optim.SGD(
        [{"params": norms, "weight_decay": 0.0}, {"params": others}], lr=0.1, momentum=0.9, weight_decay=1e-2
    )
    for _ in range(5):
        x, y = batch()
        optimizer.step(lambda: F.cross_entropy(model(x), y))
        for p, part in zip(twin.parameters(), by_hand(method, rho, twin, x, y), strict=True):
            p.grad = part
        plain.step()
    assert_close(list(model.parameters()), list(twin.parameters()), atol=1e-10)


def test_the_rest_of_the_network_neither_delays_nor_hides():
    """The start is that of the perturbed group; the print-out shows what is not perturbed; the probe measures rho."""
    model, calls = network(), []
    base = torch.optim.SGD(bsam.norm_groups(model, sharpness_start=2), lr=0.1)
    optimizer = bsam.SAM(base, model, rho=0.5)
    probe = bsam.flatness.Probe(every=3)
    for _ in range(3):
        x, y = batch()
        optimizer.step(lambda: calls.append(1) or F.cross_entropy(model(x), y))
    assert len(calls) == 1 + 1 + 2
    assert repr(optimizer).count("perturb: False") == repr(optimizer).count("in_norm: False") == 1
    probe.attach(optimizer)
    optimizer.step(lambda: F.cross_entropy(model(x), y))
    assert probe.readings[-1].rho_max == pytest.approx(0.5)
    optimizer.param_groups[0]["in_norm"] = False
    with pytest.raises(bsam.BsamError, match="in_norm"):
        optimizer.step(lambda: F.cross_entropy(model(x), y))


def test_networks_without_normalization_are_refused():
    with pytest.raises(bsam.BsamError, match="no normalization layer"):
        bsam.norm_groups(nn.Linear(3, 2))
    with pytest.raises(bsam.BsamError, match="no normalization layer that is trained"):
        bsam.norm_groups(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2).requires_grad_(False)))
    with pytest.raises(bsam.BsamError, match="Module"):
        bsam.norm_groups([nn.LayerNorm(3)])
