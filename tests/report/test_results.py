import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save

from bsam.recipes import RECIPES
from bsam.recipes.columns import column_of
from bsam.recipes.paper import Published
from bsam.recipes.runner import State, run_dir_name, state_of
from bsam.report.comparison import (
    caption,
    comparison_info,
    comparison_markdown,
    comparison_tables,
    notes_info,
    ours_text,
    parts_info,
)
from bsam.report.outcome import origin_info, runs_info, write_outcome
from bsam.report.probe_figures import plot_conflicts, readings_info, smooth
from bsam.report.recipe_figures import FIGURES, accuracy_lines_info, plot_accuracy_lines, training_curves_info
from bsam.report.recipe_progress import name_of, plan_info, plan_table, totals, watching
from bsam.report.tables import Spread
from bsam.training.config import Run

PNG = b"\x89PNG\r\n\x1a\n"

RUN = Run("sgd", epochs=200)


def accuracy_of(run):
    """Another one for each seed, known beforehand."""
    return 0.9 + 0.01 * run.seed - 0.1 * run.label_noise


def finished(run, out=Path("out")):
    """Epochs before the last one are better: the last one is reported."""
    epochs = [
        {"epoch": e + 1, "train_loss": 2.0 / (e + 1), "test_loss": 1.0 / (e + 1), "test_accuracy": 0.99, "seconds": 2.0}
        for e in range(run.epochs)
    ]
    epochs[-1]["test_accuracy"] = accuracy_of(run)
    return RunState(run, out / run_dir_name(run), tuple(epochs), finished=True)


def shown(*printed, width=200):
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        for each in printed:
            console.print(each)
    return capture.get()


def test_the_table_by_hand():
    recipe = RECIPES["classification"]
    states = [finished(run) for run in recipe.runs("paper", seeds=3)]
    entries = comparison_info(recipe, states)
    assert len(entries) == 114
    values = [90.0, 91.0, 92.0]
    for entry in entries:
        assert entry.ours.mean == pytest.approx(statistics.fmean(values))
        assert entry.ours.std == pytest.approx(statistics.stdev(values)) == pytest.approx(1.0)
        assert (entry.ours.n, entry.diverged, entry.missing) == (3, 0, 0)
    by_place = {(e.cell.section, e.cell.row, e.cell.column): e for e in entries}
    for row in ("BSAM (Algorithm 1)", "BSAM (2 passes)", "BSAM (as released)"):
        assert by_place["ResNet-18", row, "CIFAR-10"].paper == Published(96.82, 0.12)
    assert by_place["PyramidNet-110", "ASAM", "CIFAR-100"].paper == Published(
        86.47, 0.09, "taken by the paper from Li et al., CVPR 2024, after 300 epochs"
    )
    assert by_place["WideResNet-28-10", "MSAM", "CIFAR-10"].paper is None
    part = parts_info(recipe, entries)[0]
    assert (part.title, part.header) == ("ResNet-18", ("method", "CIFAR-10", "paper", "CIFAR-100", "paper"))
    rows = {row[0]: row[1:] for row in part.rows}
    assert len(rows) == 19
    assert rows["SAM"] == ("91.00 ± 1.00 (3)", "96.74 ± 0.05", "91.00 ± 1.00 (3)", "81.08 ± 0.27")
    assert rows["ASAM"][1] == "96.63 ± 0.15ᵃ"
    assert rows["MSAM"] == ("91.00 ± 1.00 (3)", "-", "91.00 ± 1.00 (3)", "-")
    assert len(notes_info(entries)) == 4


