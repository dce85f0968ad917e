import json
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from types import SimpleNamespace

import pytest

import bsam
from bsam.recipes import RECIPES
from bsam.recipes.choices import untuned, with_tuned_settings
from bsam.recipes.states import state_of
from bsam.running import job, runner
from bsam.running.job import Outcome
from bsam.running.runner import Callbacks, RunsFailed, run_all
from bsam.training.config import Run
from bsam.training.files import RunLocked, locked
from bsam.training.loop import fit
from bsam.training.run_dir import run_dir_name
from fake_fit import FakeFit
from processes import Process

TINY = Run("sgd", epochs=2, batch=64, limit_train=128, limit_test=64)
RUNS = [TINY, replace(TINY, method="sam"), replace(TINY, seed=1), replace(TINY, method="sam", seed=1)]


@pytest.fixture
def fake(monkeypatch):
    fake = FakeFit()
    monkeypatch.setattr(job, "fit", fake)
    return fake


def words(states):
    return [str(state) for state in states]


def test_in_order_and_never_twice(fake, tmp_path):
    assert words(run_all(RUNS, tmp_path)) == ["done"] * 4
    assert fake.asked == RUNS
    run_all([*RUNS, replace(TINY, seed=2)], tmp_path)
    assert fake.asked == [*RUNS, replace(TINY, seed=2)]


def test_a_diverged_run_is_noted_and_stops_nobody(fake, tmp_path):
    fake.trouble[run_dir_name(RUNS[1])] = "the training loss is nan in epoch 1: a smaller lr may help"
    states = run_all(RUNS, tmp_path)
    assert words(states) == ["done", "diverged", "done", "done"]
    assert "training loss is nan" in states[1].diverged
    assert (states[1].ended, states[1].finished, states[1].left) == (True, False, 0)
    run_all(RUNS, tmp_path)
    assert len(fake.asked) == 4  # not tried again


def test_a_run_that_fails_stops_nobody_and_is_named_at_the_end(fake, tmp_path):
    """Nor does it stop the ones that begin with it from being named; then the same call tries it again."""
    runs, told = [*RUNS, replace(TINY, init=run_dir_name(RUNS[1]))], []
    fake.trouble[run_dir_name(RUNS[1])] = RuntimeError("out of\nmemory")
    fake.trouble[run_dir_name(RUNS[2])] = bsam.BsamError("the file is damaged")
    callbacks = Callbacks(lambda state, progress, failed: failed and told.append((state.path.name, failed)))
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
    fake.asked.clear()
    assert words(run_all(RUNS, tmp_path)) == ["done"] * 4
    assert fake.asked == RUNS[2:]


def test_a_run_that_another_process_holds_is_tried_again_at_the_end(fake, tmp_path):
    """And one that begins with it after that."""
    told, runs = [], [*RUNS, replace(TINY, init=run_dir_name(RUNS[0]))]
    fake.trouble[run_dir_name(RUNS[0])] = RunLocked("another process is training there")
    assert words(run_all(runs, tmp_path, Callbacks(on_message=told.append))) == ["done"] * 5
    assert fake.asked == [*RUNS, RUNS[0], runs[4]]
    assert len(told) == 1
    assert run_dir_name(RUNS[0]) in told[0]


def test_what_others_finished_meanwhile_is_not_run(fake, tmp_path):
    def others(state, *_):
        if state.run == RUNS[0]:
            FakeFit()(RUNS[1], tmp_path / run_dir_name(RUNS[1]))

    run_all(RUNS, tmp_path, Callbacks(on_end=others))
    assert fake.asked == [RUNS[0], *RUNS[2:]]


def test_options_reach_the_training_and_callbacks_are_called(monkeypatch, tmp_path):
    seen, told = [], []

    def note(run, folder, **options):
        seen.append({name: options[name] for name in ("data_dir", "device")})
        FakeFit()(run, folder, options["on_epoch"])

    monkeypatch.setattr(job, "fit", note)
    callbacks = Callbacks(
        on_end=lambda state, progress, failed: told.append((str(state), progress.done, failed)),
        on_progress=lambda progress: told.append((progress.running, progress.left)),
    )
    run_all(RUNS[:2], tmp_path, callbacks, data_dir="there", device="cpu")
    assert seen == [{"data_dir": "there", "device": "cpu"}] * 2
    # two epochs of SGD take a second each, and SAM has two passes
    first = [(1, (5.0, 0)), (1, (4.0, 0)), ("done", 1, None), (0, (4.0, 0))]
    assert told == [*first, (1, (1.0, 0)), (1, (0.0, 0)), ("done", 2, None), (0, (0.0, 0))]


def test_real_runs_stopped_after_an_epoch_go_on_and_end_the_same(tmp_path):
    class Stop(Exception):
        pass

    def stop(done, metrics):
        raise Stop

    run = RUNS[1]
    with pytest.raises(Stop):
        fit(run, tmp_path / "a" / run_dir_name(run), on_epoch=stop)
    assert str(state_of(run, tmp_path / "a")) == "epoch 1 of 2"
    (went_on,), (whole,) = run_all([run], tmp_path / "a"), run_all([run], tmp_path / "b")
    assert went_on.finished
    assert [e["test_loss"] for e in went_on.epochs] == [e["test_loss"] for e in whole.epochs]
    weights = [(state.path / "model.safetensors").read_bytes() for state in (went_on, whole)]
    assert weights[0] == weights[1]


