import io
import json
import math
import statistics
import sys

import pytest
from matplotlib.image import imread
from rich.console import Console

import bsam
from bsam.core.extras import need
from bsam.flatness.sharpness import Sharpness
from bsam.methods import METHODS
from bsam.recipes.demo import DEFAULT, TITLES, Cell, Plan, candidates_of
from bsam.report.lists import LISTS, list_table, methods_info
from bsam.report.figures import COLOURS, DASHES, curves_info, plot_curves
from bsam.report.landscapes import plot_contours, reliefs_info
from bsam.report.progress import progress
from bsam.report.results import rows_info, write_results
from bsam.report.tables import summary_info, summary_tables
from bsam.training.result import Epoch, LossSurface, Result


def made_up(seeds=3, epochs=2, loss=1.0, methods=DEFAULT):
    """Numbers that say where they come from: the hundreds are the method, the tens the noise rate, the ones the seed."""
    plan, cells = Plan(seeds=seeds, epochs=epochs, candidates_of=candidates_of(methods)), []
    for n, noise in enumerate((0.0, 0.4)):
        for m, candidate in enumerate(plan.candidates_of):
            tuning = tuple(
                Result(run, tuple(Epoch({"validation_accuracy": a}) for a in (0.2, 0.5 + 0.01 * i)), 1.0)
                for i, run in enumerate(plan.tuning_runs(candidate, noise))
            )
            results = []
            for seed, run in enumerate(plan.final_runs(tuning[-1].run)):
                base = (100 * m + 10 * n + seed) / 1000
                curve = tuple(
                    Epoch({"test_accuracy": base + e / 10_000}, Sharpness(loss, base + 1, base + 2, 2 * base + 3, 0.5))
                    for e in range(epochs)
                )
                relief = (
                    None
                    if run.relief is None
                    else LossSurface((-1.0, 0.0, 1.0), ((3.0,) * 3, (base, base / 2, base), (3.0,) * 3))
                )
                results.append(
                    Result(run, curve, (m + 1.0) * (1 + seed), 10 + base, relief)
                )  # the machine slows down from seed to seed
            cells.append(Cell(candidate, noise, tuning, tuple(results)))
    return plan, cells


def test_rows_are_one_per_method_noise_rate_and_seed_of_the_last_epoch():
    _, cells = made_up()
    rows = rows_info(cells)
    assert len({(row["method"], row["label_noise"], row["seed"]) for row in rows}) == len(rows) == 24
    row = next(row for row in rows if (row["method"], row["label_noise"], row["seed"]) == ("bsam-2", 0.4, 1))
    assert row["test_accuracy"] == pytest.approx(0.311 + 1e-4)
    assert (row["max_sharpness"], row["min_sharpness"], row["bilateral"]) == pytest.approx((1.311, 2.311, 3.622))
    assert row["top_eigenvalue"] == pytest.approx(10.311)
    assert (row["lr"], row["weight_decay"], row["arguments"]) == (
        0.1,
        5e-2,
        {"rho_max": 0.1, "rho_min": 0.1, "passes": 2},
    )


def test_summary_is_mean_sample_deviation_and_time_against_sgd_of_the_same_seed():
    _, cells = made_up()
    entry = next(e for e in summary_info(rows_info(cells)) if (e["method"], e["label_noise"]) == ("sam", 0.4))
    values = [0.110 + 1e-4, 0.111 + 1e-4, 0.112 + 1e-4]
    assert entry["test_accuracy"].mean == pytest.approx(statistics.mean(values))
    assert entry["test_accuracy"].std == pytest.approx(0.001)
    assert entry["test_accuracy"].n == 3
    assert entry["relative_time"] == 2.0


def test_without_sgd_there_is_no_relative_time():
    _, cells = made_up(methods=["sam", "saf"])
    summary = summary_info(rows_info(cells))
    assert {entry["relative_time"] for entry in summary} == {None}
    out = io.StringIO()
    Console(file=out, width=80).print(summary_tables(summary)[0])
    assert next(line for line in out.getvalue().splitlines() if line.startswith("SAF")).split()[-4:] == [
        "-",
        "0.1",
        "λ1",
        "0.05",
    ]


@pytest.mark.parametrize("methods", [DEFAULT, TITLES])
def test_tables_show_the_numbers_in_80_columns(methods):
    _, cells = made_up(methods=methods)
    out = io.StringIO()
    for table in summary_tables(summary_info(rows_info(cells))):
        Console(file=out, width=80).print(table)
    text = out.getvalue()
    assert "…" not in text
    assert "40% of the training labels flipped, n = 3" in text
    line = [line for line in text.splitlines() if line.startswith("BSAM (2 passes)")][1]
    m = list(methods).index("bsam-2")
    base = m / 10 + 0.011
    assert line.split("passes)")[1].split() == [
        *(f"{100 * (base + 1e-4):.1f}", "±", "0.1", "1.000"),
        *(f"{value:.4f}" for value in (base + 1, base + 2, 2 * base + 3)),
        *(f"{10 + base:.3g}", f"{m + 1:.2f}", "0.1", "0.1", "0.05"),
    ]
    assert len([line for line in text.splitlines() if line.startswith("SGD")]) == 2


