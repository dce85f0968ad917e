"""The page of a report: its numbers are those of the runs, and names are text."""

import base64
import dataclasses
import gzip
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from bsam.lab.analysis.read_runs import read_records
from bsam.lab.analysis.row_comparison import (
    BETTER,
    CONFIRMED,
    CONTRADICTED,
    NOT_CONFIRMED,
    NOT_LEARNED,
    OPEN,
    TOO_FEW,
    WORSE,
)
from bsam.lab.analysis.run_record import Record, Records
from bsam.lab.report.page import html_page, prediction_plots
from bsam.lab.report.page.html_page import page_data, page_html, script_json, write_page
from bsam.lab.training.config import Run
from page_runs import EVIL, METHODS, embedded, example_records, score_of, surface
from pose_runs import write_predictions

FILES = Path(html_page.__file__).parent / "files"


@pytest.fixture
def records(tmp_path):
    return example_records(tmp_path)


@pytest.fixture
def data(records):
    return embedded(page_html(page_data(records, title="Ours")))


def figure(data, name, experiment=0):
    return data["figures"][f"figure-{experiment}-{name}"]


def traces(data, name):
    """The traces of a figure by method, without bands."""
    return {
        trace["method"]: trace
        for panel in figure(data, name)["panels"]
        for trace in panel["data"]
        if "band" not in trace
    }


def test_numbers_are_those_of_the_run_directories(out, tmp_path):
    random = np.random.default_rng(0)
    _, states = out("label-noise", seeds=3)
    scores, memorised, eigenvalues = {}, {}, {}
    for folder in (state.path for state in states):
        config = json.loads((folder / "config.json").read_text())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines[-1]["test_accuracy"] = random.uniform(0.5, 0.9)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        key = config["model"], config["data"], config["label_noise"], config["method"], str(config["arguments"])
        scores.setdefault(key, {})[config["seed"]] = 100 * lines[-1]["test_accuracy"]
        memorised.setdefault(key, []).append(100 * lines[-1]["memorised"])
        if (folder / "curvature.json").exists():
            eigenvalue = json.loads((folder / "curvature.json").read_text())["top_eigenvalue"]
            eigenvalues.setdefault(key, []).append(eigenvalue)

    data = embedded(page_html(page_data(read_records([tmp_path]))))
    rows = [row for experiment in data["experiments"] for row in experiment["rows"]]
    assert len(rows) == len(scores) > 5
    found = {round(row["mean"], 9): row for row in rows}
    for key, by_seed in scores.items():
        numbers = np.array([by_seed[seed] for seed in range(3)])
        row = found[round(numbers.mean(), 9)]
        assert row["n"] == 3
        assert row["std"] == pytest.approx(numbers.std(ddof=1))
        assert row["memorised"]["mean"] == pytest.approx(np.mean(memorised[key]))
        if key in eigenvalues:
            assert row["top_eigenvalue"]["mean"] == pytest.approx(np.mean(eigenvalues[key]))
        base = np.array([scores[*key[:3], "base", "{}"][seed] for seed in range(3)])
        if key[3] == "base":
            assert row["difference"] is None
            continue
        test = stats.ttest_rel(numbers, base)
        interval = test.confidence_interval(0.95)
        expected = {"mean": (numbers - base).mean(), "low": interval.low, "high": interval.high, "p": test.pvalue}
        assert row["difference"] == pytest.approx({**expected, "n": 3}, rel=1e-9)


def test_rows_runs_and_problems(data):
    (experiment,) = data["experiments"]
    assert (data["title"], experiment["unit"], experiment["baseline"]) == ("Ours", "test accuracy in %", "SGD")
    rows = {row["method"]: row for row in experiment["rows"]}
    assert list(rows) == [*METHODS, "GSAM"]
    for method, (passes, radius, _) in METHODS.items():
        row, scores = rows[method], [score_of(method, seed) for seed in range(3)]
        assert (row["mean"], row["std"]) == pytest.approx((np.mean(scores), np.std(scores, ddof=1)))
        assert (row["n"], row["passes"], row["radius"], row["seconds"]) == (3, passes, radius, 2.0 * passes)
        assert row["diverged"] == (method == "SAM")
        assert row["memorised"]["mean"] == pytest.approx(30)
    assert (rows["SGD"]["published"], rows["SAM"]["published"]) == (61.5, None)
    assert rows["GSAM"]["unfinished"] == 1
    assert (rows["GSAM"]["mean"], rows["GSAM"]["difference"]) == (None, None)
    runs = {run["name"]: run for run in experiment["runs"]}
    assert runs["half"]["state"] == "unfinished"
    assert (runs["half"]["epochs_done"], runs["half"]["epochs"]) == (10, 20)
    assert runs["diverged"]["reason"] == "the loss of step 7 is nan"
    assert data["problems"] == ["folder/broken: metrics.jsonl <b>cannot</b> be read"]


