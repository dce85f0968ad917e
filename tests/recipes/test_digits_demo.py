from dataclasses import replace

import pytest

import bsam
from bsam.recipes import runner
from bsam.recipes.digits_demo import DEFAULT, NOISE_RATES, candidates, demo_recipe
from bsam.recipes.runner import run_all, tuning_runs, with_tuned_settings
from bsam.recipes.variants import variant_of, variants
from bsam.training.config import Run
from bsam.training.run_dir import run_dir_name

SAME = {"seed": 0, "eval_split": "test", "radius": None, "curvature": False, "relief": None}


@pytest.fixture
def asked(fake_fit, monkeypatch):
    """The runs that were asked for, none of them trained.

    The score singles one candidate out, another one for each noise rate.
    """

    def score(run):
        wanted = 0.1 if run.label_noise == 0 else 0.03
        return 0.9 if run.lr == wanted and run.arguments.get("rho", run.arguments.get("rho_max", 0.1)) == 0.1 else 0.5

    fit = fake_fit(score)
    monkeypatch.setattr(runner, "fit", fit)
    return fit.asked


def demo(recipe, runs, out):
    """What ``bsam demo`` does, in this process."""
    run_all(tuning_runs(recipe, runs), out)
    return run_all(with_tuned_settings(recipe, runs, out), out)


def test_every_method_has_as_many_candidates():
    for variant in variants().values():
        found = candidates(Run(variant.method, variant.arguments))
        assert len({repr(each) for each in found}) == len(found) == 8
        assert {each["weight_decay"] for each in found} == {5e-4, 5e-2}
        assert all(variant_of(Run(variant.method, each["arguments"])) == variant for each in found)


def test_the_default_is_what_it_was():
    """Every setting of it, in the order that decides ties."""
    family = [(decay, lr, rho) for decay in (5e-4, 5e-2) for lr in (0.03, 0.1) for rho in (0.03, 0.1)]
    same = {"batch": 64, "label_smoothing": 0.0, "epochs": 10, "eval_split": "validation", "seed": 10_000}
    base = [Run("sgd", lr=lr, weight_decay=decay, **same) for decay in (5e-4, 5e-2) for lr in (0.03, 0.1, 0.3, 0.6)]

    def runs(method, **names):
        return [
            Run(method, {name: rho if value is None else value for name, value in names.items()}, **same, lr=lr)
            for _, lr, rho in family
        ]

    sam, bsam3 = runs("sam", rho=None), runs("bsam", rho_max=None, rho_min=None)
    bsam2 = runs("bsam", rho_max=None, rho_min=None, passes=2)
    decays = [decay for decay, _, _ in family]
    expected = base + [
        replace(run, weight_decay=decay)
        for group in (sam, bsam3, bsam2)
        for run, decay in zip(group, decays, strict=True)
    ]
    recipe = demo_recipe()
    trials = tuning_runs(recipe, recipe.runs())
    assert trials == expected + [replace(run, label_noise=0.4) for run in expected]
    assert [variant_of(run).name for run in recipe.runs()[:4]] == list(DEFAULT)


def test_methods_are_those_asked_for_each_once():
    assert [variant_of(run).name for run in demo_recipe(["msam", "sgd", "msam"]).runs()] == ["msam", "sgd"] * 2
    with pytest.raises(bsam.BsamError, match=r"no method 'adam': choose from sgd, sam, .*saf, mesa, bsam, bsam-2"):
        demo_recipe(["sgd", "adam"])
    with pytest.raises(bsam.BsamError, match="at least one method"):
        demo_recipe([])


def test_another_selection_in_the_same_folder_trains_what_is_missing(tmp_path, asked):
    before = demo(demo_recipe(), demo_recipe().runs(), tmp_path)
    asked.clear()
    other = demo_recipe(["saf", "sgd"])
    states = demo(other, other.runs(), tmp_path)
    assert {run.method for run in asked} == {"saf"}
    assert len(asked) == 18
    assert [variant_of(state.run).name for state in states] == ["saf", "sgd"] * 2
    assert states[1::2] == before[::4]


def test_tuning_never_sees_the_test_set_and_the_final_runs_use_what_it_chose(tmp_path, asked):
    recipe = demo_recipe()
    runs = [replace(run, epochs=4) for run in recipe.runs(seeds=2, first_seed=3)]
    states = demo(recipe, runs, tmp_path)
    tuning = [run for run in asked if run.eval_split == "validation"]
    final = [run for run in asked if run.eval_split == "test"]
    assert asked == tuning + final
    assert (len(tuning), len(final)) == (64, 16)
    assert {run.epochs for run in asked} == {4}
    assert {run.seed for run in tuning} == {10_003}
    assert [run.seed for run in final] == [3] * 8 + [4] * 8  # seed by seed, so that methods take turns
    assert {(run.radius, run.curvature) for run in final} == {(0.05, True)}
    assert {(run.seed, run.relief) for run in final} == {(3, 13), (4, None)}
    assert {(run.radius, run.curvature, run.relief) for run in tuning} == {(None, False, None)}
    assert [(variant_of(run).name, run.label_noise) for run in final] == [
        (n, r) for r in NOISE_RATES for n in DEFAULT
    ] * 2
    for state in states:
        best = 0.1 if state.run.label_noise == 0 else 0.03
        assert state.run.lr == best
        assert replace(state.run, **SAME) in [replace(run, **SAME) for run in tuning]


def test_the_choice_is_by_the_last_epoch_and_ties_go_to_the_first(tmp_path, fake_fit, monkeypatch):
    recipe = demo_recipe(["sam"])
    run = recipe.runs()[0]
    trials = tuning_runs(recipe, [run])
    fit = fake_fit(lambda run: {trials[1]: 0.8, trials[2]: 0.8}.get(run, 0.5))  # 0.99 in all epochs before the last
    monkeypatch.setattr(runner, "fit", fit)
    assert with_tuned_settings(recipe, [run], tmp_path) == [run]  # not before tuning
    run_all(trials[:-1], tmp_path)
    assert with_tuned_settings(recipe, [run], tmp_path) == [run]  # nor in the middle of it
    run_all(trials, tmp_path)
    (chosen,) = with_tuned_settings(recipe, [run], tmp_path)
    assert (chosen.lr, chosen.weight_decay, chosen.arguments) == (0.03, 5e-4, {"rho": 0.1})


def test_a_candidate_that_diverged_is_not_chosen(tmp_path, fake_fit, monkeypatch):
    recipe = demo_recipe(["sgd"])
    run = recipe.runs()[0]
    trials = tuning_runs(recipe, [run])
    fit = fake_fit(lambda run: 0.1)
    fit.trouble[run_dir_name(trials[0])] = "diverged"
    monkeypatch.setattr(runner, "fit", fit)
    run_all(trials, tmp_path)
    assert with_tuned_settings(recipe, [run], tmp_path)[0].lr == 0.1


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"seeds": 0}, {"seeds": 10**6}])
def test_what_cannot_be_is_refused(wrong):
    names = {"seed": "first_seed", "seeds": "seeds"}
    with pytest.raises(bsam.BsamError, match=next(iter(wrong))):
        demo_recipe().runs(**{names[name]: value for name, value in wrong.items()})
