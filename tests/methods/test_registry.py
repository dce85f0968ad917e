"""A method is its class and one line of METHODS: everything else finds it there."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

import bsam
import test_contract
from bsam import cli
from bsam.core.optimizer import SharpnessAware
from bsam.methods import METHODS
from bsam.recipes.digits_demo import candidates
from bsam.recipes.variants import variant_of, variants
from bsam.training.config import Run

EPOCH = ["--epochs", "1", "--limit-train", "64", "--limit-test", "32", "--batch", "32"]


class Toy(SharpnessAware):
    """The gradient, scaled."""

    title, reference, purpose = "Toy SAM", "Nobody et al., 2026", "To be found."
    passes: float = 1
    memory = "1"

    def __init__(self, base, model, *, factor: float = 1.0, **options):
        self.factor = factor
        super().__init__(base, model, {}, **options)

    def direction(self, L):
        return self.factor * L.grad()


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(METHODS, "toy", Toy)


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


def test_the_recipes_have_it(tmp_path, capsys):
    arguments = ["--only", "toy", "--out", str(tmp_path / "recipe"), "--dry-run"]
    assert cli.main(["run", "classification", *arguments]) == 0
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("3 runs", "Toy SAM,"))
    assert list(variants())[-1] == "toy"
    assert variant_of(Run("toy", {"factor": 0.5})).title == "Toy SAM"
    assert candidates(Run("toy")) == [{"arguments": {}}]  # it has no rho to choose


def test_the_benchmarks_have_a_case_of_it(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    case = importlib.import_module("cases").cases()["toy"]
    assert (case.label, case.passes, case.capturable) == ("Toy", 1, True)


def test_the_contract_tests_it(problem):
    assert test_contract.variants()["toy"] is Toy
    assert not test_contract.chooses("toy")
    test_contract.test_the_loss_at_w_is_returned(problem, "toy")
