"""The page of a report: its numbers are those of the runs, and names are text."""

import base64
import gzip
import io
import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from scipy import stats

from bsam.lab.analysis import significance
from bsam.lab.config import Run
from bsam.lab.report.figures import score_figures
from bsam.lab.report.figures.style import new_figure
from bsam.lab.report.page import experiment_tables, picture_rows
from bsam.lab.report.page import page as page_module
from bsam.lab.report.page.experiment_tables import VERDICT_SIGNS, baseline_verdicts
from bsam.lab.report.page.page import page_html, write_page
from bsam.lab.report.page.render import figure_info
from bsam.lab.report.table import Cell, Column, Table
from page_runs import EVIL, METHODS, PROBLEM, cells_of, example_runs, flatness, plots_of, score_of, table
from pose_runs import write_predictions

FILES = Path(page_module.__file__).parent / "files"


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    return example_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def html(example):
    return page_html(*example, title="Ours", problems=[PROBLEM])


def traces(html, name):
    """The traces of a figure by method, without bands."""
    return {unescape(trace["name"]): trace for trace in plots_of(html)[name]["data"] if "fill" not in trace}


def test_the_table_has_the_numbers_of_the_runs(html):
    rows = {row["method"]: row for row in cells_of(html)}
    assert list(rows) == [*METHODS, "GSAM"]
    base = np.array([score_of("SGD", seed) for seed in range(3)])
    for method, (passes, radius, _) in METHODS.items():
        row, scores = rows[method], np.array([score_of(method, seed) for seed in range(3)])
        assert (float(row["mean"]), float(row["std"])) == pytest.approx((scores.mean(), scores.std(ddof=1)))
        assert (row["n"], float(row["passes"]), float(row["seconds per epoch"])) == ("3", passes, 2.0 * passes)
        assert row["total radius"] == ("" if radius is None else str(radius))
        assert (row["diverged"], float(row["memorised"])) == ("1" if method == "SAM" else "0", 30)
        if method != "SGD":
            interval = stats.ttest_rel(scores, base).confidence_interval()
            assert (float(row["low"]), float(row["high"])) == pytest.approx((interval.low, interval.high))
    assert (rows["SGD"]["published"], rows["SAM"]["published"], rows["SGD"]["low"]) == ("61.5", "", "")
    assert (rows["GSAM"]["mean"], rows["GSAM"]["difference"], rows["GSAM"]["unfinished"]) == ("", "", "1")


def test_pairs_without_the_baseline_are_corrected_among_themselves(html):
    pairs = cells_of(html, 1)
    assert len(pairs) == 3
    assert "SGD" not in {pair[name] for pair in pairs for name in ("method", "compared with")}
    for pair in pairs:
        ours, theirs = ([score_of(pair[name], seed) for seed in range(3)] for name in ("method", "compared with"))
        assert float(pair["difference"]) == pytest.approx(np.mean(ours) - np.mean(theirs))
        assert pair["verdict"] in VERDICT_SIGNS
    p_values = [
        stats.ttest_rel(
            [score_of(pair["method"], s) for s in range(3)], [score_of(pair["compared with"], s) for s in range(3)]
        ).pvalue
        for pair in pairs
    ]
    smallest = int(np.argmin(p_values))
    assert float(pairs[smallest]["p"]) == pytest.approx(3 * p_values[smallest])


def test_the_runs_and_their_states(html):
    runs = {row["run"]: row for row in cells_of(html, 2)}
    assert len(runs) == 14
    assert list(runs)[:2] == ["diverged", "half"], "those that did not finish are first"
    assert (runs["half"]["state"], runs["half"]["epochs"]) == ("unfinished", "10")
    assert runs["diverged"]["remark"] == "the loss of step 7 is nan"


