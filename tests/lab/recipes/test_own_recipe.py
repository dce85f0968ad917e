"""A user's recipe: in a module of the current folder, or as one line of RECIPES."""

import json
import re
from pathlib import Path

import pytest

from bsam.lab import cli
from bsam.lab.recipes import RECIPES, Published, PublishedTable, Recipe, Scale, variants
from bsam.lab.recipes.variants import MATCHED, arguments
from bsam.lab.running import job
from bsam.lab.training.config import Run
from fake_fit import FakeFit

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "own-recipe.md"
SMALL = Scale("small", "few epochs", settings={"epochs": 2, "batch": 64, "limit_train": 128, "limit_test": 50})


def grid(scale):
    return [scale.run(variants()[name], "digits_net", "digits") for name in ("sgd", "sam")]


def radii(scale):
    return [Run("sam", {"rho": rho}, **scale.settings) for rho in (0.1, 0.2)]


def draw_names(recipe, states, path):
    path.write_text(" ".join(recipe.cell(state.run).row for state in states))


NUMBERS = PublishedTable(("data", "method"), {("digits", "sam"): Published(97.1, 0.3)}, "as published by A. Author.")
TOY = Recipe(
    "toy",
    "A toy",
    grid,
    published_table=NUMBERS,
    figures=("training_curves", draw_names),
    scales=(SMALL,),
    seeds=2,
)


def test_one_line_registers_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(RECIPES, TOY.name, TOY)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "toy", "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert all(f"DigitsNet, Digits, {name}, seed {seed}" in plan for name in ("SGD", "SAM") for seed in (0, 1))
    assert cli.main(["run", "toy", "--device", "cpu"]) == 0
    out = tmp_path / "runs" / "toy-small"
    last = {(run["title"], run["settings"]["seed"]): run["last"] for run in read(out)["runs"]}
    sam = [100 * last["SAM", seed]["test_accuracy"] for seed in (0, 1)]
    (row,) = re.findall(r"\| SAM \| (\S+) ± \S+ \(2\) \| 97.10 ± 0.30 \|", (out / "table.md").read_text())
    assert float(row) == pytest.approx(sum(sam) / 2, abs=0.01)
    assert re.search(r"\| SGD \| .* \| - \|", (out / "table.md").read_text())
    assert "paper: as published by A. Author." in (out / "table.md").read_text()
    assert (out / "training_curves.png").stat().st_size > 10_000
    assert (out / "names.png").read_text() == "SGD SAM SGD SAM"
    capsys.readouterr()
    assert cli.main(["list", "recipes"]) == 0
    assert "A toy" in capsys.readouterr().out


def read(out):
    return json.loads((out / "results.json").read_text())


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A folder with the code of the guide as a module, which is forgotten afterwards."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE))
    (tmp_path / "guide_recipes.py").write_text(code)
    (tmp_path / "needs_more.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return "guide_recipes"


def test_the_recipes_of_the_guide(module, monkeypatch, tmp_path):
    class Fit(FakeFit):
        def __call__(self, run, folder, **options):
            super().__call__(run, folder, **options)
            file = folder / "metrics.jsonl"
            file.write_text(file.read_text().replace('"seconds"', '"train_loss": 1.5, "test_loss": 2, "seconds"'))

    monkeypatch.setattr(job, "fit", Fit(lambda run: 0.9 if run.method == "sam" else 0.8))
    assert cli.main(["run", f"{module}:sam_on_digits", "--device", "cpu"]) == 0
    table = (tmp_path / "runs" / "sam-on-digits-small" / "table.md").read_text()
    assert "| SGD | 80.00 ± 0.00 (2) | - |\n| SAM | 90.00 ± 0.00 (2) | 97.10 ± 0.30 |" in table
    assert cli.main(["run", f"{module}:rho_on_digits", "--device", "cpu"]) == 0
    out = tmp_path / "runs" / "rho-on-digits-small"
    assert "| 0.2 | 90.00 (1) | 1.500 |" in (out / "table.md").read_text()
    assert {path.name for path in out.glob("*.png")} == {"accuracy_lines.png", "losses.png"}


@pytest.mark.parametrize("data", ["fashion_mnist", "folder:pets"])
def test_data_without_a_radius_of_a_paper_gets_the_defaults(data):
    for name, variant in variants().items():
        run = SMALL.run(variant, "resnet8", data)
        if name in MATCHED:
            assert run.arguments == {"rho": 0.1, "rho_floor": {"sam-sum": 0.1, "sam-follow": 0.05}[name]}
        else:
            assert run.arguments == variant.arguments  # two passes, as released
    study = RECIPES["radius"].grid(Scale("x", "", ("resnet8",), (data,), settings=SMALL.settings))
    assert {run.data for run in study} == {data}
    assert arguments(variants()["sam"], "cifar100") == {"rho": 0.1}  # where the paper states one
