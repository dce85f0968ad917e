import math

import pytest

from bsam.flatness.probe import Reading
from bsam.lab.inference.flatness_numbers import probe_info
from bsam.lab.report.figures.probe_figures import draw_gradient_conflict, plot_probe, probe_series_info


def reading(step, sharpness=0.1, cosine=0.5):
    return Reading(step, 1.0, 2 * sharpness, sharpness, 3 * sharpness, 1.0, 1.5, 0.5, cosine, 0.1, 0.05, 0)


def test_a_probe_is_columns_and_curves(tmp_path, drawn):
    columns = probe_info([reading(0, 1.0, 0.9), reading(10, 0.1, 0.4), reading(20, -0.001, 0.7)])
    assert columns["step"] == [0, 10, 20]
    assert columns["cosine"] == [0.9, 0.4, 0.7]
    plot_probe(columns, tmp_path / "probe.png")
    assert (tmp_path / "probe.png").stat().st_size > 10_000
    upper, lower = drawn[0].axes
    found = {line.get_label(): line.get_ydata().tolist() for line in upper.lines}
    assert found == {"MaxS": [2, 0.2, -0.002], "MinS": [1, 0.1, -0.001], "BilS": [3 * 1.0, 3 * 0.1, 3 * -0.001]}
    assert lower.lines[0].get_ydata().tolist() == [0.9, 0.4, 0.7]
    assert lower.get_ylim()[0] < 0.4 < 1 < lower.get_ylim()[1]
    assert set(probe_info([])) == set(columns)
    plot_probe(probe_info([]), tmp_path / "empty.png")
    holes = probe_info([reading(0, 1.0, math.nan), reading(10, math.nan, 0.4), reading(20, 0.1, 0.7)])
    plot_probe(holes, tmp_path / "holes.png")
    assert drawn[2].axes[1].get_ylim() == lower.get_ylim()


def test_series_are_means_over_the_seeds(out):
    recipe, states = out("gradient-conflict", seeds=3)
    found = probe_series_info(recipe, states)
    assert len(found) == 9
    assert found[0].columns["step"] == [0, 1, 2, 3]
    assert found[0].columns["cosine"] == pytest.approx([1.0] * 4)
    assert (found[0].n, found[0].where, found[0].row) == (3, "ResNet-8 on Digits", "0.1, fixed")


def test_a_schedule_has_its_name_and_one_colour_in_every_column(out, tmp_path, drawn):
    recipe, states = out("gradient-conflict", seeds=1)
    first = recipe.cell(states[0].run).section
    some = [s for s in states if (c := recipe.cell(s.run)) and (c.section, c.row) != (first, "0.1 to 0.05")]
    draw_gradient_conflict(recipe, some, tmp_path / "conflict.png")
    upper, lower = drawn[0].axes[:3], drawn[0].axes[3:]
    schedules = [rf"$\rho_{{\min}}$ {row}" for row in ("0.1, fixed", "0.1 to 0.05", "0.1 to 0")]
    (legend,) = drawn[0].legends
    assert sorted(text.get_text() for text in legend.get_texts()) == sorted(schedules)
    lines = [[line for line in ax.lines if line.get_label() in schedules] for ax in upper]
    colours = [{line.get_label(): line.get_color() for line in each} for each in lines]
    assert list(map(len, colours)) == [2, 3, 3]
    assert colours[1] == colours[2] == {**colours[1], **colours[0]}
    assert [[line.get_color() for line in ax.lines] for ax in lower] == [list(each.values()) for each in colours]