def test_a_column_is_one_entry_and_is_shown_if_it_has_values(example, monkeypatch):
    ordinary = experiment_tables.experiment_columns
    more = [
        Column("planned", "epochs first", "d", note="planned: the epochs."),
        Column("trained", "epochs_done max"),
        Column("least", "epochs_done min"),
        Column("none", "claimed first"),
    ]
    monkeypatch.setattr(experiment_tables, "experiment_columns", lambda *about: [*ordinary(*about), *more])
    html = page_html(*example, plots=False)
    rows = {row["method"]: row for row in cells_of(html)}
    assert {row["planned"] for row in rows.values()} == {"20"}
    assert [rows["SAM"][name] for name in ("trained", "least")] == ["20", "10"]
    assert more[0].note in html
    assert "none" not in rows["SAM"]


def test_the_baseline_may_be_named(example):
    rows = {row["method"]: row for row in cells_of(page_html(*example, "sam", plots=False))}
    gaps = [score_of("SGD", seed) - score_of("SAM", seed) for seed in range(3)]
    assert float(rows["SGD"]["difference"]) == pytest.approx(np.mean(gaps))
    assert rows["SAM"]["difference"] == ""


def test_each_experiment_is_compared_with_its_own_baseline(example):
    runs, _ = example
    both = pd.concat([runs, runs[runs["row"] != "SGD"].assign(experiment="B")], ignore_index=True)
    verdicts = baseline_verdicts(significance.compare_rows(both), both)
    against = {(verdict["experiment"], verdict["title"].split(" against ")[1]) for verdict in verdicts}
    assert against == {("DigitsNet, digits", "SGD"), ("B", "SAM")}


def test_verdicts_on_tuned_runs_say_how_settings_were_chosen(example):
    runs, _ = example
    compared = significance.compare_rows(runs)
    assert not any("the paper's" in verdict["evidence"] for verdict in baseline_verdicts(compared, runs))
    words = runs["row"].map({"SGD": "lr from 5", "SAM": "lr as for SGD"}).fillna("")
    verdicts = baseline_verdicts(compared, runs.assign(chosen=words, tuned=runs["row"] == "SGD"))
    assert ["lr as for SGD" in verdict["evidence"] for verdict in verdicts] == [True, False, False]
    assert all("lr from 5" in verdict["evidence"] for verdict in verdicts)


def test_every_outcome_has_a_sign():
    words = [
        value for name, value in vars(significance).items() if name in ("BETTER", "WORSE", "NONE_SHOWN", "TOO_FEW")
    ]
    assert {*words, significance.NOT_LEARNED} == set(VERDICT_SIGNS)


def test_names_and_titles_are_text_only(example):
    html = page_html(*example, title="{{data}} </title><script>alert(1)</script>", problems=[PROBLEM])
    assert html.count("<script") == html.count("</script>") == 2 + len(plots_of(html))
    for tag in ("<b>cannot", "<b>dog", "<script>alert", "<script>document.title"):
        assert tag not in html
    assert "<title>{{data}} &lt;/title&gt;&lt;script&gt;alert(1)&lt;/script&gt;</title>" in html
    assert "&lt;b&gt;dog&lt;/b&gt;" in plots_of(html)["classes"]["layout"]["xaxis"]["ticktext"], (
        "plotly reads it as HTML"
    )


def test_the_script_makes_no_html_and_loads_nothing():
    script = (FILES / "page.js").read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "fetch("):
        assert word not in script
    text = script + (FILES / "page.html.j2").read_text() + (FILES / "page.css").read_text()
    assert not re.findall(r"https?://", text)
    assert "default-src 'none'" in text


def test_the_style_sheet_has_no_broken_names():
    """A formatter had put a line break into margin-top."""
    style = re.sub(
        r"/\*.*?\*/", "", (Path(page_module.__file__).parent / "files/page.css").read_text("utf-8"), flags=re.DOTALL
    )
    declarations = [part for block in re.findall(r"\{([^{}]*)\}", style) for part in block.split(";") if part.strip()]
    assert len(declarations) > 100
    assert [part for part in declarations if not re.match(r"\s*[\w-]+\s*:", part)] == []


