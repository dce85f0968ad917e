"""The expansions of docs/what-bsam-does.md: its table to first order in the radii, and the second-order terms."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bsam

PAGE = Path(__file__).parents[2] / "docs/what-bsam-does.md"
RADII = (0.01, 0.005, 0.0025)  # each half of the one before
HALF, QUARTER, EIGHTH = (pytest.approx(n, rel=0.1) for n in (2, 4, 8))  # the error falls to 1/n at half the radius


def table(head: str = "| method | a (along) | b (across) | passes |") -> dict[str, list[str]]:
    """The cells of a table of the page, by the first cell of each row."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = lines.index(head) + 2
    rows = takewhile(lambda line: line.startswith("|"), lines[first:])
    cells = ([cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows)
    return {method: others for method, *others in cells}


def value_of(cell: str, names: dict[str, float]) -> float:
    """Evaluate a formula of the table, in which a thin space is a product."""
    formula = re.sub(r"\\\|(\w)\\\|", r"norm_\1", cell.strip("$")).replace(r"\,", "*")
    return eval(re.sub(r"[\\{}]", "", formula), dict(names))


def flat(tensors) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


class Expansion:
    """The derivatives of the loss that the page uses, computed with autograd."""

    def __init__(self, problem):
        self.problem, self.parameters = problem, list(problem.model.parameters())
        g = self.derivative(problem.loss())
        self.u = (g / g.norm()).detach()
        Hu = self.derivative(g @ self.u)
        Tuu = self.derivative(Hu @ self.u)
        self.g, self.norm, self.kappa = g.detach(), g.norm().item(), (Hu @ self.u).item()
        self.h, self.t = self.across(Hu.detach()), self.across(Tuu.detach())

    def derivative(self, value: Tensor) -> Tensor:
        return flat(torch.autograd.grad(value, self.parameters, create_graph=True))

    def across(self, v: Tensor) -> Tensor:
        return v - (v @ self.u) * self.u

    def direction(self, make, steps: int = 0, loss=None) -> Tensor:
        """The direction of an optimizer, after some steps that move nothing."""
        loss = loss or self.problem.loss
        optimizer = make(torch.optim.SGD(self.parameters, lr=0.0 if steps else 0.1), self.problem.model)
        for _ in range(steps):
            optimizer.step(self.problem.loss)
        optimizer.zero_grad()
        optimizer.backward(loss)
        return flat(p.grad for p in self.parameters)


@pytest.fixture
def near(plain) -> Expansion:
    return Expansion(plain)


@dataclass(frozen=True)
class Case:
    """A row of the table, and the method whose direction it describes."""

    row: str
    method: type
    radii: dict[str, float]  # in units of the radius that is halved
    others: dict[str, Any] = field(default_factory=dict)
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.row} {':'.join(map(str, self.radii.values()))}"

    def make(self, radius: float):
        return partial(self.method, **self.at(radius), **self.others)

    def at(self, radius: float) -> dict[str, float]:
        return {name: factor * radius for name, factor in self.radii.items()}


TWO_PASSES = {"passes": 2}
SIDES = [{"rho_max": a, "rho_min": b} for a, b in ((1, 1), (2, 1), (1, 2), (1, 0))]
CASES = [
    Case("SAM", bsam.SAM, {"rho": 1}),
    *(Case("BSAM", bsam.BSAM, sides) for sides in SIDES),
    *(Case("BSAM, two passes", bsam.BSAM, sides, TWO_PASSES) for sides in SIDES),
    Case("GSAM", bsam.GSAM, {"rho": 1}, {"alpha": 0.4}),
    Case("PGN", bsam.PGN, {"rho": 1}, {"alpha": 0.8}),
    Case("BSAM with `every`, in between", bsam.BSAM, {**SIDES[1], "rho_min_floor": 1}, {"every": 5}, steps=1),
    Case("LookSAM, between SAM steps", bsam.LookSAM, {"rho": 1}, {"alpha": 0.2}, steps=1),
]
GSAM = next(case for case in CASES if case.row == "GSAM")


def first_order_errors(near: Expansion, case: Case, along: str, across: str) -> list[float]:
    """The relative error of ``a kappa u + b h`` at each radius."""
    errors = []
    for radius in RADII:
        names = {**case.at(radius), **case.others, "norm_g": near.norm, "norm_h": float(near.h.norm())}
        expected = value_of(along, names) * near.kappa * near.u + value_of(across, names) * near.h
        correction = near.direction(case.make(radius), case.steps) - near.g
        errors.append(float((correction - expected).norm() / expected.norm()))
    return errors


