from dataclasses import replace
from pathlib import Path

from bsam.lab.cli.run_console import EtaEstimator, plan_table, run_title, show_runs, totals
from bsam.lab.config import Run
from bsam.lab.recipes import RECIPES
from bsam.lab.running.runner import Progress
from bsam.lab.training.run_dir import RunState

CURVES = RECIPES["training-curves"]("smoke")


def test_the_plan():
    runs = [replace(plan.run, epochs=3) for plan in CURVES.plans]
    states = [
        RunState(runs[0], Path("a"), ({"seconds": 2.0},) * 3, finished=True),
        RunState(runs[1], Path("b"), ({"seconds": 3.0},)),
        *(RunState(run, Path("c")) for run in runs[2:]),
    ]
    text = f"{plan_table(CURVES, states).to_text(200)}\n{totals(states)}"
    rows = [line.split() for line in text.splitlines() if "seed 0" in line]
    # the median second of a pass: 1.5, 2, 2, 2; SAM has two passes
    assert rows[0][-2:] == ["done", "-"]
    assert [row[-2] for row in rows[1:]] == ["8.0", "18", "12", "18"]
    assert all("missing" in row for row in rows[2:])
    assert "5 runs: 1 finished, 1 in progress, 3 not started. Time left: about 56 s." in text
    assert all(run_title(run) in text for run in runs)
    assert "?" in str(plan_table(CURVES, [RunState(run, Path("c")) for run in runs]))
    assert all("1 run:" in f"{text}:" for text in (plan_table(CURVES, states[:1]).title, totals(states[:1])))


def test_what_is_told_while_runs_are_run(tmp_path, capsys, terminal, monkeypatch):
    terminal()
    monkeypatch.setenv("COLUMNS", "120")
    run = replace(CURVES.plans[0].run, epochs=30)
    measured = {"epochs": ({"seconds": 3.0},) * 15}
    done = RunState(run, Path("a"), finished=True)
    diverged = RunState(run, Path("b"), diverged="the training loss is nan in epoch 2")
    waiting = [RunState(run, Path(name), **measured) for name in "cde"]
    progress = Progress("tuning", [done, diverged, *waiting], 2, 1, {"e": "no folder"})
    with show_runs() as callbacks:
        callbacks.on_end(done, progress, None)
        callbacks.on_end(diverged, progress, None)
        callbacks.on_end(RunState(run, tmp_path / "not writable"), progress, "no folder")
        (tmp_path / "log.txt").touch()
        callbacks.on_end(RunState(run, tmp_path), progress, "out of memory")
        callbacks.on_message("Something else.")
        callbacks.on_message("Something else.")
        callbacks.on_progress(progress._replace(slots=2))
        callbacks.on_progress(progress._replace(stage="runs"))
        callbacks.on_message("Something else.")
        callbacks.on_message("Something new.")
    out, error = capsys.readouterr()
    assert out.splitlines() == [
        f"{run_title(run)}: done. 1 of 5 done, 2 running, 2 failed, 0 waiting, left: about 90 s",
        f"{run_title(run)}: the training loss is nan in epoch 2",
        f"{run_title(run)}: no folder",
        f"{run_title(run)}: out of memory. See {tmp_path / 'log.txt'}",
        "Something else.",
        "Something new.",
    ]
    first, last, end = error.split("\n")  # a line per stage
    assert first.endswith("\rtuning: 3 of 5, 2 running, 2 failed, 0 waiting, left: about 45 s\x1b[K")
    assert last.endswith("\rruns: 3 of 5, 2 running, 2 failed, 0 waiting, left: about 90 s\x1b[K")
    assert not end


def measured(run, *seconds):
    return RunState(run, Path("there"), tuple({"seconds": s} for s in seconds))


def test_the_estimate_of_the_time_left():
    sgd, sam = (Run(method, model="resnet8", epochs=10) for method in ("sgd", "sam"))
    eta = EtaEstimator([measured(sgd, 9.0, 1.0, 2.0), measured(sgd, 4.0)])
    assert eta.left(measured(sgd)) == 10 * 3.0  # the median of 1, 2, 4, 9
    assert eta.left(measured(sgd, 9.0, 1.0)) == 8 * 3.0
    assert eta.left(measured(sam)) == 2 * 10 * 3.0
    assert eta.left(measured(replace(sam, model="resnet18"))) is None
    assert eta.left(measured(sam.changed(weight_bits=4))) is None
    assert eta.left(replace(measured(sgd), diverged="nan")) == 0
    states = [measured(sgd, *[1.0] * 8), measured(sam), measured(replace(sgd, model="resnet18"))]
    assert eta.total(states) == (2 * 3.0 + 2 * 10 * 3.0, 1)