def test_plotly_is_embedded_whole(example, tmp_path):
    from plotly.offline import get_plotlyjs

    write_page(tmp_path / "new" / "page.html", *example)
    encoded = (tmp_path / "new" / "page.html").read_bytes().split(b'id="plotly">')[1].split(b"</script>")[0]
    assert gzip.decompress(base64.b64decode(encoded)).decode() == get_plotlyjs()


def test_without_plots_the_page_has_the_tables(example):
    html = page_html(*example, plots=False)
    assert "This page has no plots" in html
    assert 'id="plotly"></script>' in html
    assert len(html) < 300_000
    assert len(cells_of(html)) == 5


def test_large_experiments_stay_small_and_curves_are_thinned(tmp_path):
    html = page_html(*example_runs(tmp_path, seeds=3, epochs=1000))
    assert len(html) < 6e6
    line = traces(html, "score")["SGD"]
    assert (len(line["x"]), line["x"][0], line["x"][-1]) == (200, 1, 1000)


def test_curves_are_means_with_bands(html):
    scores = np.array([score_of("SAM", seed) for seed in range(3)])
    line = traces(html, "score")["SAM"]
    np.testing.assert_allclose(line["y"], [scores.mean() * e / 20 for e in line["x"]], rtol=1e-4)
    (band,) = [trace for trace in plots_of(html)["score"]["data"] if "fill" in trace and trace["name"] == "SAM"]
    n = len(line["x"])
    np.testing.assert_allclose(band["y"][n - 1] - line["y"][-1], scores.std(ddof=1), rtol=1e-3)
    unfinished = traces(html, "loss")["GSAM, unfinished"]
    assert (len(unfinished["x"]), unfinished["line"]["dash"]) == (10, "dot"), "it is drawn as far as it is"
    assert "GSAM" not in traces(html, "loss")
    assert "SAM, diverged" not in traces(html, "loss"), "other seeds have finished"
    assert traces(html, "memorised")["SGD"]["y"][-1] == pytest.approx(30)


def test_many_curves_are_running_means_without_bands(tmp_path):
    runs, epochs = example_runs(tmp_path, epochs=200)
    extra = pd.concat([runs, *(runs[runs["row"] == "SGD"].assign(row=f"SGD {n}") for n in range(2))], ignore_index=True)
    noise = np.random.default_rng(0).normal(size=200)
    more = pd.concat([epochs, *(epochs[epochs["row"] == "SGD"].assign(row=f"SGD {n}") for n in range(2))])
    more["train_loss"] = noise[more["epoch"] - 1]
    figure = score_figures.curves(extra, more, "train_loss", "", "")
    assert all(trace.fill is None for trace in figure.data)
    (line,) = [trace for trace in figure.data if trace.name == "SGD 1"]
    assert line.y[100] == pytest.approx(noise[98:103].mean())


def test_scores_against_cost_and_radius(html):
    cost = traces(html, "cost")
    assert [trace["customdata"].tolist() for trace in cost.values()] == [[1], [2], [2], [3]]
    assert len({trace["x"][0] for trace in cost.values()}) == 4, "equal costs are shifted"
    lines = traces(html, "radius")
    assert lines["SAM"]["x"] == pytest.approx([0.1, 0.2])
    assert lines["SAM"]["y"] == pytest.approx([80, 84])
    assert lines["SGD"]["y"] == pytest.approx([60, 60]), "the base optimizer is a horizontal line"
    assert lines[EVIL]["x"] == pytest.approx([0.2])


