"""Radii that rise from 0, and methods that start late, equal loops that set the radii by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bsam
from helpers import assert_close

RADII = {
    "SAM": {"rho": 0.3},
    "BSAM": {"rho_max": 0.2, "rho_min": 0.15, "rho_min_floor": 0.03},
    "LookSAM": {"rho": 0.3},
}
WARMUPS = (13, 6)  # of the two parameter groups
STEPS = 20


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def build(name: str, model: nn.Module, entries=({}, {}), **arguments):
    groups = [
        {"params": layer.parameters(), **entry} for layer, entry in zip((model[0], model[2]), entries, strict=True)
    ]
    base = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-2)
    optimizer = getattr(bsam, name)(base, model, **RADII[name], **arguments)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)


def closure(model: nn.Module, t: int):
    torch.manual_seed(t)
    x, y = torch.randn(16, 5, dtype=torch.float64), torch.randint(0, 3, (16,))
    return lambda: F.cross_entropy(model(x), y)


@pytest.fixture
def by_hand():
    def end(name, warmups=WARMUPS, starts=(0, 0)):
        """The weights after all steps of a loop that sets the radii before each of them."""
        model = network()
        optimizer, scheduler = build(name, model)
        for t in range(STEPS):
            for group, warmup, start in zip(optimizer.param_groups, warmups, starts, strict=True):
                share = min((t - start + 1) / warmup, 1.0) if t >= start else 0.0
                group.update({radius: share * value for radius, value in RADII[name].items()})
            optimizer.step(closure(model, t))
            scheduler.step()
        return list(model.parameters())

    return end


@pytest.mark.parametrize("name", RADII)
@pytest.mark.parametrize("stop", [None, 4, 9])
def test_the_radii_of_each_group_rise_also_after_a_resumption(name, stop, by_hand):
    model = network()
    entries = [{"sharpness_warmup": warmup} for warmup in WARMUPS]
    optimizer, scheduler = build(name, model, entries)
    for t in range(STEPS):
        if t == stop:
            states = [part.state_dict() for part in (model, optimizer, scheduler)]
            model = network()
            optimizer, scheduler = build(name, model, entries)
            for part, state in zip((model, optimizer, scheduler), states, strict=True):
                part.load_state_dict(state)
        optimizer.step(closure(model, t))
        scheduler.step()
    assert_close(list(model.parameters()), by_hand(name), atol=1e-12)
    assert torch.dist(model[0].weight, by_hand(name, (STEPS, STEPS))[0]) > 1e-4


@pytest.mark.parametrize("name", ["SAM", "BSAM"])
def test_groups_start_one_after_the_other(name, by_hand):
    """Until the first of them starts, a step takes one pass."""
    model, passes = network(), []
    optimizer, scheduler = build(name, model, [{"sharpness_start": 4}, {"sharpness_start": 9}], warmup=5)
    for t in range(STEPS):
        loss, calls = closure(model, t), []
        optimizer.step(lambda: calls.append(t) or loss())
        passes.append(len(calls))
        scheduler.step()
    assert_close(list(model.parameters()), by_hand(name, (5, 5), (4, 9)), atol=1e-12)
    assert passes == [1] * 4 + [optimizer.passes] * (STEPS - 4)


@pytest.mark.parametrize(("name", "arguments"), [("LookSAM", {"k": 3}), ("BSAM", {"passes": 2, "every": 3})])
def test_cycles_begin_with_the_start(name, arguments):
    """A step of one kind always takes the same passes, as in a CUDA graph."""
    model, passes = network(), []
    optimizer, _ = build(name, model, start=4, **arguments)
    for t in range(12):
        loss, calls, kind = closure(model, t), [], optimizer.step_kind()
        optimizer.step(lambda: calls.append(t) or loss())
        passes.append((kind, len(calls)))
    assert passes == [("plain", 1)] * 4 + [(True, 2), (False, 1), (False, 1)] * 2 + [(True, 2), (False, 1)]


@pytest.mark.parametrize("name", RADII)
def test_zero_is_off(name):
    ends = []
    for options in ({}, {"warmup": 0, "start": 0}):
        model = network()
        optimizer, _ = build(name, model, **options)
        for t in range(STEPS):
            optimizer.step(closure(model, t))
        ends.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


def test_repr_shows_them():
    assert "warmup" not in repr(build("SAM", network())[0])
    text = repr(build("SAM", network(), warmup=5, start=3)[0])
    assert text.count("sharpness_warmup: 5") == text.count("sharpness_start: 3") == 2
