import itertools
import json
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest

import bsam
from bsam.recipes import RECIPES, run_job, runner
from bsam.recipes.choices import untuned, with_tuned_settings
from bsam.recipes.run_job import Outcome, state_of
from bsam.recipes.runner import Callbacks, RunsFailed, run_all
from bsam.training.config import Run
from bsam.training.files import RunLocked, locked
from bsam.training.loop import fit
from bsam.training.run_dir import run_dir_name
from processes import Process

TINY = Run("sgd", epochs=2, batch=64, limit_train=128, limit_test=64)
RUNS = [TINY, replace(TINY, method="sam"), replace(TINY, seed=1), replace(TINY, method="sam", seed=1)]


@pytest.fixture
def fake(fake_fit, monkeypatch):
    fake = fake_fit()
    monkeypatch.setattr(run_job, "fit", fake)
    return fake


def words(states):
    return [str(state) for state in states]


def test_in_order_and_never_twice(fake, tmp_path):
    assert words(run_all(RUNS, tmp_path)) == ["done"] * 4
    assert fake.asked == RUNS
    run_all([*RUNS, replace(TINY, seed=2)], tmp_path)
    assert fake.asked == [*RUNS, replace(TINY, seed=2)]


@pytest.mark.parametrize("loss", ["training loss is nan", "test loss is inf"])
def test_a_diverged_run_is_noted_and_stops_nobody(fake, tmp_path, loss):
    fake.trouble[run_dir_name(RUNS[1])] = f"the {loss} in epoch 1: a smaller lr may help"
    states = run_all(RUNS, tmp_path)
    assert words(states) == ["done", "diverged", "done", "done"]
    assert loss in states[1].diverged
    assert (states[1].ended, states[1].finished, states[1].left) == (True, False, 0)
    run_all(RUNS, tmp_path)
    assert len(fake.asked) == 4  # not tried again


def test_a_run_that_fails_stops_nobody_and_is_named_at_the_end(fake, tmp_path):
    """Nor does it stop the ones that begin with it from being named; then the same call tries it again."""
    runs, told = [*RUNS, replace(TINY, init=run_dir_name(RUNS[1]))], []
    fake.trouble[run_dir_name(RUNS[1])] = RuntimeError("out of\nmemory")
    fake.trouble[run_dir_name(RUNS[2])] = bsam.BsamError("the file is damaged")
    callbacks = Callbacks(on_fail=lambda state, message: told.append((state.path.name, message)))
    with pytest.raises(RunsFailed, match=r"^3 of 5 runs failed: ") as failure:
        run_all(runs, tmp_path, callbacks)
    first, second, third = map(run_dir_name, (*runs[1:3], runs[4]))
    assert told == list(failure.value.failed.items())
    assert failure.value.failed == {
        first: "RuntimeError: out of\nmemory",
        second: "the file is damaged",
        third: f"it begins with {first}, which failed",
    }
    assert f"{first}: RuntimeError: out of memory; {second}: the file is damaged" in str(failure.value)
    assert "Traceback" in (tmp_path / first / "log.txt").read_text()
    assert words(state_of(run, tmp_path) for run in runs) == ["done", "missing", "missing", "done", "missing"]
    assert words(run_all(runs, tmp_path)) == ["done"] * 5


def test_the_same_error_of_several_runs_is_said_once():
    error = RunsFailed({"a": "no folder", "b": "no memory", "c": "no folder"}, 9)
    assert str(error) == "3 of 9 runs failed: a, c: no folder; b: no memory"


def test_interrupted_it_keeps_everything(fake, tmp_path):
    fake.trouble[run_dir_name(RUNS[2])] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_all(RUNS, tmp_path)
    assert words(state_of(run, tmp_path) for run in RUNS) == ["done", "done", "missing", "missing"]
    fake.trouble.clear()
    fake.asked.clear()
    assert words(run_all(RUNS, tmp_path)) == ["done"] * 4
    assert fake.asked == RUNS[2:]


def test_a_run_that_another_process_holds_is_tried_again_at_the_end(fake, tmp_path):
    told = []
    fake.trouble[run_dir_name(RUNS[0])] = RunLocked(
        f"{tmp_path}: another process is training there. Wait for it, or choose another folder"
    )
    assert words(run_all(RUNS, tmp_path, Callbacks(tell=told.append))) == ["done"] * 4
    assert fake.asked == [*RUNS, RUNS[0]]
    assert len(told) == 1
    assert run_dir_name(RUNS[0]) in told[0]