def test_lines_of_radii_join_rows_that_differ_only_in_radii():
    rows = {
        "SAM": ("sam", "sam", {}, 0.05),
        "SAM (sum)": ("sam", "sam-sum", {"rho": 0.1, "rho_floor": 0.1}, 0.1),
        "SAM (follow)": ("sam", "sam-follow", {"rho": 0.1, "rho_floor": 0.05}, 0.1),
        "BSAM (2 passes)": ("bsam", "bsam-2", {"passes": 2}, 0.1),
        "BSAM (2 passes), rho_max 0.1, rho_min 0.1, every 1": ("bsam", "bsam-2", {"passes": 2, "every": 1}, 0.2),
        "BSAM (2 passes), rho_max 0.1, rho_min 0.1, every 5": ("bsam", "bsam-2", {"passes": 2, "every": 5}, 0.2),
        "MSAM, rho 0.1": ("msam", "msam", {"rho": 0.1}, 0.1),
        "MSAM, rho 0.1, warm-up": ("msam", "msam", {"rho": 0.1}, 0.1),
        "MSAM, rho 0.2, warm-up": ("msam", "msam", {"rho": 0.2}, 0.2),
        "X": ("", "", {}, 0.1),
        "X, rho 0.2": ("", "", {}, 0.2),
    }
    runs = table(
        {
            "row": row,
            "method": method,
            "variant": variant,
            "settings": {"arguments": arguments, "rho_warmup": 5.0 * row.endswith("warm-up")},
            "radius": r,
            "score": 8.0,
        }
        for row, (method, variant, arguments, r) in rows.items()
    )
    figure = score_figures.radius_figure(runs, pd.DataFrame())
    assert {trace.name: trace.x.astype(float).round(4).tolist() for trace in figure.data} == {
        "SAM": [0.05, 0.1],
        "SAM (follow)": [0.1],
        "BSAM (2 passes)": [0.1, 0.2],
        "BSAM (2 passes), rho_max 0.1, rho_min 0.1, every 5": [0.2],
        "MSAM, rho 0.1": [0.1],
        "MSAM, warm-up": [0.1, 0.2],
        "X": [0.1, 0.2],
    }


@pytest.mark.parametrize(("rows", "legend"), [(20, None), (21, False)])
def test_a_long_legend_would_take_the_place_of_the_curves(rows, legend):
    """Names are then shown on hover, and points of equal cost stay near it."""
    runs = table({"row": f"R{n}", "passes": 1 + (n > 0), "score": float(n)} for n in range(rows))
    figure = score_figures.cost_figure(runs, pd.DataFrame())
    assert figure.layout.showlegend is legend
    assert ("see its name" in figure.layout.meta["caption"]) == (legend is False)
    found = [trace.x[0] for trace in figure.data[1:]]
    assert len({round(float(x), 4) for x in found}) == rows - 1
    assert max(abs(x - 2) for x in found) < 0.31


def test_more_epochs_cost_more_passes():
    rows = {"AdamW": (1, 100), "AdamW, twice the epochs": (1, 200), "SAM": (2, 100)}
    runs = table({"row": row, "passes": p, "epochs": n, "score": 5.0} for row, (p, n) in rows.items())
    figure = score_figures.cost_figure(runs, pd.DataFrame())
    assert [round(float(trace.x[0])) for trace in figure.data] == [1, 2, 2]
    assert "100 epochs" in figure.layout.xaxis.title.text


def test_scores_against_the_columns_of_a_recipe():
    about = {"unit": "%", "published": 1.5, "section": "Digits"}
    runs = table(
        {**about, "row": row, "column": f"{noise} %", "seed": seed, "score": 100 - noise + seed, "method": method}
        for noise in (60, 20)
        for row, method in (("SGD", "base"), ("SAM", "sam"))
        for seed in (0, 2)
    )
    figure = score_figures.column_figure(runs, pd.DataFrame())
    assert "label noise" not in figure.layout.xaxis1.title.text
    ours = {trace.name: trace for trace in figure.data if trace.error_y.array is not None}
    assert list(ours) == ["SGD", "SAM"]
    assert (list(ours["SAM"].x), list(ours["SAM"].y)) == ([20, 60], [81, 41])
    assert ours["SAM"].error_y.array == pytest.approx(np.std([0, 2], ddof=1))
    published = [list(trace.y) for trace in figure.data if trace.error_y.array is None]
    assert published == [[1.5, 1.5]] * 2
    noisy = runs.assign(settings=[{"label_noise": float(name.split()[0]) / 100} for name in runs["column"]])
    assert "label noise" in score_figures.column_figure(noisy, pd.DataFrame()).layout.xaxis1.title.text
    assert score_figures.column_figure(runs.assign(column="a"), pd.DataFrame()) is None
    names = runs["column"].map({name: f"CIFAR-{place}0" for place, name in enumerate(runs["column"].unique(), 1)})
    assert score_figures.column_figure(runs.assign(column=names), pd.DataFrame()) is None