def test_one_seed_has_no_deviation_and_what_is_missing_or_diverged_is_said():
    recipe = RECIPES["training-curves"]
    runs = recipe.runs("paper", seeds=2)
    states = [finished(run) for run in runs]
    states[1] = RunState(runs[1], Path("out/sam"), diverged="the training loss is nan")  # SAM, seed 0
    states[0] = RunState(runs[0], Path("out/sgd"))  # SGD, neither seed
    states[5] = RunState(runs[5], Path("out/sgd"), states[5].epochs[:7])
    states[2], states[7] = (
        replace(states[i], finished=False, diverged="the training loss is nan") for i in (2, 7)
    )  # BSAM, both
    entries = comparison_info(recipe, states)
    assert [ours_text(entry) for entry in entries] == [
        "-",
        "91.00 (1), 1 diverged",
        "diverged",
        "90.50 ± 0.71 (2)",
        "90.50 ± 0.71 (2)",
    ]
    assert entries[1].ours == Spread(91.0, None, 1)
    assert [entry.missing for entry in entries] == [2, 0, 0, 0, 0]
    assert caption(entries, RUN)[-1] == "2 runs are not finished."
    assert caption(entries, RUN)[-2].startswith("diverged: ")


def test_a_run_that_diverged_and_was_finished_after_all_counts_once():
    recipe = RECIPES["training-curves"]
    states = [finished(run) for run in recipe.runs("paper", seeds=2)]
    states[1] = replace(states[1], diverged="the training loss is nan")
    entries = comparison_info(recipe, states)
    assert [ours_text(entry) for entry in entries] == ["90.50 ± 0.71 (2)"] * 5
    assert [(entry.diverged, entry.missing) for entry in entries] == [(0, 0)] * 5


def test_without_published_numbers_there_is_no_column_for_them():
    recipe = RECIPES["gradient-conflict"]
    entries = comparison_info(recipe, [finished(run) for run in recipe.runs("paper")])
    part = parts_info(recipe, entries)[1]
    assert part.header == ("rho_min", "CIFAR-100")
    assert part.rows == (("0.1, fixed", "90.00 (1)"), ("0.1 to 0.05", "90.00 (1)"), ("0.1 to 0", "90.00 (1)"))
    assert not any(line.startswith("paper") for line in caption(entries, RUN))


def test_markdown_and_terminal_say_the_same():
    recipe = RECIPES["label-noise"]
    entries = comparison_info(recipe, [finished(run) for run in recipe.runs("paper", seeds=2)])
    markdown = comparison_markdown(recipe, entries, RUN, ["Run on a machine."])
    assert (
        "| SGD | 88.50 ± 0.71 (2) | 85.94 | 86.50 ± 0.71 (2) | 70.25 | 84.50 ± 0.71 (2) | 48.50 | 82.50 ± 0.71 (2) | "
        "28.91 |" in markdown
    )
    assert markdown.endswith("Run on a machine.  \n")
    tables = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in tables}) == 1
    terminal = shown(*comparison_tables(recipe, entries))
    for part in parts_info(recipe, entries):
        assert part.title in terminal
        for row in part.rows:
            assert all(cell in terminal for cell in row)
    narrow = shown(*comparison_tables(recipe, entries), width=80)
    assert "…" not in narrow  # numbers are wrapped, never cut


@pytest.fixture
def out(tmp_path):
    """Folders of finished runs, without training."""

    def fill(name, seeds=2, scale="smoke"):
        recipe = RECIPES[name]
        states = []
        for run in recipe.runs(scale, seeds):
            state = finished(run, tmp_path)
            state.folder.mkdir()
            (state.folder / "config.json").write_text(json.dumps(run.settings()))
            (state.folder / "metrics.jsonl").write_text("".join(json.dumps(dict(e)) + "\n" for e in state.epochs))
            (state.folder / "model.safetensors").write_bytes(save({"weight": torch.ones(2)}))
            machine = {"device": "cpu", "torch": "2", "bsam": "1", "date": f"2026-11-1{run.seed}T00:00:00+00:00"}
            (state.folder / "environment.json").write_text(json.dumps([machine]))
            if run.probe is not None:
                readings = [
                    {
                        "step": s,
                        "max_sharpness": 2.0,
                        "min_sharpness": 1.0,
                        "bilateral": 3.0,
                        "cosine": float(run.seed),
                        "rho_min": 0.1,
                    }
                    for s in range(4)
                ]
                (state.folder / "probe.jsonl").write_text("".join(json.dumps(r) + "\n" for r in readings))
            states.append(state_of(run, tmp_path))
        return recipe, states

    return fill


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_recipe_leaves_behind(name, out, tmp_path):
    recipe, states = out(name)
    assert all(state.finished for state in states)
    written = write_outcome(tmp_path, recipe, "smoke", states)
    assert [path.name for path in written] == [
        "table.md",
        "results.json",
        *(f"{figure}.png" for figure in recipe.figures),
    ]
    assert all(path.read_bytes().startswith(PNG) for path in written[2:])
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["recipe"], results["scale"], results["seeds"]) == (name, "smoke", [0, 1])
    assert len(results["runs"]) == len(states)
    for state, run in zip(states, results["runs"], strict=True):
        assert run["settings"] == json.loads(json.dumps(state.run.settings()))
        assert run["last"]["test_accuracy"] == accuracy_of(state.run)
        assert (run["state"], run["training_seconds"]) == ("done", 2.0 * state.run.epochs)
        assert run["machines"][0]["device"] == "cpu"
    assert sum(entry["n"] for entry in results["table"]) == len(states)
    assert "Run on cpu, torch 2, bsam 1, 2026-11-10 to 2026-11-11." in (tmp_path / "table.md").read_text()


