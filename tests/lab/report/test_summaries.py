import json
from dataclasses import replace

import pytest

from bsam.lab.recipes import RECIPES
from bsam.lab.recipes.columns import SeedStatistics
from bsam.lab.recipes.experiments import table_info
from bsam.lab.report.recipe_results import cell_info

GROUPS = ["Head", "Shoulder", "Elbow", "Wrist", "Hip", "Knee", "Ankle", "Mean"]
BASELINE = "mean pose, no network"


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


def test_a_group_that_a_test_set_does_not_have_is_empty(finished_run):
    recipe = RECIPES["pose"]
    states = [finished_run(run) for run in recipe.runs("smoke")]
    for state in states:
        del state.epochs[-1]["test_pck_head"]
    cells = table_info(recipe, states)
    assert [each.ours is None for each in cells] == [column == "Head" for column in GROUPS] * 7
    assert {(each.diverged, each.missing) for each in cells} == {(0, 0)}
