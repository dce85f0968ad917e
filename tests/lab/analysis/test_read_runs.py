"""Runs read from run directories, from results/ and from CSV files; broken ones are named and the rest is read."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bsam.lab.recipes.candidates import TUNING_SEED
from bsam.lab.recipes.choices import tuned_recipe
from bsam.lab.recipes.paper import CLASSIFICATION, RHO_MIN_STUDY

from bsam.lab import cli
from bsam.lab.analysis.read_runs import read_records
from bsam.lab.recipes import RECIPES, recipe_of
from bsam.lab.recipes.variants import passes_of, variants
from bsam.lab.training.config import Run
from bsam.lab.training.run_dir import run_dir_name

RESULTS = Path(__file__).parents[3] / "results"
CIFAR = {"model": "resnet18", "data": "cifar10"}


def write(run, out, score=0.9, epochs=None, date="2026-11-10T00:00:00+00:00", **files):
    """Write a run directory with this last score; further files are given as content by name, without dots."""
    folder = out / run_dir_name(run)
    folder.mkdir(parents=True)
    count = run.epochs if epochs is None else epochs
    measure = "pck" if run.task == "pose" else "accuracy"
    lines = [{"epoch": e, "seconds": 10.0 + e, f"{run.eval_split}_{measure}": 0.5} for e in range(1, count + 1)]
    if lines:
        lines[-1][f"{run.eval_split}_{measure}"] = score
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text(json.dumps(run.settings()))
    (folder / "environment.json").write_text(json.dumps([{"device": "cpu", "date": date}]))
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    return folder


def read(*paths):
    """All runs, and no problem."""
    records = read_records(paths)
    assert records.problems == ()
    return records.runs


def rows(runs):
    return list(dict.fromkeys(record.method for record in runs))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_records_of_a_recipe_have_the_numbers_of_its_directories(name, out, tmp_path):
    _, states = out(name)
    records = {record.folder: record for record in read(tmp_path)}
    assert records.keys() == {state.path for state in states}
    for state in states:
        record, run = records[state.path], state.run
        lines = [json.loads(line) for line in (state.path / "metrics.jsonl").read_text().splitlines()]
        measure = "pck" if run.task == "pose" else "accuracy"
        assert record.score == pytest.approx(100 * lines[-1][f"test_{measure}"], rel=1e-12)
        assert list(record.epochs) == lines
        assert (record.state, record.reason, record.seed) == ("finished", None, run.seed)
        assert record.settings == run.settings()
        assert record.passes == passes_of(run)
        assert record.unit == f"test {'PCK' if run.task == 'pose' else 'accuracy'} in %"
        curvature = json.loads((state.path / "curvature.json").read_text()) if run.curvature else {}
        assert record.top_eigenvalue == curvature.get("top_eigenvalue")
        assert (record.surface is not None) == (curvature.get("surface") is not None)
        assert len(record.probe) == (4 if run.probe else 0)
        assert record.predictions == (state.path / "predictions.npz" if run.task == "pose" else None)
    seeds = [(record.experiment, record.method, record.seed) for record in records.values()]
    assert len(set(seeds)) == len(seeds)


def numbers_in_files():
    """The last score of every finished run in results/, by the seconds of its last epoch."""
    found = {}
    for path in RESULTS.glob("*/*.jsonl"):
        if path.parent.name.startswith("unfinished") or path.parent.name == "shift":  # SAM, shifted is no method
            continue
        last = json.loads(path.read_text().splitlines()[-1])
        found[last["seconds"]] = 100 * last.get("test_accuracy", last.get("test_pck"))
    for path in RESULTS.glob("*/results.json"):
        for run in json.loads(path.read_text())["runs"]:
            if run["last"] is not None:
                found[run["last"]["seconds"]] = 100 * run["last"].get("test_accuracy", run["last"].get("test_pck"))
    return found


def test_all_runs_in_results_are_read_once():
    runs = read(RESULTS)
    finished = {record.epochs[-1]["seconds"]: record.score for record in runs if record.state == "finished"}
    expected = numbers_in_files()
    assert finished.keys() == expected.keys()
    assert all(finished[key] == pytest.approx(expected[key], rel=1e-12) for key in expected)
    assert len(finished) == sum(record.state == "finished" for record in runs)
    others = sorted((record.reason for record in runs if record.state != "finished"), key=len)
    assert set(others[:-3]) == {"not started"}
    assert sorted(others[-3:]) == [f"epoch {n} of 200" for n in (196, 198, 199)]
    measured = [entry for path in RESULTS.glob("*/flatness*.json") for entry in json.loads(path.read_text())["models"]]
    attached = [record for record in runs if record.flatness is not None]
    assert len(attached) == len(measured) > 0
    assert all(record.flatness["metrics"] == record.epochs[-1] for record in attached)
    assert all(record.flatness["run"]["arguments"] == record.settings["arguments"] for record in attached)
    assert all(record.seconds is None for record in runs)  # they shared a GPU


@pytest.mark.parametrize("name", ["cifar10-resnet18", "cifar10-resnet18-noise40", "cifar100-resnet18", "pose"])
def test_rows_are_those_of_the_stored_table(name):
    runs = read(RESULTS / name)
    table = json.loads((RESULTS / name / "results.json").read_text())["table"]
    cells = {
        cell["row"]: cell for cell in table if cell["n"] and cell["column"] in ("CIFAR-10", "CIFAR-100", "40%", "Mean")
    }
    for row, cell in cells.items():
        scores = [record.score for record in runs if record.method == row and record.score is not None]
        if name == "pose":  # one run has 90 epochs
            scores = [r.score for r in runs if r.method == row and r.score is not None and "30 epochs" in r.experiment]
        assert len(scores) == cell["n"]
        assert statistics.fmean(scores) == pytest.approx(cell["mean"])
        if name != "pose":
            missing = [record for record in runs if record.method == row and record.state == "unfinished"]
            assert len(missing) == cell["missing"]
            paper = cell["paper"] and cell["paper"]["mean"]
            assert {record.published for record in runs if record.method == row} == {paper}


def test_titles_of_the_noise_runs():
    runs = read(RESULTS / "cifar10-resnet18-noise40")
    assert {record.experiment for record in runs} == {
        "ResNet-18, CIFAR-10, 40 % of labels drawn from other classes: 40.0 % wrong, 200 epochs"
    }
    expected = {  # row: total radius, how it was chosen
        "SGD": (None, ""),
        "SAM": (0.05, "the paper's"),
        "SAM, rho 0.2": (0.2, "set by hand"),
        "SAM (sum)": (0.1, "BSAM's total radius"),
        "SAM (follow)": (0.1, "BSAM's total radius"),
        "BSAM (Algorithm 1)": (0.1, "the paper's"),
        "BSAM (Algorithm 1), rho_max 0.1, rho_min 0.1": (0.2, "set by hand"),
        "BSAM (2 passes)": (0.1, "the paper's"),
        "BSAM (2 passes), rho_max 0.1, rho_min 0.1": (0.2, "set by hand"),
        "BSAM (as released)": (0.1, "the paper's"),
    }
    assert rows(runs) == list(expected)
    assert all((record.radius, record.chosen) == expected[record.method] for record in runs)


def test_states(tmp_path):
    run = Run("sam", **CIFAR, epochs=3)
    write(run, tmp_path, score=0.8)
    write(replace(run, seed=1), tmp_path, epochs=2)
    write(replace(run, seed=2), tmp_path, epochs=1, diverged_json='{"reason": "the loss is nan"}')
    write(replace(run, seed=3), tmp_path, epochs=0)
    states = [(record.state, record.reason, record.score, len(record.epochs)) for record in read(tmp_path)]
    assert states == [
        ("finished", None, 80.0, 3),
        ("unfinished", "epoch 2 of 3", None, 2),
        ("diverged", "the loss is nan", None, 1),
        ("unfinished", "not started", None, 0),
    ]


def test_runs_that_results_json_lists_are_missing_only_in_rows_with_runs(tmp_path):
    listed = [Run(method, **CIFAR, seed=seed) for method in ("sam", "bsam") for seed in (0, 1)]
    write(listed[0], tmp_path)
    write(listed[1], tmp_path, epochs=5)
    entries = [
        {"folder": run_dir_name(run), "state": "missing", "reason": None, "last": None, "settings": run.settings()}
        for run in [*listed, Run("sam", **CIFAR, seed=2)]
    ]
    (tmp_path / "results.json").write_text(json.dumps({"runs": entries, "tuning": []}))
    runs = [(record.method, record.seed, record.reason) for record in read(tmp_path)]
    assert runs == [("SAM", 0, None), ("SAM", 1, "epoch 5 of 200"), ("SAM", 2, "not started")]


def test_run_directories_count_rather_than_what_results_json_says_about_them(tmp_path):
    run = Run("sam", **CIFAR, epochs=3)
    folder = write(run, tmp_path, epochs=1, diverged_json='{"reason": "the loss is nan"}')
    entry = {"folder": folder.name, "state": "diverged", "reason": "an older one", "last": None}
    (tmp_path / "results.json").write_text(json.dumps({"runs": [{**entry, "settings": run.settings()}]}))
    assert [(record.reason, len(record.epochs)) for record in read(tmp_path)] == [("the loss is nan", 1)]


def test_a_diverged_run_without_its_directory(tmp_path):
    run = Run("sam", **CIFAR, epochs=3)
    entry = {"folder": run_dir_name(run), "state": "diverged", "reason": "the loss is nan", "last": None}
    (tmp_path / "results.json").write_text(json.dumps({"runs": [{**entry, "settings": run.settings()}]}))
    assert [(record.state, record.reason) for record in read(tmp_path)] == [("diverged", "the loss is nan")]


def test_a_radius_is_named_where_a_row_has_several(tmp_path):
    settings = {"data": "digits", "epochs": 2}
    for arguments in ({"rho": 0.1}, {"rho": 0.2}):
        write(Run("sam", arguments, **settings), tmp_path)
    write(Run("bsam", {"rho_max": 0.3, "rho_min": 0.2, "passes": 2}, **settings), tmp_path)
    write(Run("saf", **settings), tmp_path)
    runs = {record.method: record for record in read(tmp_path)}
    assert {name: (record.radius, record.chosen) for name, record in runs.items()} == {
        "SAM, rho 0.1": (0.1, "set by hand"),
        "SAM, rho 0.2": (0.2, "set by hand"),
        "SAF": (None, ""),
        "BSAM (2 passes)": (0.5, "set by hand"),
    }


def test_sam_at_twice_the_radius_is_sam_sum_only_next_to_bsam(tmp_path):
    for arguments in ({}, {"rho": 0.1}):
        write(Run("sam", arguments, **CIFAR), tmp_path)
    assert rows(read(tmp_path)) == ["SAM", "SAM, rho 0.1"]
    write(Run("bsam", **CIFAR), tmp_path)
    assert rows(read(tmp_path)) == ["SAM", "SAM (sum)", "BSAM (Algorithm 1)"]
    write(Run("sam", {"rho": 0.1, "rho_floor": 0.1}, **CIFAR, seed=1), tmp_path)  # the same to the last bit
    assert [record.seed for record in read(tmp_path) if record.method == "SAM (sum)"] == [0, 1]


def test_experiments_with_equal_titles_are_told_apart(tmp_path):
    for lr in (0.1, 0.2):
        write(Run("sam", lr=lr, **CIFAR, label_noise=0.2), tmp_path)
    write(Run("sam", weight_bits=4, **CIFAR), tmp_path)
    write(Run("sam", **CIFAR, limit_train=1000, curvature=True), tmp_path)
    write(Run("sgd", **CIFAR, limit_train=1000, compile=True), tmp_path)
    write(Run("sgd", model="resnet8", data="folder:some/birds", weights="a/b.pt", epochs=1), tmp_path)
    titles = [record.experiment for record in read(tmp_path)]
    assert sorted(titles) == [
        "ResNet-18, CIFAR-10, 1,000 training samples, 200 epochs",
        "ResNet-18, CIFAR-10, 1,000 training samples, 200 epochs",
        "ResNet-18, CIFAR-10, 20 % of labels drawn from all classes: 18.0 % wrong, 200 epochs, lr 0.1",
        "ResNet-18, CIFAR-10, 20 % of labels drawn from all classes: 18.0 % wrong, 200 epochs, lr 0.2",
        "ResNet-18, CIFAR-10, 4 bits, 200 epochs",
        "ResNet-8, birds, pretrained, 1 epoch",
    ]


def test_a_title_says_how_many_labels_are_wrong_even_of_data_without_an_entry(tmp_path):
    run = Run("sgd", model="resnet8", data="folder:some/birds", epochs=1, label_noise=0.6)
    write(run, tmp_path)
    assert [record.experiment for record in read(tmp_path)] == [
        "ResNet-8, birds, 60 % of labels drawn from all classes, 1 epoch"
    ]
    (folder,) = tmp_path.iterdir()
    (folder / "labels.json").write_text('{"wrong": 0.404}')
    assert [record.experiment for record in read(tmp_path)] == [
        "ResNet-8, birds, 60 % of labels drawn from all classes: 40.4 % wrong, 1 epoch"
    ]


def test_only_labels_drawn_from_all_classes_have_published_numbers(tmp_path):
    for noise_labels, published in (("all", 79.71), ("other", None)):
        write(Run("sam", **CIFAR, label_noise=0.4, noise_labels=noise_labels), tmp_path / noise_labels)
        (record,) = read(tmp_path / noise_labels)
        assert (record.published, record.method) == (published, "SAM")
        assert f"drawn from {noise_labels} classes" in record.experiment


def test_published_numbers(tmp_path):
    runs = {
        "sgd": Run("sgd", **CIFAR),
        "bsam": Run("bsam", **CIFAR),
        "asam": Run("asam", {"rho": 1.0}, model="resnet18", data="cifar100"),
    }
    for run in runs.values():
        write(run, tmp_path)
    for run in (
        Run("bsam", {"rho_min": 0.25}, **CIFAR),
        Run("bsam", {"rho_max": 0.1}, **CIFAR),
        Run("sam", {"rho": 1.0}, **CIFAR),
    ):
        write(run, tmp_path)
    for more in ({"epochs": 60}, {"limit_train": 500}, {"base": "adam"}, {"eval_split": "validation"}):
        write(Run("bsam", **CIFAR, **more), tmp_path)
    published = {record.name: record.published for record in read(tmp_path)}
    for method, run in runs.items():
        assert published.pop(run_dir_name(run)) == CLASSIFICATION.numbers["resnet18", run.data, method].mean
    name = run_dir_name(Run("bsam", {"rho_min": 0.25}, **CIFAR))
    assert published.pop(name) == RHO_MIN_STUDY.numbers["cifar10", 0.25].mean
    assert list(published.values()) == [None] * 6


def test_the_paper_does_not_state_its_radii_for_poses(tmp_path):
    write(Run("sam", model="simcc_resnet50", data="mpii", task="pose", base="adam", epochs=2), tmp_path)
    (record,) = read(tmp_path)
    assert record.published is not None
    assert record.chosen == "default"


@pytest.mark.parametrize("name", ["demo", "classification", "quantization"])
def test_tuned_runs_are_known_by_their_tuning_runs(name, tmp_path):
    recipe = recipe_of(name) if name == "demo" else tuned_recipe(recipe_of(name))
    runs = [run for run in recipe.runs(recipe.scale_names[0], 1) if run.method in ("base", "sam", "bsam")]
    final = []
    for run in runs:
        candidates = recipe.tuning.settings(run)
        for candidate in candidates:
            write(recipe.tuning.run(run, **candidate), tmp_path)
        final.append((replace(run, **candidates[-1]) if candidates else run, bool(candidates)))
    float_runs = [recipe.tuning.run(run) for run in runs if name == "quantization" and run.weight_bits is None]
    for run in float_runs:  # tuning begins with a network that has not seen the held-out samples, either
        write(run, tmp_path)
    for run, _ in final:
        write(run, tmp_path)
    records = {record.folder.name: record for record in read(tmp_path)}
    assert records.keys() == {run_dir_name(run) for run, _ in final}
    assert all(record.seed < TUNING_SEED for record in records.values())
    split = "validation" if name == "demo" else "held-out"
    for run, was_tuned in final:
        record = records[run_dir_name(run)]
        what = "weight decay " if run.method == "base" else ""
        assert record.chosen == (f"{what}tuned on {split} samples" if was_tuned else "")
        assert record.tuned == was_tuned
    if name == "demo":
        assert len({record.experiment for record in records.values()}) == 1
        assert rows(records.values())[:2] == [
            "SGD, weight decay 0.0005",
            f"SGD, weight decay {final[-1][0].weight_decay:g}",
        ]


def test_tuned_and_other_runs_of_one_method_are_two_rows(tmp_path):
    run, folder = Run("sam", **CIFAR), tmp_path / "tuned"
    for rho in (0.1, 0.2):
        write(Run("sam", {"rho": rho}, **CIFAR, seed=TUNING_SEED, eval_split="holdout"), folder)
    write(Run("sam", {"rho": 0.2}, **CIFAR), folder, score=0.8)
    write(run, tmp_path / "paper")
    assert [(r.method, r.chosen, r.published) for r in read(tmp_path / "paper", folder)] == [
        ("SAM", "the paper's", 96.74),
        ("SAM, tuned", "tuned on held-out samples", 96.74),
    ]


def test_a_base_optimizer_with_a_tuned_learning_rate_says_what_was_tuned(tmp_path):
    """It has no radius: both the row and the choice name the learning rate."""
    for lr in (0.05, 0.15):
        write(Run("sgd", **CIFAR, lr=lr, seed=TUNING_SEED, eval_split="holdout"), tmp_path)
    for run in (Run("sgd", **CIFAR, lr=0.15), Run("sam", **CIFAR)):
        write(run, tmp_path)
    found = [(record.method, record.chosen) for record in read(tmp_path)]
    assert found == [("SGD, tuned lr", "lr tuned on held-out samples"), ("SAM", "the paper's")]


def test_methods_that_were_not_tuned_and_not_run_do_not_matter(tmp_path):
    trial, final = (
        Run("sam", {"rho": 0.2}, **CIFAR, **more) for more in ({"seed": TUNING_SEED, "eval_split": "holdout"}, {})
    )
    write(trial, tmp_path)
    write(final, tmp_path)
    missing = Run("bsam", **CIFAR)
    entry = {"folder": run_dir_name(missing), "state": "missing", "reason": None, "last": None}
    (tmp_path / "results.json").write_text(json.dumps({"runs": [{**entry, "settings": missing.settings()}]}))
    assert [(record.method, record.chosen) for record in read(tmp_path)] == [("SAM", "tuned on held-out samples")]


def test_seconds_are_known_for_runs_that_had_the_machine_to_themselves(tmp_path):
    run = Run("sam", **CIFAR, epochs=4)  # 11 + 12 + 13 + 14 seconds
    for seed, date in enumerate(("00:00:00", "00:01:00", "00:01:48", "00:03:00")):
        write(replace(run, seed=seed), tmp_path, date=f"2026-11-10T{date}+00:00")
    assert [record.seconds for record in read(tmp_path)] == [12.5, None, None, 12.5]


@pytest.mark.parametrize(("date", "seconds"), [("00:00:50", None), ("00:00:51", 12.5)])
def test_runs_whose_dates_touch_may_have_overlapped(date, seconds, tmp_path):
    """Dates have whole seconds: a run of 50 s that began at 00:00:00 may have ended at 00:00:50.9."""
    run = Run("sam", **CIFAR, epochs=4)
    write(run, tmp_path, date="2026-11-10T00:00:00+00:00")
    write(replace(run, seed=1), tmp_path, date=f"2026-11-10T{date}+00:00")
    assert [record.seconds for record in read(tmp_path)] == [seconds, seconds]


def test_passes_and_the_order_of_rows(tmp_path):
    for name in ("bsam-2", "sgd", "looksam", "bsam", "sam"):
        variant = variants()[name]
        write(Run(variant.method, variant.arguments, epochs=1), tmp_path)
    found = [(record.method, record.passes) for record in read(tmp_path)]
    titles = [variants()[name].title for name in ("sgd", "sam", "bsam", "bsam-2", "looksam")]
    assert sorted(method for method, _ in found) == sorted(titles)
    assert [method for method, _ in found] == [v.title for v in variants().values() if v.title in titles]
    assert dict(found)["LookSAM"] == pytest.approx(1.2)
    assert (dict(found)["BSAM (Algorithm 1)"], dict(found)["BSAM (2 passes)"], dict(found)["SGD"]) == (3, 2, 1)


# broken things: one sentence each, which names the file, and the rest is read


def truncate(folder):
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[: len(text) // 2])
    return folder / "metrics.jsonl"


def other_version(folder):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "held_out": "test"}))
    return folder / "config.json"


def no_json(folder):
    (folder / "config.json").write_bytes(b"\xff\x00")
    return folder / "config.json"


def unreadable(folder):
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    return folder / "metrics.jsonl"


def own_task(folder):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "task": "segmentation"}))
    return folder


def no_score(folder):
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace("test_accuracy", "train_accuracy"))
    return folder


def no_seconds(folder):
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace('"seconds": 12.0', '"other": 12.0'))
    return folder / "metrics.jsonl"


def null_seconds(folder):
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace('"seconds": 12.0', '"seconds": null'))
    return folder / "metrics.jsonl"


@pytest.mark.parametrize(
    "damage", [truncate, other_version, no_json, unreadable, own_task, no_score, no_seconds, null_seconds]
)
def test_a_broken_run_directory_is_named_and_the_rest_is_read(damage, tmp_path):
    write(Run("sam", **CIFAR, epochs=3), tmp_path)
    broken = damage(write(Run("bsam", **CIFAR, epochs=3), tmp_path))
    records = read_records([tmp_path])
    assert [record.method for record in records.runs] == ["SAM"]
    assert len(records.problems) == 1
    assert str(broken) in records.problems[0]
    assert records.problems[0].endswith(".")
    assert "\n" not in records.problems[0]


@pytest.mark.parametrize("name", ["probe.jsonl", "curvature.json", "environment.json"])
def test_a_broken_extra_file_is_named_and_the_run_is_read(name, tmp_path):
    folder = write(Run("sam", **CIFAR, epochs=3), tmp_path)
    (folder / name).write_text("{")
    records = read_records([tmp_path])
    assert [record.score for record in records.runs] == [90.0]
    assert len(records.problems) == 1
    assert str(folder / name) in records.problems[0]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("environment.json", '[{"device": "cpu", "date": "yesterday"}]'),
        ("environment.json", '[{"device": "cpu", "date": null}]'),
        ("environment.json", '[{"device": "cpu", "date": "9999-12-31T23:59:59+00:00"}]'),
        ("environment.json", '[{"device": "cpu"}]'),
        ("environment.json", "[3]"),
        ("curvature.json", '{"top_eigenvalue": "3.5"}'),
        ("curvature.json", '{"top_eigenvalue": [3.5]}'),
    ],
)
def test_wrong_values_in_a_further_file_are_named_and_the_run_is_read(name, content, tmp_path):
    write(Run("bsam", **CIFAR, epochs=3), tmp_path, date="2026-11-11T00:00:00+00:00")
    folder = write(Run("sam", **CIFAR, epochs=3), tmp_path)
    (folder / name).write_text(content)
    records = read_records([tmp_path])
    runs = {record.method: record for record in records.runs}
    assert (runs["SAM"].score, runs["SAM"].top_eigenvalue) == (90.0, None)
    assert runs["SAM"].seconds == (None if name == "environment.json" else 12.0)
    assert runs["BSAM (Algorithm 1)"].seconds == 12.0
    assert len(records.problems) == 1
    assert str(folder / name) in records.problems[0]


def test_a_date_without_a_time_zone(tmp_path):
    for seed, date in enumerate(("2026-11-10T00:00:00", "2026-11-14T00:00:00+00:00")):
        write(Run("sam", **CIFAR, epochs=3, seed=seed), tmp_path, date=date)
    assert [record.seconds for record in read(tmp_path)] == [12.0, 12.0]


@pytest.mark.parametrize("score", [0.8, 0.7])  # a copy, and another run
def test_of_two_runs_with_one_seed_that_with_more_data_counts(score, tmp_path):
    run = Run("sam", **CIFAR, epochs=3)
    curvature = '{"top_eigenvalue": 3.5, "surface": {"axis": [0], "loss": [[1]]}}'
    write(run, tmp_path / "a", score=0.8)
    write(run, tmp_path / "b", score=score, curvature_json='{"top_eigenvalue": 3.5}')
    most = write(run, tmp_path / "c", score=score, curvature_json=curvature)
    assert [record.folder for record in read_records([tmp_path]).runs] == [most]
    write(run, tmp_path / "d", score=score)
    assert [record.folder for record in read_records([tmp_path]).runs] == [most]


def test_duplicate_seeds_are_named_and_the_first_counts(tmp_path):
    run = Run("sam", **CIFAR, epochs=3)
    first, second = write(run, tmp_path / "a", score=0.8), write(run, tmp_path / "b", score=0.7)
    records = read_records([tmp_path])
    assert [(record.folder, record.score) for record in records.runs] == [(first, 80.0)]
    assert len(records.problems) == 1
    assert all(str(path) in records.problems[0] for path in (first, second))
    assert "seed 0 of SAM" in records.problems[0]
    assert len(read(first, tmp_path / "a", first)) == 1  # one folder given several times is no duplicate


def test_a_finished_run_replaces_an_unfinished_copy(tmp_path):
    run = Run("sam", **CIFAR, epochs=3)
    write(run, tmp_path / "a", epochs=1)
    finished = write(run, tmp_path / "b")
    records = read_records([tmp_path])
    assert [record.folder for record in records.runs] == [finished]
    assert len(records.problems) == 1


def test_paths_without_runs_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("")
    write(Run("sam", **CIFAR, epochs=1), tmp_path / "runs")
    paths = [tmp_path / name for name in ("empty", "notes.txt", "nowhere", "runs")]
    records = read_records(paths)
    assert len(records.runs) == 1
    assert len(records.problems) == 3
    assert all(sum(str(path) in problem for problem in records.problems) == 1 for path in paths[:3])


def test_broken_folders_of_results(tmp_path):
    good, bad, lost = (tmp_path / f"{name}.jsonl" for name in ("good", "bad", "lost"))
    line = json.dumps({"epoch": 1, "seconds": 1.0, "test_accuracy": 0.5}) + "\n"
    good.write_text(line)
    bad.write_text(line[:20])
    lost.write_text(line.replace("0.5", "0.6"))
    about = {
        "settings": {**CIFAR, "epochs": 1},
        "runs": {
            "good": {"method": "sam", "seed": 0},
            "bad": {"method": "sam", "seed": 1},
            "odd": {"method": "smaa", "seed": 0},
        },
    }
    (tmp_path / "runs.json").write_text(json.dumps(about))
    (tmp_path / "results.json").write_text("[]")
    (tmp_path / "flatness.json").write_text(json.dumps({"models": [{"file": "x.pt"}, {"run": {}}]}))
    records = read_records([tmp_path])
    assert [(r.seed, r.score, r.reason) for r in records.runs] == [(0, 50.0, None), (1, None, "not started")]
    for name in (bad.name, "odd.jsonl", "results.json", "x.pt", "flatness.json cannot", lost.name):
        assert sum(name in problem for problem in records.problems) == 1
    assert len(records.problems) == 6


# others' results in a CSV file

TITLE = "ResNet-18, CIFAR-10, 200 epochs"


def csv_file(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_others_results_stand_beside_ours(tmp_path):
    write(Run("sam", **CIFAR), tmp_path / "runs")
    path = csv_file(
        tmp_path / "theirs.csv",
        "\ufeffexperiment,method,seed,score,passes,radius,published,source\n"
        f'"{TITLE}",SAM,0,96.5,2,0.05,96.74,Foret et al.\n'
        f'"{TITLE}",SAM,1,96.25,,,,\n'
        f'"{TITLE}","<b>X</b>, new", 3 , 97.125 ,,,,\n'
        "\n"
        "Words,Y,0,-1e1,,,,\n",
    )
    ours, *theirs = read(tmp_path / "runs", path)
    assert ours.folder == tmp_path / "runs" / run_dir_name(Run("sam", **CIFAR))
    assert [(r.experiment, r.method, r.seed, r.score, r.unit) for r in theirs] == [
        (TITLE, "SAM (Foret et al.)", 0, 96.5, "test accuracy in %"),
        (TITLE, "SAM (theirs)", 1, 96.25, "test accuracy in %"),
        (TITLE, "<b>X</b>, new", 3, 97.125, "test accuracy in %"),
        ("Words", "Y", 0, -10.0, "score"),
    ]
    assert [(r.passes, r.radius, r.published) for r in theirs] == [(2.0, 0.05, 96.74)] + [(None, None, None)] * 3
    assert {(r.state, r.chosen, r.higher_is_better) for r in theirs} == {("finished", "", True)}


def test_the_guide_and_the_help_say_that_higher_is_better(capsys):
    with pytest.raises(SystemExit):
        cli.main(["report", "--help"])
    assert "A higher score must be better" in " ".join(capsys.readouterr().out.split())
    guide = (RESULTS.parent / "docs" / "guides" / "report.md").read_text()
    (row,) = (line for line in guide.splitlines() if line.startswith("| `score` |"))
    assert "higher must be better" in row


def test_others_results_stay_beside_ours_if_our_title_becomes_longer(tmp_path):
    """Titles get settings that separate equal ones."""
    write(Run("sam", **CIFAR, label_noise=0.2, lr=0.05), tmp_path / "runs")
    write(Run("sam", **CIFAR, lr=0.05), tmp_path / "runs")
    title = "ResNet-18, CIFAR-10, 20 % of labels drawn from all classes: 18.0 % wrong, 200 epochs"
    text = "experiment,method,seed,score\n" + "".join(f'"{title}",X,{seed},96.5\n' for seed in (0, 1))
    text += f'"{TITLE}",X,0,96.5\n"ResNet-18, CIFAR-10, 20",X,0,96.5\n'
    path = csv_file(tmp_path / "theirs.csv", text)
    assert [record.experiment for record in read(tmp_path / "runs", path) if record.method == "X"] == [
        *[title] * 2,
        TITLE,
        "ResNet-18, CIFAR-10, 20",  # not a whole part of a title
    ]
    write(Run("sgd", **CIFAR, label_noise=0.2, lr=0.1), tmp_path / "more")
    records = read_records([tmp_path, path])
    (problem,) = records.problems
    assert str(path) in problem
    assert all(f"{title}, lr {lr}" in problem for lr in (0.05, 0.1))
    assert [record.experiment for record in records.runs if record.method == "X"][:2] == [title] * 2
    text = f'experiment,method,seed,score\n"{TITLE.removesuffix(", 200 epochs")}, 4 bits",X,0,96.5\n'
    write(Run("sam", **CIFAR, weight_bits=4), tmp_path / "bits")
    runs = read(tmp_path / "bits", csv_file(tmp_path / "theirs.csv", text))
    assert {record.experiment for record in runs} == {"ResNet-18, CIFAR-10, 4 bits, 200 epochs"}


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ("experiment,method,seed,scor", "'scor'"),
        ("experiment,method,seed", "'score'"),
        ("experiment,method,seed,score,seed", "'seed'"),
        ("experiment;method;seed;score", "'experiment;method;seed;score'"),
        ("", "'experiment'"),
    ],
)
def test_wrong_columns_of_a_csv_file_are_named(header, word, tmp_path):
    good = csv_file(tmp_path / "good.csv", "experiment,method,seed,score\nE,A,0,1\n")
    records = read_records([csv_file(tmp_path / "bad.csv", f"{header}\nE,B,0,1,\n"), good])
    assert [record.method for record in records.runs] == ["A"]
    assert len(records.problems) == 1
    assert str(tmp_path / "bad.csv") in records.problems[0]
    assert word in records.problems[0]


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ("E,A,0,high,", "score"),
        ("E,A,0,nan,", "score"),
        ("E,A,0,,", "score"),
        ("E,A,x,1,", "seed"),
        ("E,A,-1,1,", "seed"),
        (",A,0,1,", "experiment"),
        ("E,,0,1,", "method"),
        ("E,A,0,1,inf", "passes"),
        ("E,A,0", "line 3"),
        ("E,B,0,5,", "seed 0 of B"),
    ],
)
def test_wrong_rows_of_a_csv_file_are_named_and_the_others_read(row, word, tmp_path):
    path = csv_file(tmp_path / "a.csv", f"experiment,method,seed,score,passes\nE,B,0,1,\n{row}\nE,B,1,2,\n")
    records = read_records([path])
    assert [(record.method, record.seed, record.score) for record in records.runs] == [("B", 0, 1.0), ("B", 1, 2.0)]
    assert len(records.problems) == 1
    assert str(path) in records.problems[0]
    assert word in records.problems[0]


def test_another_unit_is_named(tmp_path):
    write(Run("sam", **CIFAR), tmp_path / "runs")
    path = csv_file(
        tmp_path / "a.csv", f'experiment,method,seed,score,unit\n"{TITLE}",A,0,3.5,error in %\nE,A,0,3.5,bits\n'
    )
    records = read_records([tmp_path / "runs", path])
    assert [(record.method, record.unit) for record in records.runs] == [("SAM", "test accuracy in %"), ("A", "bits")]
    assert len(records.problems) == 1
    assert "'error in %'" in records.problems[0]


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "a.csv").write_bytes(np.arange(256, dtype=np.uint8).tobytes())
    records = read_records([tmp_path / "a.csv"])
    assert records.runs == ()
    assert len(records.problems) == 1
    assert str(tmp_path / "a.csv") in records.problems[0]


@pytest.mark.parametrize("name", ["runs.json", "results.json", "flatness.json"])
def test_files_from_before_noise_labels_mean_labels_of_other_classes(name, tmp_path):
    run = Run("sam", **CIFAR, epochs=1, label_noise=0.4, noise_labels="other")
    settings = {key: value for key, value in run.settings().items() if key != "noise_labels"}
    last = {"epoch": 1, "test_accuracy": 0.5, "train_loss": 1.0, "seconds": 2.0}
    (tmp_path / "one.jsonl").write_text(json.dumps(last) + "\n")
    entry = {"folder": "none", "state": "done", "reason": None, "last": last, "settings": settings}
    network = {"file": "one", "run": settings, "metrics": last, "samples": 10, "eigenvalues": {"maximum": 1.0}}
    content = {
        "runs.json": {"settings": settings, "runs": {"one": {"method": "sam", "seed": 0}}},
        "results.json": {"runs": [entry]},
        "flatness.json": {"settings": {}, "models": [network]},
    }
    (tmp_path / name).write_text(json.dumps(content[name]))
    (record,) = read(tmp_path)
    assert record.experiment == "ResNet-18, CIFAR-10, 40 % of labels drawn from other classes: 40.0 % wrong, 1 epoch"


def test_results_without_run_directories_keep_the_share_of_wrong_labels(tmp_path):
    run = Run("sgd", model="resnet8", data="folder:some/birds", epochs=1, label_noise=0.6)
    last = {"epoch": 1, "test_accuracy": 0.5, "seconds": 2.0}
    entry = {"folder": "none", "state": "done", "reason": None, "last": last, "settings": run.settings()}
    (tmp_path / "results.json").write_text(json.dumps({"runs": [{**entry, "wrong_labels": 0.404}]}))
    (record,) = read(tmp_path)
    assert record.experiment == "ResNet-8, birds, 60 % of labels drawn from all classes: 40.4 % wrong, 1 epoch"
