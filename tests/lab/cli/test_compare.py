"""``bsam compare`` and ``bsam.lab.compare``, with networks that are really trained on digits."""

import json
import math
import os
import re
import statistics
import time
from dataclasses import replace

import pytest
from scipy import stats

import bsam
from bsam.common.errors import BsamValueError
from bsam.lab import cli
from bsam.lab.recipes.compare import compared_runs
from bsam.lab.running.runner import RunsFailed
from bsam.lab.training import Machine
from bsam.lab.training.run_dir import run_dir_name
from fake_fit import FakeFit, train_by
from processes import Command

SETTINGS = {"epochs": 2, "batch": 32, "limit_train": 128, "limit_test": 80, "lr": 0.04}
FLAGS = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def command(out, *flags, data="digits"):
    return ["compare", "--data", data, *FLAGS, "--device", "cpu", "--out", str(out), *map(str, flags)]


def scores_of(out, split="test"):
    """Return the score of each run by method, arguments and seed, computed from the files alone."""
    scores = {}
    for folder in out.iterdir():
        if folder.is_dir():
            settings = json.loads((folder / "config.json").read_text())
            if settings["eval_split"] == split:
                last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
                assert last["epoch"] == settings["epochs"] == 2
                radii = tuple(settings["arguments"].items())
                scores.setdefault((settings["method"], radii), {})[settings["seed"]] = 100 * last[f"{split}_accuracy"]
    return scores


