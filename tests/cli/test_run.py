import json
import os
import signal
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from bsam import cli
from bsam.cli import run as cli_run
from bsam.recipes import RECIPES, experiments, scales
from bsam.recipes.choices import tuning_runs
from bsam.recipes.scales import scale_of
from bsam.recipes.states import states_of
from bsam.report.plan import plan_info
from bsam.running import executors, job
from bsam.running.runner import run_all
from bsam.training import loop
from bsam.training.files import RunLocked
from bsam.training.run_dir import run_dir_name

CHEAP = {
    "classification": ["sgd"],
    "rho-min-study": ["bsam-2"],
    "label-noise": ["sgd"],
    "gradient-conflict": ["bsam-2"],
    "sharpness-curves": ["sam", "bsam-2"],
    "training-curves": ["sgd", "bsam-2"],
    "transfer": ["sgd"],
    "quantization": ["bsam-2", "--models", "resnet8"],
}


SMOKE = "smoke: shows that it runs"


@pytest.fixture
def titles(monkeypatch):
    """The titles of each figure that is saved."""
    found, save = [], Figure.savefig

    def savefig(drawn, *given, **named):
        parts = [drawn, *drawn.subfigs]
        found.append(" ".join([*(part.get_suptitle() for part in parts), *(ax.get_title() for ax in drawn.axes)]))
        save(drawn, *given, **named)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return found


def folders(out):
    return {path.name for path in out.iterdir() if path.is_dir()}


ELSEWHERE = ("demo", "pose", "radius")  # tests of their own


@pytest.fixture
def fewer_images(monkeypatch):
    """The scale smoke with as many steps on fewer images, and eigenvalues with fewer digits."""
    smoke = scale_of("smoke")
    fewer = {name: smoke.settings[name] // 8 for name in ("batch", "limit_train", "limit_test")}
    smoke = replace(smoke, settings={**smoke.settings, **fewer})
    monkeypatch.setattr(scales, "SCALES", {**scales.SCALES, "smoke": smoke})
    exact = loop.top_eigenvalues
    monkeypatch.setattr(loop, "top_eigenvalues", lambda *given, **named: exact(*given, **{**named, "tol": 0.1}))


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ELSEWHERE])
@pytest.mark.usefixtures("fewer_images")
def test_smoke(name, tmp_path, capsys, titles):
    """The cheapest methods of every recipe, really trained; then nothing is left to do."""
    only = ["--only", *CHEAP[name]] if name in CHEAP else []
    command = ["run", name, "--out", str(tmp_path), "--device", "cpu", *only]
    assert cli.main(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    results = json.loads((tmp_path / "results.json").read_text())
    trained = [run for run in results["runs"] if run["state"] == "done"]
    assert {run["folder"] for run in trained} == folders(tmp_path)
    assert all(0 <= run["last"]["test_accuracy"] <= 1 and len(run["machines"]) == 1 for run in trained)
    assert f"{len(trained)} runs: 0 ended, 0 started, {len(trained)} not started." in text
    for figure in RECIPES[name].figures:
        assert (tmp_path / f"{figure}.png").stat().st_size > 10_000
    assert len(titles) == len(RECIPES[name].figures)
    assert all(SMOKE in " ".join(each.split()) for each in titles)
    assert text.startswith(f"{RECIPES[name].title} ({SMOKE}). ")
    headings = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("#")]
    assert len(headings) > 1
    assert all(line.endswith(f" ({SMOKE})") for line in headings)
    assert all(f"{line.removeprefix('## ')}" in text for line in headings[1:])
    assert cli.main([*command, "--dry-run"]) == 0
    left = f"{len(trained)} runs: {len(trained)} ended, 0 started, 0 not started."
    assert left in " ".join(capsys.readouterr().out.split())


