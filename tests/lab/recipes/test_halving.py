"""Successive halving: which candidates go on, up to which epoch, and what is chosen from what is on disk."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bsam.lab.config import Run
from bsam.lab.recipes import RECIPES, Plan
from bsam.lab.recipes.plan import select
from bsam.lab.recipes.study import Snapshot
from bsam.lab.recipes.tuning import RUNGS, WINDOW, Choice, Tuning, rungs, start_of
from bsam.lab.report.tuning_section import tuning_tables
from bsam.lab.running.runner import run_all
from bsam.lab.training.run_dir import RunState, run_dir_name
from fake_fit import FakeFit, train_by

EPOCHS = 40
RUN = Run("sam", {"rho": 0.1}, epochs=EPOCHS, eval_split="holdout")


def start(candidates, seeds=1):
    """A choice between so many radii, before any training."""
    plan = Plan(RUN, candidates=[{"arguments": {"rho": 0.1 * 2**n}} for n in range(candidates)])
    return Choice(plan, Tuning("holdout", seeds, halving=True), [RunState(RUN, Path("a"))] * candidates * seeds)


def train(choice, curves, ends=None):
    """Train the runs up to where the choice wants them: ``curves`` has the scores in %, ``ends`` where one diverges."""
    states = []
    for number, (trial, curve) in enumerate(zip(choice.trials, curves, strict=True)):
        until, end = max(len(trial.epochs), trial.until or EPOCHS), (ends or {}).get(number, math.inf)
        epochs = tuple({"holdout_accuracy": score / 100} for score in curve[: min(until, end)])
        diverged = "the loss is nan" if until >= end else None
        states.append(replace(trial, epochs=epochs, diverged=diverged, finished=until == EPOCHS, until=None))
    return replace(choice, states=states)


def halve(choice, curves, ends=None):
    """Train until there is a choice; return it."""
    while choice.best() is None:
        choice = train(choice, curves, ends)
    return choice


def test_candidates_are_compared_when_their_radii_have_an_effect():
    """Before the start, or the first epoch of SAF and MESA, all candidates are equal."""
    for settings, begin in [({"rho_start": 20.0}, 20), ({"rho_start": 10.0, "rho_warmup": 20.0}, 30)]:
        choice = start(4)
        later = replace(choice, plan=replace(choice.plan, run=replace(RUN, **settings)))
        assert set(later.aims) == {math.ceil(begin + (EPOCHS - begin) * RUNGS[0])}
    assert start_of(Run("mesa", {"start_epoch": 7}, epochs=EPOCHS)) == 7
    assert start_of(Run("sam", epochs=9, rho_start=4, rho_warmup=4)) == 8


def replay(curves, candidates, seeds):
    """What halving chooses, and the epochs of each candidate, from the complete curves alone."""
    means = np.mean(np.reshape(curves, (candidates, seeds, EPOCHS)), axis=1)
    left, trained, stages = list(range(candidates)), np.zeros(candidates, int), math.ceil(math.log2(candidates))
    for rung in np.linspace(*RUNGS, stages):
        epoch = math.ceil(round(rung * EPOCHS, 9))
        trained[left] = epoch
        score = means[:, epoch - round(WINDOW * EPOCHS) : epoch].mean(axis=1).round(9)
        left.sort(key=lambda number: (-score[number], abs(2 * number - (candidates - 1)), number))
        left = left[: math.ceil(len(left) / 2)]
    return left[0], trained.tolist()


@pytest.mark.parametrize(("candidates", "seeds"), [(2, 1), (4, 1), (4, 3), (5, 2), (12, 1)])
@pytest.mark.parametrize("steps", [None, 10])  # rounded to 10 points, which gives ties
def test_halving_stops_the_same_runs_as_a_replay_of_full_trainings(candidates, seeds, steps):
    for number in range(5):
        curves = np.random.default_rng(number).uniform(0, 100, (candidates * seeds, EPOCHS))
        curves = curves if steps is None else np.round(curves / steps) * steps
        choice = halve(start(candidates, seeds), curves)
        best, trained = replay(curves, candidates, seeds)
        assert choice.best() == best
        assert [len(state.epochs) for state in choice.states[::seeds]] == trained
        assert [tried.epoch for tried in choice.table] == trained
    assert max(trained) < EPOCHS


def test_halving_costs_a_third():
    """Four radii cost about a third of four full trainings, and the rungs are never beyond the run."""
    first, last = rungs(200, 4)
    assert 4 * first + 2 * (last - first) == 4 * 200 * 0.35
    for epochs in range(1, 30):
        for candidates in (1, 2, 4, 12):
            listed = rungs(epochs, candidates)
            assert listed == sorted(listed)
            assert all(1 <= rung <= epochs for rung in listed)
    assert (rungs(40, 1), len(rungs(40, 12))) == ([], 4)


def test_a_candidate_that_diverges_goes_out_first_and_another_takes_its_place():
    first, last = rungs(EPOCHS, 4)
    curves = [[score] * EPOCHS for score in (70, 90, 80, 60)]
    early = halve(start(4), curves, {1: first - 1})
    assert (early.best(), [tried.epoch for tried in early.table]) == (2, [last, first, last, first])
    late = halve(start(4), curves, {1: first + 1, 2: first + 1})  # both after the first rung
    assert (late.best(), [tried.epoch for tried in late.table]) == (0, [last, first, first, last])
    three = halve(start(4), curves, {0: 1, 1: 1, 3: 1})  # nothing is left to compare with
    assert (three.best(), len(three.states[2].epochs)) == (2, first)
    assert halve(start(4), curves, dict.fromkeys(range(4), 2)).best() == 0
    seed = halve(start(4, seeds=2), np.repeat(curves, 2, axis=0), {2: 3})  # one of two seeds of the best
    assert seed.best() == 2


def test_an_old_grid_is_compared_after_the_last_epoch():
    """All its runs have ended; the best after the last epoch is the worst before."""
    curves = [[score] * (EPOCHS - 1) + [100 - score] for score in (70, 90, 80, 60)]
    grid = train(replace(start(4), tuning=Tuning("holdout")), curves)
    assert all(state.finished for state in grid.states)
    for halving in (False, True):
        choice = replace(grid, tuning=Tuning("holdout", halving=halving))
        assert (choice.best(), [tried.epoch for tried in choice.table]) == (3, [EPOCHS] * 4)
    part = replace(grid, tuning=Tuning("holdout", halving=True), states=[*grid.states[:3], RunState(RUN, Path("a"))])
    assert (part.best(), [trial.left for trial in part.trials]) == (None, [0, 0, 0, rungs(EPOCHS, 4)[0]])
    assert halve(part, curves).best() == 1  # before the last epoch


def test_a_candidate_that_stops_early_is_compared_at_that_epoch():
    """The best is far above the score at which another one stopped, but was not at that epoch."""
    first, _ = rungs(EPOCHS, 4)
    curves = [[10.0] * EPOCHS, [50.0] * first + [90.0] * EPOCHS, [50.0] * first + [60.0] * EPOCHS, [49.9] * EPOCHS]
    choice = halve(start(4), curves)
    assert (choice.best(), choice.noise) == (1, None)  # the number of samples is unknown
    assert not choice.is_noisy
    curves[3] = [50.0] * EPOCHS  # a tie at the first rung, which the middle of the grid decides
    assert (halve(start(4), curves).best(), halve(start(4), curves).is_noisy) == (1, True)


def test_runs_go_on_in_their_folders_and_tables_say_where_they_stopped(monkeypatch, tmp_path):
    fit = train_by(FakeFit(lambda run: 0.3 + run.arguments["rho"] if run.arguments else 0.5), monkeypatch)
    study = RECIPES["classification"]("smoke", 1, tune=True)
    plans = [replace(plan, run=replace(plan.run, epochs=EPOCHS)) for plan in select(study.plans, ["sam"])[:1]]
    study = replace(study, plans=plans)
    first, last = rungs(EPOCHS, 4)
    for rung, asked in ((first, 4), (last, 6)):
        tuned = study.decide(Snapshot(tmp_path))
        assert list(tuned.waiting) == [plans[0].name]
        assert {plan.until for plan in tuned.trials} == {first, rung}
        run_all(tuned.now.states(tuned.trials), tmp_path)
        assert len(fit.asked) == asked
    assert [plan.run.arguments["rho"] for plan in tuned.trials if plan.until == last] == [0.1, 0.2]
    tuned = study.decide(Snapshot(tmp_path))
    assert (tuned.waiting, tuned.finals[0].run.arguments["rho"]) == ({}, 0.2)
    assert not list(tmp_path.rglob("model.safetensors"))
    (table,), notes = tuning_tables(tuned)
    assert "after the last epoch, or after the epoch given, where the worse half stops, on" in notes[0]
    cells = zip((first, first, last, last), table.rows[0][1:5], strict=True)
    assert all(cell.marks == (f"epoch {epoch}",) for epoch, cell in cells)
    assert {plan.name for plan in tuned.trials} == {run_dir_name(run) for run in fit.asked}
