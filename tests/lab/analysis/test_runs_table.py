"""Runs as one table: run directories, results.json, CSV files; what cannot be read is named, and the rest is read."""

import json
import math
from pathlib import Path

import pytest

from bsam.lab.analysis.runs_table import COLUMNS, read_epochs, read_runs
from bsam.lab.analysis.significance import compare_family, compare_rows
from bsam.lab.config import Run
from bsam.lab.recipes import RECIPES
from bsam.lab.recipes.planning import TUNING_SEED, describe
from bsam.lab.recipes.variants import passes_of
from fake_fit import FakeFit

RESULTS = Path(__file__).parents[3] / "results"


@pytest.fixture
def train(tmp_path):
    """Write the directory of a run without training; returns it."""

    def fit(run, name, score=0.9, about=None):
        folder = tmp_path / "runs" / name
        FakeFit(lambda run: score)(run, folder)
        if about is not None:
            (folder / "run.json").write_text(json.dumps(about))
        return folder

    return fit


def read(*paths):
    """The table, without any problem."""
    problems = []
    runs = read_runs(paths, problems)
    assert problems == []
    return runs


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_rows_have_the_numbers_of_the_directories(name, out, tmp_path):
    _, states = out(name)
    runs = read(tmp_path).set_index("path")
    assert sorted(runs.index) == sorted(state.path for state in states)
    epochs = read_epochs(runs.reset_index())
    for state in states:
        row, run = runs.loc[state.path], state.run
        lines = [json.loads(line) for line in (state.path / "metrics.jsonl").read_text().splitlines()]
        measure = "pck" if run.task.name == "pose" else "accuracy"
        assert row["score"] == pytest.approx(100 * lines[-1][f"test_{measure}"], rel=1e-12)
        assert (row["state"], row["seed"], row["epochs_done"]) == ("finished", run.seed, run.epochs)
        assert row["settings"] == run.settings()
        assert row["passes"] == passes_of(run)
        curvature = json.loads((state.path / "curvature.json").read_text()) if run.curvature else {}
        assert row["top_eigenvalue"] == pytest.approx(curvature.get("top_eigenvalue", math.nan), nan_ok=True)
        assert row["memorised"] == pytest.approx(100 * lines[-1].get("memorised", math.nan), nan_ok=True)
    losses = [line["train_loss"] for state in states for line in state.epochs]
    assert sorted(epochs["train_loss"]) == sorted(losses)
    assert not runs.duplicated(["experiment", "row", "seed"]).any()


def test_all_of_results_is_read():
    runs = read(RESULTS)
    assert runs["state"].value_counts()["unfinished"] == 3
    finished = {run["last"]["seconds"]: run for run in runs.to_dict("records") if run["state"] == "finished"}
    kept = 0
    for file in RESULTS.glob("*/results.json"):
        for entry in json.loads(file.read_text())["runs"]:
            if entry["metrics"] is not None and entry["state"] == "done":
                last = json.loads((file.parent / entry["metrics"]).read_text().splitlines()[-1])
                score = 100 * last.get("test_accuracy", last.get("test_pck"))
                assert finished[last["seconds"]]["score"] == pytest.approx(score, rel=1e-12)
                kept += 1
    assert kept > 100
    measured = [entry for path in RESULTS.glob("*/flatness*.json") for entry in json.loads(path.read_text())["models"]]
    attached = runs[runs["flatness"].notna()]
    assert len(attached) == len(measured) > 0
    assert all(row.flatness["metrics"] == row.last for row in attached.itertuples())


def test_a_run_says_what_it_is(train):
    run = Run("sam", {"rho": 0.2}, epochs=2)
    plain, told = train(run, "a"), train(run, "b", about=describe(run, experiment="Mine", row="Ours", place=7))
    found = read(plain, told).set_index("name")
    assert dict(found.loc["b", ["experiment", "row", "place"]]) == {"experiment": "Mine", "row": "Ours", "place": 7}
    assert found.loc["a", "row"] == describe(run)["row"]
    assert found.loc["a", "radius"] == 0.2


