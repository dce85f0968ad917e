"""A method is its file and one line of METHODS: the rest of the library finds it there."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

import bsam
import test_contract as contract
from bsam.lab import cli
from bsam.lab.cli.run_console import EtaEstimator
from bsam.lab.config import Run
from bsam.lab.recipes.demo_recipe import candidates
from bsam.lab.recipes.variants import passes_of, variant_of, variants
from bsam.lab.training.run_dir import RunState
from bsam.methods import METHODS
from helpers import distance
from methods.toy_method import AlternatingSAM

ROOT = Path(__file__).parents[2]
EPOCH = ["--epochs", "1", "--limit-train", "96", "--limit-test", "32", "--batch", "32"]


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(METHODS, "toy", AlternatingSAM)


def test_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert cli.main(["list", "methods"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("toy"))
    assert all(text in row for text in ("Toy SAM", " 2 ", "To be found.", "Nobody"))
    out = tmp_path / "run"
    arguments = ["--method", "toy", "--set", "rho=0.1", "--device", "cpu", "--probe", "1", "--out", str(out)]
    assert cli.main(["train", *arguments, *EPOCH]) == 0
    assert json.loads((out / "config.json").read_text())["method"] == "toy"
    with pytest.raises(bsam.BsamError, match="radius"):
        Run("toy", {"radius": 0.1})


def test_recipes_and_time_left(tmp_path, capsys):
    assert cli.main(["run", "classification", "--only", "toy", "--out", str(tmp_path / "recipe"), "--dry-run"]) == 0
    assert "Toy SAM," in capsys.readouterr().out
    assert list(variants())[-1] == "toy"
    assert variant_of(Run("toy", {"rho": 0.5})).title == "Toy SAM"
    assert len(candidates(Run("toy"))) == 3
    measured = RunState(Run("sgd", epochs=5), tmp_path, ({"seconds": 2.0},))
    assert EtaEstimator([measured]).left(RunState(Run("toy", epochs=3), tmp_path)) == 2 * 2.0 * 3


@pytest.mark.parametrize(
    ("run", "passes"),
    [
        (Run("rst"), 1.5),
        (Run("rst", {"p": 0.1}), 1.1),
        (Run("looksam", {"k": 10}), 1.1),
        (Run("bsam", {"passes": 2}), 2),
        (Run("aesam"), 1.5),
    ],
    ids=str,
)
def test_passes_depend_on_the_arguments(run, passes):
    assert passes_of(run) == pytest.approx(passes)


def test_documentation(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs/_ext"))
    pages = importlib.import_module("generated_pages").pages()
    assert "| [`AlternatingSAM`](toy.md) | 2 | 3 | - | To be found. |" in pages["methods/index.md"]
    page = pages["methods/toy.md"]
    assert page.startswith("# Toy SAM\n")
    assert all(text in page for text in ("cannot be captured", "--method toy", "  - Nobody, 2026\n"))
    (path,) = (line.split()[-1] for line in page.splitlines() if "autoclass" in line)
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name) is AlternatingSAM
    assert "autoclass:: bsam.SAM\n" in pages["methods/sam.md"]


def test_benchmarks_run_all_kinds_of_steps(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    case = importlib.import_module("cases").cases()["toy"]
    assert (case.label, case.passes, case.capturable) == ("AlternatingSAM", 2, False)
    assert case.cycle >= 3


def test_laws_of_the_contract(problem):
    assert contract.variants()["toy"] is AlternatingSAM
    contract.test_the_loss_at_w_is_returned(problem.clone(), "toy")
    contract.test_batch_norm_is_updated_once_a_step(problem.clone(), "toy", contract.SGD)
    contract.test_resume_is_bit_identical(problem, "toy", "sgd")


def test_steps(plain):
    """The numbers of passes, and equality with its equations."""
    twin, calls = plain.clone(), []
    optimizer = AlternatingSAM(torch.optim.SGD(plain.model.parameters(), lr=0.1), plain.model, rho=0.2)
    params = list(twin.model.parameters())
    for t in range(6):
        calls.append(0)

        def closure():
            calls[-1] += 1
            return plain.loss()

        optimizer.step(closure)
        w = [p.detach().clone() for p in params]
        g = torch.autograd.grad(twin.loss(), params)
        for _ in range(t % 3):
            length = sum(float((a**2).sum()) for a in g) ** 0.5
            with torch.no_grad():
                for p, a in zip(params, g, strict=True):
                    p += 0.2 * a / length
            g = torch.autograd.grad(twin.loss(), params)
        with torch.no_grad():
            for p, start, a in zip(params, w, g, strict=True):
                p.copy_(start - 0.1 * a)
    assert calls == [1, 2, 3, 1, 2, 3]
    assert distance(plain.weights(), twin.weights()) < 1e-12
