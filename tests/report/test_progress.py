import io
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import bsam
from bsam.core.extras import require_package
from bsam.recipes import RECIPES
from bsam.recipes.runner import Progress
from bsam.report.progress import name_of, plan_info, plan_table, progress, run_bars, totals
from bsam.training.run_dir import RunState

CURVES = RECIPES["training-curves"]


@pytest.mark.parametrize(
    ("module", "extra"), [("matplotlib", "plot"), ("plotly", "plot"), ("rich", "demo"), ("sklearn", "demo")]
)
def test_a_missing_package_is_refused_with_the_mend(monkeypatch, module, extra):
    require_package(module, extra)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(bsam.BsamError, match=rf"{module}.*pip install -c constraints.txt '\.\[{extra}\]'"):
        require_package(module, extra)


def shown(*printed):
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        for each in printed:
            console.print(each)
    return capture.get()


def test_the_plan():
    recipe = CURVES
    runs = [replace(run, epochs=3) for run in recipe.runs("smoke")]
    states = [
        RunState(runs[0], Path("a"), ({"seconds": 2.0},) * 3, finished=True),
        RunState(runs[1], Path("b"), ({"seconds": 3.0},)),
        *(RunState(run, Path("c")) for run in runs[2:]),
    ]
    plan = plan_info(recipe, states)
    assert [state for _, state, _ in plan] == ["done", "epoch 1 of 3", "missing", "missing", "missing"]
    first = statistics.median([2.0, 1.5])  # of SGD and SAM, for one pass
    assert [seconds for _, _, seconds in plan] == pytest.approx(
        [0.0, 3.0 + 2.0 * 2, 3 * (first + 2 * 2.0), 3.0 + 2 * 2 * 2.0, 3 * (first + 2 * 2.0)]
    )
    text = shown(plan_table(recipe, states), totals(states))
    assert "5 runs: 1 ended, 1 started, 3 not started. Time left: about 52 s." in text
    assert all(name_of(run) in text for run in runs)
    assert "?" in shown(plan_table(recipe, [RunState(run, Path("c")) for run in runs]))


def test_what_is_told_while_runs_are_run(tmp_path):
    run = CURVES.runs("smoke")[2]
    console = Console(width=400, no_color=True, force_terminal=False)
    with console.capture() as capture, run_bars(console, CURVES, 5) as callbacks:
        callbacks.on_start(RunState(run, Path("a")), Progress(5, 1, 0, 1, (90.0, 0)))
        callbacks.on_epoch(1, 3)
        diverged = RunState(run, Path("a"), diverged="the training loss is nan in epoch 2")
        callbacks.on_end(diverged, Progress(5, 1, 0, 2, (90.0, 0)))
        callbacks.on_fail(RunState(run, tmp_path / "not writable"), "no folder")
        (tmp_path / "log.txt").touch()
        callbacks.on_fail(RunState(run, tmp_path), "out of memory")
        callbacks.tell("Something else.")
    text = capture.get()
    assert f"{name_of(run)}. Left: about 90 s" in text
    assert "the training loss is nan in epoch 2" in text
    assert f"{name_of(run)}: no folder.\n" in text
    assert f"{name_of(run)}: out of memory. See {tmp_path / 'log.txt'}" in text
    assert "Something else." in text
    assert "3/5" in text


def test_what_is_told_while_several_runs_are_run_at_the_same_time():
    run = CURVES.runs("smoke")[2]
    console = Console(width=200, no_color=True, force_terminal=False)
    with console.capture() as capture, run_bars(console, CURVES, 5, several=True) as callbacks:
        callbacks.on_start(RunState(run, Path("a")), Progress(5, 0, 2, 0, (0.0, 5)))
        callbacks.on_end(RunState(run, Path("a"), finished=True), Progress(5, 1, 2, 1, (90.0, 0)))
        callbacks.on_progress(Progress(5, 2, 2, 1, (45.0, 0)))
    line, bar = capture.get().splitlines()
    assert line == f"{name_of(run)}: done. 1 of 5 done, 2 running, 1 failed, 1 waiting, left: about 90 s"
    assert bar.startswith("2 running, 1 failed, 0 waiting, left: about 45 s")
    assert "3/5" in bar
    with (
        console.capture() as capture,
        run_bars(console, CURVES, 5, several=True) as callbacks,
    ):  # called again, nothing ended
        callbacks.on_start(RunState(run, Path("a")), Progress(5, 3, 2, 1, (0.0, 1)))
    assert "4/5 0:00:00" in " ".join(capture.get().split())


def test_bars_reach_and_start_again():
    out = io.StringIO()
    with progress(Console(file=out, width=100), {"models": 2, "trace": 1}) as bars:
        bars.reach("trace", 3, 9)
        bars.reach("trace", 9, 9)
        bars.reach("models", 1, 2)
        bars.reach("trace", 2, 8)
    assert "1/2" in out.getvalue()
    assert "2/8" in out.getvalue()
