"""What tuning tries, what it chooses from the scores of its runs, and when it says that the choice may be noise."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from bsam.lab import cli
from bsam.lab.config import Run
from bsam.lab.recipes import RECIPES, Plan, describe
from bsam.lab.recipes.plan import select
from bsam.lab.recipes.study import Snapshot
from bsam.lab.recipes.tuning import Choice, Tuning, base_candidates, radius_candidates
from bsam.lab.recipes.variants import variant_of
from bsam.lab.report.tuning_section import tuning_tables
from bsam.lab.running.runner import run_all
from bsam.lab.training.run_dir import RunState, run_dir_name
from fake_fit import FakeFit, train_by

RUN = Run("sam", {"rho": 0.1}, epochs=1)
FACTORS = (0.5, 1, 2, 4)
NOWHERE = Path("nowhere")


def choice(scores, folder=None, split="holdout", samples=None, candidates=None):
    """A choice with these scores in %: one or several seeds for each candidate; None diverged."""
    run = replace(RUN, eval_split=split)

    def state(score):
        if score is None:
            return RunState(run, folder, diverged="the loss is nan", eval_samples=samples)
        return RunState(run, folder, ({f"{split}_accuracy": score / 100},), finished=True, eval_samples=samples)

    seeds = [of if isinstance(of, tuple) else (of,) for of in scores]
    plan = Plan(RUN, candidates=radius_candidates(RUN) if candidates is None else candidates)
    return Choice(plan, Tuning(split, len(seeds[0])), [state(score) for of in seeds for score in of])


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ((80, 81, 82, 79), 2),
        ((-40, -30, None, -50), 1),  # negative scores: a run that diverged is not better
        ((None, -200, None, None), 1),
        ((None, None, None, None), 0),
        ((90, 90, 90, 90), 1),  # ties: towards the middle, then the smaller one
        ((90, 80, 90, 90), 2),
        ((90, 80, 80, 90), 0),
        ((50, 0.1 + 0.2 + 80, 80.3, 0.3), 1),  # equal except for rounding
        (((90, 80), (84, 87), (85, 85), (88, None)), 1),  # means of two seeds; the last one diverged with one of them
        (((90, None), (None, None), (85, None), (None, None)), 0),
    ],
)
def test_the_best_candidate(scores, best, tmp_path):
    assert choice(scores, tmp_path).best() == best


def test_nothing_is_chosen_before_all_runs_have_ended(tmp_path):
    waiting = choice((80, 81, 82, 83), tmp_path)
    waiting = replace(waiting, states=[*waiting.states[:3], RunState(RUN, tmp_path)])
    assert (waiting.best(), waiting.noise, waiting.is_noisy, waiting.tuned_on) == (None, None, False, "")


def test_the_noise_of_one_seed_is_the_error_of_a_share(tmp_path):
    """The standard error of 90 % of 64 samples is 4 points: three of these four scores are equally good."""
    found = choice((86.5, 90, 88.5, 80), tmp_path, samples=64)
    share = (0.9 * 64 + 2) / 68
    assert found.noise == pytest.approx(100 * math.sqrt(share * (1 - share) / 68)) == pytest.approx(3.99, abs=0.01)
    assert (found.is_noisy, "noise" in found.tuned_on, "edge" in found.tuned_on) == (True, True, False)
    many = choice((86.5, 90, 88.5, 80), tmp_path, samples=10_000)
    assert (many.noise, many.is_noisy) == (pytest.approx(0.3, abs=0.01), False)
    assert "10,000 held-out samples, 1 seed" in many.tuned_on
    perfect = choice((99.75, 99.5, 99, 100), tmp_path, samples=400)  # one wrong sample of 400 is no difference
    assert (perfect.is_noisy, "noise" in perfect.tuned_on, "edge" in perfect.tuned_on) == (True, True, True)


def test_the_noise_of_several_seeds(tmp_path):
    """Each seed holds out other samples; validation samples stay the same. Scattered seeds are noise, too."""
    calm = ((90, 90), (91, 91), (85, 85), (85, 85))
    for split, n in (("holdout", 2000), ("validation", 1000)):
        share = (0.91 * n + 2) / (n + 4)
        found = choice(calm, tmp_path, split, 1000)
        assert found.noise == pytest.approx(100 * math.sqrt(share * (1 - share) / (n + 4)))
    wild = ((80, 90), (85, 97), (70, 84), (75, 89))
    spread = statistics.stdev((85, 97)) / math.sqrt(2)
    assert choice(wild, tmp_path, samples=1000).noise == pytest.approx(spread)
    assert choice(wild, tmp_path, samples=1000).is_noisy
    one_wild = ((90, 89.75), (80, 80.5), (63.5, 87.5), (10, 10))  # one that hardly trains is no noise of the best
    assert not choice(one_wild, tmp_path, samples=1000).is_noisy
    assert choice(wild, tmp_path).noise == pytest.approx(spread)
    assert choice((-1, -2, -1, -3), tmp_path).is_noisy
    assert not choice((-1, -2, -1.5, -3), tmp_path).is_noisy


def test_the_grid_of_the_base_optimizer(tmp_path):
    candidates = base_candidates(Run("sgd", lr=0.1, weight_decay=1e-3))
    pairs = [(candidate["lr"], candidate["weight_decay"]) for candidate in candidates]
    assert pairs == [(lr, decay) for lr in (0.03, 0.1, 0.3) for decay in (1e-4, 1e-3, 1e-2, 1e-1)]
    tied = choice([90] * 12, tmp_path, candidates=candidates)
    assert pairs[tied.best()] == (0.1, 1e-3)  # the settings without tuning
    edges = {pair: list(tied.table[number].edges) for number, pair in enumerate(pairs)}
    assert (edges[0.1, 1e-3], edges[0.1, 1e-2]) == ([], [])
    assert (edges[0.3, 1e-2], edges[0.1, 1e-4], edges[0.03, 0.1]) == (["lr"], ["weight_decay"], ["lr", "weight_decay"])
    without = base_candidates(Run("base", base="adam", weight_decay=0.0))
    adam = choice([0] * 9, tmp_path, candidates=without)
    assert [candidate["weight_decay"] for candidate in without[:3]] == [0, 1e-3, 1e-2]
    assert (adam.table[3].edges, adam.table[5].edges) == ((), ("weight_decay",))  # nothing lies below 0
    schedules = [{"schedule": "cosine", "warmup": 0}, {"schedule": "constant", "warmup": 0}]
    unordered = choice((80, 90), tmp_path, candidates=schedules)
    assert (list(unordered.values[0]), unordered.best(), unordered.table[1].edges) == (["schedule"], 1, ())


def radii(run):
    return {name: value for name, value in run.arguments.items() if name.startswith("rho")}


@pytest.mark.parametrize("name", ["classification", "label-noise", "transfer", "pose", "quantization"])
def test_every_method_has_four_tries_that_differ_in_the_radius_alone(name):
    study = RECIPES[name]("short", 2, tune=True)
    trials = study.decide(Snapshot(NOWHERE)).trials
    assert all(plan.about == describe(plan.run, trial=True) for plan in trials)  # in no cell of the table
    assert {(plan.run.eval_split, plan.run.seed) for plan in trials} == {("holdout", 10_000)}
    methods = [plan.run for plan in study.plans if plan.run.seed == 0 and plan.run.method != "base"]
    assert "sam-sum" not in {variant_of(run).name for run in methods}  # SAM's candidates contain it
    tried = [plan.run for plan in trials if plan.run.method != "base"]
    assert len(tried) == 4 * len(methods)
    for run, tries in zip(methods, zip(*[iter(tried)] * 4, strict=True), strict=True):
        assert {variant_of(trial) for trial in tries} == {variant_of(run)}
        changed = ("arguments", "seed", "eval_split", "init", "curvature", "limit_test")
        kept = {key: value for key, value in run.settings().items() if key not in changed}
        assert all(kept.items() <= trial.settings().items() for trial in tries)


def test_the_candidates_are_multiples_of_the_radii():
    for variant, rho, names in (("sam", 0.1, ["rho"]), ("bsam", 0.1, ["rho_max", "rho_min"])):
        run = Run(variant, dict.fromkeys(names, rho))
        assert [radii(replace(run, **tried)) for tried in radius_candidates(run)] == [
            dict.fromkeys(names, factor * rho) for factor in FACTORS
        ]
    follow = Run("sam", {"rho": 0.2, "rho_floor": 0.1})
    assert radius_candidates(follow)[3] == {"arguments": {"rho": 0.8, "rho_floor": 0.4}}
    assert [tried["arguments"]["lam"] for tried in radius_candidates(Run("saf"))] == [
        0.3 * factor for factor in FACTORS
    ]
    assert radius_candidates(Run("sgd")) == ()


def test_a_quantized_try_starts_from_a_float_network_that_has_not_seen_the_held_out_images():
    study = RECIPES["quantization"]("short", 2, tune=True)
    trials = {plan.name: plan.run for plan in study.decide(Snapshot(NOWHERE)).trials}
    quantized = [run for run in trials.values() if run.task.weight_bits is not None]
    assert quantized
    for run in quantized:
        initial = trials[run.init]  # which is trained, too
        assert (initial.eval_split, initial.seed, initial.model) == ("holdout", run.seed, run.model)
        assert initial.task.weight_bits is None


def test_final_runs_have_the_chosen_radius_and_say_so(monkeypatch, tmp_path):
    scores = {0.025: 0.3, 0.05: 0.5, 0.1: 0.55, 0.2: 0.4}
    fit = train_by(FakeFit(lambda run: scores.get(next(iter(radii(run).values()), None), 0.7)), monkeypatch)
    study = RECIPES["classification"]("smoke", 2, tune=True)
    plans = select(study.plans, ["sgd", "sam", "bsam"], ["resnet8"])
    study = replace(study, plans=plans)
    before = study.decide(Snapshot(tmp_path))
    assert [plan.run for plan in before.finals] == [plan.run for plan in plans]
    assert len(before.waiting) == 4
    fit.trouble = {run_dir_name(before.trials[1].run): "nan"}  # of SAM, rho 0.05
    run_all([plan.run for plan in before.trials], tmp_path)
    tuned = study.decide(Snapshot(tmp_path))
    assert not tuned.waiting
    assert [radii(plan.run) for plan in tuned.finals] == [{}, {"rho": 0.1}, {"rho_max": 0.1, "rho_min": 0.1}] * 2
    assert {plan.run.eval_split for plan in tuned.finals} == {"test"}
    sgd, sam, bsam = (plan.about for plan in tuned.finals[:3])
    assert (sgd["tuned"], sam["tuned"], sam["radius"], bsam["radius"]) == (False, True, 0.1, 0.2)
    assert (sgd["row"], sam["row"]) == ("SGD", "SAM, tuned")
    assert "held-out samples, 1 seed" in sam["chosen"]
    assert [plan.settings_chosen for plan in tuned.finals[:2]] == [None, {"rho": 0.1}]


def test_the_tables_name_the_split_and_the_columns_that_tell_them_apart(monkeypatch, tmp_path):
    train_by(FakeFit(), monkeypatch)
    study = RECIPES["label-noise"]("smoke", 1, tune=True)
    study = replace(study, plans=select(study.plans, ["sam"]))
    run_all([plan.run for plan in study.decide(Snapshot(tmp_path)).trials], tmp_path)
    titles = [table.title for table in tuning_tables(study.decide(Snapshot(tmp_path)))[0]]
    assert all(rate in title for rate, title in zip(("20%", "40%", "60%", "80%"), titles, strict=True))
    assert all("held-out" in title for title in titles)


def test_the_command_line_tunes_runs_of_several_seeds(monkeypatch, tmp_path):
    """Quantized ones, which start from a network of their own seed: the choice of the first seed holds for all."""
    fit = train_by(FakeFit(lambda run: 0.9 if radii(run) == {"rho": 0.2} else 0.5), monkeypatch)
    monkeypatch.chdir(tmp_path)
    command = ["run", "quantization", "--only", "sgd", "sam", "--models", "resnet8", "--seeds", "2", "--device", "cpu"]
    assert cli.main([*command, "--tune"]) == 0
    for seed in (0, 1):
        finals = [run for run in fit.asked if run.eval_split == "test" and run.seed == seed]
        rows = [(variant_of(run).name, run.task.weight_bits, radii(run)) for run in finals]
        assert rows == [("sgd", None, {}), ("sgd", 4, {}), ("sam", 4, {"rho": 0.2})]
    assert len(fit.asked) == 5 + 6  # a float network and four radii; three runs of each seed
    out = tmp_path / "runs" / "quantization-smoke-tuned"
    assert "rho 0.2*" in (out / "table.md").read_text()  # the largest candidate
    assert json.loads((out / "results.json").read_text())["tuned"]
