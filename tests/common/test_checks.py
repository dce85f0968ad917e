"""Arguments that raise an error at construction. The message names the argument."""

from __future__ import annotations

import pytest
import torch

import bsam
from helpers import sgd

BAD_RADII = (-0.1, float("nan"), float("inf"), "0.05", None, True)
ARGUMENTS = [  # of BSAM, and the argument that the message names
    *(({"rho_max": value}, "rho_max") for value in BAD_RADII),
    *(({"rho_min": value}, "rho_min") for value in BAD_RADII),
    *(({"rho_min_floor": value}, "rho_min_floor") for value in BAD_RADII),
    ({"rho_min": 0.01, "rho_min_floor": 0.02}, "rho_min_floor"),
    *(({"passes": value}, "passes") for value in (4, 1, "3", 3.0)),
    *(({"lr_max": value}, "lr_max") for value in (0.0, float("nan"), "high")),
    ({"lr_max": 0.1, "lr_min": 0.1}, "lr_max"),
    ({"lr_max": 0.05, "lr_min": 0.1}, "lr_max"),
    *(({"lr_min": value}, "lr_min") for value in (0.1, -0.1)),
    ({"start_from_min": "no"}, "start_from_min"),
    *(({"m_sharpness": value}, "m_sharpness") for value in (True, 1)),
    ({"same_draws": 1}, "same_draws"),
]


@pytest.mark.parametrize(("arguments", "name"), ARGUMENTS)
def test_arguments(problem, arguments, name):
    base = sgd(problem.model.parameters())
    before = set(base.param_groups[0])
    with pytest.raises(bsam.BsamError, match=name):
        bsam.BSAM(base, problem.model, **arguments)
    assert set(base.param_groups[0]) == before
    bsam.BSAM(base, problem.model)  # the base can still be used


BASES = {  # made of the parameters, and a word of the message
    "a string": (lambda parameters: "sgd", "base"),
    "None": (lambda parameters: None, "base"),
    "LBFGS": (torch.optim.LBFGS, "LBFGS"),
    "in use": (lambda parameters: bsam.SAM(sgd(parameters), None).base, "belongs"),
    "wrapped": (lambda parameters: bsam.SAM(sgd(parameters), None), "belongs"),
    "maximize": (lambda parameters: sgd(parameters, maximize=True), "maximize"),
    "differentiable": (lambda parameters: sgd(parameters, differentiable=True), "differentiable"),
    "a setting rho": (torch.optim.Adadelta, "rho"),
}


@pytest.mark.parametrize("name", BASES)
def test_bases(problem, name):
    make, word = BASES[name]
    with pytest.raises(bsam.BsamError, match=word):
        bsam.SAM(make(list(problem.model.parameters())), problem.model)


def test_models(problem, plain):
    base = sgd(problem.model.parameters())
    for model, word in [
        ("model", "str"),
        ([], "empty"),
        ([problem.model, "d"], "Sequential, str"),
        ([plain.model, problem.model], "6 trainable"),
    ]:
        with pytest.raises(bsam.BsamError, match=word):
            bsam.SAM(base, model)
    with pytest.raises(bsam.BsamError, match=r"6 trainable.*1\.weight"):
        bsam.SAM(sgd(list(problem.model.parameters())[:2]), problem.model)


SGD = torch.optim.SGD
CALLS = {  # in the style of other packages, and the line to write instead
    "the class of the base": (
        lambda base, model: bsam.SAM(model.parameters(), torch.optim.Adam, lr=0.1),
        r"base = torch.optim.Adam\(model.parameters\(\), lr=...\) and bsam.SAM\(base, model\)",
    ),
    "parameters": (lambda base, model: bsam.SAM(list(model.parameters()), model), r"bsam.SAM\(base, model\)"),
    "parameters by name": (lambda base, model: bsam.SAM(base=model.parameters(), model=model), "not parameters"),
    "params": (lambda base, model: bsam.SAM(params=model.parameters(), base_optimizer=SGD), "torch.optim.SGD"),
    "swapped": (lambda base, model: bsam.SAM(model, base), "base first"),
    "no model": (lambda base, model: bsam.SAM(base), r"needs model.*bsam.SAM\(base, model\)"),
    "a class": (lambda base, model: bsam.SAM(SGD, model), r"SGD\(model.parameters\(\), ...\)"),
    "SAM's radius": (lambda base, model: bsam.BSAM(base, model, rho=0.05), "radii are rho_max=..., rho_min=..."),
    "a setting of the base": (lambda base, model: bsam.SAM(base, model, lr=0.1), "lr: pass it to the base optimizer"),
    "a typo": (lambda base, model: bsam.LookSAM(base, model, interval=5), "no argument interval: it has rho, k, "),
    "total_steps": (lambda base, model: bsam.AESAM(base, model), r"AESAM\(base, model, total_steps=...\)"),
    "SAF": (lambda base, model: bsam.SAF(base, model), r"is a loss.*bsam.SAF\(samples=len\(dataset\), classes=10\)"),
    "MESA": (lambda base, model: bsam.MESA(base, model), r"is a loss.*bsam.MESA\(model, optimizer\)"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_in_the_style_of_other_packages(plain, name):
    call, answer = CALLS[name]
    with pytest.raises(bsam.BsamError, match=answer) as error:
        call(sgd(plain.model.parameters()), plain.model)
    assert len(str(error.value)) < 250


def test_attributes_of_other_packages(plain):
    optimizer = bsam.SAM(sgd(plain.model.parameters()), plain.model)
    for name, hint in [
        ("first_step", r"optimizer.step\(closure\)"),
        ("second_step", r"optimizer.step\(closure\)"),
        ("base_optimizer", "base"),
        ("spam", "spam"),
    ]:
        with pytest.raises(AttributeError, match=hint):
            getattr(optimizer, name)
    assert not hasattr(optimizer, "train")  # only schedule-free bases have it
    assert not hasattr(optimizer, "eval")
