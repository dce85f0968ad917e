from dataclasses import replace
from pathlib import Path

from bsam.lab.cli.run_console import name_of, plan_table, show_runs, totals
from bsam.lab.recipes import RECIPES
from bsam.lab.running.runner import Progress
from bsam.lab.training.run_dir import RunState

CURVES = RECIPES["training-curves"].experiment("smoke")


def test_the_plan(shown):
    runs = [replace(plan.run, epochs=3) for plan in CURVES.planned]
    states = [
        RunState(runs[0], Path("a"), ({"seconds": 2.0},) * 3, finished=True),
        RunState(runs[1], Path("b"), ({"seconds": 3.0},)),
        *(RunState(run, Path("c")) for run in runs[2:]),
    ]
    text = shown(plan_table(CURVES, states), totals(states))
    rows = [line.split() for line in text.splitlines() if "seed 0" in line]
    # SAM as measured; three passes by the median second of a pass: 1.5, 2, 2, 2
    assert rows[0][-2:] == ["done", "-"]
    assert [row[-2] for row in rows[1:]] == ["6.0", "18", "9.0", "18"]
    assert all("missing" in row for row in rows[2:])
    assert "5 runs: 1 finished, 1 in progress, 3 not started. Time left: about 51 s." in text
    assert all(name_of(run) in text for run in runs)
    assert "?" in shown(plan_table(CURVES, [RunState(run, Path("c")) for run in runs]))


def test_what_is_told_while_runs_are_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    run = CURVES.planned[2].run
    diverged = RunState(run, Path("a"), diverged="the training loss is nan in epoch 2")
    told = set()
    with show_runs(5, "tuning", told) as callbacks:
        callbacks.on_end(RunState(run, Path("a"), finished=True), Progress(5, 1, 2, 1, (90.0, 0)), None)
        callbacks.on_end(diverged, Progress(5, 1, 0, 2, (90.0, 0)), None)
        callbacks.on_end(RunState(run, tmp_path / "not writable"), Progress(5, 1, 0, 3, (90.0, 0)), "no folder")
        (tmp_path / "log.txt").touch()
        callbacks.on_end(RunState(run, tmp_path), Progress(5, 1, 0, 4, (90.0, 0)), "out of memory")
        callbacks.on_message("Something else.")
        callbacks.on_message("Something else.")
        callbacks.on_progress(Progress(5, 1, 2, 2, (45.0, 0)))
    out, error = capsys.readouterr()
    assert out.splitlines() == [
        f"{name_of(run)}: done. 1 of 5 done, 2 running, 1 failed, 1 waiting, left: about 90 s",
        f"{name_of(run)}: the training loss is nan in epoch 2",
        f"{name_of(run)}: no folder",
        f"{name_of(run)}: out of memory. See {tmp_path / 'log.txt'}",
        "Something else.",
    ]
    with show_runs(5, "runs", told) as callbacks:
        callbacks.on_message("Something else.")
        callbacks.on_message("Something new.")
    assert capsys.readouterr().out == "Something new.\n"
    assert error.endswith("\rtuning: 3 of 5, 2 running, 2 failed, 0 waiting, left: about 45 s\x1b[K\n")