def test_one_epoch_is_a_marker(tmp_path):
    point = traces(page_html(*example_runs(tmp_path, epochs=1)), "score")["SAM"]
    assert (point["mode"], point["y"]) == ("markers", pytest.approx([80]))
    assert point["error_y"]["array"] == pytest.approx([np.std([79.25, 80, 80.75], ddof=1)])


def test_no_curves_if_only_the_last_epoch_was_kept(example):
    runs, epochs = example
    names = set(plots_of(page_html(runs, epochs[epochs["epoch"] == 20])))
    assert "cost" in names
    assert not {"score", "loss", "memorised"} & names


def test_one_colour_per_method_in_all_figures(html):
    colours = {}
    for plot in plots_of(html).values():
        for trace in plot["data"]:
            if trace["type"] == "scatter" and "line" in trace and "color" in trace["line"]:
                name = unescape(trace["name"]).split(", ")[0]
                colours.setdefault(name, set()).add(trace["line"]["color"])
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*(colours[name] for name in ("SGD", "SAM", "GSAM")))) == 3


def test_panels_have_their_own_axes(html):
    probe = plots_of(html)["probe"]
    first, *_, last = (trace for trace in probe["data"] if trace["name"] == "SGD")
    assert first["y"] == pytest.approx([1, 2, 3, 4, 5])
    assert last["y"] == pytest.approx([0.1] * 5)
    assert {(trace["xaxis"], trace["yaxis"]) for trace in probe["data"]} == {(f"x{n}", f"y{n}") for n in range(1, 5)}
    surfaces = plots_of(html)["surfaces"]
    assert [trace["scene"] for trace in surfaces["data"]] == [f"scene{n}" for n in range(1, 5)]
    scenes = [part for name, part in surfaces["layout"].items() if name.startswith("scene")]
    assert len(scenes) == 4
    assert len({tuple(scene["zaxis"]["range"]) for scene in scenes}) == 1, "one scale"


def test_pictures_of_mistakes(example):
    rows = picture_rows.picture_rows(*example)["rows"]
    assert list(rows) == list(METHODS)
    item = rows["SGD"][0]
    assert (item["text"], item["small"]) == ("<b>dog</b>, 90%", "true: cat")
    picture = Image.open(io.BytesIO(base64.b64decode(item["src"].removeprefix("data:image/png;base64,"))))
    np.testing.assert_array_equal(np.array(picture), np.arange(64).reshape(8, 8))
    large = picture_rows.data_uri(np.zeros((300, 200, 3), np.uint8)).removeprefix("data:image/jpeg;base64,")
    assert max(Image.open(io.BytesIO(base64.b64decode(large))).size) == 128


def test_skeletons(tmp_path):
    write_predictions(tmp_path)
    runs = table([{"row": "Adam", "score": 60.0, "unit": "PCK", "path": tmp_path, "settings": {"task": "pose"}}])
    rows = picture_rows.picture_rows(runs, pd.DataFrame())["rows"]
    labels, found = ([len(item["lines"]) for item in rows[name]] for name in ("label", "Adam"))
    assert found[0] == found[1] == labels[0] > labels[1], "a joint of the second person is not labelled"
    joints = np.load(tmp_path / "predictions.npz")["found"][0].astype(float)
    ends = {tuple(line[1:3]) for line in rows["Adam"][0]["lines"]}
    assert ends <= {tuple(np.round((joint + 0.5) / 32, 4).tolist()) for joint in joints}