def test_real_runs_diverge_and_the_next_one_does_not(tmp_path):
    """One in its first steps; one in its last step, so that its training loss is fine."""
    wild, late = replace(TINY, lr=1e30), replace(TINY, epochs=1, batch=128, lr=1e30)
    states = run_all([wild, late, TINY], tmp_path)
    assert words(states) == ["diverged", "diverged", "done"]
    assert "loss is" in states[0].diverged
    assert states[1].diverged.startswith("the test loss is")
    (states[2].path / "diverged.json").write_text('{"reason": "on another machine"}')
    again = state_of(TINY, tmp_path)  # it was finished after all
    assert (str(again), again.finished, again.diverged) == ("done", True, None)


def test_a_real_lock_is_passed_over(tmp_path):
    told = []
    with locked(tmp_path / run_dir_name(TINY), "training"):
        assert words(run_all(RUNS[:2], tmp_path, Callbacks(on_message=told.append))) == ["missing", "done"]
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


def test_a_folder_of_other_settings_is_refused_and_finished_needs_every_epoch_and_the_network(fake, tmp_path):
    run_all([TINY], tmp_path)
    folder = tmp_path / run_dir_name(TINY)
    (folder / "model.safetensors").unlink()
    assert not state_of(TINY, tmp_path).finished
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "metrics.jsonl").write_text(json.dumps({"epoch": 1, "test_accuracy": 0.5, "seconds": 1.0}) + "\n")
    assert str(state_of(TINY, tmp_path)) == "epoch 1 of 2"
    (folder / "config.json").write_text(json.dumps(replace(TINY, lr=0.3).settings()))
    with pytest.raises(bsam.BsamError, match=r"other settings \(lr 0.3 there, 0.05 here\)"):
        state_of(TINY, tmp_path)


def test_what_was_compiled_for_another_run_is_forgotten(fake, tmp_path, monkeypatch):
    resets = []
    monkeypatch.setattr(job.torch.compiler, "reset", lambda: resets.append(len(fake.asked)))
    run_all([TINY, replace(TINY, compile=True), replace(TINY, compile=True, seed=1)], tmp_path)
    assert resets == [1, 2]  # before each of the two


class TwoSlots:
    """An executor of two runs at a time whose outcomes the test sets, and that knows what it was given."""

    slots = 2

    def __init__(self):
        self.given = {}

    def submit(self, job, *_):
        self.given[job.run] = Future()
        return self.given[job.run]


def test_runs_of_other_processes_are_told_and_measured(tmp_path, monkeypatch):
    """The process of a run is killed and it continues, another command ends a locked run, one fails, others end."""
    runs = [replace(TINY, seed=seed) for seed in range(4)]
    executor, told, found = TwoSlots(), [], []
    monkeypatch.setattr(runner, "LOOK", 0)

    def finish(run):
        FakeFit()(run, tmp_path / run_dir_name(run))
        (tmp_path / run_dir_name(run) / "log.txt").touch()

    def look(progress):
        found.append((progress.done, progress.running, progress.failed))
        given, step = executor.given, len(found)
        if step == 1:
            assert list(given) == runs[:2]
            given.pop(runs[0]).set_exception(BrokenProcessPool())
        if step == 2:
            assert list(given) == runs[1:2]
        if step == 3:
            assert list(given) == [runs[1], runs[0]]
            given[runs[1]].set_result(Outcome(False, messages=("it is locked",)))
            finish(runs[1])
        if step == 5:
            assert list(given)[2:] == runs[2:3]
            given[runs[2]].set_result(Outcome(False, "no memory"))
            finish(runs[0])
            given[runs[0]].set_result(Outcome(True, messages=("it was slow",)))
        if step == 7:
            assert progress.left == (2.0, 0)  # two epochs of a second, as that one had
            finish(runs[3])
            given[runs[3]].set_result(Outcome(True))

    with pytest.raises(RunsFailed, match=f"1 of 4 runs failed: {run_dir_name(runs[2])}: no memory"):
        run_all(runs, tmp_path, Callbacks(on_progress=look, on_message=told.append), executor)
    killed, *others = told
    assert killed.startswith(f"The process of {run_dir_name(runs[0])} was killed")
    assert others == ["it is locked", "it was slow"]
    assert found == [(0, 2, 0), (0, 1, 0), (0, 2, 0), (1, 1, 0), (1, 2, 0), (2, 0, 1), (2, 1, 1), (3, 0, 1), (3, 0, 1)]


def test_a_run_whose_process_ends_each_time_is_given_up(tmp_path, monkeypatch):
    submitted = []

    def submit(job, *_):
        submitted.append(job.run)
        future = Future()
        future.set_exception(BrokenProcessPool() if job.run == TINY else OSError("the executor is broken"))
        return future

    with pytest.raises(RunsFailed, match=r"its process was killed 4 times.*the executor is broken"):
        run_all(RUNS[:2], tmp_path, executor=SimpleNamespace(slots=1, submit=submit))
    assert submitted == [*[TINY] * 4, RUNS[1]]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_runs_without_tuning_wait_for_none(recipe, tmp_path):
    """Also where runs of several seeds differ in more than the seed, as in what they begin with."""
    runs = recipe.runs(None, 2)
    assert with_tuned_settings(recipe, runs, tmp_path) == runs
    assert bool(untuned(recipe, runs, tmp_path)) == (recipe.tuning is not None)
