import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bsam.lab import Machine, cli, study_run
from bsam.lab.cli.run_console import run_title
from bsam.lab.common.files import RunLocked
from bsam.lab.recipes import RECIPES
from bsam.lab.recipes.study import Snapshot
from bsam.lab.recipes.variants import variants
from bsam.lab.running.runner import run_all
from bsam.lab.training import fit
from bsam.lab.training.run_dir import RunDir, run_dir_name
from fake_fit import FakeFit, train_by
from processes import Command

CHEAP = {
    "classification": ["sgd"],
    "rho-min-study": ["bsam-2"],
    "label-noise": ["sgd"],
    "gradient-conflict": ["bsam-2"],
    "sharpness-curves": ["sam", "bsam-2"],
    "training-curves": ["sgd", "bsam-2"],
    "transfer": ["sgd"],
    "quantization": ["bsam-2", "--models", "resnet8"],
    "transformers": ["adamw", "msam"],
}


SMOKE = "smoke: shows that it runs"


def folders(out):
    return {path.name for path in out.iterdir() if path.is_dir()}


TESTED = [name for name in RECIPES if name not in ("demo", "pose", "radius")]  # other files test these


@pytest.fixture
def small(monkeypatch, small_measurements):
    """The scale smoke with one epoch on fewer images, and rough eigenvalues."""
    for name in TESTED:
        scale = RECIPES[name].scales["smoke"]
        fewer = {key: max(1, scale[key] // 8) for key in ("batch", "limit_train", "limit_test")}
        monkeypatch.setitem(RECIPES, name, replace(RECIPES[name], scales={"smoke": {**scale, **fewer, "epochs": 1}}))


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.usefixtures("small")
def test_smoke(name, tmp_path, capsys):
    """The cheapest methods of every recipe, really trained; then nothing is left to do."""
    only = ["--only", *CHEAP[name]] if name in CHEAP else []
    command = ["run", name, "--out", str(tmp_path), "--device", "cpu", *only]
    assert cli.main(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    results = json.loads((tmp_path / "results.json").read_text())
    trained = [run for run in results["runs"] if run["state"] == "done"]
    assert {run["folder"] for run in trained} == folders(tmp_path)
    assert all(0 <= run["last"]["test_accuracy"] <= 1 and len(run["machines"]) == 1 for run in trained)
    assert f"{len(trained)} runs: 0 finished, 0 in progress, {len(trained)} not started." in text
    assert text.startswith(f"{RECIPES[name].title} ({SMOKE}). ")
    headings = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("#")]
    assert len(headings) > 1
    assert headings[0].endswith(f" ({SMOKE})")
    assert all(line.removeprefix("## ") in text for line in headings[1:])
    assert text.endswith(f"Open {tmp_path / 'report.html'} in a browser.")
    assert all(json.loads((tmp_path / run["folder"] / "run.json").read_text()) == run["about"] for run in trained)
    assert cli.main([*command, "--dry-run"]) == 0
    left = f"{len(trained)} runs: {len(trained)} finished, 0 in progress, 0 not started."
    assert left in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("without_page")
def test_the_study_of_the_total_radius_compares_at_equal_radii(tmp_path, monkeypatch, capsys):
    """With known scores: BSAM is 3 points above SAM of the same total radius, whatever the radius is."""
    train_by(
        FakeFit(lambda run: 0.5 + 0.03 * (run.method == "bsam") + 0.001 * run.seed * (run.method == "bsam") / 3),
        monkeypatch,
    )
    flags = ["--only", "sgd", "sam", "bsam", "--seeds", "3", "--jobs", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert cli.main(["run", "radius", *flags]) == 0
    lines = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("Against ")]
    assert len(lines) == 4  # total radii
    for line, total in zip(lines, (0.1, 0.2, 0.4, 0.6), strict=True):
        assert line.startswith(
            f"Against SAM, total radius {total:g}: BSAM (Algorithm 1), total radius {total:g} is better"
        )
        assert "+3.03 points" in line


def test_every_method_trains_at_the_scale_smoke(tmp_path):
    """On a smaller network and less data."""
    plans = RECIPES["classification"]("smoke").plans
    runs = [plan.run for plan in plans if plan.run.model == "resnet8"]
    assert len(runs) == len(variants())
    runs = [replace(run, model="digits_net", batch=16, limit_train=32, limit_test=20) for run in runs]
    assert all(state.finished for state in run_all(runs, tmp_path, Machine("cpu")))


def test_a_dry_run_writes_nothing(tmp_path, capsys):
    command = ["run", "label-noise", "--scale", "paper", "--seeds", "2", "--dry-run"]
    assert cli.main([*command, "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert (
        "112 runs: 0 finished, 0 in progress, 112 not started. Time left: unknown before the first epoch."
        in " ".join(text.split())
    )
    assert text.count("missing") == 112
    assert not (tmp_path / "out").exists()


def test_the_plan_of_the_demo_is_that_of_bsam_demo(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main(["run", "demo", "--dry-run", "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "29 runs: 0 finished, 0 in progress, 29 not started." in " ".join(text.split())
    labels = [line.split("  ")[0] for line in map(str.strip, text.splitlines()) if line.startswith("DigitsNet")]
    assert len(labels) == len(set(labels)) == 29
    plans = []

    def note(study, out, machine):
        plans.extend(study.selected_plans)
        assert (out, machine) == (Path("runs/demo"), Machine("cpu"))
        return SimpleNamespace(failure=None)

    monkeypatch.setattr("bsam.lab.cli.run.show_study", note)
    assert cli.main(["demo"]) == 0
    assert plans == RECIPES["demo"]().plans


@pytest.mark.parametrize("name", RECIPES)
def test_labels_of_runs_are_distinct(name, tmp_path):
    for scale in RECIPES[name].scales:
        study = RECIPES[name](scale, seeds=2)
        trials = study.decide(Snapshot(tmp_path)).trials
        labels = [run_title(plan.run) for plan in (*trials, *study.plans)]
        assert len(set(labels)) == len(labels)


@pytest.mark.usefixtures("without_page")
def test_a_selection_of_networks_and_data_sets(tmp_path, capsys):
    """The table shows all finished runs, and counts the missing runs of the selection."""
    command = ["run", "classification", "--out", str(tmp_path / "out")]
    assert cli.main([*command, "--scale", "paper", "--models", "resnet18", "--data", "cifar10", "--dry-run"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    count = len(variants())
    assert f"{count} runs: 0 finished, 0 in progress, {count} not started." in text
    assert text.count("ResNet-18, CIFAR-10,") == count
    assert cli.main([*command, "--models", "resnet8", "--only", "sgd", "--device", "cpu"]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    done = [run for run in results["runs"] if run["state"] == "done"]
    assert [run["settings"]["model"] for run in done] == ["resnet8"]
    assert sum(cell["missing"] for cell in results["table"]) == len(results["runs"]) - 1
    for text in (capsys.readouterr().out, (tmp_path / "out" / "table.md").read_text()):
        assert "not finished" not in text
    assert cli.main([*command, "--models", "resnet8", "--only", "sgd", "sam", "--report"]) == 0
    for text in (capsys.readouterr().out, (tmp_path / "out" / "table.md").read_text()):
        assert "1 run is not finished." in text


def test_the_default_folder_and_report_without_training(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "rho-min-study", "--scale", "short", "--report"]) == 0
    out = tmp_path / "runs" / "rho-min-study-short"
    assert folders(out) == set()
    assert not (out / "report.html").exists()
    table = (out / "table.md").read_text()
    assert "after the last of 24 epochs" in table
    assert "30 runs are not finished." in table
    assert "paper: as published, after 200 epochs" in table


def test_the_error_after_the_table_lists_runs_that_failed_or_diverged(tmp_path, capsys, monkeypatch):
    runs = [plan.run for plan in RECIPES["training-curves"]("smoke").plans[:3]]
    runs = [replace(run, model="digits_net", epochs=1) for run in runs]
    runs[1:] = [replace(runs[1], arguments={"rho": -1.0}), replace(runs[2], lr=1e30)]
    monkeypatch.setitem(RECIPES, "training-curves", replace(RECIPES["training-curves"], function=lambda **_: runs))
    assert cli.main(["run", "training-curves", "--out", str(tmp_path), "--device", "cpu"]) == 2
    out, error = capsys.readouterr()
    assert "Written: " in out
    assert "2 of 3 runs failed" in error
    assert all(run_dir_name(run) in error for run in runs[1:])
    assert error.count("\n") == 1
    states = [run["state"] for run in json.loads((tmp_path / "results.json").read_text())["runs"]]
    assert states == ["done", "missing", "diverged"]
    assert (tmp_path / run_dir_name(runs[1]) / "log.txt").exists()


@pytest.mark.usefixtures("demo_in_one_process", "without_page")
def test_a_run_whose_tuning_failed_is_not_trained(tmp_path, capsys, monkeypatch):
    """Nor one whose tuning runs another process holds. The row without tuning is trained."""
    tried = []

    def fit(run, *_, **options):
        tried.append(run)
        if len(tried) == 1:
            raise RuntimeError("out of memory")
        raise RunLocked("another process is training there")

    train_by(fit, monkeypatch)
    command = ["demo", "--out", str(tmp_path), "--methods", "sgd", "--seeds", "2", "--epochs", "1"]
    assert cli.main(command) == 2
    out, error = capsys.readouterr()
    assert {(run.weight_decay, run.seed) for run in tried if run.eval_split == "test"} == {(5e-4, 0), (5e-4, 1)}
    assert "3 of 7 runs failed" in error
    assert f"{run_dir_name(tried[0])}: RuntimeError: out of memory" in error
    assert "Written: " in out
    assert cli.main(command) == 0
    assert "not finished: another process" in capsys.readouterr().out
    assert {run.weight_decay for run in tried if run.eval_split == "test"} == {5e-4}


def test_torchrun_is_an_error(monkeypatch, tmp_path, error_of):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun" in error_of("run", "label-noise", "--out", tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder for runs that are not interrupted, so that each is trained once."""
    return tmp_path_factory.mktemp("whole")


@pytest.mark.parametrize(("jobs", "to_all"), [("1", False), ("2", False), ("2", True)])
def test_runs_stopped_by_a_signal_write_checkpoints_and_continue(jobs, to_all, tmp_path, whole):
    """As a cluster sends SIGUSR1 before the end of a job's time, to all processes or to the first one."""
    command = ["compare", "--methods", "sgd", "sam", "--seeds", "1", "--epochs", "9", "--batch", "32"]
    command += ["--limit-train", "256", "--limit-test", "50", "--device", "cpu", "--checkpoint-every", "1000"]
    process = Command(*command, "--out", tmp_path / "stopped", "--jobs", jobs)
    logs = []
    while len(logs) < int(jobs) or not all("epoch 2 of" in log.read_text() for log in logs):
        assert process.returncode is None
        time.sleep(0.01)
        logs = list((tmp_path / "stopped").glob("*/log.txt"))
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGUSR1)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error.count("\n")) == (138, 1)
    assert all("stopped by SIGUSR1" in log.read_text() for log in logs)
    states = [torch.load(path, weights_only=True) for path in (tmp_path / "stopped").glob("*/checkpoint.pt")]
    assert [state["begun"]["steps"] > 0 for state in states] == [True] * int(jobs)
    runs = [RunDir(log.parent).run() for log in logs]
    pairs = [run_all(runs, folder, Machine("cpu")) for folder in (tmp_path / "stopped", whole)]
    for ours, theirs in zip(*pairs, strict=True):
        assert [{**row, "seconds": 0} for row in ours.epochs] == [{**row, "seconds": 0} for row in theirs.epochs]
        networks = [(state.path / "model.safetensors").read_bytes() for state in (ours, theirs)]
        assert networks[0] == networks[1]


@pytest.mark.parametrize(("number", "status", "how"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_several_jobs_end_at_a_signal_to_all(number, status, how, tmp_path):
    """As a terminal sends Ctrl-C, and a cluster SIGTERM at the end of a job's time."""
    process = Command("run", "training-curves", "--out", str(tmp_path), "--device", "cpu", "--jobs", "2")
    plans = RECIPES["training-curves"]("smoke").plans
    logs = [tmp_path / plan.name / "log.txt" for plan in plans[:2]]
    while not all(log.exists() and "process " in log.read_text() for log in logs):
        assert process.returncode is None
        time.sleep(0.01)
    os.killpg(process.pid, getattr(signal, number))
    _, error = process.communicate(timeout=60)
    assert process.returncode == status
    assert error.startswith(f"bsam: {how}. ")
    assert error.count("\n") == 1
    pids = {int(log.read_text().split("process ")[1].split()[0]) for log in logs}
    assert len({process.pid, *pids}) == 3
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"  # nobody waits for orphans


@pytest.mark.usefixtures("without_page")
def test_interrupted_the_same_command_continues(tmp_path, capsys, monkeypatch):
    first, second, *_ = (plan.run for plan in RECIPES["training-curves"]("smoke").plans)
    arguments = ["run", "training-curves", "--only", "sgd", "sam", "--out", str(tmp_path), "--device", "cpu"]
    seconds = []

    def interrupt(run, folder, machine, **options):
        seconds.append(machine.checkpoint_every)
        if run == second:
            raise KeyboardInterrupt
        return fit(run, folder, machine, **options)

    with monkeypatch.context() as patch:
        train_by(interrupt, patch)
        assert cli.main([*arguments, "--checkpoint-every", "7.5"]) == 130
    assert seconds == [7.5, 7.5]
    assert f"are saved in {tmp_path}; run the same command again to continue" in capsys.readouterr().err
    model = tmp_path / run_dir_name(first) / "model.safetensors"
    before = model.stat().st_mtime_ns
    assert cli.main(arguments) == 0
    assert model.stat().st_mtime_ns == before
    states = [run["state"] for run in json.loads((tmp_path / "results.json").read_text())["runs"]]
    assert states == ["done"] * 2 + ["missing"] * 3


@pytest.mark.usefixtures("without_page")
def test_the_default_number_of_jobs_follows_from_the_unfinished_runs(tmp_path, monkeypatch):
    numbers = []
    monkeypatch.setattr(study_run, "default_slots", lambda device, unfinished, on_cpu: numbers.append(unfinished) or 1)
    train_by(FakeFit(), monkeypatch)
    command = ["run", "classification", "--models", "resnet8", "--out", str(tmp_path), "--device", "cpu"]
    assert cli.main([*command, "--only", "sgd", "sam"]) == 0
    assert cli.main(command) == 0
    assert numbers == [2, len(variants()) - 2]


@pytest.mark.usefixtures("without_page")
def test_another_scale_does_not_empty_the_table(tmp_path, monkeypatch, error_of):
    train_by(FakeFit(), monkeypatch)
    command = ["run", "label-noise", "--only", "sgd", "sam", "--out", str(tmp_path), "--device", "cpu"]
    assert cli.main(command) == 0
    table = (tmp_path / "table.md").read_bytes()
    for more in (["--report"], ["--dry-run"], []):
        assert "other results (label-noise at the scale smoke; " in error_of(*command, "--scale", "short", *more)
    assert (tmp_path / "table.md").read_bytes() == table


@pytest.mark.usefixtures("at_once")
def test_a_damaged_directory_is_reported_and_the_other_runs_are_trained(tmp_path, monkeypatch, error_of, capsys):
    """In the plan, in the training, and in the results; once it is repaired, nothing is missing."""
    fit = train_by(FakeFit(), monkeypatch)
    command = ["run", "label-noise", "--only", "sgd", "sam", "--out", str(tmp_path), "--device", "cpu"]
    plans = RECIPES["label-noise"]().plans
    names = [plan.name for plan in plans if plan.about["variant"] in ("sgd", "sam")]
    (tmp_path / names[0]).mkdir()
    damaged = tmp_path / names[0] / "config.json"
    damaged.write_text("{")
    reason = f"1 of {len(names)} runs failed: {names[0]}: {damaged} cannot be read"
    assert reason in error_of(*command, "--dry-run")
    assert reason in error_of(*command)
    assert len(fit.asked) == len(names) - 1
    assert damaged.read_text() == "{"
    stored = {run["folder"]: run["state"] for run in json.loads((tmp_path / "results.json").read_text())["runs"]}
    assert {name: stored[name] for name in names} == {**dict.fromkeys(names, "done"), names[0]: "unreadable"}
    assert "1 run is not finished." in (tmp_path / "table.md").read_text()
    assert f"{damaged} cannot be read" in (tmp_path / "report.html").read_text()
    assert reason in error_of(*command, "--report")
    damaged.unlink()
    assert cli.main(command) == 0
    assert len(fit.asked) == len(names)
    assert "not finished" not in (tmp_path / "table.md").read_text()


@pytest.mark.usefixtures("without_page")
def test_results_without_a_run_with_a_damaged_note(tmp_path, monkeypatch, error_of):
    train_by(FakeFit(), monkeypatch)
    command = ["run", "label-noise", "--only", "sgd", "sam", "--out", str(tmp_path), "--device", "cpu"]
    assert cli.main(command) == 0
    folder = next(folder for folder in sorted(tmp_path.iterdir()) if folder.is_dir())
    for name in ("environment.json", "labels.json", "data.json", "flatness.json"):
        note = folder / name
        before = note.read_bytes() if note.exists() else None
        note.write_text("{")
        assert f"{note} cannot be read" in error_of(*command, "--report")
        runs = json.loads((tmp_path / "results.json").read_text())["runs"]
        assert {run["folder"] for run in runs if run["state"] == "unreadable"} == {folder.name}
        if before is None:
            note.unlink()
        else:
            note.write_bytes(before)
