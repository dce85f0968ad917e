"""A method is its class and one line of METHODS: everything else finds it there."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import ClassVar

import pytest

import bsam
import test_contract
from bsam import cli
from bsam.core.optimizer import SharpnessAware
from bsam.methods import METHODS, Method
from bsam.recipes.digits_demo import candidates
from bsam.recipes.variants import variant_of, variants
from bsam.training.config import Run

EPOCH = ["--epochs", "1", "--limit-train", "64", "--limit-test", "32", "--batch", "32"]


class Toy(SharpnessAware):
    """The gradient, scaled."""

    title, reference, purpose = "Toy SAM", "Nobody et al., 2026", "To be found."
    passes: float = 1
    memory = "1"
    data_settings: ClassVar = {"digits": {"factor": 3.0}}
    tuning: ClassVar = ({"factor": 0.5}, {"factor": 2.0})
    variants: ClassVar = {"toy": ("Toy SAM", {}), "toy-half": ("Toy SAM (half)", {"factor": 0.5})}

    def __init__(self, base, model, *, factor: float = 1.0, m_sharpness: bool = False, same_draws: bool = True):
        self.factor = factor
        super().__init__(base, model, {}, m_sharpness=m_sharpness, same_draws=same_draws)

    def direction(self, L):
        return self.factor * L.grad()


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(METHODS, "toy", Method("toy", Toy))


def test_the_command_line_lists_and_trains_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert cli.main(["list", "methods"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("toy"))
    assert all(word in row for word in ("Toy SAM", "1", "To be found.", "Nobody"))
    out = tmp_path / "run"
    arguments = ["--method", "toy", "--set", "factor=2.0", "--device", "cpu", "--out", str(out), *EPOCH]
    assert cli.main(["train", *arguments]) == 0
    assert json.loads((out / "config.json").read_text())["method"] == "toy"
    with pytest.raises(bsam.BsamError, match="toy has no argument 'rho': it takes factor, m_sharpness, same_draws"):
        Run("toy", {"rho": 0.1})


def test_the_recipes_have_its_variants_and_settings(tmp_path, capsys):
    arguments = ["--only", "toy", "toy-half", "--out", str(tmp_path / "recipe"), "--dry-run"]
    assert cli.main(["run", "classification", *arguments]) == 0
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("6 runs", "Toy SAM,", "Toy SAM (half),"))
    assert list(variants())[-2:] == ["toy", "toy-half"]
    assert variant_of(Run("toy", {"factor": 0.5})).title == "Toy SAM (half)"
    assert {settings["arguments"]["factor"] for settings in candidates(Run("toy"))} == {0.5, 2.0}


def test_the_benchmarks_have_a_case_of_it(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    case = importlib.import_module("cases").cases()["toy"]
    assert (case.label, case.passes, case.capturable) == ("Toy", 1, True)


def test_the_contract_tests_it(problem):
    assert test_contract.variants()["toy"] is Toy
    assert not test_contract.chooses("toy")
    test_contract.test_the_loss_at_w_is_returned(problem, "toy")
