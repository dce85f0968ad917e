"""Arguments that are refused at construction, by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bsam
from helpers import sgd


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "0.05", None, True])
@pytest.mark.parametrize("name", ["rho_max", "rho_min", "rho_min_floor"])
def test_bad_radii_are_refused_by_name(problem, name, value):
    base = sgd(problem.model.parameters())
    with pytest.raises(bsam.BsamError, match=name):
        bsam.BSAM(base, problem.model, **{name: value})
    assert set(base.param_groups[0]) == set(sgd(problem.model.parameters()).param_groups[0])  # nothing was written
    with pytest.raises(bsam.BsamError, match="rho"):
        bsam.SAM(base, problem.model, rho=value)
    bsam.BSAM(base, problem.model)  # and the base is as good as new


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"passes": 4}, "passes"),
        ({"passes": 1}, "passes"),
        ({"passes": "3"}, "passes"),
        ({"rho_min": 0.01, "rho_min_floor": 0.02}, "rho_min_floor"),
        ({"lr_max": 0.1, "lr_min": 0.1}, "lr_max"),
        ({"lr_max": 0.05, "lr_min": 0.1}, "lr_max"),
        ({"lr_min": 0.1}, "lr_min"),
        ({"lr_min": -0.1}, "lr_min"),
        ({"lr_max": 0.0}, "lr_max"),
        ({"passes": 3.0}, "passes"),
        ({"start_from_min": "no"}, "start_from_min"),
        ({"lr_max": float("nan")}, "lr_max"),
        ({"lr_max": "high"}, "lr_max"),
        ({"m_sharpness": True}, "m_sharpness"),
    ],
)
def test_other_bad_arguments_are_refused_by_name(problem, arguments, word):
    with pytest.raises(bsam.BsamError, match=word):
        bsam.BSAM(sgd(problem.model.parameters()), problem.model, **arguments)


def test_names_that_are_not_used_or_are_the_bases_are_refused(problem):
    first, rest = problem.model[:3].parameters(), problem.model[3:].parameters()
    with pytest.raises(bsam.BsamError, match="rho_mx"):
        bsam.BSAM(sgd([{"params": first, "rho_mx": 0.1}, {"params": rest}]), problem.model)
    with pytest.raises(bsam.BsamError, match="setting rho of its own"):
        bsam.SAM(torch.optim.Adadelta(problem.model.parameters()), problem.model)
    optimizer = bsam.SAM(sgd(problem.model.parameters()), problem.model)
    with pytest.raises(bsam.BsamError, match="rho_max"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "rho_max": 0.1})
    assert len(optimizer.param_groups) == 1


def test_bad_bases_and_models_are_refused(problem):
    parameters = list(problem.model.parameters())
    wrapped = sgd(parameters)
    bsam.SAM(wrapped, problem.model)
    cases = [
        (torch.optim.SGD, problem.model, "already built"),
        ("sgd", problem.model, "base"),
        (None, problem.model, "base"),
        (torch.optim.LBFGS(parameters), problem.model, "LBFGS"),
        (wrapped, problem.model, "already belongs"),
        (bsam.SAM(sgd(parameters), problem.model), problem.model, "already belongs"),
        (torch.optim.SGD(parameters, lr=0.1, maximize=True), problem.model, "maximize"),
        (sgd(parameters), "model", "model"),
        (sgd(parameters[:2]), problem.model, r"6 trainable.*1\.weight"),
    ]
    for base, model, word in cases:
        with pytest.raises(bsam.BsamError, match=word):
            bsam.BSAM(base, model)
    with pytest.raises(TypeError, match="model"):
        bsam.BSAM(sgd(parameters))  # it has to be said, if only as None


SGD = torch.optim.SGD
FROM_ELSEWHERE = {  # calls, with what to write instead
    "the class of the base": (
        lambda base, model: bsam.SAM(model.parameters(), torch.optim.Adam, lr=0.1),
        r"base = torch.optim.Adam\(model.parameters\(\), lr=...\) and bsam.SAM\(base, model\)",
    ),
    "parameters": (lambda base, model: bsam.SAM(list(model.parameters()), model), r"bsam.SAM\(base, model\)"),
    "parameters by name": (lambda base, model: bsam.SAM(base=model.parameters(), model=model), "not parameters"),
    "params": (lambda base, model: bsam.SAM(params=model.parameters(), base_optimizer=SGD), "torch.optim.SGD"),
    "base_optimizer": (
        lambda base, model: bsam.SAM(model.parameters(), base_optimizer=torch.optim.AdamW),
        "torch.optim.AdamW",
    ),
    "swapped": (lambda base, model: bsam.SAM(model, base), "base first"),
    "no model": (lambda base, model: bsam.SAM(base), r"needs model.*bsam.SAM\(base, model\)"),
    "a class": (lambda base, model: bsam.SAM(SGD, model), "already built"),
    "SAM's radius": (lambda base, model: bsam.BSAM(base, model, rho=0.05), "radii are rho_max=..., rho_min=..."),
    "a setting of the base": (lambda base, model: bsam.SAM(base, model, lr=0.1), "lr: pass it to the base optimizer"),
    "a typing error": (
        lambda base, model: bsam.LookSAM(base, model, interval=5),
        "no argument interval: it has rho, k, ",
    ),
    "total_steps": (lambda base, model: bsam.AESAM(base, model), r"AESAM\(base, model, total_steps=...\)"),
    "SAF": (lambda base, model: bsam.SAF(base, model), r"is a loss.*bsam.SAF\(samples=len\(dataset\), classes=10\)"),
    "MESA": (lambda base, model: bsam.MESA(base, model), r"is a loss.*bsam.MESA\(model, optimizer\)"),
}


@pytest.mark.parametrize("name", FROM_ELSEWHERE)
def test_calls_that_other_packages_take_are_answered_with_the_line_to_write(plain, name):
    call, answer = FROM_ELSEWHERE[name]
    with pytest.raises(bsam.BsamError, match=answer) as error:
        call(sgd(plain.model.parameters()), plain.model)
    assert len(str(error.value)) < 250


def test_the_half_steps_of_other_packages_are_answered_with_the_line_to_write(plain):
    optimizer = bsam.SAM(sgd(plain.model.parameters()), plain.model)
    for name in ("first_step", "second_step"):
        with pytest.raises(AttributeError, match=r"optimizer.step\(closure\)"):
            getattr(optimizer, name)(zero_grad=True)
    with pytest.raises(AttributeError, match="called base"):
        optimizer.base_optimizer  # noqa: B018
    with pytest.raises(AttributeError, match="SAM has no attribute spam"):
        optimizer.spam  # noqa: B018
    assert not hasattr(optimizer, "train")  # which only schedule-free bases have