def test_states_of_runs(train, tmp_path):
    for seed, (lines, network) in enumerate([(2, True), (2, False), (1, False), (0, False)]):
        folder = train(Run("sgd", epochs=2, seed=seed), f"s{seed}")
        metrics = folder / "metrics.jsonl"
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:lines]))
        if not network:
            (folder / "model.safetensors").unlink()
    (tmp_path / "runs" / "s2" / "diverged.json").write_text(json.dumps({"reason": "the loss is nan"}))
    found = read(tmp_path).set_index("seed")
    assert found["state"].to_dict() == {0: "finished", 1: "unfinished", 2: "diverged", 3: "not started"}
    assert found.loc[2, "reason"] == "the loss is nan"
    assert found["score"].notna().to_dict() == {0: True, 1: False, 2: False, 3: False}


def test_trials_are_left_out_and_rows_keep_the_order_of_their_places(train, tmp_path):
    train(Run("sgd", epochs=1, seed=TUNING_SEED, eval_split="validation"), "trial")
    for place, method in enumerate(("sam", "sgd")):
        run = Run(method, epochs=1)
        train(run, method, about=describe(run, place=place, experiment="E"))
    assert read(tmp_path)["row"].tolist() == ["SAM", "SGD"]


def test_one_of_two_copies_is_kept_and_another_result_is_a_problem(train, tmp_path):
    run = Run("sgd", epochs=2)
    train(run, "a")
    train(run, "b")
    assert len(read(tmp_path)) == 1
    longer = read_runs(tmp_path)["epochs_done"].iloc[0]
    half = train(run, "d")
    lines = (half / "metrics.jsonl").read_text().splitlines(keepends=True)
    (half / "metrics.jsonl").write_text(lines[0])
    (half / "model.safetensors").unlink()
    problems = []
    assert read_runs(tmp_path, problems)["epochs_done"].tolist() == [longer]
    assert "runs/d" in problems[0]
    (half / "config.json").unlink()
    train(run, "c", score=0.8)
    problems = []
    assert len(read_runs(tmp_path, problems)) == 1
    assert len(problems) == 1
    assert "runs/c" in problems[0]


def test_of_two_unfinished_copies_the_longer_one_is_kept(train, tmp_path):
    for name, epochs in (("a", 1), ("b", 2)):
        folder = train(Run("sgd", epochs=3), name)
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(lines[:epochs]))
        (folder / "model.safetensors").unlink()
    assert read_runs(tmp_path, [])["epochs_done"].tolist() == [2]


def test_seconds_of_runs_that_shared_a_device_are_not_shown(train, tmp_path):
    for seed, shared in enumerate((False, True)):
        run = Run("sgd", epochs=3, seed=seed)
        metrics = train(run, f"s{seed}", about=describe(run, shared=shared)) / "metrics.jsonl"
        metrics.write_text(metrics.read_text().replace('"seconds": 1.0', '"seconds": 9.0', 1))  # compiles
    assert read(tmp_path)["seconds"].fillna(-1).tolist() == [1.0, -1]


def test_results_of_others_in_a_csv_file(train, tmp_path):
    folder = train(Run("sgd", epochs=2), "a")
    title = read(folder)["experiment"].iloc[0]
    lines = [
        "experiment, method, seed, score, radius, source",
        f'"{title}", SGD, 0, 91.5,,',
        f'"{title}", New, 0, 92, 0.1, TR 7',
    ]
    (tmp_path / "theirs.csv").write_text("\n".join(lines) + "\n")
    found = read(folder, tmp_path / "theirs.csv")
    assert found["row"].tolist() == ["SGD", "SGD (theirs)", "New (TR 7)"]
    assert found["score"].tolist() == [pytest.approx(90.0), 91.5, 92.0]
    assert set(found["unit"]) == {"test accuracy in %"}
    assert found["radius"].iloc[2] == 0.1