def test_what_others_finished_meanwhile_is_not_run(fake, fake_fit, tmp_path):
    def others(state, over):
        if state.run == RUNS[0]:
            fake_fit()(RUNS[1], tmp_path / run_dir_name(RUNS[1]))

    run_all(RUNS, tmp_path, Callbacks(on_end=others))
    assert fake.asked == [RUNS[0], *RUNS[2:]]


def test_options_reach_the_training_and_callbacks_are_called(fake_fit, monkeypatch, tmp_path):
    seen, told, clock = [], [], itertools.count()

    def note(run, folder, **options):
        seen.append({name: options[name] for name in ("data_dir", "device")})
        fake_fit()(run, folder, options["each_epoch"])

    monkeypatch.setattr(run_job, "fit", note)
    look = SimpleNamespace(perf_counter=lambda: next(clock))  # a second later at each look
    monkeypatch.setattr(runner, "time", look)
    callbacks = Callbacks(
        on_start=lambda state, progress: told.append((str(state), progress.done, progress.left)),
        on_epoch=lambda done, total: told.append((done, total)),
        on_end=lambda state, progress: told.append((str(state), progress.done)),
    )
    run_all(RUNS[:2], tmp_path, callbacks, data_dir="there", device="cpu")
    assert seen == [{"data_dir": "there", "device": "cpu"}] * 2
    first = [("missing", 0, (0, 2)), (1, 2), (2, 2), ("done", 1)]
    assert told == [
        *first,
        ("missing", 1, (4.0, 0)),
        (1, 2),
        (2, 2),
        ("done", 2),
    ]  # SAM: two passes, two epochs, a second each


def test_real_runs_stopped_after_an_epoch_go_on_and_end_the_same(tmp_path):
    class Stop(Exception):
        pass

    def stop(done, metrics):
        raise Stop

    run = RUNS[1]
    with pytest.raises(Stop):
        fit(run, tmp_path / "a" / run_dir_name(run), each_epoch=stop)
    assert str(state_of(run, tmp_path / "a")) == "epoch 1 of 2"
    (went_on,), (whole,) = run_all([run], tmp_path / "a"), run_all([run], tmp_path / "b")
    assert went_on.finished
    assert [e["test_loss"] for e in went_on.epochs] == [e["test_loss"] for e in whole.epochs]
    weights = [(state.path / "model.safetensors").read_bytes() for state in (went_on, whole)]
    assert weights[0] == weights[1]


def test_a_real_run_diverges_and_the_next_one_does_not(tmp_path):
    wild = replace(TINY, lr=1e30)
    states = run_all([wild, TINY], tmp_path)
    assert words(states) == ["diverged", "done"]
    assert "loss is" in states[0].diverged


def test_a_run_that_was_finished_after_all_is_not_said_to_have_diverged(tmp_path):
    (state,) = run_all([TINY], tmp_path)
    (state.path / "diverged.json").write_text('{"reason": "on another machine"}')
    again = state_of(TINY, tmp_path)
    assert (str(again), again.finished, again.diverged) == ("done", True, None)


def test_a_real_run_whose_last_step_went_too_far(tmp_path):
    (state,) = run_all(
        [replace(TINY, epochs=1, batch=128, lr=1e30)], tmp_path
    )  # one step: the training loss before it is fine
    assert state.diverged.startswith("the test loss is")


def test_a_real_lock_is_passed_over(tmp_path):
    told = []
    with locked(tmp_path / run_dir_name(TINY), "training"):
        assert words(run_all(RUNS[:2], tmp_path, Callbacks(tell=told.append))) == ["missing", "done"]
    assert len(told) == 2  # tried again at the end
    assert words(run_all(RUNS[:2], tmp_path)) == ["done", "done"]


def test_two_processes_share_the_work(tmp_path):
    """Both end well, whichever did what."""
    runs = [replace(TINY, seed=seed) for seed in range(4)]
    two = [Process(run_all, runs, tmp_path) for _ in range(2)]
    assert [process.wait(100) for process in two] == [0, 0]
    states = [state_of(run, tmp_path) for run in runs]
    assert words(states) == ["done"] * 4
    assert all([metrics["epoch"] for metrics in state.epochs] == [1, 2] for state in states)


def test_a_folder_of_other_settings_is_refused(fake, tmp_path):
    run_all([TINY], tmp_path)
    (tmp_path / run_dir_name(TINY) / "config.json").write_text(json.dumps(replace(TINY, lr=0.3).settings()))
    with pytest.raises(bsam.BsamError, match=r"other settings \(lr 0.3 there, 0.05 here\)"):
        state_of(TINY, tmp_path)


