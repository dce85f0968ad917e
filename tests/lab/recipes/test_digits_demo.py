from dataclasses import replace
from pathlib import Path

import pytest

from bsam.lab.recipes.choices import TunedRuns
from bsam.lab.recipes.digits_demo import DEFAULT, TUNED_SGD, by_method, candidates, demo_recipe
from bsam.lab.recipes.variants import arguments, variant_of, variants
from bsam.lab.running import job
from bsam.lab.running.runner import run_all
from bsam.lab.training.config import Run
from fake_fit import FakeFit

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


def second_is_best(run):
    """The score singles the second candidate of each row out."""
    chosen = ({"rho": 0.2}, {"rho_max": 0.1, "rho_min": 0.1})
    return 0.9 if run.arguments in chosen or run.weight_decay == 0.1 else 0.5


@pytest.fixture
def asked(monkeypatch):
    """The runs that were asked for, none of them trained."""
    fit = FakeFit(second_is_best)
    monkeypatch.setattr(job, "fit", fit)
    return fit.asked


def demo(recipe, runs, out):
    """What ``bsam demo`` does, in this process."""
    run_all(TunedRuns(recipe, runs, Path("nowhere")).trials, out)
    return run_all(TunedRuns(recipe, runs, out).finals, out)


def test_every_method_has_three_candidates_which_are_arguments_only_and_sgd_has_none():
    for variant in variants().values():
        run = Run(variant.method, arguments(variant, "digits"), **SHARED)
        found = candidates(run)
        if variant.name == "sgd":
            assert found == []
            continue
        assert len({repr(each) for each in found}) == len(found) == 3
        assert all(list(each) == ["arguments"] for each in found)
        assert all(variant_of(replace(run, **each)) == variant for each in found)
    decays = [each["weight_decay"] for each in candidates(Run("sgd", **{**SHARED, "weight_decay": 0.1}))]
    assert len(set(decays)) == len(decays) == 3
    assert 5e-4 not in decays  # the shared one has a row of its own


def test_every_setting_but_the_chosen_ones_is_shared():
    recipe = demo_recipe()
    trials = TunedRuns(recipe, recipe.runs(), Path("nowhere")).trials
    tuning = {**SHARED, "seed": 10_000, "eval_split": "validation"}
    assert trials == [
        *(Run("sam", {"rho": rho}, **tuning) for rho in (0.1, 0.2, 0.4)),
        *(Run("bsam", {"rho_max": rho, "rho_min": rho}, **tuning) for rho in (0.05, 0.1, 0.2)),
        *(Run("sgd", **{**tuning, "weight_decay": decay}) for decay in (0.03, 0.1, 0.3)),
    ]
    measured = {"curvature": True, "surface": 13}
    assert recipe.runs()[:3] == [Run(name, **SHARED, **measured) for name in DEFAULT]
    assert [by_method(run).row for run in recipe.runs()] == ROWS


def test_tuning_never_sees_the_test_set_and_the_final_runs_use_what_it_chose(tmp_path, asked):
    recipe = demo_recipe()
    runs = [replace(run, epochs=4) for run in recipe.runs(seeds=2, first_seed=3)]
    states = demo(recipe, runs, tmp_path)
    tuning, final = asked[:9], asked[9:]
    assert {run.eval_split for run in tuning} == {"validation"}
    assert {run.eval_split for run in final} == {"test"}
    assert {run.epochs for run in asked} == {4}
    assert {run.seed for run in tuning} == {10_003}
    assert [run.seed for run in final] == [3] * 4 + [4] * 4  # seed by seed, so that methods take turns
    assert {(run.seed, run.surface) for run in final} == {(3, 13), (4, None)}
    assert {run.curvature for run in final} == {True}
    assert {(run.curvature, run.surface) for run in tuning} == {(False, None)}
    assert [by_method(run).row for run in final] == ROWS * 2
    chosen = [(5e-4, {}), (5e-4, {"rho": 0.2}), (5e-4, {"rho_max": 0.1, "rho_min": 0.1}), (0.1, {})]
    assert [(state.run.weight_decay, state.run.arguments) for state in states] == chosen * 2


def test_another_selection_in_the_same_folder_trains_what_is_missing(tmp_path, asked):
    before = demo(demo_recipe(), demo_recipe().runs(), tmp_path)
    asked.clear()
    other = demo_recipe(["bsam-2", "sgd"])
    states = demo(other, other.runs(), tmp_path)
    assert {variant_of(run).name for run in asked} == {"bsam-2"}
    assert len(asked) == 4
    assert [by_method(state.run).row for state in states] == ["BSAM (2 passes)", "SGD", TUNED_SGD]
    assert states[1:] == [before[0], before[3]]


def test_the_choice_is_by_the_last_epoch_and_ties_go_to_the_first(tmp_path, monkeypatch):
    recipe = demo_recipe(["sam"])
    run = recipe.runs()[0]
    trials = TunedRuns(recipe, [run], Path("nowhere")).trials
    fit = FakeFit(lambda run: {trials[1]: 0.8, trials[2]: 0.8}.get(run, 0.5))  # 0.99 in all epochs before the last
    monkeypatch.setattr(job, "fit", fit)
    assert TunedRuns(recipe, [run], tmp_path).finals == [run]  # not before tuning
    run_all(trials[:-1], tmp_path)
    assert TunedRuns(recipe, [run], tmp_path).finals == [run]  # nor in the middle of it
    run_all(trials, tmp_path)
    assert TunedRuns(recipe, [run], tmp_path).finals == [replace(run, arguments={"rho": 0.2})]
