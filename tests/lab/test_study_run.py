"""``run_study``, which the commands and Python share; the commands' tests train with it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bsam.lab import study_run as module
from bsam.lab.recipes import RECIPES
from bsam.lab.recipes.compare import plan_comparison
from bsam.lab.running.runner import RunsFailed, StudyCallbacks
from bsam.lab.study_run import run_study
from bsam.lab.training import Machine
from fake_fit import FakeFit, train_by


def test_the_executor_follows_from_the_machine(gpus, monkeypatch):
    made = []
    monkeypatch.setattr(module, "local_processes", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(module, "ray_tasks", lambda *arguments: made.append(arguments))
    machine = Machine("cuda:1")
    study = replace(RECIPES["radius"]("smoke"), threads=7)
    callbacks = StudyCallbacks()
    module._executor(replace(machine, jobs=3), study, 4, callbacks)
    module._executor(Machine("cpu"), replace(study, workers=2), 4, callbacks)
    module._executor(Machine("cuda", ray="auto", gpus_per_run=0.5), study, 4, callbacks)
    assert made == [
        (3, "cuda:1", 7, callbacks.on_message, False),
        (2, "cpu", 7, callbacks.on_message, True),
        (Machine("cuda", ray="auto", gpus_per_run=0.5),),
    ]
    with module._executor(replace(machine, jobs=1, device="cpu"), study, 4, callbacks) as executor:
        assert executor is None  # in this process
    for unfinished, jobs in ((4, 2), (1, None)):  # timed runs do not share a device
        made.clear()
        gpus(2)
        module._executor(Machine("cuda"), replace(study, timed=True), unfinished, callbacks)
        assert [arguments[0] for arguments in made] == ([] if jobs is None else [jobs])


def test_a_silent_experiment_writes_its_results_and_returns_them(tmp_path, monkeypatch, capsys):
    fit = train_by(FakeFit(lambda run: 0.9 if run.method == "sam" else 0.8), monkeypatch)
    runs = plan_comparison(["sgd", "sam"], {"data": "digits", "epochs": 2}, seeds=2)
    fit.trouble = {runs.plans[3].name: "the loss is nan"}
    result = run_study(runs, tmp_path, Machine("cpu"))
    assert capsys.readouterr().out == ""
    assert [str(state) for state in result.states] == ["done", "done", "done", "diverged"]
    assert result.files == [tmp_path / name for name in ("table.md", "results.json", "report.html")]
    assert result.page == result.comparison.page == tmp_path / "report.html"
    assert result.comparison.table[["row", "mean", "n"]].values.tolist() == [
        ["SGD", pytest.approx(80), 2],
        ["SAM", pytest.approx(90), 1],
    ]
    assert {json.loads(file.read_text())["row"] for file in tmp_path.glob("*/run.json")} == {"SGD", "SAM"}
    assert set(result.comparison.sentences) <= set(result.notes)
    assert isinstance(result.failure, RunsFailed)
    assert "1 of 4 runs failed" in str(result.failure)
    asked = len(fit.asked)
    again = run_study(runs, tmp_path, train=False)
    assert len(fit.asked) == asked
    assert again.notes == result.notes
    assert again.failure is None  # nothing was trained, so nothing failed


def test_callbacks_from_python(tmp_path, monkeypatch):
    train_by(FakeFit(lambda run: 0.8), monkeypatch)
    runs = plan_comparison(["sgd", "sam"], {"data": "digits", "epochs": 2}, seeds=1)
    ended = []
    callbacks = StudyCallbacks(on_end=lambda state, progress, _: ended.append((str(state), progress.stage)))
    run_study(runs, tmp_path, Machine("cpu"), callbacks)
    assert ended == [("done", "runs")] * 2


@pytest.mark.parametrize(
    ("slots", "options", "devices", "shared"),
    [
        (None, {}, 1, False),
        (2, {}, 1, True),
        (2, {}, 2, False),
        (3, {}, 2, True),
        (4, {"ray": "auto"}, 8, True),
        (4, {"ray": "auto", "gpus_per_run": 0.5}, 8, True),
        (4, {"ray": "auto", "gpus_per_run": 1.0}, 1, False),
    ],
)
def test_runs_on_one_device_share_it(slots, options, devices, shared, gpus):
    gpus(devices)
    executor = None if slots is None else SimpleNamespace(slots=lambda: slots)
    assert module._is_shared(Machine(**options), executor) is shared
