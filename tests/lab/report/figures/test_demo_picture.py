from dataclasses import replace

import pytest
from bsam.lab.recipes.digits_demo import TUNED_SGD, demo_findings

from bsam.lab.recipes.columns import CellSummary, SeedStatistics, TableCell
from bsam.lab.recipes.variants import variants
from bsam.lab.report.figures.epoch_figures import draw_demo
from bsam.lab.report.figures.panels import line_style
from bsam.lab.training.config import Run

RUN = Run("sgd", weight_decay=5e-4, label_noise=0.4)


def row(title, mean, std, share=50.0, chosen=None, n=5, top=None):
    eigenvalue = None if top is None else SeedStatistics(top, 1.0, n)
    details = {"memorised": SeedStatistics(share, 1.0, n), "top_eigenvalue": eigenvalue}
    return CellSummary(TableCell("", title, ""), SeedStatistics(mean, std, n), 0, 0, None, details, chosen)


SGD = row("SGD", 70.0, 2.0, 96.0)


TUNED = {"weight_decay": 0.1}
REACHES = "SGD with tuned weight decay 0.1 instead of 0.0005 reaches {} ± 0.5 % and memorises 4 % of the wrong labels"
FLAT = [row("SGD", 70.0, 2.0, top=25.9), row("SAM", 90.0, 1.0, top=3.1)]
SENTENCES = [
    (
        [SGD, row("SAM", 90.0, 1.0, 5.0)],
        "SAM is 20.0 points above SGD, more than the spread (2.0): 90.0 ± 1.0 against 70.0 ± 2.0 %. It memorises 5 % "
        "of the wrong labels, SGD 96 %.",
    ),
    *(
        (
            [SGD, row("SAM", mean, std)],
            f"SAM shows no gain here. It is {where}: {mean} ± {std} against 70.0",
        )
        for mean, std, where in (
            (72.0, 1.0, "within the spread (2.0 points) of SGD"),
            (74.0, 4.5, "within the spread (4.5 points) of SGD"),
            (68.5, 1.0, "within the spread (2.0 points) of SGD"),
            (67.0, 1.0, "3.0 points below SGD"),
        )
    ),
    ([SGD, row("SAM", 75.0, 1.0, 96.0)], "SAM is 5.0 points above SGD, but does not memorise less: 75.0 ± 1.0 against"),
    ([SGD, replace(row("SAM", 90.0, 1.0, n=3), diverged=2)], "SGD 96 %. With 2 more seeds it diverged."),
    (
        [SGD, row("BSAM", 90.0, None, n=1)],
        "Only one seed of BSAM is finished, which is too few to compare: 90.0 against",
    ),
    ([SGD, replace(row("PGN", 0.0, 0.0), ours=None, diverged=5)], "PGN diverged with every seed."),
    ([SGD, row("SAM", 90.0, 1.0), row("BSAM", 90.5, 1.5)], "BSAM is 0.5 points above SAM, within the spread (1.5)."),
    ([SGD, row("SAM", 90.0, 1.0), row("BSAM", 87.0, 1.5)], "SAM is 3.0 points above BSAM, more than the spread (1.5)."),
    (FLAT, "SAM has the best accuracy and the smallest λmax (3.1)."),
    (
        [*FLAT, row(TUNED_SGD, 92.0, 0.5, 4.0, TUNED, top=57.2)],
        "A small λmax does not imply high accuracy: SGD, tuned weight decay is the most accurate, with λmax 57.2, but "
        "SAM has the smallest λmax, 3.1.",
    ),
    ([SGD, row(TUNED_SGD, 89.1, 0.5, 4.0, TUNED)], f"{REACHES.format(89.1)}."),
    *(
        (
            [SGD, row("BSAM", 85.0, 9.0), row("SAM", 90.0, 1.0), row(TUNED_SGD, mean, 0.5, 4.0, TUNED)],
            f"{REACHES.format(mean)}: {where} SAM, the best of the others (90.0 ± 1.0 %).",
        )
        for mean, where in (
            (89.1, "within a standard deviation (1.0 points) of"),
            (93.0, "3.0 points, more than the spread (1.0), above"),
            (80.0, "10.0 points, more than the spread (1.0), below"),
        )
    ),
    ([row("SAM", 90.0, 1.0)], "Without SGD there is nothing to compare with."),
    ([replace(SGD, ours=None), row("SAM", 90.0, 1.0)], "Without SGD there is nothing to compare with."),
    ([row("SGD", 70.0, None, n=1), row("SAM", 90.0, None, n=1)], "With one seed there is no spread to compare with"),
]


@pytest.mark.parametrize(("rows", "sentence"), SENTENCES)
def test_findings(rows, sentence):
    assert any(sentence in line for line in demo_findings(rows, RUN))


def test_what_cannot_be_compared_is_not():
    one_seed = [row("SGD", 70.0, None, n=1), row("SAM", 90.0, None, n=1), row(TUNED_SGD, 90.0, None, n=1)]
    assert not any("SAM" in line for line in demo_findings(one_seed, RUN))
    assert not any("above BSAM" in line or "λmax" in line for line in demo_findings([SGD, row("BSAM", 87.0, 1.5)], RUN))


def colours(ax):
    return [line.get_color() for line in ax.lines if line.get_label()[:1] != "_"]


def test_the_picture_has_curves_eigenvalues_and_a_surface_of_each_row_in_its_colour(out, tmp_path, drawn):
    recipe, states = out("demo")
    draw_demo(recipe, states, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    accuracy, memorised, eigenvalues, *surfaces, bar = drawn[0].axes
    own = [line_style(number)["color"] for number in range(4)]
    assert accuracy.get_ylabel() == "test accuracy, %"
    assert memorised.get_ylabel() == "wrong labels memorised, %"
    assert colours(accuracy) == colours(memorised) == own
    assert list(memorised.lines[1].get_ydata())[-1] == pytest.approx(1.05)
    assert eigenvalues.get_ylabel().replace("\n", " ") == "λmax, cross-entropy, at most 256 training samples"
    heights = [float(points.lines[0].get_ydata()[0]) for points in eigenvalues.containers]
    assert heights == pytest.approx([10.0005, 10.1005, 10.0005 + 0.1 * list(variants()).index("bsam"), 10.0005])
    assert [points.lines[0].get_color() for points in eigenvalues.containers] == own
    names = [label.get_text() for label in eigenvalues.get_xticklabels()]
    assert names == [line.get_label() for line in accuracy.lines]
    titles = ["SGD", "SAM", "BSAM (Algorithm 1)", TUNED_SGD]
    assert [ax.get_title().split("\nloss")[0] for ax in surfaces] == titles
    assert [ax.title.get_color() for ax in surfaces] == own
    assert len({tuple(ax.collections[0].levels) for ax in surfaces}) == 1
    assert bar.get_ylabel() == "loss"


@pytest.mark.usefixtures("coarse")
def test_without_a_finished_run_of_the_first_seed_there_are_no_surfaces(out, tmp_path, drawn):
    recipe, states = out("demo")
    draw_demo(recipe, [replace(state, finished=state.run.seed == 1) for state in states], tmp_path / "demo.png")
    assert len(drawn[0].axes) == 3
