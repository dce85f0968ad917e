import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from bsam.lab.cli.run_console import rich_tables
from bsam.lab.recipes import RECIPES
from bsam.lab.recipes.columns import SeedStatistics
from bsam.lab.recipes.digits_demo import demo_recipe
from bsam.lab.recipes.experiments import table_info
from bsam.lab.recipes.paper import Published
from bsam.lab.recipes.variants import MATCHED, variant_of, variants
from bsam.lab.report.recipe_results import text_below
from bsam.lab.report.recipe_table import caption, markdown, notes_info, ours_text, sections_info
from bsam.lab.training.config import Run
from bsam.lab.training.run_dir import RunState

RUN = Run("sgd", epochs=200)
NOTES = [variants()[name].note for name in MATCHED]


def test_the_table_by_hand(finished_run):
    recipe = RECIPES["classification"]
    cells = table_info(recipe, [finished_run(run) for run in recipe.runs("paper", seeds=3)])
    assert len(cells) == 126
    values = [90.0, 91.0, 92.0]
    for each in cells:
        assert each.ours.mean == pytest.approx(statistics.fmean(values))
        assert each.ours.std == pytest.approx(statistics.stdev(values)) == pytest.approx(1.0)
        assert (each.ours.n, each.diverged, each.missing, each.details) == (3, 0, 0, {})
    by_cell = {(each.cell.section, each.cell.row, each.cell.column): each for each in cells}
    for row in ("BSAM (Algorithm 1)", "BSAM (2 passes)", "BSAM (as released)"):
        assert by_cell["ResNet-18", row, "CIFAR-10"].paper == Published(96.82, 0.12)
    assert by_cell["PyramidNet-110", "ASAM", "CIFAR-100"].paper == Published(
        86.47, 0.09, "taken by the paper from Li et al., CVPR 2024, after 300 epochs"
    )
    assert by_cell["WideResNet-28-10", "MSAM", "CIFAR-10"].paper is None
    section = sections_info(recipe, cells)[0]
    assert (section.title, section.header) == ("ResNet-18", ("method", "CIFAR-10", "paper", "CIFAR-100", "paper"))
    rows = {row[0]: row[1:] for row in section.rows}
    assert len(rows) == len(variants())
    assert rows["SAM"] == ("91.00 ± 1.00 (3)", "96.74 ± 0.05", "91.00 ± 1.00 (3)", "81.08 ± 0.27")
    assert rows["ASAM"][1] == "96.63 ± 0.15ᵃ"
    assert rows["MSAM"] == ("91.00 ± 1.00 (3)", "-", "91.00 ± 1.00 (3)", "-")
    assert len(notes_info(cells)) == 4
    assert {each.chosen for each in cells} == {None}


def test_one_seed_has_no_deviation_and_what_is_missing_or_diverged_is_said(finished_run):
    recipe = RECIPES["training-curves"]
    runs = recipe.runs("paper", seeds=2)
    states = [finished_run(run) for run in runs]
    nan = "the training loss is nan"
    states[1] = RunState(runs[1], Path("out/sam"), diverged=nan)  # SAM, seed 0
    states[0] = RunState(runs[0], Path("out/sgd"))  # SGD, neither seed
    states[5] = RunState(runs[5], Path("out/sgd"), states[5].epochs[:7])
    states[2], states[7] = (replace(states[i], finished=False, diverged=nan) for i in (2, 7))  # BSAM, both
    states[3] = replace(states[3], diverged=nan)  # and finished after all: it counts once
    cells = table_info(recipe, states)
    whole = "90.50 ± 0.71 (2)"
    assert [ours_text(each) for each in cells] == ["-", "91.00 (1), 1 diverged", "diverged", whole, whole]
    assert cells[1].ours == SeedStatistics(91.0, None, 1)
    assert [(each.diverged, each.missing) for each in cells] == [(0, 2), (1, 0), (2, 0), (0, 0), (0, 0)]
    lines = text_below(recipe, cells, states)
    assert lines[-1] == "2 runs are not finished."
    assert lines[-2].startswith("diverged: ")
    assert text_below(recipe, cells, states, selected={"sgd"})[-1] == "2 runs are not finished."
    assert text_below(recipe, cells, states, selected={"sam"})[-1].startswith("diverged: ")