def test_every_method_trains_at_the_scale_smoke(tmp_path):
    """On a network that is smaller still."""
    runs = [run for run in RECIPES["classification"].runs("smoke") if run.model == "resnet8"]
    assert len(runs) == 21
    runs = [replace(run, model="digits_net", limit_test=20) for run in runs]
    assert all(state.finished for state in run_all(runs, tmp_path, device="cpu"))


def test_a_dry_run_writes_nothing(tmp_path, capsys):
    command = ["run", "label-noise", "--scale", "paper", "--seeds", "2", "--dry-run"]
    assert cli.main([*command, "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "112 runs: 0 ended, 0 started, 112 not started. Time left: unknown before the first epoch." in " ".join(
        text.split()
    )
    assert text.count("missing") == 112
    assert not (tmp_path / "out").exists()


def test_the_dry_run_of_the_demo_has_its_tuning_and_as_many_seeds_as_bsam_demo(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main(["run", "demo", "--dry-run", "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "29 runs: 0 ended, 0 started, 29 not started." in " ".join(text.split())
    labels = [line.split("  ")[0] for line in map(str.strip, text.splitlines()) if line.startswith("DigitsNet")]
    assert len(labels) == len(set(labels)) == 29
    planned = []
    monkeypatch.setattr("bsam.cli.demo.run_recipe", lambda arguments, recipe, runs, chosen: planned.extend(chosen))
    assert cli.main(["demo"]) == 0
    recipe = RECIPES["demo"]
    assert planned == recipe.runs(seeds=recipe.seeds)


@pytest.mark.parametrize("name", RECIPES)
def test_labels_of_runs_are_distinct(name, tmp_path):
    recipe = RECIPES[name]
    for scale in recipe.scales:
        runs = recipe.runs(scale, seeds=2)
        states = states_of([*tuning_runs(recipe, runs), *runs], tmp_path)
        labels = [label for label, *_ in plan_info(recipe, states)]
        assert len(set(labels)) == len(labels)


def test_a_selection_of_networks_and_data_sets(tmp_path, capsys):
    """ResNet-18 on CIFAR-10 alone; the table has all that is there, and says what of the selection is missing."""
    command = ["run", "classification", "--out", str(tmp_path / "out")]
    assert cli.main([*command, "--scale", "paper", "--models", "resnet18", "--data", "cifar10", "--dry-run"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "21 runs: 0 ended, 0 started, 21 not started." in text
    assert text.count("ResNet-18, CIFAR-10,") == 21
    assert cli.main([*command, "--models", "resnet8", "--only", "sgd", "--device", "cpu"]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    done = [run for run in results["runs"] if run["state"] == "done"]
    assert [run["settings"]["model"] for run in done] == ["resnet8"]
    assert sum(cell["missing"] for cell in results["table"]) == len(results["runs"]) - 1
    for text in (capsys.readouterr().out, (tmp_path / "out" / "table.md").read_text()):
        assert "not finished" not in text  # of those selected
    assert cli.main([*command, "--models", "resnet8", "--only", "sgd", "sam", "--report"]) == 0
    for text in (capsys.readouterr().out, (tmp_path / "out" / "table.md").read_text()):
        assert "1 run is not finished." in text


def test_the_default_folder_and_report_without_training(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "rho-min-study", "--scale", "short", "--report"]) == 0
    out = tmp_path / "runs" / "rho-min-study-short"
    assert folders(out) == set()
    table = (out / "table.md").read_text()
    assert "| 0.05 | - | 96.82 ± 0.12 | - | 81.65 ± 0.04 |" in table
    assert "after the last of 24 epochs" in table
    assert "paper: as published, after 200 epochs" in table


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing"], "recipe must be one of classification"),
        (["label-noise", "--scale", "huge"], "scale must be one of smoke, short, paper"),
        (["label-noise", "--seeds", "0"], "seeds"),
        (["label-noise", "--seeds", "1000000", "--dry-run"], "seeds must be a whole number between 1 and 100"),
        (["label-noise", "--only", "msam"], "method of the recipe must be one of sgd, sam"),
        (["label-noise", "--models", "resnet18"], "model of the recipe must be one of resnet8"),
        (["label-noise", "--data", "cifar10"], "data set of the recipe must be one of digits; got 'cifar10'"),
        (["demo", "--scale", "smoke"], "scale must be one of demo; got 'smoke'"),
        (["label-noise", "--device", "tpu"], "device"),
        (["label-noise", "--jobs", "0"], "jobs must be"),
        (["label-noise", "--scale", "short", "--device", "cpu"], "--data-dir"),
    ],
)
def test_refusals(arguments, sentence, tmp_path, capsys):
    assert cli.main(["run", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(("below", "mode"), [("", ["--report"]), ("further", [])])
def test_a_folder_that_cannot_be_is_refused(below, mode, tmp_path, capsys):
    (tmp_path / "file").write_text("something else")
    assert cli.main(["run", "label-noise", "--device", "cpu", "--out", str(tmp_path / "file" / below), *mode]) == 2
    out, error = capsys.readouterr()
    assert error.startswith(f"bsam: {tmp_path / 'file'}")
    assert "cannot be used as a folder" in error
    assert error.count("\n") == 1
    assert "Test accuracy" not in out
    assert (tmp_path / "file").read_text() == "something else"


def test_torchrun_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["run", "label-noise", "--out", str(tmp_path)]) == 2
    assert "instead of torchrun" in capsys.readouterr().err


def test_a_recipe_that_nobody_listens_to_says_what_is_kept(tmp_path, command):
    """As before `| head -1`."""
    with command("run", "training-curves", "--out", str(tmp_path), "--device", "cpu") as process:
        assert "5 runs" in process.stdout.readline()
        process.stdout.close()
        error = process.stderr.read()
    assert error.startswith("bsam: the output pipe was closed. ")
    assert process.returncode == 141
    assert not (tmp_path / "table.md").exists()


def test_where_nothing_is_trained_nothing_has_to_be_said(tmp_path, command):
    with command("run", "training-curves", "--out", str(tmp_path / "out"), "--report") as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141
    assert (tmp_path / "out" / "table.md").exists()


def test_runs_that_fail_or_diverge_are_named_after_the_table_of_the_others(tmp_path, capsys, monkeypatch):
    runs = RECIPES["training-curves"].runs("smoke")[:3]
    runs = [replace(run, model="digits_net", epochs=1) for run in runs]
    runs[1:] = [replace(runs[1], arguments={"rho": -1.0}), replace(runs[2], lr=1e30)]
    monkeypatch.setattr("bsam.recipes.experiments.Recipe.runs", lambda *_: runs)
    assert cli.main(["run", "training-curves", "--out", str(tmp_path), "--device", "cpu"]) == 2
    out, error = capsys.readouterr()
    assert "Written: " in out
    assert error.startswith(f"bsam: 2 of 3 runs failed: {run_dir_name(runs[1])}: rho must be")
    assert f"; {run_dir_name(runs[2])}: the " in error
    assert error.count("\n") == 1
    states = [run["state"] for run in json.loads((tmp_path / "results.json").read_text())["runs"]]
    assert states == ["done", "missing", "diverged"]
    assert (tmp_path / run_dir_name(runs[1]) / "log.txt").exists()


def test_what_a_tuning_run_was_to_choose_is_not_trained_where_it_fails(tmp_path, capsys, monkeypatch):
    """Nor where another process holds it. The row without tuning is trained, and the other one is named."""
    tried = []

    def fit(run, *_, **options):
        tried.append(run)
        if len(tried) == 1:
            raise RuntimeError("out of memory")
        raise RunLocked("another process is training there")

    monkeypatch.setattr(job, "fit", fit)
    monkeypatch.setattr(experiments, "scale_of", lambda name: replace(scale_of(name), workers=1))
    command = ["demo", "--out", str(tmp_path), "--methods", "sgd", "--seeds", "2", "--epochs", "1"]
    assert cli.main(command) == 2
    out, error = capsys.readouterr()
    assert {(run.weight_decay, run.seed) for run in tried if run.eval_split == "test"} == {(5e-4, 0), (5e-4, 1)}
    assert error.startswith(f"bsam: 3 of 7 runs failed: {run_dir_name(tried[0])}: RuntimeError: out of memory; ")
    assert error.endswith(": its tuning failed\n")
    assert "Written: " in out
    assert cli.main(command) == 0
    assert "Some runs are not finished: another process" in capsys.readouterr().out
    assert {run.weight_decay for run in tried if run.eval_split == "test"} == {5e-4}


def test_a_data_folder_that_is_not_there_is_named_before_anything_starts(tmp_path, refused, monkeypatch):
    monkeypatch.setattr(executors, "worker_pool", None)  # no process is started
    command = ["run", "label-noise", "--scale", "short", "--device", "cpu", "--out", tmp_path / "out"]
    command += ["--jobs", "2", "--data-dir"]
    assert f"there is no folder {tmp_path / 'no'} on " in refused(*command, tmp_path / "no")
    assert "does not hold the files of CIFAR-10" in refused(*command, tmp_path)
    assert not (tmp_path / "out").exists()


def test_interrupted_the_same_command_goes_on(tmp_path, command):
    arguments = ["run", "training-curves", "--only", "sgd", "sam", "--out", str(tmp_path), "--device", "cpu"]
    process = command(*arguments)
    first, second, *_ = RECIPES["training-curves"].runs("smoke")
    while not (tmp_path / run_dir_name(first) / "model.safetensors").exists():
        assert process.returncode is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"are saved in {tmp_path}; run the same command again to continue" in error
    assert not (tmp_path / run_dir_name(second) / "model.safetensors").exists()
    assert cli.main(arguments) == 0
    states = [run["state"] for run in json.loads((tmp_path / "results.json").read_text())["runs"]]
    assert states == ["done"] * 2 + ["missing"] * 3


@pytest.mark.parametrize(("number", "status", "how"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_several_at_a_time_end_at_a_signal_to_all(number, status, how, tmp_path, command):
    """As a terminal sends Ctrl-C, and a cluster SIGTERM at the end of a job's time."""
    process = command("run", "training-curves", "--out", str(tmp_path), "--device", "cpu", "--jobs", "2")
    logs = [tmp_path / run_dir_name(run) / "log.txt" for run in RECIPES["training-curves"].runs("smoke")[:2]]
    while not all(log.exists() and "process " in log.read_text() for log in logs):
        assert process.returncode is None
        time.sleep(0.01)
    os.killpg(process.pid, getattr(signal, number))
    out, error = process.communicate(timeout=60)
    assert process.returncode == status
    assert error.startswith(f"bsam: {how}. ")
    assert "Stopping" in out
    begun = [log.read_text().split("process ")[1] for log in logs]
    pids = {int(words.split()[0]) for words in begun}
    assert len({process.pid, *pids}) == 3
    assert all(", device cpu: missing" in words for words in begun)
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"  # nobody waits for orphans


def test_the_executor_that_flags_ask_for(monkeypatch):
    made = []
    monkeypatch.setattr(cli_run, "LocalProcesses", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(cli_run, "ray_tasks", lambda *arguments: made.append(arguments))
    flags = {"jobs": 3, "ray": None, "gpus_per_run": None, "device": "cuda:1"}
    scale = replace(scale_of("smoke"), threads=7)
    cli_run._executor(Namespace(**flags), scale, print)
    cli_run._executor(Namespace(**flags | {"jobs": None}), replace(scale, workers=2), print)
    cli_run._executor(Namespace(**flags | {"jobs": None, "ray": "auto", "gpus_per_run": 0.5}), scale, print)
    assert made == [(3, "cuda:1", 7, print), (2, "cuda:1", 7, print), ("auto", 0.5, "cuda:1")]