def text_of(capsys):
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison of two methods with two seeds: the folder and the result."""
    out = tmp_path_factory.mktemp("compared")
    return out, bsam.lab.compare("digits", methods=["sgd", "sam"], seeds=2, out=out, machine=Machine("cpu"), **SETTINGS)


def test_the_numbers_are_those_of_the_run_directories(compared):
    out, result = compared
    scores = scores_of(out)
    assert sorted(scores) == [("base", ()), ("sam", ())]
    sgd, sam = ([scores[name, ()][seed] for seed in (0, 1)] for name in ("base", "sam"))
    assert result.table["row"].tolist() == ["SGD", "SAM"]
    for row, ours in zip(result.table.itertuples(), (sgd, sam), strict=True):
        assert (row.n, row.diverged, row.unfinished) == (2, 0, 0)
        assert (row.mean, row.std) == pytest.approx((statistics.fmean(ours), statistics.stdev(ours)), abs=1e-9)
    test = stats.ttest_rel(sam, sgd)
    assert (row.low, row.high) == pytest.approx(tuple(test.confidence_interval()))
    assert row.difference == pytest.approx(statistics.fmean(sam) - statistics.fmean(sgd))
    assert result.table["passes"].tolist() == [1, 2]
    assert result.table["radius"].tolist() == [pytest.approx(math.nan, nan_ok=True), 0.05]
    assert result.page == out / "report.html"


def test_the_command_continues_and_gives_the_same_numbers(compared, capsys):
    """Nothing is trained again; the paragraph is on the screen and in table.md."""
    out, result = compared
    times = {path: path.stat().st_mtime_ns for path in out.rglob("model.safetensors")}
    assert cli.main(command(out, "--methods", "sgd", "sam", "--seeds", 2)) == 0
    text = text_of(capsys)
    assert str(result) in text
    assert "4 runs: 4 finished, 0 in progress, 0 not started." in text
    assert str(out / "report.html") in text
    assert all(sentence in (out / "table.md").read_text() for sentence in result.sentences)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("model.safetensors")} == times
    assert len(times) == 4
    assert cli.main(command(out, "--methods", "sgd", "sam", "--seeds", 2, "--baseline", "SAM")) == 0
    gain = result.table["difference"].iloc[1]
    assert f"SGD: too few seeds ({-gain:+.2f} points" in text_of(capsys)


@pytest.mark.usefixtures("without_page")
def test_more_seeds_and_methods_train_only_the_new_runs(compared, tmp_path, monkeypatch):
    fit = train_by(FakeFit(lambda run: 0.5 + run.seed / 100), monkeypatch)
    options = {"out": tmp_path, "machine": Machine("cpu"), **SETTINGS}
    bsam.lab.compare("digits", methods=["sgd", "sam"], seeds=1, **options)
    assert [(run.method, run.seed) for run in fit.asked] == [("base", 0), ("sam", 0)]
    result = bsam.lab.compare("digits", methods=["sgd", "bsam-2", "sam"], seeds=2, **options)
    asked = [(run.method, run.seed) for run in fit.asked[2:]]
    assert asked == [("bsam", 0), ("base", 1), ("bsam", 1), ("sam", 1)]
    assert result.table[["mean", "n"]].values.tolist() == [[pytest.approx(50.5), 2]] * 3


@pytest.mark.usefixtures("without_page")
def test_a_comparison_with_other_settings_needs_another_folder(tmp_path, monkeypatch, error_of):
    """Also if the first one was interrupted before it wrote its results."""
    fit = train_by(FakeFit(), monkeypatch)
    settings = {"data": "digits", **SETTINGS}
    fit.trouble = {run_dir_name(compared_runs(["sgd", "sam"], settings)["sam"]): KeyboardInterrupt()}
    flags = ("--methods", "sgd", "sam", "--seeds", 1)
    assert cli.main(command(tmp_path, *flags)) == 130
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for more in ((), ("--report",), ("--dry-run",)):
        sentence = error_of(*command(tmp_path, *flags), "--lr", 0.02, *more)
        assert f"{tmp_path / 'results.json'} holds other results (compare; lr 0.04 there, 0.02 here)" in sentence
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    assert cli.main(command(tmp_path, *flags)) == 0
    assert len(json.loads((tmp_path / "results.json").read_text())["runs"]) == 2


def tuning_curves(out):
    """Return the scores in % after each epoch of the tuning runs, by radius, and the epochs in their logs."""
    curves, logged = {}, {}
    for folder in out.glob("*-seed10000-*"):
        if (folder / "metrics.jsonl").exists():
            rho = json.loads((folder / "config.json").read_text())["arguments"]["rho"]
            lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
            curves[rho] = [100 * line["validation_accuracy"] for line in lines]
            logged[rho] = re.findall(r" epoch (\d+) of 12: ", (folder / "log.txt").read_text())
    return curves, logged


def test_tuned_radii_and_a_kill(tmp_path, capsys):
    """All radii are trained for 4 of 12 epochs, the better two for 5. A process that is killed while these go on is
    continued: the same radius is chosen, and no epoch is trained twice.
    """
    settings = {**SETTINGS, "epochs": 12, "limit_train": 64}
    flags = (
        "--methods",
        "sgd",
        "sam",
        "--seeds",
        1,
        "--tune",
        "--epochs",
        12,
        "--limit-train",
        64,
        "--checkpoint-every",
        0,
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert cli.main(command(whole, *flags)) == 0
    text, (curves, _) = text_of(capsys), tuning_curves(whole)

    def ranked(epoch):  # on ties, the middle of the grid
        reached = [rho for rho, curve in curves.items() if len(curve) >= epoch]
        return sorted(reached, key=lambda rho: (-curves[rho][epoch - 1], rho not in (0.05, 0.1), rho))

    assert sorted(curves) == sorted(ranked(4)) == [0.025, 0.05, 0.1, 0.2]
    assert sorted(ranked(5)) == sorted(ranked(4)[:2])
    assert max(map(len, curves.values())) == 5
    best = ranked(5)[0]
    finals = [json.loads(file.read_text())["arguments"] for file in whole.glob("*-sam-*seed0-*/config.json")]
    assert [arguments.get("rho", 0.05) for arguments in finals] == [best]
    assert f"SAM, tuned at total radius {best:g} (tuned on 400 validation samples, 1 seed" in text
    assert "on 400 validation samples, which the tuning runs did not train on" in text

    with Command(*command(killed, *flags)) as process:
        while not any(path.read_text().count("process ") > 1 for path in killed.glob("*/log.txt")):
            assert process.returncode is None
            time.sleep(0.001)
        process.kill()
    assert not list(killed.glob("*seed0-*"))
    again = bsam.lab.compare(
        "digits", methods=["sgd", "sam"], seeds=1, tune=True, out=killed, machine=Machine("cpu"), **settings
    )
    assert str(again) in text
    assert again.table["radius"].iloc[1] == best
    same, logged = tuning_curves(killed)
    assert same == curves
    assert all(len(epochs) == len(set(epochs)) for epochs in logged.values())


class FakeTuning(FakeFit):
    """Trains nothing; the scores on validation samples are best at lr 0.12, weight decay 0.01 and rho 0.1."""

    SAMPLES = 1200

    def __call__(self, run, folder, machine, **options):
        super().__call__(run, folder, machine, **options)
        (folder / "identity.json").write_text(json.dumps({"task": "", "data": "", "eval_samples": self.SAMPLES}))


def tuned_score(run):
    if run.eval_split == "test":
        return 0.9 + 0.001 * run.seed + 0.01 * (run.method == "sam")
    if run.method == "base":
        return 0.9 - 0.1 * (run.lr != 0.12) - 0.1 * (run.weight_decay != 0.01)
    return 0.9 - (0.005 if run.arguments["rho"] == 0.05 else 0.1 if run.arguments["rho"] != 0.1 else 0.0)


def test_the_tuned_base_and_what_console_and_pages_say_about_it(tmp_path, monkeypatch, capsys):
    fit = train_by(FakeTuning(tuned_score), monkeypatch)
    out = tmp_path / "out"
    flags = ("--methods", "sgd", "sam", "--seeds", 3, "--tune", "--tune-base", "--tune-seeds", 2)
    assert cli.main(command(out, *flags)) == 0
    tried, radii = fit.asked[:24], fit.asked[24:32]
    assert {(run.method, run.eval_split, run.seed) for run in tried} == {
        ("base", "validation", 10_000),
        ("base", "validation", 10_001),
    }
    assert {(run.method, run.lr, run.weight_decay, run.seed) for run in radii} == {
        ("sam", 0.12, 0.01, 10_000),
        ("sam", 0.12, 0.01, 10_001),
    }
    finals = [(run.method, run.arguments, run.lr, run.weight_decay) for run in fit.asked[32:]]
    assert finals == [("base", {}, 0.12, 0.01), ("sam", {"rho": 0.1}, 0.12, 0.01)] * 3
    text = text_of(capsys)
    assert 0.5 < 100 * (0.9 * 0.1 / 1200) ** 0.5 < 1  # rho 0.05, which is 0.5 points below, may be as good
    assert "on 1,200 validation samples, which the tuning runs did not train on" in text
    assert "SAM, tuned at total radius 0.1 (tuned on 1,200 validation samples, 2 seeds; within the noise; " in text
    shared = (
        "lr 0.12 and weight decay 0.01, which were chosen for SGD alone from 12 candidates (tuned on 1,200 validation"
    )
    assert f"All methods use {shared} samples, 2 seeds; lr at the edge of the grid)." in text
    assert "lr 0.12, weight decay 0.01*" in (out / "table.md").read_text()
    assert "rho 0.1~" in (out / "table.md").read_text()
    assert len(fit.asked) == 38
    runs = bsam.lab.read_runs(out)
    assert runs["chosen"].drop_duplicates().tolist() == [
        "lr and weight decay tuned on 1,200 validation samples, 2 seeds; lr at the edge of the grid",
        "tuned on 1,200 validation samples, 2 seeds; within the noise; lr and weight decay as tuned for SGD",
    ]
    assert len(set(runs["experiment"])) == 1


def test_a_base_that_could_not_be_tuned_stops_the_comparison(tmp_path, monkeypatch, error_of):
    fit = train_by(FakeTuning(tuned_score), monkeypatch)
    run = compared_runs(["sgd", "sam"], {"data": "digits", **SETTINGS})["sgd"]
    first = replace(run, lr=0.012, weight_decay=1e-4, seed=10_000, eval_split="validation", limit_test=None)
    fit.trouble = {run_dir_name(first): RuntimeError("out of memory")}
    tune = {"tune_base": True, "tune_seeds": 1}
    with pytest.raises(RunsFailed, match="out of memory"):
        bsam.lab.compare(
            "digits", methods=["sgd", "sam"], seeds=1, out=tmp_path, machine=Machine("cpu"), **tune, **SETTINGS
        )
    assert len(fit.asked) == 12
    assert {run.eval_split for run in fit.asked} == {"validation"}
    other = error_of(*command(tmp_path, "--methods", "sgd", "sam", "--seeds", 1, "--tune"))
    assert "holds other results (compare, with --tune-base): choose another folder" in other


@pytest.mark.usefixtures("at_once", "without_page")
@pytest.mark.parametrize("name", ["config.json", "identity.json"])
def test_a_damaged_tuning_run_stops_only_the_method_that_it_tunes(name, tmp_path, monkeypatch, capsys):
    """The number of validation samples in identity.json is not needed to choose a radius."""
    train_by(FakeTuning(tuned_score), monkeypatch)
    flags = ("--methods", "sgd", "sam", "--seeds", 1, "--tune", "--tune-full")
    assert cli.main(command(tmp_path, *flags)) == 0
    (tmp_path / "results.json").unlink()
    trial = next(tmp_path.glob("*-sam-rho0.1-seed10000-*"))
    (trial / name).write_text("{")
    text = capsys.readouterr().out
    status = cli.main(command(tmp_path, *flags))
    printed = capsys.readouterr()
    results = {
        run["about"]["variant"]: run["state"] for run in json.loads((tmp_path / "results.json").read_text())["runs"]
    }
    assert results["sgd"] == "done"
    assert "2 runs: 2 finished" not in text
    if name == "config.json":
        assert status == 2
        assert f"{trial.name}: {trial / name} cannot be read" in printed.err
        assert "its tuning failed" in printed.err
        assert results["sam"] == "missing"
    else:
        assert f"{trial / name} cannot be read" in printed.err
        assert results["sam"] == "done"


@pytest.mark.usefixtures("without_page")
def test_diverged_runs_are_counted_and_failed_runs_raise(tmp_path, monkeypatch, capsys):
    fit = train_by(FakeFit(), monkeypatch)
    runs = compared_runs(["sgd", "sam"], {"data": "digits", **SETTINGS})
    fit.trouble = {run_dir_name(runs["sam"]): "the loss is nan"}
    options = {"out": tmp_path, "machine": Machine("cpu"), **SETTINGS}
    result = bsam.lab.compare("digits", methods=["sgd", "sam"], seeds=2, **options)
    assert result.table[["n", "diverged"]].values.tolist() == [[2, 0], [1, 1]]
    assert cli.main(command(tmp_path, "--methods", "sgd", "sam", "--seeds", 2)) == 2
    assert "1 of 4 runs failed" in capsys.readouterr().err
    bsams = compared_runs(["sgd", "bsam"], {"data": "digits", **SETTINGS})
    fit.trouble = {run_dir_name(bsams["bsam"]): RuntimeError("out of memory")}
    with pytest.raises(RunsFailed, match="out of memory"):
        bsam.lab.compare("digits", methods=["sgd", "bsam"], seeds=1, **options)


@pytest.mark.parametrize(
    ("lr", "tries"),
    [
        (1e12, "Try a smaller --lr (now 1e+12) or smaller radii (--methods sam:rho=0.025), and check the data"),
        (
            1e-12,
            "Try a smaller or a larger --lr (now 1e-12), more --epochs (now 1) or smaller radii (--methods",
        ),
    ],
)
def test_advice_if_no_network_learned(lr, tries, tmp_path, capsys):
    settings = {"epochs": 1, "limit_train": 128, "out": tmp_path, "machine": Machine("cpu")}
    result = bsam.lab.compare("digits", methods=["sgd", "sam"], seeds=1, lr=lr, **settings)
    assert result.nobody_learned
    assert tries in text_of(capsys)


def test_no_advice_if_a_network_learned(tmp_path, monkeypatch, capsys):
    fit = train_by(FakeFit(), monkeypatch)
    runs = compared_runs(["sgd", "sam"], {"data": "digits", **SETTINGS})
    fit.trouble = {run_dir_name(runs["sam"]): "the loss is nan"}
    result = bsam.lab.compare(
        "digits", methods=["sgd", "sam"], seeds=1, out=tmp_path, machine=Machine("cpu"), **SETTINGS
    )
    assert not result.nobody_learned
    assert "check the data" not in text_of(capsys)


@pytest.mark.usefixtures("without_page")
def test_defaults_follow_from_the_data_and_the_initial_run(digits_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fit = train_by(FakeFit(), monkeypatch)
    assert cli.main(["compare", "--epochs", "2", "--seeds", "1", "--device", "cpu"]) == 0
    assert "Written: runs/compare-digits_net-digits/table.md" in text_of(capsys)
    assert [run.method for run in fit.asked] == ["base", "sam", "bsam"]
    flags = [
        "--init",
        os.path.relpath(digits_run),
        "--weight-bits",
        "4",
        "--methods",
        "sgd",
        "sam",
        "--seeds",
        "2",
        "--tune",
    ]
    assert cli.main(["compare", *flags, "--device", "cpu"]) == 0
    assert (tmp_path / "runs" / "compare-resnet8-digits-tuned" / "results.json").exists()
    assert {(run.init, run.model, run.epochs) for run in fit.asked[3:]} == {(str(digits_run), "resnet8", 60)}


def test_a_folder_of_images_and_a_dry_run(images, tmp_path, capsys):
    flags = ("--model", "resnet8", "--image-size", 28, "--dry-run")
    assert cli.main(command(tmp_path / "out", *flags, data=f"folder:{images}")) == 0
    assert "9 runs: 0 finished, 0 in progress, 9 not started." in text_of(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--methods", "sgd", "bsma"], "Did you mean 'bsam'?"),
        (["--methods", "sgd", "sam", "--baseline", "bsam"], "baseline must be one of sgd, sam; got 'bsam'"),
        (["--data", "folder:nowhere"], "nowhere"),
        (["--init", "nowhere"], "nowhere"),
        (["--tune-seeds", "2"], "--tune-seeds has no effect without --tune or --tune-base"),
        (["--tune-full"], "--tune-full has no effect without --tune or --tune-base"),
    ],
)
def test_errors(flags, message, error_of, tmp_path):
    sentence = error_of(*command(tmp_path / "out"), *flags)
    assert message in sentence
    assert sentence.count("\n") == 1
    assert not list(tmp_path.rglob("config.json"))


def test_torchrun_is_an_error(monkeypatch, tmp_path, error_of):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "`bsam compare` trains each run on one device" in error_of(*command(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epoch": 3}, "'epoch'. Did you mean 'epochs'?"),
        ({"seed": 3}, "setting must be one of"),
        ({"eval_split": "validation"}, "setting must be one of"),
    ],
)
def test_errors_in_python(settings, message, tmp_path):
    with pytest.raises(BsamValueError) as error:
        bsam.lab.compare("digits", out=tmp_path, **settings)
    assert message in str(error.value)


def test_names_that_the_package_does_not_have():
    assert callable(bsam.lab.compare)
    assert not hasattr(bsam, "compair")


@pytest.mark.usefixtures("without_page")
def test_the_share_of_wrong_labels_of_a_folder_of_images(images, tmp_path, capsys):
    """Of 12 images of three classes, 60 % are drawn: 0.6 * 2 / 3 * 12 = 4.8, so 5 labels are wrong."""
    noise = "60 % of labels drawn from all classes: 41.7 % wrong"
    flags = ["--model", "resnet8", "--weights", "random", "--image-size", "28", "--batch", "6", "--epochs", "1"]
    flags += ["--data", f"folder:{images}", "--label-noise", "0.6", "--device", "cpu"]
    assert cli.main(["train", "--method", "sgd", *flags, "--out", str(tmp_path / "one")]) == 0
    assert f"({noise})" in text_of(capsys)
    out = tmp_path / "both"
    assert cli.main(["compare", "--methods", "sgd", "sam", "--seeds", "1", *flags, "--out", str(out)]) == 0
    assert f"Label noise: {noise}." in text_of(capsys)
    assert f"Label noise: {noise}." in (out / "table.md").read_text()
    assert {run["wrong_labels"] for run in json.loads((out / "results.json").read_text())["runs"]} == {5 / 12}