def test_rows_columns_and_sections_in_which_nothing_has_ended_are_left_out(finished_run):
    recipe = RECIPES["classification"]
    states = [RunState(run, Path("out")) for run in recipe.runs("paper")]
    some = ("resnet18", "cifar100", ("sam", "base", "esam"))
    states = [
        finished_run(state.run) if (state.run.model, state.run.data, state.run.method in some[2]) == (*some[:2], True)
        else state for state in states
    ]  # fmt: skip
    cells = table_info(recipe, states)
    (section,) = sections_info(recipe, cells)
    assert (section.title, section.header) == ("ResNet-18", ("method", "CIFAR-100", "paper"))
    assert [row[0] for row in section.rows] == ["SGD", "SAM", "SAM (sum)", "SAM (follow)", "ESAM"]
    assert [row[-1][-1] for row in section.rows] == ["8", "7", "-", "-", "ᵃ"]  # marks count what is shown
    lines = text_below(recipe, cells, states)
    assert [line for line in lines if line.startswith("SAM (")] == NOTES
    assert sum("taken by the paper" in line for line in lines) == 1
    assert lines[-1] == f"{len(states) - 5} runs are not finished."
    nothing = table_info(recipe, [RunState(run, Path("out")) for run in recipe.runs("paper")])
    assert len(sections_info(recipe, nothing)) == 3


def test_markdown_and_terminal_say_the_same(finished_run, shown):
    recipe = RECIPES["label-noise"]
    sections = sections_info(recipe, table_info(recipe, [finished_run(run) for run in recipe.runs("paper", seeds=2)]))
    text = markdown(recipe.title, sections, ["Run on a machine."])
    ours = [f"{mean} ± 0.71 (2) | {paper}" for mean, paper in ((88.5, 85.94), (86.5, 70.25), (84.5, "48.50"))]
    assert f"| SGD | {' | '.join(ours)} |".replace(".5 ±", ".50 ±") in text
    assert text.endswith("Run on a machine.  \n")
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    terminal = shown(*rich_tables(sections))
    for section in sections:
        assert section.title in terminal
        for row in section.rows:
            assert all(cell in terminal for cell in row)
    assert "…" not in shown(*rich_tables(sections), width=80)  # numbers are wrapped, never cut


@pytest.mark.parametrize("methods", [("sgd", "sam", "bsam", "bsam-2"), variants()])
def test_details_are_means_over_the_seeds(methods, finished_run, shown):
    recipe = demo_recipe(methods)
    place = list(variants()).index("bsam-2")
    runs = [replace(run, **(recipe.tuning.settings(run) or [{}])[-1]) for run in recipe.runs(seeds=3)]
    cells = table_info(recipe, [finished_run(run) for run in runs])
    own = next(each for each in cells if each.cell.row == "BSAM (2 passes)")
    assert own.details["memorised"] == SeedStatistics(pytest.approx(place + 0.1), pytest.approx(0.1), 3)
    assert own.details["top_eigenvalue"] is None  # there is no file
    assert own.chosen == {"rho_max": 0.2, "rho_min": 0.2}
    (section,) = sections_info(recipe, cells)
    assert section.title == "40 % of labels drawn from other classes: 40.0 % wrong"
    top = "λmax, cross-entropy, at most 256 training samples"
    assert section.header == ("method", "test accuracy, %", "memorised, %", top, "chosen")
    rows = {row[0]: row[1:] for row in section.rows}
    numbers = ("87.00 ± 1.00 (3)", f"{place + 0.1:.1f} ± 0.1", "-")
    assert rows["BSAM (2 passes)"] == (*numbers, "rho_max 0.2, rho_min 0.2")
    assert (rows["SGD"][-1], rows["SGD, tuned weight decay"][-1]) == ("-", "weight decay 0.3")
    assert "…" not in shown(*rich_tables([section]), width=80)


HEADER = ("method", "Head", "Shoulder", "Elbow", "Wrist", "Hip", "Knee", "Ankle", "Mean")


