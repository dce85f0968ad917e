"""What a study trains next, from plain data, and how often it reads the files of its runs."""

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from bsam.lab import Score, Splits, Task
from bsam.lab.config import Run
from bsam.lab.recipes import RECIPES, Plan
from bsam.lab.recipes.compare import plan_comparison
from bsam.lab.recipes.study import Snapshot
from bsam.lab.recipes.tuning import Choice, Tried, Tuning, ranked, rungs
from bsam.lab.tasks import task_of
from bsam.lab.training.run_dir import RunState, run_dir_name
from fake_fit import FakeFit

EPOCHS = 40
SETTINGS = {"data": "digits", "epochs": EPOCHS}
FOLDER = Path("never-read")


def known(study, scores=None, ended=()):
    """A look at runs that are in memory: by name, the score of each epoch; those that ended are finished."""
    states = {}
    for name, run in runs_of(study).items():
        epochs = tuple({f"{run.eval_split}_accuracy": score, "seconds": 1.0} for score in (scores or {}).get(name, ()))
        states[name] = RunState(run, FOLDER / name, epochs, finished=name in ended)
    return Snapshot(FOLDER, states)


def runs_of(study):
    """All runs that a study may train: its plans with each of their candidates, and the runs that choose."""
    decision = study.decide(Snapshot(FOLDER))
    finals = [plan.run.changed(**tried) for plan in study.plans for tried in ({}, *plan.candidates)]
    return {run_dir_name(run): run for run in (*finals, *(plan.run for plan in decision.trials))}


def test_stages_follow_each_other():
    """Both rungs of each method, and then the final runs with what was chosen."""
    study = plan_comparison(["sgd", "sam"], SETTINGS, seeds=2, tune=True)
    first, last = rungs(EPOCHS, 4)
    trials = {plan.run.arguments["rho"]: plan.name for plan in study.decide(Snapshot(FOLDER)).trials}
    final = {"sgd": 0.0, "sam": 0.2}

    stage = study.decide(known(study)).stage
    assert (stage.title, {plan.until for plan in stage.plans}) == ("tuning", {first})
    level = {0.025: 0.5, 0.05: 0.6, 0.1: 0.8, 0.2: 0.7}
    scores = {trials[rho]: [level[rho]] * first for rho in trials}
    stage = study.decide(known(study, scores)).stage
    assert {plan.run.arguments["rho"]: plan.until for plan in stage.plans} == {
        0.025: first, 0.05: first, 0.1: last, 0.2: last,
    }  # fmt: skip
    scores |= {trials[rho]: [level[rho]] * first + [0.9 if rho == 0.2 else 0.1] * (last - first) for rho in (0.1, 0.2)}
    decision = study.decide(known(study, scores))
    assert (decision.stage.title, decision.waiting) == ("runs", {})
    radii = [plan.run.arguments.get("rho", 0.0) for plan in decision.stage.plans]
    assert radii == [final["sgd"], final["sam"]] * 2
    ended = [plan.name for plan in decision.finals]
    assert study.decide(known(study, scores, ended)).stage is None


def test_runs_that_failed_are_not_tried_again():
    """Nor those that others have locked: a study would not end. The others go on."""
    study = plan_comparison(["sgd", "sam", "bsam"], SETTINGS, seeds=1, tune=True)
    sam = [plan.name for plan in study.decide(known(study)).trials if plan.run.method == "sam"]
    stage = study.decide(known(study), failed=sam).stage
    assert {plan.run.method for plan in stage.plans} == {"bsam"}
    every = [plan.name for plan in study.decide(known(study)).trials]
    decision = study.decide(known(study), failed=every)
    assert (decision.stage.title, [plan.run.method for plan in decision.stage.plans]) == ("runs", ["base"])
    assert study.decide(known(study), failed=[*every, study.plans[0].name]).stage is None


def test_only_selected_runs_are_trained():
    study = RECIPES["quantization"]("smoke", 2, tune=True)
    names = [plan.name for plan in study.plans if plan.about["variant"] == "sgd"]
    chosen = replace(study, selected=names)
    decision = chosen.decide(Snapshot(FOLDER))
    assert [plan.name for plan in decision.selected_finals] == names
    assert (decision.stage.title, list(decision.stage.plans)) == ("runs", list(decision.selected_finals))
    assert decision.selected_trials == []
    assert [plan.name for plan in decision.finals] == [plan.name for plan in study.plans]
    assert decision.trials == study.decide(Snapshot(FOLDER)).trials