@pytest.mark.parametrize("name", ["SAM", "sam"])
def test_verdicts_of_the_named_baseline_are_first(records, name):
    (experiment,) = page_data(records, baseline=name)["experiments"]
    assert experiment["baseline"] == "SAM"
    by_method = {row["method"]: row["difference"] for row in experiment["rows"]}
    assert by_method["SAM"] is None
    gaps = [score_of("SGD", seed) - score_of("SAM", seed) for seed in range(3)]
    assert by_method["SGD"]["mean"] == pytest.approx(np.mean(gaps))
    verdicts = page_data(records, baseline=name)["verdicts"]
    assert verdicts[0]["group"] == "baseline"
    assert verdicts[0]["claim"] == "SGD against SAM: DigitsNet, digits 0"
    assert {verdict["experiment"] for verdict in verdicts} == {"DigitsNet, digits 0"}
    assert page_data(records, baseline="unknown")["experiments"][0]["baseline"] == "SGD"


def test_each_experiment_has_its_own_baseline(tmp_path):
    first, second = (example_records(tmp_path / name, experiments=2) for name in "ab")
    runs = [run for run in first.runs if run.experiment.endswith("0")]
    runs += [run for run in second.runs if run.experiment.endswith("1") and run.method != "SGD"]
    data = page_data(Records(tuple(runs), ()))
    assert [experiment["baseline"] for experiment in data["experiments"]] == ["SGD", "SAM"]
    claims = [(verdict["claim"].split(" against ")[1], verdict["experiment"]) for verdict in data["verdicts"]]
    assert len(claims) > 4
    assert set(claims) == {
        (f"{base}: DigitsNet, digits {n}", f"DigitsNet, digits {n}") for n, base in ((0, "SGD"), (1, "SAM"))
    }


def test_names_and_titles_are_text_only(records):
    html = page_html(page_data(records, title="{{data}} </title><script>alert(1)</script>")).decode()
    assert html.count("<script") == (FILES / "page.html").read_text().count("<script")
    assert "document.title = 'broken'</script>" not in html
    assert "<b>cannot" not in html
    assert "<b>dog" not in html
    assert "<title>{{data}} &lt;/title&gt;&lt;script&gt;alert(1)&lt;/script&gt;</title>" in html
    data = embedded(html.encode())
    assert any(run["method"] == EVIL for run in data["experiments"][0]["runs"])
    assert "<b>dog</b>" in figure(data, "classes")["panels"][0]["layout"]["xaxis"]["ticktext"]