def test_a_single_seed_has_no_deviation():
    _, cells = made_up(seeds=1)
    summary = summary_info(rows_info(cells))
    assert summary[0]["test_accuracy"].std is None
    out = io.StringIO()
    Console(file=out, width=80).print(summary_tables(summary)[0])
    assert "±" not in out.getvalue()


def test_results_are_strict_json_with_environment_and_tuning(tmp_path):
    plan, cells = made_up(loss=math.nan)
    write_results(tmp_path, plan, cells)
    content = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert {row["train_loss"] for row in content} == {None}
    about = json.loads((tmp_path / "about.json").read_text(), parse_constant=pytest.fail)
    assert {"bsam", "torch", "python", "cores", "date"} <= set(about["environment"])
    assert about["settings"]["curvature_samples"] == 256
    tuning = about["tuning"]
    assert tuning["runs_per_method_and_noise_rate"] == 8
    assert "clean" in tuning["chosen_by"]
    assert about["settings"]["methods"] == list(DEFAULT)
    assert [len(choice["tried"]) for choice in tuning["choices"]] == [8] * 8
    for choice in tuning["choices"]:
        assert choice["validation_accuracy"] == max(tried["validation_accuracy"] for tried in choice["tried"])


def test_curves_are_means_over_seeds_epoch_by_epoch():
    _, cells = made_up()
    curve = next(c for c in curves_info(cells) if (c.title, c.label_noise) == ("BSAM", 0.4))
    assert [s.mean for s in curve.accuracy] == pytest.approx([0.211, 0.2111])
    assert [s.std for s in curve.bilateral] == pytest.approx([0.002, 0.002])


@pytest.mark.parametrize(
    ("seeds", "epochs", "methods"), [(3, 4, DEFAULT), (1, 1, DEFAULT), (2, 3, ["saf"]), (2, 3, TITLES)]
)
def test_figure_is_drawn(tmp_path, seeds, epochs, methods):
    _, cells = made_up(seeds, epochs, methods=methods)
    plot_curves(curves_info(cells), tmp_path / "figure.png")
    image = imread(tmp_path / "figure.png")
    assert image.shape[0] > 600
    assert image.shape[1] > 900
    assert len({tuple(pixel) for pixel in image.reshape(-1, image.shape[2]).round(1)}) > 10


def test_on_a_full_disk_the_old_figure_stays(on_a_full_disk):
    on_a_full_disk(lambda path: plot_curves(curves_info(made_up()[1]), path), "figure.png")


def test_landscapes_are_of_the_first_seed_on_one_scale_for_each_noise_rate(tmp_path):
    _, cells = made_up()
    infos = reliefs_info(cells)
    assert [(info.group, info.title) for info in infos] == [
        (group, TITLES[name]) for group in ("Clean labels", "40% of the training labels flipped") for name in DEFAULT
    ]
    assert infos[6].centre == pytest.approx(0.105)  # BSAM, noisy, the first seed
    assert (infos[6].axis, infos[6].loss[1]) == ([-1, 0, 1], pytest.approx([0.21, 0.105, 0.21]))
    plot_contours(infos, tmp_path / "landscape.png")
    assert imread(tmp_path / "landscape.png").shape[1] > 1500


def test_no_two_methods_are_drawn_alike():
    assert len({(COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)]) for i in range(len(TITLES))}) == len(TITLES)


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("width", [20, 100, 120, 160, 400])
def test_a_list_fits_and_loses_no_word(name, width):
    lines = list_table(name, width).splitlines()
    assert max(map(len, lines)) <= min(max(width, 100), 160)
    starts = [lines[0].index(title) for title in LISTS[name].header]
    ends = [start - 2 for start in starts[1:]] + [None]
    columns = list(zip(starts, ends, strict=True))
    cells = [[line[start:end].strip() for start, end in columns] for line in lines[2:]]
    rows = []
    for line in cells:
        if line[0]:
            rows.append(line)
        else:
            rows[-1] = [f"{so_far} {more}".strip() for so_far, more in zip(rows[-1], line, strict=True)]
    assert [tuple(text.replace("- ", "-") for text in row) for row in rows] == LISTS[name].rows()


def test_the_list_of_methods_has_them_all():
    assert [row[0] for row in methods_info()] == list(METHODS)
    assert [float(row[3]) for row in methods_info()] == [method.passes for method in METHODS.values()]


@pytest.mark.parametrize(
    ("module", "extra"), [("matplotlib", "plot"), ("plotly", "plot"), ("rich", "demo"), ("sklearn", "demo")]
)
def test_a_missing_package_is_refused_with_the_mend(monkeypatch, module, extra):
    need(module, extra)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(bsam.BsamError, match=rf"{module}.*pip install 'bsam\[{extra}\]'"):
        need(module, extra)


def test_bars_count():
    out = io.StringIO()
    with progress(Console(file=out, width=100), {"tuning": 3, "training": 2}) as bars:
        bars.advance("tuning", 2)
        bars.advance("tuning", 1)
        bars.advance("training", 1)
    assert "3/3" in out.getvalue()
    assert "1/2" in out.getvalue()