def test_a_network_has_one_largest_eigenvalue(tmp_path):
    """Numbers of a column are of equally many samples, and the spectrum is that of the number in the table."""
    runs, epochs = example_runs(tmp_path, seeds=1)
    rows = {row: place for place, row in zip(runs.index, runs["row"], strict=True)}
    runs["flatness"], runs["top_eigenvalue"] = None, np.nan
    for row, maximum, samples in (("SGD", 78.0, 1000), ("SAM, rho 0.2", 303.0, 256), (EVIL, 28.0, 256)):
        entry = flatness(Run("sgd"), maximum / 20)
        training = {"samples": 256, "eigenvalues": {"maximum": 303.0, "converged": True}}
        runs.at[rows[row], "flatness"] = [{**entry, "samples": samples}, training] if row == "SGD" else [training]
        runs.loc[rows[row], ["top_eigenvalue", "eigenvalue_samples"]] = maximum, samples
    html = page_html(runs, epochs)
    large, small = (f"λmax, cross-entropy, {n} training samples" for n in ("1,000", "256"))
    found = {row["method"]: (row[large], row[small]) for row in cells_of(html)}
    assert {name: found[name] for name in ("SGD", "SAM", "SAM, rho 0.2")} == {
        "SGD": ("78.0", ""),
        "SAM": ("", ""),
        "SAM, rho 0.2": ("", "303.0"),
    }
    plots = plots_of(html)
    assert plots["eigenvalues"]["layout"]["yaxis"]["ticktext"] == ["SGD<br>max 78"]
    assert sorted(trace["y"].tolist() for trace in plots["top_eigenvalue"]["data"]) == [[28.0], [303.0]]


def test_what_is_damaged_is_a_problem_of_the_page(tmp_path):
    runs, epochs = example_runs(tmp_path)
    damaged = runs.loc[runs["row"] == "SAM", "path"].iloc[0] / "predictions.npz"
    damaged.write_bytes(b"no archive")
    runs.at[0, "flatness"] = [{"samples": 1, "eigenvalues": {"values": [2, 1]}}]
    problems = []
    html = page_html(runs, epochs, problems=problems)
    assert [str(runs.at[0, "path"]) in problem for problem in problems] == [False, True, False]
    assert all(str(damaged) in problem for problem in (problems[0], problems[2])), "two figures read predictions"
    assert "SAM" not in traces(html, "classes")
    assert "SGD" in traces(html, "classes"), "the others are drawn"


@pytest.mark.parametrize("content", ["", '{"a": 1}\n'])
def test_a_probe_without_readings_is_no_line(tmp_path, content):
    runs, epochs = example_runs(tmp_path)
    file = runs.loc[runs["row"] == "SAM", "path"].iloc[0] / "probe.jsonl"
    assert file.exists()
    file.write_text(content)
    lines = traces(page_html(runs, epochs), "probe")
    assert "SGD" in lines
    assert "SAM" not in lines
    assert score_figures.probe_curves(runs[runs["row"] == "SAM"], epochs) is None


def test_a_figure_with_an_empty_array_is_written():
    figure = new_figure("Empty", "", [{"type": "scatter", "x": np.array([]), "y": np.array([])}])
    (trace,) = json.loads(figure_info(figure)["plot"])["data"]
    assert trace["x"] == []


def test_a_recipe_says_what_its_console_says(example):
    tuned = {"method": "SAM", "": Cell("90.00 ± 1 (3)", marks=("1 diverged",)), "chosen": Cell("rho 0.1*")}
    cells = [{**tuned, "data": data, "paper": Cell(paper)} for data, paper in (("A", "89.0"), ("B", "88.0"))]
    table = Table.pivot("Tuning", cells, "method", "data", ("", "paper", "chosen"))
    texts = ["SGD is level with <SAM>.", "* At the edge of the grid."]
    context = {"findings": texts[:1], "tables": [table], "notes": texts[1:]}
    html = unescape(page_html(*example, context=context, plots=False))
    assert all(text in html for text in (*texts, "Tuning", "1 diverged", "90.00\u00a0±\u00a01\u00a0(3)"))
    assert html.count('data-label="paper"') == 2


def test_no_runs_at_all():
    html = page_html(table([{}]).iloc[:0], pd.DataFrame(), problems=["there is nothing"], watched=True)
    assert "there is nothing" in html
    assert 'id="waiting"' in html
