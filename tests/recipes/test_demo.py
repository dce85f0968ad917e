from dataclasses import replace
from typing import ClassVar

import pytest

import bsam
from bsam.flatness.sharpness import Sharpness
from bsam.methods import METHODS
from bsam.recipes import demo as recipe
from bsam.recipes.demo import DEFAULT, NOISE_RATES, Plan, best, candidates_of, demo, titles
from bsam.training.config import Run
from bsam.training.record import Record
from bsam.training.result import Epoch, LossSurface, Result


def result(run, accuracies):
    return Result(run, tuple(Epoch({f"{run.eval_split}_accuracy": a}) for a in accuracies), 0.001)


def score(run):
    """An accuracy that singles one candidate out, another one for each noise rate, and that is no better than any on
    the test set.
    """
    wanted = 0.1 if run.label_noise == 0 else 0.03
    return 0.9 if run.lr == wanted and run.arguments.get("rho", run.arguments.get("rho_max", 0.1)) == 0.1 else 0.5


def complete(found):
    """With what its run says that it measures."""
    last, points = found.epochs[-1], found.run.relief
    if found.run.radius is not None:
        last = replace(last, sharpness=Sharpness(1.0, 0.2, 0.1, 0.3, 0.5))
    relief = None if points is None else LossSurface((0.0,) * points, ((1.0,) * points,) * points)
    return replace(found, epochs=(*found.epochs[:-1], last), relief=relief)


class FakeWorkers:
    """Trains nothing, notes everything, and may break off."""

    asked: ClassVar[list[Run]] = []
    stop_after: ClassVar[int | None] = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def fit_all(self, runs, finished):
        for run in runs:
            if FakeWorkers.stop_after is not None and len(FakeWorkers.asked) == FakeWorkers.stop_after:
                raise KeyboardInterrupt
            FakeWorkers.asked.append(run)
            finished(complete(result(run, [0.99, score(run)])))


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setattr(recipe, "Workers", FakeWorkers)
    monkeypatch.setattr(FakeWorkers, "asked", [])
    monkeypatch.setattr(FakeWorkers, "stop_after", None)
    return FakeWorkers


def quiet(stage, runs):
    pass


def test_budget_is_equal_for_all_methods():
    assert list(titles()) == ["sgd", *METHODS, "bsam-2"]
    for candidate in candidates_of(titles()):
        assert len(candidate.candidates) == 8
        assert len({repr(c) for c in candidate.candidates}) == len(candidate.candidates)
        assert {c.method for c in candidate.candidates} == {candidate.name.removesuffix("-2")}
        assert {c.weight_decay for c in candidate.candidates} == {
            5e-4,
            5e-2,
        }  # no method gets a decay that another does not
        assert {c.arguments.get("passes", 3) for c in candidate.candidates} == {2 if candidate.name == "bsam-2" else 3}


def test_the_default_is_what_it_was():
    """Every setting of it, in the order that decides ties."""
    family = [(decay, lr, rho) for decay in (5e-4, 5e-2) for lr in (0.03, 0.1) for rho in (0.03, 0.1)]
    same = {"batch": 64, "label_smoothing": 0.0}
    expected = {
        "sgd": [
            Run("sgd", lr=lr, weight_decay=decay, **same) for decay in (5e-4, 5e-2) for lr in (0.03, 0.1, 0.3, 0.6)
        ],
        "sam": [Run("sam", {"rho": rho}, lr=lr, weight_decay=decay, **same) for decay, lr, rho in family],
        "bsam": [
            Run("bsam", {"rho_max": rho, "rho_min": rho}, lr=lr, weight_decay=decay, **same)
            for decay, lr, rho in family
        ],
        "bsam-2": [
            Run("bsam", {"rho_max": rho, "rho_min": rho, "passes": 2}, lr=lr, weight_decay=decay, **same)
            for decay, lr, rho in family
        ],
    }
    assert {c.name: list(c.candidates) for c in Plan().candidates_of} == expected
    assert tuple(expected) == DEFAULT


def test_methods_are_those_asked_for_each_once():
    assert [c.name for c in candidates_of(["msam", "sgd", "msam"])] == ["msam", "sgd"]
    with pytest.raises(bsam.BsamError, match=r"no method 'adam': choose from sgd, sam, .*saf, mesa, bsam, bsam-2"):
        candidates_of(["sgd", "adam"])
    with pytest.raises(bsam.BsamError, match="at least one method"):
        Plan(candidates_of=candidates_of([]))