def test_the_script_makes_no_html_and_loads_nothing():
    script = (FILES / "page.js").read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in script
    text = script + (FILES / "page.html").read_text() + (FILES / "page.css").read_text()
    assert set(re.findall(r"https?://[\w./]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text


def test_numbers_that_are_not_finite_become_null():
    assert json.loads(script_json({"a": [np.nan, -np.inf, 1.5], "b": ("<", None)})) == {
        "a": [None, None, 1.5],
        "b": ["<", None],
    }


def test_plotly_is_embedded_whole(records, tmp_path):
    from plotly.offline import get_plotlyjs

    write_page(tmp_path / "page.html", page_data(records))
    html = (tmp_path / "page.html").read_bytes()
    encoded = html.split(b'id="plotly">')[1].split(b"</script>")[0]
    assert gzip.decompress(base64.b64decode(encoded)).decode() == get_plotlyjs()


def test_without_plotly_the_page_has_the_tables(records, monkeypatch):
    html_page._plotly.cache_clear()
    monkeypatch.setattr(html_page, "find_spec", lambda name: None)
    html = page_html(page_data(records))
    html_page._plotly.cache_clear()
    assert b'id="plotly"></script>' in html
    assert len(html) < 300_000
    assert embedded(html)["experiments"][0]["rows"]


def test_fifty_runs_stay_small_and_curves_are_thinned(tmp_path):
    records = example_records(tmp_path, seeds=10, epochs=1000)
    assert len(records.runs) > 40
    html = page_html(page_data(records))
    assert len(html) < 6e6
    line = traces(embedded(html), "score")["SGD"]
    assert len(line["x"]) == len(line["y"]) == 200
    assert (line["x"][0], line["x"][-1]) == (1, 1000)
    probe = traces(embedded(html), "probe")["SGD"]
    assert len(probe["x"]) <= 200


def test_curves_are_means_with_bands(data):
    scores = np.array([score_of("SAM", seed) for seed in range(3)])
    line = traces(data, "score")["SAM"]
    np.testing.assert_allclose(line["y"], [scores.mean() * e / 20 for e in line["x"]], rtol=1e-4)
    (band,) = [t for t in figure(data, "score")["panels"][0]["data"] if "band" in t and t["method"] == "SAM"]
    n = len(line["x"])
    np.testing.assert_allclose(np.subtract(band["y"][n - 1], line["y"][-1]), scores.std(ddof=1), rtol=1e-3)
    np.testing.assert_allclose(np.subtract(line["y"][-1], band["y"][n]), scores.std(ddof=1), rtol=1e-3)
    unfinished = traces(data, "loss")["GSAM, unfinished"]
    assert (len(unfinished["x"]), unfinished["dotted"]) == (10, True), "an unfinished run is drawn as far as it is"
    assert "GSAM" not in traces(data, "loss")
    assert traces(data, "memorised")["SGD"]["y"][-1] == pytest.approx(30)


def test_scores_against_cost_and_radius(data):
    cost = traces(data, "cost")
    assert [trace["customdata"] for trace in cost.values()] == [[1], [2], [2], [3]]
    assert len({trace["x"][0] for trace in cost.values()}) == 4, "equal costs are shifted"
    assert cost["SGD"]["y"] == pytest.approx([60])
    lines = traces(data, "radius")
    assert lines["SAM"]["x"] == [0.1, 0.2]
    assert lines["SAM"]["y"] == pytest.approx([80, 84])
    assert lines["SGD"]["y"] == pytest.approx([60, 60]), "the base optimizer is a horizontal line"
    assert lines[EVIL]["x"] == [0.2]


def test_lines_of_radii_join_rows_that_differ_only_in_radii(tmp_path):
    rows = {
        "SAM": ("sam", {}, 0.05),
        "SAM (sum)": ("sam", {"rho": 0.1, "rho_floor": 0.1}, 0.1),
        "SAM, rho 0.2": ("sam", {"rho": 0.2}, 0.2),
        "SAM (follow)": ("sam", {"rho": 0.1, "rho_floor": 0.05}, 0.1),
        "SAM (follow), rho 0.2, rho_floor 0.1": ("sam", {"rho": 0.2, "rho_floor": 0.1}, 0.2),
        "BSAM (2 passes)": ("bsam", {"passes": 2}, 0.1),
        "BSAM (2 passes), rho_max 0.1, rho_min 0.1, every 1": (
            *("bsam", {"passes": 2, "rho_max": 0.1, "rho_min": 0.1}),
            0.2,
        ),
        "BSAM (2 passes), rho_max 0.05, rho_min 0.05, every 5": ("bsam", {"passes": 2, "every": 5}, 0.1),
        "BSAM (2 passes), rho_max 0.1, rho_min 0.1, every 5": (
            *("bsam", {"passes": 2, "rho_max": 0.1, "rho_min": 0.1, "every": 5}),
            0.2,
        ),
        "LookSAM": ("looksam", {}, 0.1),
    }
    about = {"state": "finished", "reason": None, "score": 80.0, "unit": "%", "higher_is_better": True}
    runs = [
        Record(title, tmp_path, "E", title, 0, radius=radius, settings=Run(method, arguments).settings(), **about)
        for title, (method, arguments, radius) in rows.items()
    ]
    runs += [
        Record(title, tmp_path, "E", title, 0, radius=r, **about) for title, r in (("X", 0.1), ("X, rho 0.2", 0.2))
    ]
    lines = traces(page_data(Records(tuple(runs), ())), "radius")
    assert {name: line["x"] for name, line in lines.items()} == {
        "SAM": [0.05, 0.1, 0.2],
        "SAM (follow)": [0.1, 0.2],
        "BSAM (2 passes)": [0.1, 0.2],
        "BSAM (2 passes), every 5": [0.1, 0.2],
        "LookSAM": [0.1],
        "X": [0.1, 0.2],
    }


def test_one_epoch_is_a_marker(tmp_path):
    data = page_data(example_records(tmp_path, epochs=1))
    points = traces(data, "score")
    assert {point["mode"] for point in points.values()} == {"markers"}
    assert points["SAM"]["y"] == pytest.approx([80])
    assert points["SAM"]["error_y"]["array"] == pytest.approx([np.std([79.25, 80, 80.75], ddof=1)])
    assert figure(data, "score")["panels"][0]["layout"]["xaxis"]["tickvals"] == [1]
    assert "bars of one standard deviation" in figure(data, "score")["caption"]


def test_one_reading_of_the_probe_is_a_marker(records):
    runs = tuple(dataclasses.replace(run, probe=run.probe[:1]) for run in records.runs)
    assert {trace["mode"] for trace in traces(page_data(Records(runs, ())), "probe").values()} == {"markers"}


def test_no_curves_if_only_the_last_epoch_was_kept(records):
    last = [dataclasses.replace(run, epochs=run.epochs[-1:]) for run in records.runs if run.state == "finished"]
    kept = page_data(Records(tuple(last), ()))["figures"]
    assert "figure-0-cost" in kept
    assert not {"figure-0-score", "figure-0-loss", "figure-0-memorised"} & kept.keys()
    mixed = [first if first.seed == 0 else other for first, other in zip(records.runs, last, strict=False)]
    assert len(traces(page_data(Records(tuple(mixed), ())), "score")["SAM"]["x"]) == 20


def test_few_epochs_have_a_tick_each(tmp_path):
    few, many = (page_data(example_records(tmp_path, epochs=n)) for n in (4, 20))
    assert figure(few, "loss")["panels"][0]["layout"]["xaxis"]["tickvals"] == [1, 2, 3, 4]
    assert "tickvals" not in figure(many, "loss")["panels"][0]["layout"]["xaxis"]


def test_unfinished_seeds_have_lines_of_their_own(records):
    sam = next(run for run in records.runs if run.method == "SAM")
    unfinished = dataclasses.replace(sam, seed=5, state="unfinished", score=None, epochs=sam.epochs[:3])
    waiting = dataclasses.replace(unfinished, seed=6, reason="not started", epochs=())
    data = page_data(Records((*records.runs, unfinished, waiting), ()))
    lines = traces(data, "score")
    assert lines["SAM"]["x"][-1] == 20, "the mean is that of the finished seeds"
    assert (lines["SAM, unfinished"]["x"], lines["SAM, unfinished"]["dotted"]) == ([1, 2, 3], True)
    assert lines["SAM, unfinished"]["style"] == lines["SAM"]["style"]
    assert "SAM, diverged" not in lines
    assert "Each run that has not finished is a dotted line." in figure(data, "score")["caption"]


def test_runs_that_have_not_started(records):
    half = next(run for run in records.runs if run.name == "half")
    waiting = dataclasses.replace(half, name="waiting", seed=1, reason="not started", epochs=())
    (experiment,) = page_data(Records((*records.runs, waiting), ()))["experiments"]
    (run,) = [run for run in experiment["runs"] if run["name"] == "waiting"]
    assert (run["state"], run["reason"]) == ("not started", None)
    row = experiment["rows"][-1]
    assert (row["method"], row["unfinished"], row["not_started"]) == ("GSAM", 1, 1)


def test_one_style_per_method_in_all_figures(data):
    styles = {}
    for drawn in data["figures"].values():
        for trace in (trace for panel in drawn.get("panels", ()) for trace in panel["data"]):
            assert styles.setdefault(trace["method"], trace["style"]) == trace["style"]
    assert styles["SAM"][0] == styles["SAM, rho 0.2"][0], "one colour for the radii of a method"
    assert len({tuple(style) for style in styles.values()}) == len(styles)
    assert len({style[1] for style in styles.values()}) == len(styles), "dashes and markers differ without colours"


def test_sharpness_during_training(data):
    panels = figure(data, "probe")["panels"]
    assert [panel["layout"]["yaxis"]["title"]["text"][:4] for panel in panels] == ["MaxS", "MinS", "BilS", "cosi"]
    assert panels[0]["data"][0]["y"] == pytest.approx([1, 2, 3, 4, 5])
    assert panels[3]["data"][0]["y"] == pytest.approx([0.1] * 5)


def test_eigenvalues_and_densities(data):
    panels = figure(data, "eigenvalues")["panels"]
    assert [sum(panel["data"][0]["y"]) for panel in panels] == [20] * 4
    assert len({tuple(panel["data"][0]["x"]) for panel in panels}) == 1, "one scale"
    assert panels[1]["title"] == "SAM: max 40, mean 21 (cross-entropy, 1,000 training samples)"
    assert "; cross-entropy, 1,000 training samples, with" in figure(data, "density")["caption"]
    density = traces(data, "density")["SGD"]
    x, y = np.array(density["x"]), np.array(density["y"])
    assert np.trapezoid(y, x) == pytest.approx(1, rel=1e-2)
    assert x[y.argmax()] == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize(
    ("settings", "loss"),
    [({}, "cross-entropy"), ({"task": "pose"}, "SimCC loss"), ({"limit_train": 64}, "cross-entropy")],
)
def test_eigenvalues_of_tables_and_figures_have_different_labels(records, settings, loss):
    """Tables show those of training, figures those of `bsam flatness`."""
    runs = [
        dataclasses.replace(
            run,
            settings={**run.settings, **settings},
            flatness=run.flatness and {**run.flatness, "samples": 500 if run.method == "SAM" else 1000},
        )
        for run in records.runs
    ]
    data = page_data(Records(tuple(runs), ()))
    assert data["experiments"][0]["top_eigenvalue"] == f"λmax, {loss}, at most 256 training samples"
    titles = [panel["title"] for panel in figure(data, "eigenvalues")["panels"]]
    assert titles[0].endswith(f" ({loss}, 1,000 training samples)")
    assert titles[1].endswith(f" ({loss}, 500 training samples)")
    both = f"; {loss}, 1,000 training samples or {loss}, 500 training samples, with"
    assert both in figure(data, "density")["caption"]
    trained = [dataclasses.replace(run, flatness=None) for run in runs]
    caption = figure(page_data(Records(tuple(trained), ())), "contours")["caption"]
    assert f"; {loss}, at most 256 training samples, with the labels used in training." in caption


def test_the_page_knows_every_outcome():
    """The tally of verdicts counts only those with a sign."""
    signs = re.search(r"const SIGNS = {(.*?)};", (FILES / "page.js").read_text("utf-8"), re.DOTALL)[1]
    outcomes = {CONFIRMED, CONTRADICTED, NOT_CONFIRMED, NOT_LEARNED, BETTER, WORSE, OPEN, TOO_FEW}
    assert {key.strip('"') for key in re.findall(r'("[^"]+"|\w+):', signs)} == outcomes


def test_landscapes_share_their_scale(data):
    contours, surfaces = figure(data, "contours"), figure(data, "surfaces")
    for drawn in (contours, surfaces):
        assert drawn["panels"][0]["title"] == "SGD: loss 0.1"
        assert drawn["levels"][0] == pytest.approx(0.1)
        assert drawn["levels"][-1] == pytest.approx(0.1 + 2 * 2.0), "twice the height of the flattest"
    z = np.array(surfaces["panels"][0]["data"][0]["z"])
    np.testing.assert_allclose(z, np.array(surface(1.0).loss).T, rtol=1e-4)
    assert "; cross-entropy, 1,000 training samples, with the labels used in training." in contours["caption"]
    steepest = np.array(surfaces["panels"][3]["data"][0]["z"])
    assert steepest.max() == pytest.approx(4.1), "cut off"
    height = np.array(contours["panels"][0]["data"][0]["z"])
    np.testing.assert_allclose(height, np.sqrt((z - 0.1) / 4), atol=1e-3)
    ranges = {tuple(panel["layout"]["scene"]["zaxis"]["range"]) for panel in surfaces["panels"]}
    assert ranges == {(0.1, 4.1)}


def test_panels_name_the_seeds_that_differ(records):
    first, *rest = records.runs
    runs = (dataclasses.replace(first, seed=4), *(run for run in rest if run.method != "SGD"))
    data = page_data(Records(runs, ()))
    for name, title in (("eigenvalues", "max 20, mean 10.5 ("), ("contours", "loss 0.1"), ("surfaces", "loss 0.1")):
        assert figure(data, name)["panels"][0]["title"].startswith(f"SGD, seed 4: {title}")
        assert figure(data, name)["panels"][1]["title"].startswith("SAM, seed 0: ")


def test_predictions_of_classes(data):
    by_method = traces(data, "classes")
    assert by_method["SGD"]["y"] == pytest.approx([80, 90, 100])
    rows = figure(data, "mistakes")["rows"]
    assert [row["title"] for row in rows] == list(METHODS)
    item = rows[0]["items"][0]
    assert (item["text"], item["small"]) == ("<b>dog</b>, 90%", "true: cat")
    picture = Image.open(io.BytesIO(base64.b64decode(item["src"].removeprefix("data:image/png;base64,"))))
    np.testing.assert_array_equal(np.array(picture), np.arange(64).reshape(8, 8))


def test_skeletons(tmp_path):
    write_predictions(tmp_path)
    run = Record("a", tmp_path, "LSP", "Adam", 0, "finished", None, 60.0, "PCK", True)
    runs = [dataclasses.replace(run, predictions=tmp_path / "predictions.npz")]
    drawn = figure(page_data(Records(tuple(runs), ())), "skeletons")
    assert [row["title"] for row in drawn["rows"]] == ["label", "Adam"]
    assert len(drawn["pictures"]) == 3
    labels, found = ([len(item["lines"]) for item in row["items"]] for row in drawn["rows"])
    assert found[0] == found[1] == labels[0] > labels[1], "a joint of the second person is not labelled"
    arrays = np.load(tmp_path / "predictions.npz")
    ends = {tuple(line[1:3]) for line in drawn["rows"][1]["items"][0]["lines"]}
    assert ends <= {tuple(np.round((joint + 0.5) / 32, 4).tolist()) for joint in arrays["found"][0].astype(float)}


def test_large_pictures_are_scaled_down():
    uri = prediction_plots.data_uri(np.zeros((300, 200, 3), np.uint8))
    picture = Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/jpeg;base64,"))))
    assert max(picture.size) == 128


def test_what_is_damaged_is_a_problem_of_the_page(records, tmp_path):
    first, *rest = records.runs
    assert first.predictions is not None
    first.predictions.write_bytes(b"no archive")
    broken = dataclasses.replace(first, flatness={"eigenvalues": {"none": 1}, "density": {"nodes": "x"}})
    data = page_data(Records((broken, *rest), ()))
    assert len(data["problems"]) == 3
    assert str(first.predictions) in data["problems"][2]
    where = f"check SGD-seed0 in {first.folder}."
    assert data["problems"][0] == (
        f"DigitsNet, digits 0: the figure 'eigenvalues' is left out (KeyError: 'values'): {where}"
    )
    assert data["problems"][1].endswith(where)
    assert [row["title"] for row in figure(data, "mistakes")["rows"]] == list(METHODS)[1:]


def test_damaged_predictions_are_those_of_one_run(records):
    damaged = next(run for run in records.runs if run.method == "SAM")
    arrays = dict(np.load(damaged.predictions))
    np.savez_compressed(damaged.predictions, **arrays | {"truth": np.array([7, 0, 1])})
    (_, problem) = page_data(records)["problems"]
    assert problem.startswith("DigitsNet, digits 0: the figure 'mistakes' is left out (IndexError: ")
    assert problem.endswith(f": check SAM-seed0 in {damaged.folder}.")


def test_no_runs_at_all():
    data = embedded(page_html(page_data(Records((), ("there is nothing",)))))
    assert (data["experiments"], data["verdicts"], data["problems"]) == ([], [], ["there is nothing"])
