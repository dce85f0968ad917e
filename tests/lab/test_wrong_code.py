"""Mistakes in the code of a user are named before anything is trained."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

import bsam
from bsam import BsamError
from bsam.lab import Run, Score, Splits, Task
from bsam.lab.models import check_network
from bsam.lab.recipes.compare import compared_runs
from bsam.lab.tasks.splits import load_splits
from bsam.lab.tasks.task import check_members


class Shared(bsam.SharpnessAware):
    title = "Shared"

    def __init__(self, base, model, *, share, rho=0.05):
        super().__init__(base, model, {"rho": rho})
        self.share = share

    def direction(self, L):
        g = L.grad()
        return L.grad(at=self.share * self.epsilon(g, "rho"))


class Forgetful(bsam.SharpnessAware):
    def __init__(self, base, model):
        self.rho = 0.05

    def direction(self, L):
        return L.grad()


class Named(Task):
    score = Score("error", "error")
    datasets: ClassVar = ["bars"]
    networks: ClassVar = {"one": nn.Linear}


class Titled(Task):
    score = "f1"
    datasets: ClassVar = {"bars": list}
    networks: ClassVar = {"one": nn.Linear}


def message(function, *arguments, **named):
    with pytest.raises(BsamError) as error:
        function(*arguments, **named)
    return str(error.value)


def test_arguments_of_methods():
    name = f"{__name__}:Shared"
    text = message(Run.of, Shared)
    assert text.startswith(f"{name} needs share: give it among its arguments, with --set share=...")
    wrong = message(compared_runs, ["base", f"{name}:share=0.5,rho=abc"], {})
    assert wrong == f"rho of {name} must be a number, got 'abc'"
    assert "rho of sam must be a number" in message(compared_runs, ["base", "sam:rho=abc"], {})
    own = compared_runs(["base", f"{name}:share=[0.5],rho=1"], {})
    assert own[f"{name}:share=[0.5],rho=1"].arguments == {"share": [0.5], "rho": 1}
    assert "or MODULE:CLASS for one of your own; got 'my.Shared'" in message(compared_runs, ["base", "my.Shared"], {})


def test_a_method_without_the_constructor_of_its_base_class():
    parameter = nn.Parameter(torch.zeros(2))
    method = Forgetful(torch.optim.SGD([parameter], lr=0.1), None)
    with pytest.raises(AttributeError, match=r"its __init__ must first call super\(\).__init__\(base, model"):
        method.rho_max  # noqa: B018
    with pytest.raises(TypeError, match=r"write Shared\(base, model, share=...\)"):
        Shared(torch.optim.SGD([parameter], lr=0.1), None)
    with pytest.raises(TypeError, match=r"write bsam.SAM\(base, model"):
        bsam.SAM(torch.optim.SGD([parameter], lr=0.1))


def test_lazy_layers():
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    assert "has the lazy layer 1, whose weights have no shape yet" in message(check_network, lazy, "nets:lazy")
    lazy(torch.zeros(2, 4, 4))
    check_network(lazy, "nets:lazy")


def test_members_of_tasks():
    assert message(check_members, Named) == "datasets of Named must map names to functions, got list"
    assert message(check_members, Titled) == "score of Titled must be a bsam.lab.Score, got str"


def test_functions_of_data():
    given = {"data_dir": None, "cache_dir": None, "image_size": None}
    text = message(load_splits, lambda path: None, "my:data", given, {"width": 3})
    assert "asks for 'path'; it can get width, data_dir, cache_dir, image_size" in text
    text = message(load_splits, lambda: Splits(train=[1, 2]), "my:data", given, {})
    assert text == "train of my:data must be a tuple (x, *targets) of arrays, got [1, 2]"
