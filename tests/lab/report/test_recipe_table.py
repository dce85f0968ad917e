"""The table of a recipe as text, from runs without directories."""

import json
import math
import statistics

import pandas as pd
import pytest

from bsam.lab.analysis.runs_table import COLUMNS
from bsam.lab.paper import join
from bsam.lab.recipes import RECIPES
from bsam.lab.recipes.variants import MATCHED, variants
from bsam.lab.report.recipe_table import caption, cells_of, markdown, our_number, tables_of

HEADER = ("method", "Head", "Shoulder", "Elbow", "Wrist", "Hip", "Knee", "Ankle", "Mean")


def rows_of(table):
    """The rows of a table as text, by name."""
    return {str(name): tuple(map(str, cells)) for name, *cells in table.rows}


def header_of(table):
    return tuple(column.title for column in table.columns)


@pytest.fixture
def table(finished_run, tmp_path):
    """A table of runs as ``join`` makes it; all are finished unless ``states`` says otherwise, by number."""

    def make(name, scale="paper", seeds=2, states=None, keep=lambda plan: True):
        plans = [plan for plan in RECIPES[name](scale, seeds).plans if keep(plan)]
        rows = []
        for number, plan in enumerate(plans):
            state, last = (states or {}).get(number, "finished"), finished_run(plan.run).epochs[-1]
            finished = state == "finished"
            row = {
                **{key: value for key, value in plan.about.items() if key in COLUMNS},
                "seed": plan.run.seed,
                "state": state,
                "last": last if finished else None,
                "memorised": 100 * last["memorised"] if finished and "memorised" in last else math.nan,
                "settings": plan.run.settings(),
                "settings_chosen": None,
                "path": tmp_path / plan.name,
            }
            rows.append({**COLUMNS, **row})
        return join(pd.DataFrame(rows))

    return make


def test_the_table_by_hand(table):
    runs = table("classification", seeds=3)
    cells = cells_of(runs, "classification")
    values = [90.0, 91.0, 92.0]
    assert len(cells) == 150
    for cell in cells:
        assert (cell["mean"], cell["std"]) == pytest.approx((statistics.fmean(values), statistics.stdev(values)))
        assert (cell["n"], cell["diverged"], cell["missing"], cell["chosen"]) == (3, 0, 0, None)
    by_cell = {(cell["section"], cell["row"], cell["column"]): cell["paper"] for cell in cells}
    for row in ("BSAM (Algorithm 1)", "BSAM (2 passes)", "BSAM (as released)"):
        assert by_cell["ResNet-18", row, "CIFAR-10"] == {"mean": 96.82, "std": 0.12, "note": ""}
    assert "after 300 epochs" in by_cell["PyramidNet-110", "ASAM", "CIFAR-100"]["note"]
    section = tables_of(cells, "classification")[0]
    assert (section.title, header_of(section)) == ("ResNet-18", ("method", "CIFAR-10", "paper", "CIFAR-100", "paper"))
    rows = rows_of(section)
    assert len(rows) == len(variants())
    assert rows["SAM"] == ("91.00 ± 1.00 (3)", "96.74 ± 0.05", "91.00 ± 1.00 (3)", "81.08 ± 0.27")
    assert rows["ASAM"][1] == "96.63 ± 0.15ᵃ"
    assert rows["MSAM"] == ("91.00 ± 1.00 (3)", "-", "91.00 ± 1.00 (3)", "-")
    assert sum(line[0] in "ᵃᵇᶜᵈᵉ" for line in caption(runs, cells, "classification")) == 4
    json.dumps(cells)


def test_one_seed_has_no_deviation_and_what_diverged_is_said(table):
    """SGD has not ended with either seed, SAM diverged with one, the first BSAM with both."""
    states = {0: "not started", 5: "unfinished", 1: "diverged", 2: "diverged", 7: "diverged"}
    runs = table("training-curves", states=states)
    cells = cells_of(runs, "classification")
    whole = "90.50 ± 0.71 (2)"
    assert [str(our_number(cell)) for cell in cells] == ["-", "91.00 (1), 1 diverged", "diverged", whole, whole]
    assert [(cell["diverged"], cell["missing"]) for cell in cells] == [(0, 2), (1, 0), (2, 0), (0, 0), (0, 0)]
    (section,) = tables_of(cells, "classification")
    assert len(section.rows) == 4  # without SGD
    assert caption(runs, cells)[-1].startswith("diverged: ")


def test_notes_and_footnotes_are_those_of_what_is_shown(table):
    names = ("sgd", "sam", *MATCHED, "esam")
    states = dict.fromkeys(range(5, 10), "not started")
    runs = table("classification", seeds=1, states=states, keep=lambda plan: plan.about["variant"] in names)
    runs = runs[runs["section"] == "ResNet-18"]
    cells = cells_of(runs, "classification")
    (section,) = tables_of(cells, "classification")
    assert header_of(section) == ("method", "CIFAR-10", "paper")
    lines = caption(runs, cells, "classification")
    assert [line for line in lines if line.startswith("SAM (")] == [variants()[name].note for name in MATCHED]
    assert sum("taken by the paper" in line for line in lines) == 1
    assert tables_of(cells_of(runs[5:]), "classification") == []


def test_markdown_has_the_tables_and_the_lines_below(table):
    text = markdown("A title", tables_of(cells_of(table("label-noise"), "label-noise"), "label-noise"), ["A", "B"])
    assert text.startswith("# A title\n\n## ")
    assert "\n\n| method | 20% | paper | memorised, % | 40% |" in text
    assert "| SGD | 88.50 ± 0.71 (2) | 85.94 | " in text
    assert text.endswith(" |\n\nA  \nB  \n")


