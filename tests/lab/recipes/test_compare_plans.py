"""The runs of a comparison: the settings that they share, their radii and their tuning."""

import pytest

from bsam.common.errors import BsamValueError
from bsam.lab.config import Run
from bsam.lab.paper import paper_table
from bsam.lab.recipes.compare import compared_runs, comparison_folder, plan_comparison, tuning_split
from bsam.lab.recipes.study import Snapshot
from bsam.lab.recipes.variants import variant_of, variants

SETTINGS = {"data": "cifar100", "model": "resnet8", "epochs": 3, "lr": 0.1}


def test_a_warm_up_of_the_radius_is_for_methods_with_a_radius():
    runs = compared_runs(["sgd", "sam", "saf"], {"rho_warmup": 5, "rho_start": 2.5})
    assert [run.rho_warmup for run in runs.values()] == [0, 5, 0]
    experiment = plan_comparison(["sgd", "sam"], {"rho_warmup": 5}, tune_base=True)
    assert [plan.about["row"] for plan in experiment.plans[:2]] == ["SGD", "SAM, rho_warmup 5"]
    assert len({plan.about["experiment"] for plan in experiment.plans}) == 1
    assert paper_table(Run("sam", model="resnet18", data="cifar10")) == "classification"
    assert paper_table(Run("sam", model="resnet18", data="cifar10", rho_warmup=5)) is None


def test_runs_differ_in_the_method_alone():
    """The radii are those of the recipes for the data set."""
    runs = compared_runs(variants(), SETTINGS)
    assert list(runs) == list(variants())
    for name, run in runs.items():
        assert variant_of(run).name == name
        assert run == Run.of(variants()[name].method, run.arguments, **SETTINGS)
    assert runs["sam-sum"].arguments == {"rho": 0.2, "rho_floor": 0.2}
    assert runs["bsam-2"].arguments == {"rho_max": 0.1, "rho_min": 0.1, "passes": 2}
    assert list(compared_runs(["BSAM", "sgd", "base", "SAM", "bsam"], {})) == ["bsam", "sgd", "sam"]
    assert {run.base for run in compared_runs(["base", "sam"], {"base": "adamw"}).values()} == {"adamw"}


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
        (["sgd", "saf"], {"rho_warmup": 1}, "rho_warmup needs a method with a radius"),
    ],
)
def test_errors(methods, settings, message):
    with pytest.raises(BsamValueError) as error:
        compared_runs(methods, settings)
    assert message in str(error.value)


def test_one_experiment_with_rows_in_the_order_of_the_methods(tmp_path):
    names = ["sam", "sgd", "sam-sum"]
    plan = plan_comparison(names, SETTINGS, seeds=2, baseline="SAM")
    assert [(p.about["variant"], p.run.seed) for p in plan.plans] == [(name, seed) for seed in (0, 1) for name in names]
    assert [p.about["place"] for p in plan.plans] == [0, 1, 2] * 2
    assert {p.about["experiment"] for p in plan.plans} == {"ResNet-8, CIFAR-100, 3 epochs, lr 0.1"}
    assert plan.baseline == "SAM"
    assert plan.decide(Snapshot(tmp_path)).trials == []
    assert comparison_folder(plan).name == "compare-resnet8-cifar100"
    for seeds in (0, 101):
        with pytest.raises(BsamValueError, match="seeds"):
            plan_comparison(names, SETTINGS, seeds=seeds)


def test_every_method_has_the_same_number_of_tuning_runs(tmp_path):
    """Including SAM at the sum of the radii, which recipes leave out: here the user asks for it."""
    settings = {**SETTINGS, "init": "/elsewhere/float", "weight_bits": 4}
    plan = plan_comparison(["sgd", "sam", "sam-sum", "bsam"], settings, seeds=3, tune=True)
    trials = [trial.run for trial in plan.decide(Snapshot(tmp_path)).trials]
    factors = (0.5, 1, 2, 4)
    sums = [{"rho": 0.2 * factor, "rho_floor": 0.2 * factor} for factor in factors]
    both = [{"rho_max": 0.1 * factor, "rho_min": 0.1 * factor} for factor in factors]
    assert [run.arguments for run in trials] == [*({"rho": 0.1 * factor} for factor in factors), *sums, *both]
    assert {(run.seed, run.eval_split, run.init) for run in trials} == {(10_000, "holdout", "/elsewhere/float")}


def test_tuning_uses_the_validation_set_if_there_is_one(tmp_path, monkeypatch):
    """Image files are listed, and arrays of a function are looked at; no image is decoded."""
    for name in ("train", "test"):
        for label in ("cat", "dog"):
            (tmp_path / "both" / name / label).mkdir(parents=True)
            (tmp_path / "both" / name / label / "1.jpg").touch()
    assert tuning_split(Run("sam", data=f"folder:{tmp_path / 'both'}")) == "holdout"
    (tmp_path / "both" / "test").rename(tmp_path / "both" / "val")
    for label in ("cat", "dog"):
        (tmp_path / "both" / "test" / label).mkdir(parents=True)
        (tmp_path / "both" / "test" / label / "1.jpg").touch()
    assert tuning_split(Run("sam", data=f"folder:{tmp_path / 'both'}")) == "validation"
    (tmp_path / "made_arrays.py").write_text(
        "import numpy as np\nfrom bsam.lab.data import Dataset\n"
        "pair = np.zeros((4, 8, 8), np.uint8), np.array([0, 1, 0, 1])\n"
        "def three(folder):\n    return Dataset.from_arrays(pair, pair, pair)\n"
        "def two(folder):\n    return Dataset.from_arrays(pair, pair)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    splits = [
        tuning_split(Run("sam", data=data))
        for data in ("made_arrays:three", "made_arrays:two", "digits", "cifar10", "mpii")
    ]
    assert splits == ["validation", "holdout", "validation", "holdout", "holdout"]


def test_the_base_optimizer_is_tuned_alone_and_first(tmp_path):
    settings = {**SETTINGS, "data": "digits"}
    plan = plan_comparison(["sam", "bsam"], settings, seeds=3, tune=True, tune_base=True, tune_seeds=2)
    tuned = plan.decide(Snapshot(tmp_path))
    trials = [trial.run for trial in tuned.trials if trial.run.method == "base"]
    assert {(run.method, run.eval_split) for run in trials} == {("base", "validation")}
    grid = [(lr, decay) for lr in (0.03, 0.1, 0.3) for decay in (1e-4, 1e-3, 1e-2, 1e-1)]
    assert [(run.lr, run.weight_decay, run.seed) for run in trials] == [(*p, s) for p in grid for s in (10_000, 10_001)]
    radii = [(trial.run.arguments["rho"], trial.run.seed) for trial in tuned.trials if trial.run.method == "sam"]
    assert radii == [(rho, seed) for rho in (0.025, 0.05, 0.1, 0.2) for seed in (10_000, 10_001)]
    assert len(tuned.waiting) == 6
    with pytest.raises(BsamValueError, match="tune_seeds"):
        plan_comparison(["sam", "bsam"], settings, tune=True, tune_seeds=0)