def test_finished_needs_every_epoch_and_the_network(fake, tmp_path):
    run_all([TINY], tmp_path)
    folder = tmp_path / run_dir_name(TINY)
    (folder / "model.safetensors").unlink()
    assert not state_of(TINY, tmp_path).finished
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "metrics.jsonl").write_text(json.dumps({"epoch": 1, "test_accuracy": 0.5, "seconds": 1.0}) + "\n")
    assert str(state_of(TINY, tmp_path)) == "epoch 1 of 2"


def test_what_was_compiled_for_another_run_is_forgotten(fake, tmp_path, monkeypatch):
    resets = []
    monkeypatch.setattr(run_job.torch.compiler, "reset", lambda: resets.append(len(fake.asked)))
    run_all([TINY, replace(TINY, compile=True), replace(TINY, compile=True, seed=1)], tmp_path)
    assert resets == [1, 2]  # before each of the two


def test_what_other_processes_do_is_told_and_measured(fake_fit, tmp_path, monkeypatch):
    """An executor of two runs at a time: an epoch is done, a run that is locked by another command ends there, two of
    ours fail, the others end.
    """
    runs = [replace(TINY, seed=seed, epochs=4) for seed in range(5)]
    futures, told, found = {run: Future() for run in runs}, [], []
    executor = SimpleNamespace(slots=2, submit=lambda job, *_: futures[job.run])
    monkeypatch.setattr(runner, "LOOK", 0)

    def begin(run, epochs):
        folder = tmp_path / run_dir_name(run)
        folder.mkdir(exist_ok=True)
        (folder / "log.txt").touch()
        (folder / "config.json").write_text(json.dumps(run.settings()))
        lines = [json.dumps({"epoch": epoch, "seconds": 3.0, "test_accuracy": 0.5}) for epoch in range(1, epochs + 1)]
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))

    def look(progress):
        found.append(progress)
        if len(found) == 1:
            begin(runs[0], 1)
        if len(found) == 2:
            futures[runs[1]].set_result(Outcome(False, ("it is locked",)))
        if len(found) == 3:
            fake_fit()(runs[1], tmp_path / run_dir_name(runs[1]))
            (tmp_path / run_dir_name(runs[1]) / "log.txt").touch()
        if len(found) == 4:
            for run in (runs[2], runs[4]):
                futures[run].set_exception(OSError("the executor is broken"))
        if len(found) in (7, 8):
            run = runs[0] if len(found) == 7 else runs[3]
            fake_fit()(run, tmp_path / run_dir_name(run))
            futures[run].set_result(Outcome(True, ("it was slow",)))

    with pytest.raises(RunsFailed, match="the executor is broken"):
        run_all(runs, tmp_path, Callbacks(on_progress=look, tell=told.append), executor)
    assert told == ["it is locked", "it was slow", "it was slow"]
    assert [(each.done, each.running, each.failed) for each in found] == [
        (0, 2, 0),
        (0, 2, 0),
        (0, 2, 0),
        (1, 2, 0),  # the other command has ended its run
        (1, 2, 1),  # a run failed, at once,
        (1, 2, 2),  # and another one;
        (1, 2, 2),  # as each second
        (2, 1, 2),
        (3, 0, 2),
        (3, 0, 2),  # when the run of the other command is tried again
    ]
    assert found[7].left == (5.0, 0)  # one run is left, beside two that failed
    assert [each.left for each in found[:3]] == [(0.0, 5), (57.0 / 2, 0), (57.0 / 2, 0)]  # two at a time


def test_only_runs_that_began_are_looked_at(fake, tmp_path, monkeypatch):
    looked, futures = [], {run: Future() for run in RUNS}
    executor = SimpleNamespace(slots=2, submit=lambda job, *_: futures[job.run])
    monkeypatch.setattr(runner, "LOOK", 0)
    real = runner.state_of
    run_all(RUNS[:1], tmp_path)

    def look(progress):
        if not looked:
            monkeypatch.setattr(runner, "state_of", lambda run, *a, **k: looked.append(run) or real(run, *a, **k))
            (tmp_path / run_dir_name(RUNS[1])).mkdir()
            (tmp_path / run_dir_name(RUNS[1]) / "log.txt").touch()
        else:
            assert looked == [RUNS[1]]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(RUNS, tmp_path, Callbacks(on_progress=look), executor)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_runs_without_tuning_wait_for_none(recipe, tmp_path):
    """Also where runs of several seeds differ in more than the seed, as in what they begin with."""
    runs = recipe.runs(None, 2)
    assert with_tuned_settings(recipe, runs, tmp_path) == runs
    assert bool(untuned(recipe, runs, tmp_path)) == (recipe.tuning is not None)
