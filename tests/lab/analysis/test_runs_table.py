"""Runs as one table: run directories, results.json, CSV files; what cannot be read is named, and the rest is read."""

import hashlib
import json
import math
from pathlib import Path

import pytest

from bsam.lab.analysis.runs_table import COLUMNS, read_epochs, read_runs
from bsam.lab.analysis.significance import compare_family, compare_rows
from bsam.lab.config import Run
from bsam.lab.recipes import RECIPES
from bsam.lab.recipes.plan import TUNING_SEED, describe
from bsam.lab.recipes.variants import passes_of
from bsam.lab.training.run_dir import run_dir_name
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


ENTRY = {"run_dir": run_dir_name(Run("sam", epochs=2)), "sha256": None, "samples": 256}
DAMAGED_ENTRIES = (
    5,
    {"samples": 256},
    {**ENTRY, "samples": "many"},
    {**ENTRY, "eigenvalues": {"maximum": "high", "converged": True}},
    {**ENTRY, "eigenvalues": 5},
    {**ENTRY, "run_dir": ["a"]},
    {name: value for name, value in ENTRY.items() if name != "sha256"},
)


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
        measured = json.loads((state.path / "flatness.json").read_text())["models"] if run.curvature else []
        assert (row["flatness"] or []) == measured
        maxima = [entry["eigenvalues"]["maximum"] for entry in measured] or [math.nan]
        assert [row["top_eigenvalue"]] == pytest.approx(maxima, nan_ok=True)
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
    shown = [(row.last, entry["sha256"]) for row in attached.itertuples() for entry in row.flatness if "file" in entry]
    assert len(shown) == len(measured) > 0
    assert all((entry["metrics"], entry["sha256"]) in shown for entry in measured)


def measured(planned, samples, maximum, folder, sha256, **more):
    """Write a ``flatness.json`` with a measurement of the network of a run."""
    key = {"run_dir": run_dir_name(planned), "sha256": sha256, "samples": samples}
    entry = {**key, "eigenvalues": {"values": [maximum, 1.0], "maximum": maximum, "converged": True}, **more}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "flatness.json").write_text(json.dumps({"models": [entry]}))
    return entry


def digest_of(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_a_network_has_the_measurement_with_the_most_samples(train, tmp_path):
    """Wherever its files are, in any order, and also if the run directory has another name."""
    run = Run("sam", epochs=2)
    folder = train(run, "renamed")
    digest = digest_of(folder)
    small = measured(run, 256, 300.0, folder, digest)
    large = measured(run, 1000, 78.0, tmp_path / "large", digest)
    tiny = measured(run, 100, 500.0, tmp_path / "tiny", digest)
    for paths in ([tmp_path], [tmp_path / "tiny", folder, tmp_path / "large"], [tmp_path / "large", folder, tmp_path]):
        (row,) = read(*paths).to_dict("records")
        assert (row["path"], row["top_eigenvalue"], row["eigenvalue_samples"]) == (folder, 78.0, 1000)
        assert row["flatness"] == [large, small, tiny]


def test_a_measurement_belongs_to_the_weights_that_were_measured(train, tmp_path):
    """Not to those of a run with equal settings and metrics."""
    run, other = Run("sam", epochs=2), Run("sam", epochs=2, seed=1)
    folder = train(run, "a")
    train(other, "b")
    measured(run, 1000, 78.0, tmp_path / "flatness", digest_of(folder))
    (folder / "model.safetensors").write_bytes(b"trained again")
    problems = []
    runs = read_runs(tmp_path, problems)
    assert runs["flatness"].isna().all()
    assert runs["top_eigenvalue"].isna().all()
    (problem,) = problems
    assert run_dir_name(run) in problem
    assert "measure it again" in problem
    measured(run, 1000, 78.0, tmp_path / "flatness", digest_of(folder))
    found = read(tmp_path).set_index("name")["top_eigenvalue"].to_dict()
    assert found == pytest.approx({"a": 78.0, "b": math.nan}, nan_ok=True)


def test_a_measured_run_whose_directory_is_gone_is_a_row(tmp_path):
    """Its weights are known from the measurement; a run that only served to tune others is no row."""
    metrics = {"epoch": 2, "test_accuracy": 0.9, "holdout_accuracy": 0.8, "seconds": 1.0}
    for run in (Run("sam", epochs=2), Run("sam", epochs=2, seed=10_000, eval_split="holdout")):
        known = {"file": "runs/gone", "run": run.settings(), "metrics": metrics}
        measured(run, 1000, 78.0, tmp_path / str(run.seed), "a", **known)
        measured(run, 2000, 79.0, tmp_path / str(run.seed) / "again", "a", **known)
        measured(run, 3000, 80.0, tmp_path / str(run.seed) / "other", "b", **known)
    problems = []
    (row,) = read_runs(tmp_path / "0", problems).to_dict("records")
    assert (row["name"], row["score"], row["top_eigenvalue"], row["seed"]) == ("gone", 90.0, 79.0, 0)
    assert [problem for problem in problems if "measure it again" in problem] == problems != []
    assert read_runs(tmp_path / "10000", []).empty


def test_a_failed_measurement_is_no_number(train, tmp_path):
    for seed, wrong in enumerate(({"maximum": None, "converged": False}, {"maximum": 3.0, "converged": False})):
        run = Run("sam", epochs=2, seed=seed)
        folder = train(run, f"{seed}")
        measured(run, 256, 0.0, folder, digest_of(folder), eigenvalues=wrong)
    assert read(tmp_path)["top_eigenvalue"].isna().all()


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
        *(("flatness.json", json.dumps({"models": [entry]})) for entry in DAMAGED_ENTRIES),
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
