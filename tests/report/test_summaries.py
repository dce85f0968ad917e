import json
from dataclasses import replace

import pytest

from bsam.recipes import RECIPES
from bsam.recipes.columns import SeedStatistics
from bsam.recipes.summaries import table_info
from bsam.report.results import cell_info

GROUPS = ["Head", "Shoulder", "Elbow", "Wrist", "Hip", "Knee", "Ankle", "Mean"]
BASELINE = "mean pose, no network"


def test_each_measure_of_a_run_has_a_cell(finished_run):
    recipe = RECIPES["pose"]
    cells = table_info(recipe, [finished_run(run) for run in recipe.runs("paper", seeds=3)])
    assert len(cells) == 7 * 8
    for i, each in enumerate(cells):
        assert each.cell.column == GROUPS[i % 8]
        assert (each.ours.mean, each.ours.std, each.ours.n) == (pytest.approx(91 - i % 8), pytest.approx(1), 3)
    assert [cells[i].paper.mean for i in (0, 7, 8, 32, 40, 55)] == [96.828, 89.318, 96.965, 96.794, 96.794, 89.552]


def test_what_is_reached_without_training_is_a_row_without_seeds(out):
    recipe, states = out("pose")
    cells = table_info(recipe, states)
    assert len(cells) == 8 * 8
    last = cells[-8:]
    assert [(each.cell.row, each.cell.column) for each in last] == [(BASELINE, column) for column in GROUPS]
    assert {each.cell.section for each in cells} == {"SimCC, ResNet-8 on Stick figures, PCK@0.2 in %"}
    assert [each.ours for each in last] == [SeedStatistics(pytest.approx(10 * i), None, 0) for i in range(1, 9)]
    assert str(last[1].ours) == "20.00"
    assert {(each.diverged, each.missing, each.paper) for each in last} == {(0, 0, None)}
    stored = json.loads(json.dumps(cell_info(last[0])))
    assert (stored["row"], stored["mean"], stored["n"]) == (BASELINE, pytest.approx(10), 0)
    running = [replace(state, finished=False) for state in states]
    assert all(each.cell.row != BASELINE for each in table_info(recipe, running))
    some = table_info(recipe, [*running[:-1], states[-1]])
    assert [each.ours for each in some[-8:]] == [each.ours for each in last]


def test_a_baseline_of_another_recipe_stands_in_its_column(out):
    """Any task may write one; here of classification, for one of two data sets."""
    recipe, states = out("label-noise", seeds=1)
    note = {"title": "most frequent class", "scores": {"accuracy": 0.125}}
    (states[0].path / "baseline.json").write_text(json.dumps(note))
    *others, own = table_info(recipe, states)
    assert (own.cell.section, own.cell.row, own.cell.column) == ("ResNet-8, Digits", "most frequent class", "20%")
    assert own.ours == SeedStatistics(12.5, None, 0)
    assert len(others) == len(states)


def test_a_group_that_a_test_set_does_not_have_is_empty(finished_run):
    recipe = RECIPES["pose"]
    states = [finished_run(run) for run in recipe.runs("smoke")]
    for state in states:
        del state.epochs[-1]["test_pck_head"]
    cells = table_info(recipe, states)
    assert [each.ours is None for each in cells] == [column == "Head" for column in GROUPS] * 7
    assert {(each.diverged, each.missing) for each in cells} == {(0, 0)}
