"""The demo: what its rows share, what is chosen, and on what."""

from dataclasses import replace

import pytest

from bsam.lab.config import Run
from bsam.lab.recipes import RECIPES
from bsam.lab.recipes.demo_recipe import DEFAULT, TUNED_SGD, candidates
from bsam.lab.recipes.study import Snapshot
from bsam.lab.recipes.variants import arguments_on, variant_of, variants
from bsam.lab.report.recipe_results import write_results
from bsam.lab.running.runner import run_all
from fake_fit import FakeFit, train_by

SHARED = {
    "lr": 0.04,
    "warmup": 3,
    "weight_decay": 5e-4,
    "epochs": 22,
    "batch": 64,
    "label_smoothing": 0.0,
    "label_noise": 0.4,
    "noise_labels": "other",
}
ROWS = ["SGD", "SAM", "BSAM (Algorithm 1)", TUNED_SGD]


@pytest.fixture
def asked(monkeypatch):
    """The runs that were asked for, none of them trained; the second candidate of each row is the best."""
    chosen = ({"rho": 0.2}, {"rho_max": 0.1, "rho_min": 0.1})
    fit = train_by(FakeFit(lambda run: 0.9 if run.arguments in chosen or run.weight_decay == 0.1 else 0.5), monkeypatch)
    return fit.asked


def run_demo(out, **options):
    """Do what ``bsam demo`` does, in this process; return the final runs."""
    experiment = RECIPES["demo"](**options)
    run_all([plan.run for plan in experiment.decide(Snapshot(out)).trials], out)
    finals = experiment.decide(Snapshot(out)).finals
    run_all([plan.run for plan in finals], out)
    return finals


def test_every_method_has_three_candidates_which_are_arguments_only_and_sgd_has_none():
    for variant in variants().values():
        run = Run.of(variant.method, arguments_on(variant, "digits"), **SHARED)
        found = candidates(run)
        assert len({repr(tried) for tried in found}) == len(found) == (0 if variant.name == "sgd" else 3)
        assert all(list(tried) == ["arguments"] and variant_of(replace(run, **tried)) == variant for tried in found)


def test_every_setting_but_the_chosen_ones_is_shared(tmp_path):
    experiment = RECIPES["demo"](seeds=1)
    tuning = {**SHARED, "seed": 10_000, "eval_split": "validation"}
    assert [plan.run for plan in experiment.decide(Snapshot(tmp_path)).trials] == [
        *(Run.of("sam", {"rho": rho}, **tuning) for rho in (0.1, 0.2, 0.4)),
        *(Run.of("bsam", {"rho_max": rho, "rho_min": rho}, **tuning) for rho in (0.05, 0.1, 0.2)),
        *(Run.of("sgd", **{**tuning, "weight_decay": decay}) for decay in (0.03, 0.1, 0.3)),
    ]
    finals = [Run.of(name, **SHARED, curvature=True, surface=13) for name in DEFAULT]
    assert [plan.run for plan in experiment.plans[:3]] == finals
    assert [plan.about["row"] for plan in experiment.plans] == ROWS
    assert len({plan.about["experiment"] for plan in experiment.plans}) == 1


def test_tuning_never_sees_the_test_set_and_the_final_runs_use_what_it_chose(tmp_path, asked):
    finals = run_demo(tmp_path, epochs=4, seeds=2, first_seed=3)
    tuning, final = asked[:9], asked[9:]
    assert {(run.eval_split, run.seed, run.curvature, run.surface) for run in tuning} == {
        ("validation", 10_003, False, None)
    }
    assert {(run.eval_split, run.curvature, run.epochs, run.warmup) for run in final} == {("test", True, 4, 3)}
    assert [run.seed for run in final] == [3] * 4 + [4] * 4  # seed by seed, so that methods take turns
    assert {(run.seed, run.surface) for run in final} == {(3, 13), (4, None)}
    assert [plan.about["row"] for plan in finals] == ROWS * 2
    chosen = [(5e-4, {}), (5e-4, {"rho": 0.2}), (5e-4, {"rho_max": 0.1, "rho_min": 0.1}), (0.1, {})]
    assert [(plan.run.weight_decay, plan.run.arguments) for plan in finals] == chosen * 2
    assert [plan.about["tuned"] for plan in finals[:4]] == [False, True, True, True]
    assert finals[3].about["chosen"].startswith("weight decay 0.1 tuned on")


@pytest.mark.usefixtures("pages")
def test_the_results_name_the_split_of_the_tuning_and_the_chosen_weight_decay(tmp_path, asked):
    run_demo(tmp_path, epochs=1, seeds=3)
    study = RECIPES["demo"](epochs=1, seeds=3)
    result = write_results(study, study.decide(Snapshot(tmp_path)))
    _, tuning = result.tables
    assert "validation" in tuning.title
    assert "test" not in tuning.title
    (sentence,) = (note for note in result.notes if note.startswith(f"{TUNED_SGD} ("))
    assert "weight decay 0.1 tuned" in sentence


def test_without_sgd_the_first_method_is_the_baseline():
    assert RECIPES["demo"](methods=["bsam", "sam"]).baseline == "BSAM (Algorithm 1)"


def test_another_selection_in_the_same_folder_trains_what_is_missing(tmp_path, asked):
    before = run_demo(tmp_path, seeds=1)
    asked.clear()
    finals = run_demo(tmp_path, methods=["bsam-2", "sgd"], seeds=1)
    assert {variant_of(run).name for run in asked} == {"bsam-2"}
    assert len(asked) == 4
    assert [plan.about["row"] for plan in finals] == ["BSAM (2 passes)", "SGD", TUNED_SGD]
    assert [plan.name for plan in finals[1:]] == [before[0].name, before[3].name]