def test_measures_are_columns_and_the_papers_numbers_rows(finished_run, shown):
    recipe = RECIPES["pose"]
    runs = recipe.runs("paper", seeds=3)
    cells = table_info(recipe, [finished_run(run) for run in runs])
    (section,) = sections_info(recipe, cells)
    assert (section.title, section.header) == ("SimCC, ResNet-50 on MPII Human Pose, PCKh@0.5 in %", HEADER)
    rows = {row[0]: row[1:] for row in section.rows}
    bsam = ["BSAM (Algorithm 1)", "BSAM (2 passes)", "BSAM (as released)"]
    matched = ["SAM (sum)", "SAM (follow)"]
    assert list(rows) == ["Adam", "SAM", *matched, *bsam, "Adam, paper", "SAM, paper", "BSAM, paper"]
    assert {rows[name] for name in ("Adam", "SAM", *matched, *bsam)} == {tuple(f"{91 - i}.00 ± 1.00" for i in range(8))}
    assert rows["SAM, paper"] == ("96.965", "95.703", "89.637", "84.222", "88.402", "85.513", "81.862", "89.388")
    lines = caption(recipe, cells, runs[0])
    assert lines[0] == "Test PCK in %, after the last of 210 epochs: mean ± standard deviation of 3 seeds."
    assert lines[1] == (
        "paper: as published; the paper does not say after how many epochs. The paper reports one BSAM."
    )
    assert lines[2:4] == NOTES
    assert lines[4].startswith("PCKh@0.5: ")
    assert "without pelvis and thorax" in lines[5]
    assert lines[6].startswith("Mean pose: ")
    assert "torso" not in " ".join(lines)
    assert not any("not finished" in line for line in lines)
    assert f"| Adam | {' | '.join(rows['Adam'])} |" in markdown("", [section], [])


def test_the_terminal_has_deviations_below_means(finished_run, shown):
    recipe = RECIPES["pose"]
    sections = sections_info(recipe, table_info(recipe, [finished_run(run) for run in recipe.runs("paper", seeds=3)]))
    for width in (80, 100, 120):
        lines = shown(*rich_tables(sections), width=width).splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith("SAM "))
        assert lines[at].split() == ["SAM", *(f"{91 - i}.00" for i in range(8))]
        assert lines[at + 1].split() == ["±", "1.00"] * 8
        assert "…" not in "".join(lines)
        assert lines[1].split() == list(HEADER)


def test_rows_with_different_seeds_say_how_many(finished_run, shown):
    """As in a table without measures, diverged and missing runs count once."""
    recipe = RECIPES["pose"]
    runs = [run for run in recipe.runs("short", seeds=2) if variant_of(run).name not in MATCHED]
    states = [finished_run(run) for run in runs]
    states[1] = replace(states[1], finished=False, diverged="nan")  # SAM, seed 0
    states[7] = replace(states[7], finished=False)  # BSAM, seed 1
    states[3], states[8] = (replace(states[i], finished=False, diverged="nan") for i in (3, 8))  # 2 passes, both
    cells = table_info(recipe, states)
    (section,) = sections_info(recipe, cells)
    labels = ["Adam, 2 seeds", "SAM, 1 seed, 1 diverged", "BSAM (Algorithm 1), 1 seed", "BSAM (2 passes), 2 diverged"]
    assert [row[0] for row in section.rows] == [*labels, "BSAM (as released), 2 seeds"]
    assert [row[1] for row in section.rows] == ["90.50 ± 0.71", "91.00", "90.00", "-", "90.50 ± 0.71"]
    terminal = shown(*rich_tables([section]), width=80).splitlines()  # labels are wrapped, numbers are not
    assert terminal[1].split() == list(HEADER)
    assert sum(line.split()[-16:] == ["±", "0.71"] * 8 for line in terminal) == 2
    lines = text_below(recipe, cells, states)
    assert lines[0] == "Test PCK in %, after the last of 30 epochs: mean ± standard deviation of the seeds."
    assert lines[-1] == "1 run is not finished."
    assert lines[-2].startswith("diverged: ")
    assert not any(line.startswith("paper") for line in lines)
    assert "left shoulder to right hip" in lines[1]
    assert "torso is not known are left out" in lines[2]
    assert not any(word in " ".join(lines) for word in ("PCKh", "head size", "MPII", "pelvis"))
    one = table_info(recipe, [finished_run(run) for run in recipe.runs("short")])
    assert caption(recipe, one, runs[0])[0] == "Test PCK in %, after the last of 30 epochs: one seed."


def test_a_baseline_that_is_not_known_in_a_column_is_a_dash(finished_run, tmp_path):
    recipe = RECIPES["label-noise"]
    states = [finished_run(run, tmp_path) for run in recipe.runs("smoke")]
    states[0].path.mkdir()
    (states[0].path / "baseline.json").write_text('{"title": "a guess", "scores": {"accuracy": 0.1}}')
    (section,) = sections_info(recipe, table_info(recipe, states))
    assert section.rows[-1] == ("a guess", "10.00", "-", "-", "-")
    assert section.rows[0] == ("SGD", "88.00 (1)", "86.00 (1)", "84.00 (1)", "82.00 (1)")