def ratios(errors: list[float]) -> list[float]:
    return [large / small for large, small in pairwise(errors)]


def test_the_rows_of_the_page_are_those_tested():
    assert list(table()) == list(dict.fromkeys(case.row for case in CASES))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_holds_to_first_order(near, case):
    along, across, passes = table()[case.row]
    errors = first_order_errors(near, case, along, across)
    assert ratios(errors) == [HALF, HALF]
    assert errors[-1] < 0.05
    calls = []
    near.direction(case.make(0.01), case.steps, loss=lambda: calls.append(None) or near.problem.loss())
    assert str(len(calls)) == passes


def test_a_wrong_coefficient_is_found(near):
    errors = first_order_errors(near, GSAM, r"\rho", r"\rho")
    assert ratios(errors) == [pytest.approx(1, abs=0.05)] * 2
    assert errors[-1] > 0.05


# The shift of `start_from_min`: the change of the weights, instead of the direction.

LR = 0.1
STEPS = "| step | along $u$ | along $h$ |"
RELEASED = {"start_from_min": True}
STARTS = [
    *(Case("BSAM, from $w$", bsam.BSAM, sides) for sides in SIDES),
    *(Case(r"BSAM, from $w - \rho_{\min} u$", bsam.BSAM, sides, RELEASED) for sides in SIDES),
    Case(r"BSAM, from $w - \rho_{\min} u$", bsam.BSAM, SIDES[1], {**RELEASED, **TWO_PASSES}),
]


def change(near: Expansion, make, **settings) -> Tensor:
    """The weights before a step of SGD minus those after it, divided by the learning rate."""
    before = flat(near.parameters).detach().clone()
    optimizer = make(torch.optim.SGD(near.parameters, lr=LR, **settings), near.problem.model)
    optimizer.step(near.problem.loss)
    moved = (before - flat(near.parameters).detach()) / LR
    torch.nn.utils.vector_to_parameters(before, near.parameters)
    return moved


def change_errors(near: Expansion, case: Case, along: str, across: str) -> list[float]:
    """The relative error of ``along u + across h`` at each radius, without the term |g| of the step of SGD."""
    errors = []
    for radius in RADII:
        names = {**case.at(radius), "eta": LR, "norm_g": near.norm}
        expected = (value_of(along, names) - near.norm) * near.u + value_of(across, names) * near.h
        difference = change(near, case.make(radius)) - near.g
        errors.append(float((difference - expected).norm() / expected.norm()))
    return errors


def test_the_steps_of_the_page_are_those_tested():
    assert list(table(STEPS)) == list(dict.fromkeys(case.row for case in STARTS))


@pytest.mark.parametrize("case", STARTS, ids=lambda case: f"{case} {case.others}")
def test_a_step_holds_to_first_order(near, case):
    errors = change_errors(near, case, *table(STEPS)[case.row])
    assert ratios(errors) == [HALF, HALF]
    assert errors[-1] < 0.05


@pytest.mark.parametrize("factor", ["0", "2"], ids=["without the shift", "twice the shift"])
def test_a_wrong_shift_is_found(near, factor):
    released = next(case for case in STARTS if case.others)
    along, across = table(STEPS)[released.row]
    assert r"\rho_{\min} / \eta" in along
    errors = change_errors(near, released, along.replace(r"\rho_{\min} / \eta", f"{factor}*rho_min/eta"), across)
    assert ratios(errors) == [pytest.approx(1, abs=0.05)] * 2
    assert errors[-1] > 0.4


def test_weight_decay_acts_at_the_shifted_point_and_momentum_does_not_see_the_shift(near):
    w = flat(near.parameters).detach().clone()
    make = partial(bsam.BSAM, rho_max=0.01, rho_min=0.02, **RELEASED)
    d, shifted = near.direction(make), w - 0.02 * near.u
    base = torch.optim.SGD(near.parameters, lr=LR, momentum=0.9, weight_decay=0.3)
    make(base, near.problem.model).step(near.problem.loss)
    buffer = flat(base.state[p]["momentum_buffer"] for p in near.parameters)
    torch.testing.assert_close(buffer, d + 0.3 * shifted)
    torch.testing.assert_close(flat(near.parameters).detach(), shifted - LR * buffer)


