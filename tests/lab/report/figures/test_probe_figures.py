import pytest

from bsam.lab.report.figures.probe_figures import draw_gradient_conflict, probe_series_info


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
