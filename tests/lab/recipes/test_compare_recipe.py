"""The runs of a comparison: the settings that they share, their radii and their tuning."""

from pathlib import Path

import pytest

from bsam.common.errors import BsamValueError
from bsam.lab.recipes.choices import TunedRuns
from bsam.lab.recipes.compare_recipe import compared_runs, plan_comparison, tuning_split
from bsam.lab.recipes.variants import variant_of, variants
from bsam.lab.training.config import Run

SETTINGS = {"data": "cifar100", "model": "resnet8", "epochs": 3, "lr": 0.1}


def test_runs_differ_in_the_method_alone():
    """The radii are those of the recipes for the data set."""
    runs = compared_runs(variants(), SETTINGS)
    assert list(runs) == list(variants())
    for name, run in runs.items():
        assert variant_of(run).name == name
        assert run == Run(variants()[name].method, run.arguments, **SETTINGS)
    assert runs["sam"].arguments == {"rho": 0.1}
    assert runs["sam-sum"].arguments == {"rho": 0.2, "rho_floor": 0.2}
    assert runs["bsam-2"].arguments == {"rho_max": 0.1, "rho_min": 0.1, "passes": 2}


def test_names_of_methods():
    assert list(compared_runs(["BSAM", "sgd", "base", "SAM", "bsam"], {})) == ["bsam", "sgd", "sam"]
    runs = compared_runs(["base", "sam"], {"base": "adamw"})
    assert {run.base for run in runs.values()} == {"adamw"}
    assert variant_of(runs["base"]).title == "AdamW"


@pytest.mark.parametrize(
    ("methods", "settings", "message"),
    [
        (["sgd", "bsma"], {}, "got 'bsma'. Did you mean 'bsam'?"),
        (["sgd"], {}, "at least two different methods to compare, got ['sgd']"),
        (["sgd", "base"], {}, "at least two different methods"),
        ([], {}, "at least two different methods"),
        ("sgd", {}, "must be a list of names, got 'sgd'"),
        (["sgd", "sam"], {"base": "adamw"}, 'set method to "base"'),
        (["sgd", "sam"], {"lr": -1}, "lr must be"),
    ],
)
def test_errors(methods, settings, message):
    with pytest.raises(BsamValueError) as error:
        compared_runs(methods, settings)
    assert message in str(error.value)


def test_seeds_and_the_table():
    names = ["sgd", "sam", "sam-sum"]
    plan = plan_comparison(names, SETTINGS, seeds=2, baseline="SAM")
    recipe, planned = plan.recipe, plan.runs
    assert plan.baseline == "SAM"
    assert [(variant_of(run).name, run.seed) for run in planned] == [(name, seed) for seed in (0, 1) for name in names]
    assert recipe.title == "SGD, SAM and SAM (sum): ResNet-8, CIFAR-100"
    assert TunedRuns(recipe, planned, Path("nowhere")).trials == []
    for seeds in (0, 101):
        with pytest.raises(BsamValueError, match="seeds"):
            recipe.runs(seeds=seeds)


def test_every_method_has_the_same_number_of_tuning_runs():
    """Including SAM at the sum of the radii, which recipes leave out: here the user asks for it."""
    plan = plan_comparison(["sgd", "sam", "sam-sum", "bsam"], SETTINGS, seeds=3, tune=True)
    trials = TunedRuns(plan.recipe, plan.runs, Path("nowhere")).trials
    tried = [run.arguments for run in trials]
    factors = (0.5, 1, 2, 4)
    sums = [{"rho": 0.2 * factor, "rho_floor": 0.2 * factor} for factor in factors]
    both = [{"rho_max": 0.1 * factor, "rho_min": 0.1 * factor} for factor in factors]
    assert tried == [*({"rho": 0.1 * factor} for factor in factors), *sums, *both]
    assert {(run.seed, run.eval_split) for run in trials} == {(10_000, "holdout")}


def test_all_seeds_and_trials_begin_with_a_given_run():
    plan = plan_comparison(["sgd", "sam"], {"init": "/elsewhere/float", "weight_bits": 4}, seeds=2, tune=True)
    trials = TunedRuns(plan.recipe, plan.runs, Path("nowhere")).trials
    assert {run.init for run in [*plan.runs, *trials]} == {"/elsewhere/float"}


def test_tuning_uses_the_validation_set_if_there_is_one(tmp_path, monkeypatch):
    """Image files are listed, and arrays of a function are looked at; no image is decoded."""
    for name in ("train", "val", "test"):
        for label in ("cat", "dog"):
            (tmp_path / "both" / name / label).mkdir(parents=True)
            (tmp_path / "both" / name / label / "1.jpg").touch()
    (tmp_path / "both" / "val").rename(tmp_path / "val")
    assert tuning_split(f"folder:{tmp_path / 'both'}") == "holdout"
    (tmp_path / "val").rename(tmp_path / "both" / "val")
    assert tuning_split(f"folder:{tmp_path / 'both'}") == "validation"
    (tmp_path / "made_arrays.py").write_text(
        "import numpy as np\nfrom bsam.lab.data import Dataset\n"
        "pair = np.zeros((4, 8, 8), np.uint8), np.array([0, 1, 0, 1])\n"
        "def three(folder):\n    return Dataset.from_arrays(pair, pair, pair)\n"
        "def two(folder):\n    return Dataset.from_arrays(pair, pair)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert (tuning_split("made_arrays:three"), tuning_split("made_arrays:two")) == ("validation", "holdout")
    assert (tuning_split("digits"), tuning_split("cifar10"), tuning_split("mpii")) == (
        "validation",
        "holdout",
        "holdout",
    )


def test_the_base_optimizer_is_tuned_alone_and_first():
    settings = {**SETTINGS, "data": "digits"}
    plan = plan_comparison(["sam", "bsam"], settings, seeds=3, tune=True, tune_base=True, tune_seeds=2)
    tuned = TunedRuns(plan.recipe, plan.runs, Path("nowhere"))
    trials = tuned.base_trials
    assert {(run.method, run.eval_split) for run in trials} == {("base", "validation")}
    grid = [(lr, decay) for lr in (0.03, 0.1, 0.3) for decay in (1e-4, 1e-3, 1e-2, 1e-1)]
    assert [(run.lr, run.weight_decay, run.seed) for run in trials] == [(*p, s) for p in grid for s in (10_000, 10_001)]
    radii = [(run.arguments["rho"], run.seed) for run in tuned.trials if run.method == "sam"]
    assert radii == [(rho, seed) for rho in (0.025, 0.05, 0.1, 0.2) for seed in (10_000, 10_001)]
    with pytest.raises(BsamValueError, match="tune_seeds"):
        plan_comparison(["sam", "bsam"], settings, tune=True, tune_seeds=0)
