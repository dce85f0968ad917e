from dataclasses import replace

import numpy as np
import pytest
from bsam.lab.recipes.digits_demo import demo_recipe
from matplotlib.backends.backend_agg import FigureCanvasAgg

from bsam.lab.recipes import RECIPES, Axis
from bsam.lab.recipes.columns import SeedStatistics
from bsam.lab.recipes.variants import variants
from bsam.lab.report.figures.epoch_figures import (
    MEMORISED_METRIC,
    TRAIN_LOSS,
    curves_info,
    draw_training_curves,
    plot_curves,
    score_metric,
)
from bsam.lab.report.figures.panels import line_style
from bsam.lab.report.figures.setting_figures import (
    AccuracyLine,
    accuracy_lines_info,
    draw_accuracy_lines,
    plot_accuracy_lines,
)
from bsam.lab.training.config import Run


def legend_of(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_the_legend_names_the_lines_of_every_panel_once(finished_run, tmp_path, drawn):
    recipe = RECIPES["label-noise"]
    states = [finished_run(run) for run in recipe.runs("paper") if (run.method, run.data) != ("bsam", "cifar10")]
    draw_accuracy_lines(recipe, states, tmp_path / "lines.png")
    ours = ["SGD", "SAM", "SAM (sum)", "SAM (follow)", "BSAM (Algorithm 1)", "BSAM (2 passes)", "BSAM (as released)"]
    assert legend_of(drawn[0]) == [*ours, "SGD, paper", "SAM, paper", "BSAM, paper"]
    assert [len(ax.get_legend_handles_labels()[1]) for ax in drawn[0].axes] == [6, 10]


def test_no_line_hides_another_that_is_equal(tmp_path, drawn):
    point, methods = SeedStatistics(90.0, None, 1), list(variants())[:7]
    lines = [AccuracyLine("data", name, name, name, (0.1, 0.2, 0.8), (point,) * 3, (None,) * 3) for name in methods]
    axis = Axis("x", lambda run: 0.0, log=True)
    plot_accuracy_lines(lines, axis, "y", tmp_path / "lines.png")
    drawn[0].set_dpi(150)  # as in the file
    (ax,), canvas = drawn[0].axes, FigureCanvasAgg(drawn[0])
    canvas.draw()
    box = ax.get_window_extent()
    pixels = np.asarray(canvas.buffer_rgba()).astype(int)[:, :, :3]
    bottom, top = len(pixels) - int(box.y1), len(pixels) - int(box.y0)
    x = ax.transData.transform([(0.3, 90.0), (0.5, 90.0)])[:, 0].astype(int)  # between the points
    between = pixels[bottom:top, x[0] : x[1]].reshape(-1, 3)
    for number, name in enumerate(methods):
        colour = np.array([int(line_style(number)["color"][i : i + 2], 16) for i in (1, 3, 5)])
        assert (np.abs(between - colour).max(axis=1) < 40).sum() > 10, name
    assert len({line.get_linestyle() for line in ax.lines if len(line.get_xdata()) == 3}) > 1


def test_lines_against_rho_min_and_noise(finished_run):
    study = RECIPES["rho-min-study"]
    lines = accuracy_lines_info(study, [finished_run(run) for run in study.runs("paper", seeds=2)])
    names = ("bsam", "bsam-2", "bsam-released")
    assert [(line.panel, line.variant) for line in lines][:3] == [("CIFAR-10, ResNet-18", name) for name in names]
    assert lines[0].x == (0.01, 0.025, 0.05, 0.1, 0.25)
    assert [number.mean for number in lines[0].paper] == [96.75, 96.78, 96.82, 96.66, 96.18]
    noise = RECIPES["label-noise"]
    lines = accuracy_lines_info(noise, [finished_run(run) for run in noise.runs("paper")])
    assert lines[0].x == (20.0, 40.0, 60.0, 80.0)
    assert [point.mean for point in lines[0].ours] == pytest.approx([88.0, 86.0, 84.0, 82.0])
    assert [number.mean for number in lines[-1].paper] == [71.65, 57.61, 38.71, 32.69]


def test_curves_are_means_over_the_seeds_epoch_by_epoch(finished_run):
    recipe = RECIPES["training-curves"]
    states = [finished_run(replace(run, epochs=3)) for run in recipe.runs("smoke", seeds=2)]
    curves = curves_info(recipe, states, (TRAIN_LOSS, score_metric(states[0].run)))
    assert [curve.title for curve in curves] == [
        variants()[n].title for n in ("sgd", "sam", "bsam", "bsam-2", "bsam-released")
    ]
    assert (curves[0].where, curves[0].n) == ("WideResNet-10-1 on Digits", 2)
    train, accuracy = ([value.mean for value in values] for values in curves[0].metrics)
    assert train == pytest.approx([2.0, 1.0, 2 / 3])
    assert accuracy == pytest.approx([99.0, 99.0, 90.5])
    assert curves[0].metrics[1][-1].std == pytest.approx(0.5**0.5)


def test_training_curves_show_the_loss_of_the_evaluated_split_if_there_is_one(finished_run, tmp_path, drawn):
    recipe = RECIPES["training-curves"]
    (run, *_), split = recipe.runs("smoke"), "validation"
    state = finished_run(replace(run, eval_split=split))
    for names in ([f"{split}_accuracy"], [f"{split}_accuracy", f"{split}_loss"]):
        epochs = [{"train_loss": 1.0, **dict.fromkeys(names, 0.5)}] * run.epochs
        draw_training_curves(recipe, [replace(state, epochs=epochs)], tmp_path / "figure.png")
    labels = [[ax.get_ylabel() for ax in figure.axes][1:] for figure in drawn]
    assert labels == [[f"{split} accuracy, %"], [f"{split} loss", f"{split} accuracy, %"]]


@pytest.mark.parametrize(("seeds", "methods"), [(2, ["sgd", "sam"]), (1, ["sam"]), (2, variants())])
def test_curves_are_drawn_with_bands_or_whiskers_inside_the_picture(seeds, methods, finished_run, tmp_path, drawn):
    recipe, metrics = demo_recipe(methods), (score_metric(Run("sgd")), MEMORISED_METRIC)
    curves = curves_info(recipe, [finished_run(run) for run in recipe.runs(seeds=seeds)], metrics)
    plot_curves(curves, metrics, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    many, rows = len(curves) > 4, len(methods) + ("sgd" in methods)
    for ax, values in zip(drawn[0].axes, zip(*(curve.metrics for curve in curves), strict=True), strict=True):
        assert len(ax.get_legend_handles_labels()[1]) == rows
        assert len(ax.collections) == (0 if seeds == 1 else rows)  # a band, or a whisker
        assert len(ax.lines) == rows * (1 + many)
        low, high = ax.get_ylim()
        ends = [point.mean + side * (point.std or 0) for curve in values for point in curve for side in (-1, 1)]
        assert low < min(point.mean for curve in values for point in curve)
        assert high > max(point.mean for curve in values for point in curve)
        assert many or (low < min(ends) and max(ends) < high)
        assert all(tick == round(tick) for tick in ax.get_xticks())


def test_no_two_methods_are_drawn_alike():
    assert len({str(line_style(i)) for i in range(len(variants()))}) == len(variants())