def test_a_snapshot_reads_a_directory_once(tmp_path):
    run = Run("sgd", epochs=2)
    now = Snapshot(tmp_path)
    assert str(now.state(run)) == "missing"
    FakeFit()(run, tmp_path / run_dir_name(run))
    assert str(now.state(run)) == "missing"
    again = now.again([run_dir_name(run)])
    assert str(again.state(run)) == "done"
    assert now.again(["another"]).state(run) is not again.state(run)
    assert (str(now.again(["another"]).state(run)), again.state(run, until=1).until) == ("missing", 1)


PROGRAM = """
import json
import sys
from collections import Counter
from pathlib import Path
import pytest
from bsam.lab.cli import main
from fake_fit import FakeFit, train_by

command = ["compare", "--data", "digits", "--epochs", "2", "--seeds", "2", "--tune"]
command += ["--methods", "sgd", "sam", "bsam", "asam"]
command += ["--device", "cpu", "--jobs", "1", "--out", "out"]
train_by(FakeFit(lambda run: 0.8), pytest.MonkeyPatch())
assert main(command) == 0
reads = Counter()

def note(event, arguments):
    if event == "open" and str(arguments[0]).endswith("config.json"):
        reads[Path(arguments[0]).parent.name] += 1

sys.addaudithook(note)
assert main(command) == 0
print("READS", json.dumps(reads))
"""


