"""A user's recipe: the one of the guide, in a module of the current folder."""

import json
import re
from pathlib import Path

import pytest

from bsam.lab import cli
from bsam.lab.config import Run
from bsam.lab.recipes import RECIPES, Plan, recipe, variants
from bsam.lab.recipes.paper_recipes import method_run
from bsam.lab.recipes.variants import MATCHED
from bsam.lab.running import job
from fake_fit import FakeFit

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "own-recipe.md"


def test_the_recipes_of_the_guide(monkeypatch, tmp_path, capsys):
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE))
    (tmp_path / "guide_recipes.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    fit = FakeFit(lambda run: 0.9 if run.method == "sam" else 0.8)
    monkeypatch.setattr(job, "fit", fit)
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


METHOD = """
import bsam

class Thrice(bsam.SharpnessAware):
    passes = 3

    def __init__(self, base, model, *, rho=0.05, **options):
        super().__init__(base, model, {"rho": rho}, **options)

    def direction(self, L):
        return L.grad()
"""


def test_the_method_of_a_planned_run_is_imported(monkeypatch, tmp_path):
    (tmp_path / "own_step.py").write_text(METHOD)
    monkeypatch.syspath_prepend(tmp_path)
    made = recipe("Mine", scales={"small": {}})(lambda: [Plan(Run("own_step:Thrice"), row="Ours")])
    assert [plan.about["passes"] for plan in made().plans] == [3]