def test_columns_that_runs_have_are_shown(table):
    runs = table("demo", "demo", seeds=3)
    runs["top_eigenvalue"] = [10.0 + seed for seed in runs["seed"]]
    runs.loc[runs["row"] == "SGD", "top_eigenvalue"] = math.nan
    runs["settings_chosen"] = [{"rho": 0.2} if row == "SAM" else None for row in runs["row"]]
    place = list(variants()).index("sam")
    (section,) = tables_of(cells_of(runs))
    assert header_of(section)[1:3] == ("test accuracy, %", "memorised, %")
    assert header_of(section)[3].startswith("λmax")
    rows = rows_of(section)
    assert rows["SAM"] == ("87.00 ± 1.00 (3)", f"{place + 0.1:.1f} ± 0.1", "11.0 ± 1.0", "rho 0.2")
    assert rows["SGD"][2:] == ("-", "-")
    notes = [line.partition(":")[0] for line in caption(runs, cells_of(runs))]
    assert {"Memorised", "λmax"} <= set(notes)


def test_measures_are_columns_and_the_papers_numbers_rows(table):
    runs = table("pose", seeds=3)
    (section,) = tables_of(cells_of(runs, "pose"), "pose")
    assert (section.title, header_of(section)) == ("SimCC, ResNet-50 on MPII Human Pose, PCKh@0.5 in %", HEADER)
    rows = rows_of(section)
    bsam = ["BSAM (Algorithm 1)", "BSAM (2 passes)", "BSAM (as released)"]
    ours = ["Adam", "SAM", "SAM (sum)", "SAM (follow)", *bsam]
    assert list(rows) == [*ours, "Adam, paper", "SAM, paper", "BSAM, paper"]
    assert {rows[name] for name in ours} == {tuple(f"{91 - i}.00 ± 1.00 (3)" for i in range(8))}
    assert rows["SAM, paper"] == ("96.965", "95.703", "89.637", "84.222", "88.402", "85.513", "81.862", "89.388")


def test_the_number_of_a_plan_is_next_to_the_score_of_a_task_with_parts(table):
    runs = table("pose", "smoke", seeds=2)
    runs["published"] = runs["row"].map({"SAM": 88.0})
    (section,) = tables_of(cells_of(runs))
    assert header_of(section) == (*HEADER, "paper")
    assert rows_of(section)["SAM"][-2:] == ("83.50 ± 0.71 (2)", "88.00")
    assert rows_of(section)["Adam"][-1] == "-"


def test_the_number_of_a_plan_goes_before_that_of_a_table_of_numbers(table):
    runs = table("pose", seeds=2)
    runs.loc[runs["row"] == "SAM", "published"] = 88.0
    (section,) = tables_of(cells_of(runs, "pose"), "pose")
    assert rows_of(section)["SAM, paper"][-2:] == ("81.862", "88.000")
    assert rows_of(section)["BSAM, paper"][-1] != "88.000"


def test_the_eigenvalue_of_poses_names_their_loss_and_is_shown_once(table):
    runs = table("pose", "smoke", seeds=1).assign(top_eigenvalue=10.0)
    (section,) = tables_of(cells_of(runs, "pose"), "pose", runs["settings"].iloc[0])
    assert [name.partition(", ")[0] for name in header_of(section)[-2:]] == ["Mean", "λmax"]
    (note,) = (line for line in caption(runs, [], "pose") if line.startswith("λmax"))
    for text in (header_of(section)[-1], note):
        assert "SimCC loss" in text
        assert "cross-entropy" not in text


def test_a_row_without_training_and_a_group_that_a_test_set_does_not_have(table):
    runs = table("pose", "smoke", seeds=1)
    for last in runs["last"]:
        del last["test_pck_head"]
    runs["path"].iloc[0].mkdir()
    scores = {"pck_shoulder": 0.5, "pck": 0.25}
    (runs["path"].iloc[0] / "baseline.json").write_text(json.dumps({"title": "mean pose", "scores": scores}))
    cells = cells_of(runs, "pose")
    assert [(cell["column"], cell["mean"], cell["n"]) for cell in cells if cell["row"] == "mean pose"] == [
        ("Shoulder", 50.0, 0),
        ("Mean", 25.0, 0),
    ]
    (section,) = tables_of(cells, "pose")
    assert "Head" not in header_of(section)
    assert list(rows_of(section).items())[-1] == ("mean pose", ("50.00", *["-"] * 5, "25.00"))


def test_a_timed_recipe_has_a_column_of_seconds(table):
    """Runs that shared their device were not timed."""
    runs = table("transformers", "smoke", keep=lambda plan: plan.about["row"].startswith(("AdamW", "SAM, rho 0.05")))
    runs["training_seconds"] = [10.0, 20.0, 30.0, math.nan, *[12.0, 24.0, math.nan, math.nan]]
    cells = cells_of(runs)
    (section,) = tables_of(cells, settings=runs["settings"].iloc[0])
    assert header_of(section) == ("method", "Digits", "seconds")
    rows = {name: cells[-1] for name, cells in rows_of(section).items()}
    assert rows == {
        "AdamW": "11.0 ± 1.4",
        "AdamW, twice the epochs": "22.0 ± 2.8",
        "SAM, rho 0.05": "30.0",
        "SAM, rho 0.05, warm-up": "-",
    }
    assert any(line.startswith("Seconds: ") for line in caption(runs, cells))
    assert not any(line.startswith("Seconds: ") for line in caption(runs.drop(columns="training_seconds"), cells))
    assert " after the last epoch: " in caption(runs, cells)[0]  # some were trained for twice as long
    assert " after the last of 2 epochs: " in caption(runs[runs["row"] == "AdamW"], cells)[0]