# The next order.


def bsam_parts(near: Expansion, rho_max: float, rho_min: float, passes: int) -> tuple[float, Tensor]:
    """Return BSAM's direction minus the gradient: along the gradient and across it."""
    d = near.direction(partial(bsam.BSAM, rho_max=rho_max, rho_min=rho_min, passes=passes))
    return float((d - near.g) @ near.u), near.across(d)


@pytest.mark.parametrize("passes", [2, 3])
def test_with_equal_radii_the_part_along_the_gradient_changes_to_third_order(near, passes):
    assert ratios([abs(bsam_parts(near, r, r, passes)[0]) for r in RADII]) == [EIGHTH, EIGHTH]


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize(("a", "b"), [(2, 1), (1, 2), (1, 0)])
def test_with_unequal_radii_it_changes_to_second_order(near, a, b, passes):
    errors = []
    for r in RADII:
        expected = ((b * r) ** 2 - (a * r) ** 2) * float(near.h @ near.h) / (2 * near.norm)
        errors.append(abs(bsam_parts(near, a * r, b * r, passes)[0] / expected - 1))
    assert ratios(errors) == [HALF, HALF]
    assert errors[-1] < 0.05


@pytest.mark.parametrize(("a", "b"), [(1, 1), (2, 1), (1, 2), (1, 0)])
@pytest.mark.parametrize("passes", [2, 3])
def test_the_part_across_the_gradient_to_second_order(near, a, b, passes):
    errors = []
    for rho_max, rho_min in ((a * r, b * r) for r in RADII):
        c = rho_max - (rho_min if passes == 3 else 0)
        expected = (rho_max + rho_min) * ((1 + rho_min * near.kappa / near.norm) * near.h + c / 2 * near.t)
        errors.append(float((bsam_parts(near, rho_max, rho_min, passes)[1] - expected).norm() / expected.norm()))
    assert ratios(errors) == [QUARTER, QUARTER]
    assert errors[-1] < 1e-3


@pytest.mark.parametrize(("passes", "fall"), [(3, QUARTER), (2, HALF)])
def test_with_equal_radii_only_the_third_pass_removes_the_third_derivative(near, passes, fall):
    errors = []
    for r in RADII:
        expected = 2 * r * (1 + r * near.kappa / near.norm) * near.h
        errors.append(float((bsam_parts(near, r, r, passes)[1] - expected).norm() / expected.norm()))
    assert ratios(errors) == [fall, fall]


def test_sams_part_across_the_gradient_to_second_order(near):
    errors = []
    for r in RADII:
        expected = r * (near.h + r / 2 * near.t)
        across = near.across(near.direction(partial(bsam.SAM, rho=r)))
        errors.append(float((across - expected).norm() / expected.norm()))
    assert ratios(errors) == [QUARTER, QUARTER]


@pytest.mark.parametrize(("rho", "expected"), [(0.9, 1.0), (1.1, 3 + 2 * 1.1)])
def test_past_the_minimum_the_step_along_the_gradient_jumps(rho, expected):
    """On w²/2 at w = 1, where the gradient, its curvature and the distance to the minimum are 1."""
    w = nn.Parameter(torch.ones(1, dtype=torch.float64))
    bsam.BSAM(torch.optim.SGD([w], lr=0.1), None, rho_max=rho, rho_min=rho).backward(lambda: (w**2).sum() / 2)
    assert float(w.grad) == pytest.approx(expected)


@pytest.mark.parametrize("lr", [0.1, 0.07, 0.02, 0.0])
def test_sam_with_a_floor_has_bsams_total_radius(plain, lr):
    sides = {"rho_max": 0.03, "rho_min": 0.05}
    both = bsam.BSAM(torch.optim.SGD(plain.model.parameters(), lr=0.1), plain.model, **sides)
    sam = bsam.SAM(torch.optim.SGD(plain.model.parameters(), lr=0.1), plain.model, rho=0.08, rho_floor=0.03)
    for optimizer in (both, sam):
        optimizer.param_groups[0]["lr"] = lr
    assert sam.radii("rho") == pytest.approx(both.radii("rho_max") + both.radii("rho_min"))
    assert sam.radii("rho") == pytest.approx(0.03 + 0.05 * lr / 0.1)