def test_another_selection_in_the_same_folder_trains_what_is_missing(tmp_path, asked):
    first = Plan(seeds=1, epochs=1)
    before = demo(first, Record(tmp_path, first.settings()), quiet)
    asked.asked.clear()
    other = Plan(seeds=1, epochs=1, candidates_of=candidates_of(["saf", "sgd"]))
    cells = demo(other, Record(tmp_path, other.settings()), quiet)
    assert {run.method for run in asked.asked} == {"saf"}
    assert len(asked.asked) == 18
    assert [cell.candidate.name for cell in cells] == ["saf", "sgd"] * 2
    assert [cell for cell in cells if cell.candidate.name == "sgd"] == [
        cell for cell in before if cell.candidate.name == "sgd"
    ]


def test_choice_is_by_the_last_epoch_and_ties_go_to_the_first():
    runs = candidates_of()[1].candidates
    high_once = result(runs[0], [0.99, 0.5])
    first, second = result(runs[1], [0.1, 0.8]), result(runs[2], [0.1, 0.8])
    assert best((high_once, first, second)) is first


def test_tuning_never_sees_the_test_set_and_the_final_runs_use_what_it_chose(tmp_path, asked):
    plan = Plan(seed=3, seeds=2, epochs=4)
    cells = demo(plan, Record(tmp_path, {}), quiet)
    tuning = [run for run in asked.asked if run.eval_split == "validation"]
    final = [run for run in asked.asked if run.eval_split == "test"]
    assert asked.asked == tuning + final
    assert (len(tuning), len(final)) == plan.total == (64, 16)
    assert {run.epochs for run in asked.asked} == {4}
    assert {run.seed for run in final} == {3, 4}
    assert {run.seed for run in tuning}.isdisjoint({3, 4})
    assert {run.radius for run in final} == {0.05}
    assert {run.curvature for run in final} == {True}
    assert {(run.seed, run.relief) for run in final} == {(3, 13), (4, None)}
    assert {(run.radius, run.curvature, run.relief) for run in tuning} == {
        (None, False, None)
    }  # and no time for what nobody asks for
    assert [(cell.candidate.name, cell.label_noise) for cell in cells] == [
        (n, r) for r in NOISE_RATES for n in ("sgd", "sam", "bsam", "bsam-2")
    ]
    for cell in cells:
        assert len(cell.tuning) == 8
        assert [r.run.seed for r in cell.results] == [3, 4]
        assert cell.choice.score == 0.9
        for r in cell.results:
            same = {"seed": 0, "eval_split": "test", "radius": None, "curvature": False, "relief": None}
            assert replace(r.run, **same) == replace(cell.choice.run, **same)


def test_seed_by_seed_so_that_methods_take_turns(tmp_path, asked):
    demo(Plan(seeds=2, epochs=1), Record(tmp_path, {}), quiet)
    assert [run.seed for run in asked.asked[64:]] == [0] * 8 + [1] * 8


@pytest.mark.parametrize("stop_after", [0, 20, 67])
def test_interrupted_it_goes_on_where_it_stopped(tmp_path, asked, stop_after):
    plan = Plan(seeds=1, epochs=1)
    whole = demo(plan, Record(tmp_path / "whole", {}), quiet)
    asked.asked.clear()
    asked.stop_after = stop_after
    with pytest.raises(KeyboardInterrupt):
        demo(plan, Record(tmp_path / "broken", {}), quiet)
    asked.stop_after = None
    counted = {"tuning": 0, "training": 0}

    def count(stage, runs):
        counted[stage] += runs

    assert demo(plan, Record(tmp_path / "broken", {}), count) == whole
    assert len(asked.asked) == 72  # none of them twice
    assert len({repr(run) for run in asked.asked}) == 72
    assert counted == {"tuning": 64, "training": 8}


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"seeds": 0}, {"seeds": 10**6}, {"epochs": 0}])
def test_plan_refuses_what_cannot_be(wrong):
    with pytest.raises(bsam.BsamError, match=next(iter(wrong))):
        Plan(**wrong)