def test_others_results_join_the_table_whose_title_begins_like_theirs(train, tmp_path):
    title = "ResNet-18, CIFAR-10, 200 epochs"
    folders = [
        train(run, name, about=describe(run, experiment=f"{title}, {name}"))
        for run, name in ((Run("sgd", epochs=2), "batch 256"), (Run("sgd", epochs=2), "lr 0.2"))
    ]
    file = tmp_path / "theirs.csv"
    file.write_text(f'experiment,method,seed,score\n"{title}",New,0,90\n"{title[:-1]}",Other,0,90\n')
    joined = read(file, folders[0]).set_index("row")
    assert joined.loc["New", ["experiment", "unit"]].tolist() == [f"{title}, batch 256", "test accuracy in %"]
    assert joined.loc["Other", "experiment"] == title[:-1], "titles are cut at commas"
    problems = []
    runs = read_runs([*folders, file], problems).set_index("row")
    assert runs.loc["New", "experiment"] == title
    assert len(problems) == 1
    assert "batch 256" in problems[0]
    assert "lr 0.2" in problems[0]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("experiment,method,seed\nE,A,0\n", "score"),
        ("experiment,method,seed,score,colour\nE,A,0,1,red\n", "colour"),
        ("experiment,method,seed,score\nE,A,-1,1\n", "seed"),
        ("experiment,method,seed,score\nE,A,0,inf\n", "score"),
        ("experiment,method,seed,score\nE,,0,1\n", "method"),
        ("experiment,method,seed,score\nResNet-18, CIFAR-10,A,0,1\n", "quotes"),
        ("", "CSV"),
    ],
)
def test_wrong_csv_files_are_named(tmp_path, content, word):
    (tmp_path / "x.csv").write_text(content)
    problems = []
    assert read_runs(tmp_path / "x.csv", problems).empty
    assert len(problems) == 1
    assert "x.csv" in problems[0]
    assert word in problems[0]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "{"),
        ("config.json", '{"method": "nope"}'),
        ("metrics.jsonl", "not JSON\n"),
        ("metrics.jsonl", '{"epoch": 1}\n{"epoch": 2}\n'),
        ("run.json", "[]"),
        ("run.json", '{"a": 1}'),
        *(("run.json", value) for value in ({"experiment": 3}, {"radius": "x"}, {"radius": [1]}, {"radius": math.inf})),
        *(("run.json", value) for value in ({"published": "97"}, {"passes": "2"}, {"chosen": 5}, {"tuned": "no"})),
        ("curvature.json", '{"top_eigenvalue": "high"}'),
    ],
)
def test_damaged_files_are_named_and_the_rest_is_read(train, tmp_path, file, content):
    train(Run("sgd", epochs=2), "good")
    run = Run("sam", epochs=2)
    content = content if isinstance(content, str) else json.dumps({**describe(run), **content})
    (train(run, "bad") / file).write_text(content)
    problems = []
    assert "SGD" in set(read_runs(tmp_path, problems)["row"])
    assert len(problems) == 1
    assert "bad" in problems[0]


@pytest.mark.parametrize("note", [{"scores": {}}, {"a": 1}, {"scores": {"pck": "high"}}, {"scores": 5}])
def test_a_damaged_baseline_is_harmless(train, tmp_path, note):
    run = Run.of("sgd", epochs=2, task="pose", data="stick_figures", model="simcc_resnet8")
    folder = train(run, "a")
    (folder / "baseline.json").write_text(json.dumps(note))
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("test_accuracy", "test_pck"))
    assert read(tmp_path)["failure"].tolist() == [""]


def test_two_scores_of_one_seed_in_a_csv_file(tmp_path):
    (tmp_path / "x.csv").write_text("experiment,method,seed,score\nE,A,0,90\nE,A,0,10\nE,A,1,90\nE,A,1,90\n")
    problems = []
    assert read_runs(tmp_path / "x.csv", problems)["seed"].tolist() == [0, 1]
    assert len(problems) == 1


def test_without_a_list_problems_are_warnings(tmp_path):
    with pytest.warns(UserWarning, match="does not exist"):
        assert read_runs(tmp_path / "none").columns.tolist() == list(COLUMNS)


def test_the_lines_of_the_guide_without_any_run(tmp_path):
    guide = (RESULTS.parent / "docs/guides/own-analysis.md").read_text()
    code = guide.split("```python\n")[1].split("```")[0]
    with pytest.warns(UserWarning, match="has no runs"):
        exec(code.replace('"runs"', repr(str(tmp_path))))


def test_tables_have_the_same_columns_without_any_run(train):
    runs = read(train(Run("sgd", epochs=1), "a"), train(Run("sam", epochs=1), "b"))
    none = runs.iloc[:0]
    assert compare_rows(none).columns.tolist() == compare_rows(runs).columns.tolist()
    assert compare_rows(runs).columns.tolist() == list(compare_family(runs, [("SAM", "SGD")])[0])
    assert set(read_epochs(none)) == {*read_epochs(runs), "train_loss"} - {"test_accuracy", "seconds"}