def test_nothing_finished_is_a_table_of_dashes_and_no_figure(tmp_path):
    recipe = RECIPES["training-curves"]
    states = [state_of(run, tmp_path) for run in recipe.runs("smoke")]
    assert [path.name for path in write_outcome(tmp_path, recipe, "smoke", states)] == ["table.md", "results.json"]
    assert "5 runs are not finished." in (tmp_path / "table.md").read_text()
    assert origin_info(runs_info(states)) == []


def test_figures_leave_out_what_is_not_finished(out, tmp_path):
    for name in ("gradient-conflict", "training-curves", "label-noise"):
        (tmp_path / name).mkdir()
        recipe, states = out(name)
        states[0] = replace(states[0], finished=False, diverged="the training loss is nan")
        assert len(write_outcome(tmp_path / name, recipe, "smoke", states)) == 3


@pytest.mark.parametrize("name", FIGURES)
def test_on_a_full_disk_the_old_figure_stays(name, out, on_a_full_disk):
    recipe, states = out(next(recipe.name for recipe in RECIPES.values() if name in recipe.figures))
    on_a_full_disk(lambda path: FIGURES[name](recipe, states, path), f"{name}.png")


def legend_of(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_the_legend_names_the_lines_of_every_panel_once(tmp_path, drawn):
    recipe = RECIPES["label-noise"]
    states = [finished(run) for run in recipe.runs("paper") if (run.method, run.data) != ("bsam", "cifar10")]
    plot_accuracy_lines(accuracy_lines_info(recipe, states), "noise", tmp_path / "lines.png")
    ours = ["SGD", "SAM", "BSAM (Algorithm 1)", "BSAM (2 passes)", "BSAM (as released)"]
    assert legend_of(drawn[0]) == [*ours, "SGD, paper", "SAM, paper", "BSAM, paper"]
    assert [len(ax.get_legend_handles_labels()[1]) for ax in drawn[0].axes] == [4, 8]


def test_a_schedule_has_its_name_and_one_colour_in_every_column(out, tmp_path, drawn):
    recipe, states = out("gradient-conflict", seeds=1)
    found = readings_info(recipe, states)
    plot_conflicts(
        [each for each in found if (each.part, each.row) != (found[0].part, "0.1 to 0.05")], tmp_path / "conflict.png"
    )
    upper, lower = drawn[0].axes[:3], drawn[0].axes[3:]
    schedules = [rf"$\rho^{{min}}$ {row}" for row in ("0.1, fixed", "0.1 to 0.05", "0.1 to 0")]
    assert sorted(legend_of(drawn[0])) == sorted(schedules)
    colours = [
        {line.get_label(): line.get_color() for line in ax.lines if line.get_label() in schedules} for ax in upper
    ]
    assert list(map(len, colours)) == [2, 3, 3]
    assert colours[1] == colours[2] == {**colours[1], **colours[0]}
    assert [[line.get_color() for line in ax.lines] for ax in lower] == [list(each.values()) for each in colours]


def test_courses_are_means_over_the_seeds(out):
    _, states = out("training-curves")
    courses = training_curves_info(states)
    assert [course.title for course in courses] == [
        "SGD",
        "SAM",
        "BSAM (Algorithm 1)",
        "BSAM (2 passes)",
        "BSAM (as released)",
    ]
    assert courses[0].where == "WideResNet-10-1 on Digits"
    assert courses[0].train_loss == pytest.approx([2.0, 1.0, 2 / 3])
    assert courses[0].test_accuracy == pytest.approx([99.0, 99.0, 90.5])
    assert courses[0].n == 2


def test_readings_are_means_over_the_seeds(out):
    recipe, states = out("gradient-conflict", seeds=3)
    found = readings_info(recipe, states)
    assert len(found) == 9
    assert found[0].steps == (0, 1, 2, 3)
    assert found[0].series["cosine"] == pytest.approx([1.0] * 4)
    assert (found[0].n, found[0].where, found[0].row) == (3, "ResNet-8 on Digits", "0.1, fixed")


def test_lines_against_rho_min_and_noise():
    study = RECIPES["rho-min-study"]
    lines = accuracy_lines_info(study, [finished(run) for run in study.runs("paper", seeds=2)])
    assert [(line.panel, line.method) for line in lines][:3] == [
        ("CIFAR-10, ResNet-18", name) for name in ("bsam", "bsam-2", "bsam-released")
    ]
    assert lines[0].x == (0.01, 0.025, 0.05, 0.1, 0.25)
    assert [number.mean for number in lines[0].paper] == [96.75, 96.78, 96.82, 96.66, 96.18]
    noise = RECIPES["label-noise"]
    lines = accuracy_lines_info(noise, [finished(run) for run in noise.runs("paper")])
    assert lines[0].x == (20.0, 40.0, 60.0, 80.0)
    assert [point.mean for point in lines[0].ours] == pytest.approx([88.0, 86.0, 84.0, 82.0])
    assert [number.mean for number in lines[-1].paper] == [71.65, 57.61, 38.71, 32.69]


def test_smoothing_keeps_length_and_mean():
    assert smooth([5.0] * 300) == [5.0] * 300
    assert smooth([1.0, 2.0]) == [1.0, 2.0]


def test_the_plan():
    recipe = RECIPES["training-curves"]
    runs = recipe.runs("smoke")
    states = [
        finished(runs[0]),
        RunState(runs[1], Path("b"), ({"seconds": 3.0},)),
        *(RunState(run, Path("c")) for run in runs[2:]),
    ]
    plan = plan_info(states)
    assert [state for _, state, _ in plan] == ["done", "epoch 1 of 3", "missing", "missing", "missing"]
    first = statistics.median([2.0, 1.5])  # of SGD and SAM, for one pass
    assert [seconds for _, _, seconds in plan] == pytest.approx(
        [0.0, 3.0 + 2.0 * 2, 3 * (first + 2 * 2.0), 3.0 + 2 * 2 * 2.0, 3 * (first + 2 * 2.0)]
    )
    text = shown(plan_table(recipe, states), totals(states))
    assert "5 runs: 1 over, 1 begun, 3 missing. Time left: about 52 s." in text
    assert all(name_of(run) in text for run in runs)
    assert "?" in shown(plan_table(recipe, [RunState(run, Path("c")) for run in runs]))


def test_what_is_told_while_runs_are_run():
    run = RECIPES["training-curves"].runs("smoke")[2]
    console = Console(width=120, no_color=True, force_terminal=False)
    with console.capture() as capture, watching(console, 5) as watcher:
        watcher.begins(RunState(run, Path("a")), 2, (90.0, 0))
        watcher.epoch(1, 3)
        watcher.ends(RunState(run, Path("a"), diverged="the training loss is nan in epoch 2"))
        watcher.tell("Something else.")
    text = capture.get()
    assert f"{name_of(run)}. Left: about 90 s" in text
    assert "the training loss is nan in epoch 2" in text
    assert "Something else." in text
    assert "3/5" in text
    assert column_of(run).title == "BSAM (Algorithm 1)"
