"""A user's recipe: the one of the guide, in a module of the current folder."""

import json
import re
from pathlib import Path

import pytest

from bsam.lab import cli
from bsam.lab.recipes import RECIPES, variants
from bsam.lab.recipes.paper_recipes import method_run
from bsam.lab.recipes.variants import MATCHED
from fake_fit import FakeFit, train_by

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "own-recipe.md"


def test_the_recipes_of_the_guide(monkeypatch, tmp_path, capsys):
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE))
    (tmp_path / "guide_recipes.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    fit = train_by(FakeFit(lambda run: 0.9 if run.method == "sam" else 0.8), monkeypatch)
    known = list(RECIPES)
    for name in re.findall(r"bsam run my_recipes:(\w+)$", GUIDE.read_text(), re.MULTILINE):
        assert cli.main(["run", f"guide_recipes:{name}", "--device", "cpu"]) == 0
    table = (tmp_path / "runs" / "sam-on-digits-small" / "table.md").read_text()
    assert "| SGD | 80.00 ± 0.00 (2) | - |\n| SAM | 90.00 ± 0.00 (2) | 97.10 |" in table
    results = json.loads((tmp_path / "runs" / "sam-on-digits-small" / "results.json").read_text())
    assert [run["about"].get("published") for run in results["runs"]] == [None, 97.1] * 2
    assert [(run.method, run.seed, run.epochs) for run in fit.asked] == [
        (method, seed, 8) for seed in (0, 1) for method in ("base", "sam")
    ]
    assert list(RECIPES) == known


@pytest.mark.parametrize("data", ["fashion_mnist", "folder:pets"])
def test_data_without_a_radius_of_a_paper_gets_the_defaults(data):
    for name, variant in variants().items():
        run = method_run(name, "resnet8", data)
        if name in MATCHED:
            assert run.arguments == {"rho": 0.1, "rho_floor": {"sam-sum": 0.1, "sam-follow": 0.05}[name]}
        else:
            assert run.arguments == variant.arguments  # two passes, as released
    assert {plan.run.data for plan in RECIPES["radius"]("paper", model="resnet8", data=data).plans} == {data}


RECIPES_OF_A_USER = """
from torch import nn

import bsam
from bsam.lab import Run
from bsam.lab.recipes import Plan, recipe
from own_shapes import Segmentation


class Thrice(bsam.SharpnessAware):
    passes = 3

    def __init__(self, base, model, *, rho=0.05, **options):
        super().__init__(base, model, {"rho": rho}, **options)

    def direction(self, L):
        return L.grad()


def linear(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))


SMALL = {"epochs": 1, "limit_train": 32, "limit_test": 20, "batch": 16}


@recipe("My network and my method", scales={"small": SMALL}, baseline="sgd")
def mine(**settings):
    own = {"model": "own_recipes:linear", **settings}
    return [Run.of("sgd", **own), Plan(Run.of("own_recipes:Thrice", **own), row="Ours")]


@recipe("My task", scales={"small": {**SMALL, "task": Segmentation, "widths": (2, 3)}})
def shapes(widths, **settings):
    runs = [Run.of("sam", width=width, **settings) for width in widths]
    return [Plan(run, column=f"width {width}") for run, width in zip(runs, widths)]
"""
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.usefixtures("script_path")
def test_networks_methods_and_tasks_of_a_user(tmp_path, monkeypatch):
    """Naming the recipe imports them, in this process and in those of ``--jobs``, which have imported nothing yet."""
    (tmp_path / "own_recipes.py").write_text(RECIPES_OF_A_USER)
    (tmp_path / "own_shapes.py").write_text((EXAMPLES / "segmentation.py").read_text())
    monkeypatch.chdir(tmp_path)
    passes = {}
    for name, jobs, cells in (("mine", 2, ["SGD", "Ours"]), ("shapes", 1, ["width 2", "width 3"])):
        assert cli.main(["run", f"own_recipes:{name}", "--jobs", str(jobs), "--device", "cpu"]) == 0
        out = tmp_path / "runs" / f"{name}-small"
        results = json.loads((out / "results.json").read_text())
        assert [run["state"] for run in results["runs"]] == ["done", "done"]
        table = (out / "table.md").read_text()
        assert all(cell in table for cell in cells)
        passes[name] = [run["about"]["passes"] for run in results["runs"]]
    assert passes["mine"] == [1, 3]