def test_the_cost_of_planning_in_reads(tmp_path):
    """A finished comparison reads the settings of a final run twice, to plan and for the page, of a tuning run once."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    reads = json.loads(done.stdout.rpartition("READS ")[2])
    trials = {name: count for name, count in reads.items() if "-seed10000-" in name}
    finals = {name: count for name, count in reads.items() if name not in trials}
    assert (list(finals.values()), list(trials.values())) == ([2] * 8, [1] * 12)


def choice(scores, samples=None, seeds=1, data="digits", chance=0.1):
    """A choice between radii whose tuning runs have these scores in % after every epoch."""
    run = Run("sam", {"rho": 0.1}, epochs=EPOCHS, eval_split="holdout", data=data)
    plan = Plan(run, candidates=[{"arguments": {"rho": 0.1 * 2**n}} for n in range(len(scores) // seeds)])
    epochs = [tuple({"holdout_accuracy": score / 100} for _ in range(EPOCHS)) for score in scores]
    states = [RunState(run, FOLDER, rows, eval_samples=samples, chance=chance) for rows in epochs]
    return Choice(plan, Tuning("holdout", seeds, halving=True), states)


def test_a_rung_at_chance_decides_nothing():
    """Ten classes, 200 samples: two standard errors are 4.3 points. All go on, and the end decides."""
    first, last = rungs(EPOCHS, 4)
    assert choice((9, 12, 14, 11), samples=200).aims == [EPOCHS] * 4
    assert choice((9, 12, 15, 11), samples=200).aims == [first, last, last, first]
    assert choice((9, 12, 14, 11), samples=1000).aims == [first, last, last, first]
    assert choice((9, 12, 14, 11)).aims == [first, last, last, first]  # nothing is known of the samples
    assert choice((9, 12, 14, 11), samples=200, chance=None).aims == [first, last, last, first]  # of guessing
    assert choice((2.5, 2, 1, 2), samples=200, data="cifar100", chance=0.01).aims == [EPOCHS] * 4
    pair = choice((5, 14), samples=200)
    assert (pair.aims, pair.best()) == ([EPOCHS] * 2, None)  # not trained to the end yet
    states = [replace(state, finished=True) for state in pair.states]
    assert replace(pair, states=states).best() == 1


def line():
    return Splits(train=(torch.arange(8.0)[:, None],) * 2)


class Distance(Task):
    """A task whose score is an error, not a share."""

    score = Score("error", "error", higher=False)
    datasets: ClassVar = {"line": line}
    networks: ClassVar = {"one": partial(torch.nn.Linear, 1, 1)}

    def losses(self, outputs, y):
        return (outputs - y).square().mean(1)

    def sums(self, outputs, y):
        return {"error": (outputs - y).abs().mean(1)}


def test_an_error_at_a_rung_is_compared_with_that_of_the_best_constant():
    run = Run.of("sam", {"rho": 0.1}, task=Distance, epochs=EPOCHS, eval_split="holdout")
    plan = Plan(run, candidates=[{"arguments": {"rho": 0.1 * 2**n}} for n in range(4)])
    first, last = rungs(EPOCHS, 4)

    def aims(errors, chance):
        epochs = [tuple({"holdout_error": error} for _ in range(EPOCHS)) for error in errors]
        states = [RunState(run, FOLDER, rows, chance=chance) for rows in epochs]
        return Choice(plan, Tuning("holdout", halving=True), states).aims

    assert aims((2.0, 2.1, 2.3, 2.2), chance=2.0) == [EPOCHS] * 4
    assert aims((2.3, 1.9, 2.1, 2.0), chance=2.0) == [first, last, first, last]
    assert aims((2.3, 2.5, 2.4, 2.6), chance=None) == [last, first, last, first]


@pytest.mark.parametrize(
    ("run", "files", "chance"),
    [
        (Run.of("sgd", data="cifar100"), {}, 0.01),
        (Run.of("sgd", data="folder:photos", model="resnet8"), {"inputs": {"class_names": ["cat", "dog"]}}, 0.5),
        (Run.of("sgd", data="folder:photos", model="resnet8"), {}, None),
        (Run.of("sam", task=Distance), {"task": {"chance": 2.0}}, 2.0),
        (Run.of("base", task="pose", data="stick_figures", model="simcc_resnet8"), {}, None),
        (
            Run.of("base", task="pose", data="stick_figures", model="simcc_resnet8"),
            {"baseline": {"title": "mean pose", "scores": {"pck": 0.25}}},
            0.25,
        ),
    ],
)
def test_the_score_of_guessing_is_that_of_the_files(run, files, chance):
    assert task_of(run).guess(run, lambda name: files.get(name, {})) == chance


def test_a_tie_at_a_rung_goes_to_the_candidate_that_was_better_at_the_rung_before():
    """Of eight radii, the third and the sixth are equally far from the middle of the grid."""
    first, second, third = rungs(EPOCHS, 8)
    for before, goes_on in (((60, 70), 5), ((70, 60), 2), ((70, 70), 2)):
        curves = {number: [20] * EPOCHS for number in range(8)} | {3: [95] * EPOCHS, 4: [70] * EPOCHS}
        curves |= {number: [score] * (first - 1) + [80] * 3 for number, score in zip((2, 5), before, strict=True)}
        tied = choice([0] * 8)
        states = [
            replace(state, epochs=tuple({"holdout_accuracy": score / 100} for score in curves[number]))
            for number, state in enumerate(tied.states)
        ]
        aims = replace(tied, states=states).aims
        assert [number for number, aim in enumerate(aims) if aim == third] == sorted([3, goes_on])
        assert aims[7 - goes_on] == second


def test_candidates_that_diverge_do_not_go_on_at_chance():
    trained = choice((9, 12, 14, 11), samples=200)
    states = [replace(trained.states[0], diverged="the loss is nan"), *trained.states[1:]]
    first, _ = rungs(EPOCHS, 4)
    assert replace(trained, states=states).aims == [first, EPOCHS, EPOCHS, EPOCHS]


def independent_order(candidates):
    """The best, then the best of the others ...: pairwise, from the rules in words."""

    def is_better(one, other):
        a, b = candidates[one], candidates[other]
        if a.diverged != b.diverged:
            return a.diverged < b.diverged
        if math.isnan(a.score) or math.isnan(b.score):
            return not math.isnan(a.score) or (math.isnan(b.score) and tie(one, other))
        if abs(a.score - b.score) > 5e-10:
            return a.score > b.score
        return tie(one, other)

    def tie(one, other):
        a, b = candidates[one].centre, candidates[other].centre
        return a < b if abs(a - b) > 5e-10 else one < other

    left, order = list(candidates), []
    while left:
        best = next(one for one in left if all(is_better(one, other) for other in left if other != one))
        order.append(best)
        left.remove(best)
    return order


@pytest.mark.parametrize("seed", range(60))
def test_the_order_of_candidates(seed):
    rng = random.Random(seed)
    candidates = {
        number: Tried(
            epoch=13,
            score=math.nan if (diverged := rng.choice((0, 0, 0, 1, 2))) == 2 else rng.choice((50, 60, 70.1, 0.3)),
            clean=0.0,
            error=math.nan,
            diverged=diverged,
            centre=rng.choice((0.0, 1 / 9, 1.0, 2.0)),
            edges=(),
        )
        for number in range(rng.choice((2, 4, 12)))
    }
    equal = {number: tried._replace(score=tried.score + rng.choice((0, 1e-12))) for number, tried in candidates.items()}
    assert ranked(equal) == independent_order(candidates)
