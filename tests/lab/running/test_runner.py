import errno
import json
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import bsam
from bsam.lab.recipes.columns import state_of
from bsam.lab.running import job, runner
from bsam.lab.running.job import Outcome
from bsam.lab.running.runner import Callbacks, EtaEstimator, RunsFailed, run_all
from bsam.lab.training import files
from bsam.lab.training.config import Run
from bsam.lab.training.files import RunLocked
from bsam.lab.training.run_dir import RunState, run_dir_name
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


def test_a_diverged_run_does_not_stop_the_others(fake, tmp_path):
    fake.trouble[run_dir_name(RUNS[1])] = "the training loss is nan in epoch 1: a smaller lr may help"
    states = run_all(RUNS, tmp_path)
    assert words(states) == ["done", "diverged", "done", "done"]
    assert "training loss is nan" in states[1].diverged
    assert (states[1].ended, states[1].finished, states[1].left) == (True, False, 0)
    run_all(RUNS, tmp_path)
    assert len(fake.asked) == 4  # not tried again


def test_a_failed_run_does_not_stop_the_others_and_is_tried_again(fake, tmp_path):
    """A run that starts from it fails, too."""
    runs, ended = [*RUNS, replace(TINY, init=run_dir_name(RUNS[1]))], []
    fake.trouble[run_dir_name(RUNS[1])] = RuntimeError("out of\nmemory")
    fake.trouble[run_dir_name(RUNS[2])] = bsam.BsamError("the file is damaged")
    callbacks = Callbacks(on_end=lambda state, progress, failed: failed and ended.append((state.path.name, failed)))
    with pytest.raises(RunsFailed, match=r"^3 of 5 runs failed: ") as failure:
        run_all(runs, tmp_path, callbacks)
    first, second, third = map(run_dir_name, (*runs[1:3], runs[4]))
    assert ended == list(failure.value.failed.items())
    assert failure.value.failed == {
        first: "RuntimeError: out of\nmemory",
        second: "the file is damaged",
        third: f"it starts from {first}, which failed",
    }
    assert f"{first}: RuntimeError: out of memory; {second}: the file is damaged" in str(failure.value)
    assert "Traceback" in (tmp_path / first / "log.txt").read_text()
    assert words(state_of(run, tmp_path) for run in runs) == ["done", "missing", "missing", "done", "missing"]
    assert words(run_all(runs, tmp_path)) == ["done"] * 5


def test_a_folder_that_cannot_be_written_is_one_error_before_the_first_run(fake, tmp_path, monkeypatch):
    """Not one for each run, as from worker processes."""
    (tmp_path / "file").touch()
    ended = []
    callbacks = Callbacks(on_end=lambda state, progress, failed: ended.append(failed))

    def submit(job, *callbacks):
        future = Future()
        try:
            future.set_result(job.train(*callbacks))
        except Exception as error:
            future.set_exception(error)
        return future

    def check(folder, reason):
        with pytest.raises(bsam.BsamError, match=f"{folder} cannot be used .*{reason}") as error:
            run_all(RUNS, folder, callbacks, SimpleNamespace(slots=4, submit=submit))
        assert not isinstance(error.value, RunsFailed)
        assert not ended

    def read_only(dir):
        raise PermissionError(errno.EACCES, "Permission denied")

    check(tmp_path / "file" / "runs", "Not a directory")
    monkeypatch.setattr(files.tempfile, "TemporaryFile", read_only)
    check(tmp_path, "Permission denied")
    monkeypatch.undo()
    monkeypatch.setattr(job, "fit", fake)
    run_all(RUNS, tmp_path)
    monkeypatch.setattr(files.tempfile, "TemporaryFile", read_only)
    run_all(RUNS, tmp_path)  # nothing to train


def test_an_error_of_several_runs_is_reported_once():
    error = RunsFailed({"a": "no folder", "b": "no memory", "c": "no folder"}, 9)
    assert str(error) == "3 of 9 runs failed: a, c: no folder; b: no memory"


def test_an_interruption_keeps_finished_runs(fake, tmp_path):
    fake.trouble[run_dir_name(RUNS[2])] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_all(RUNS, tmp_path)
    assert words(state_of(run, tmp_path) for run in RUNS) == ["done", "done", "missing", "missing"]
    fake.asked.clear()
    assert words(run_all(RUNS, tmp_path)) == ["done"] * 4
    assert fake.asked == RUNS[2:]


def test_a_run_without_a_checkpoint_still_needs_the_run_that_it_starts_from(fake, tmp_path):
    """Also if it has finished epochs, which it repeats."""
    first, second = replace(TINY, seed=8), replace(TINY, seed=9, init=run_dir_name(replace(TINY, seed=8)), epochs=2)
    folder = tmp_path / run_dir_name(second)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(second.settings()))
    (folder / "metrics.jsonl").write_text('{"epoch": 1, "test_accuracy": 0.5, "seconds": 1.0}\n')
    for name in ("metrics.jsonl", "checkpoint.pt"):
        fake.trouble[run_dir_name(first)] = RuntimeError("no memory")
        fake.asked.clear()
        (folder / name).touch()
        with pytest.raises(RunsFailed, match="no memory"):
            run_all([first, second], tmp_path)
        assert fake.asked == [first, *[second] * (name == "checkpoint.pt")]


def test_a_locked_run_is_tried_again_at_the_end(fake, tmp_path):
    """A run that starts from it comes after it."""
    messages, runs = [], [*RUNS, replace(TINY, init=run_dir_name(RUNS[0]))]
    fake.trouble[run_dir_name(RUNS[0])] = RunLocked("another process is training there")
    assert words(run_all(runs, tmp_path, Callbacks(on_message=messages.append))) == ["done"] * 5
    assert fake.asked == [*RUNS, RUNS[0], runs[4]]
    assert len(messages) == 1
    assert run_dir_name(RUNS[0]) in messages[0]


def test_runs_finished_by_another_process_are_skipped(fake, tmp_path):
    def others(state, *_):
        if state.run == RUNS[0]:
            FakeFit()(RUNS[1], tmp_path / run_dir_name(RUNS[1]))

    run_all(RUNS, tmp_path, Callbacks(on_end=others))
    assert fake.asked == [RUNS[0], *RUNS[2:]]


def test_options_reach_the_training_and_callbacks_are_called(monkeypatch, tmp_path):
    passed, calls = [], []

    def record(run, folder, **options):
        passed.append({name: options[name] for name in ("data_dir", "device")})
        FakeFit()(run, folder, options["on_epoch"])

    monkeypatch.setattr(job, "fit", record)
    callbacks = Callbacks(
        on_end=lambda state, progress, failed: calls.append((str(state), progress.done, failed)),
        on_progress=lambda progress: calls.append((progress.running, progress.left)),
    )
    run_all(RUNS[:2], tmp_path, callbacks, data_dir="there", device="cpu")
    assert passed == [{"data_dir": "there", "device": "cpu"}] * 2
    # two epochs of SGD take a second each, and SAM has two passes
    first = [(1, (5.0, 0)), (1, (4.0, 0)), ("done", 1, None), (0, (4.0, 0))]
    assert calls == [*first, (1, (1.0, 0)), (1, (0.0, 0)), ("done", 2, None), (0, (0.0, 0))]


def test_real_runs_that_diverge_do_not_stop_the_others(tmp_path):
    """One diverges in its first steps; the other in its last step, with a finite training loss."""
    wild, late = replace(TINY, lr=1e30), replace(TINY, epochs=1, batch=128, lr=1e30)
    states = run_all([wild, late, TINY], tmp_path)
    assert words(states) == ["diverged", "diverged", "done"]
    assert "loss is" in states[0].diverged
    assert states[1].diverged.startswith("the test loss is")


def test_two_processes_share_the_work(tmp_path):
    runs = [replace(TINY, seed=seed) for seed in range(4)]
    two = [Process(run_all, runs, tmp_path) for _ in range(2)]
    assert [process.wait(100) for process in two] == [0, 0]
    states = [state_of(run, tmp_path) for run in runs]
    assert words(states) == ["done"] * 4
    assert all([metrics["epoch"] for metrics in state.epochs] == [1, 2] for state in states)


def test_a_finished_run_has_every_epoch_and_the_network(fake, tmp_path):
    run_all([TINY], tmp_path)
    folder = tmp_path / run_dir_name(TINY)
    (folder / "model.safetensors").unlink()
    assert not state_of(TINY, tmp_path).finished
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "metrics.jsonl").write_text(json.dumps({"epoch": 1, "test_accuracy": 0.5, "seconds": 1.0}) + "\n")
    assert str(state_of(TINY, tmp_path)) == "epoch 1 of 2"


def test_compiled_graphs_of_other_runs_are_dropped(fake, tmp_path, monkeypatch):
    resets = []
    monkeypatch.setattr(job.torch.compiler, "reset", lambda: resets.append(len(fake.asked)))
    run_all([TINY, replace(TINY, compile=True), replace(TINY, compile=True, seed=1)], tmp_path)
    assert resets == [1, 2]  # before each of the two


class TwoSlots:
    """An executor for two runs at a time whose outcomes are set by the test."""

    slots = 2

    def __init__(self):
        self.futures = {}

    def submit(self, job, *_):
        self.futures[job.run] = Future()
        return self.futures[job.run]


def test_the_progress_of_runs_in_other_processes(tmp_path, monkeypatch):
    """One process is killed and its run continues, another command finishes a locked run, one fails, others finish."""
    runs = [replace(TINY, seed=seed) for seed in range(4)]
    executor, messages, history = TwoSlots(), [], []
    monkeypatch.setattr(runner, "LOOK", 0)

    def finish(run):
        FakeFit()(run, tmp_path / run_dir_name(run))
        (tmp_path / run_dir_name(run) / "log.txt").touch()

    def look(progress):
        history.append((progress.done, progress.running, progress.failed))
        futures, step = executor.futures, len(history)
        if step == 1:
            assert list(futures) == runs[:2]
            futures.pop(runs[0]).set_exception(BrokenProcessPool())
        if step == 2:
            assert list(futures) == runs[1:2]
        if step == 3:
            assert list(futures) == [runs[1], runs[0]]
            futures[runs[1]].set_result(Outcome(False, messages=("it is locked",)))
            finish(runs[1])
        if step == 5:
            assert list(futures)[2:] == runs[2:3]
            futures[runs[2]].set_result(Outcome(False, "no memory"))
            finish(runs[0])
            futures[runs[0]].set_result(Outcome(True, messages=("it was slow",)))
        if step == 7:
            assert progress.left == (2.0, 0)  # two epochs of one second each
            finish(runs[3])
            futures[runs[3]].set_result(Outcome(True))

    with pytest.raises(RunsFailed, match=f"{run_dir_name(runs[2])}.*memory"):
        run_all(runs, tmp_path, Callbacks(on_progress=look, on_message=messages.append), executor)
    killed, *others = messages
    assert run_dir_name(runs[0]) in killed
    assert others == ["it is locked", "it was slow"]
    assert history[:5] == [(0, 2, 0), (0, 1, 0), (0, 2, 0), (1, 1, 0), (1, 2, 0)]
    assert history[5:] == [(2, 0, 1), (2, 1, 1), (3, 0, 1), (3, 0, 1)]


def test_a_run_whose_process_is_killed_every_time_fails(tmp_path):
    submitted = []

    def submit(job, *_):
        submitted.append(job.run)
        future = Future()
        future.set_exception(BrokenProcessPool() if job.run == TINY else OSError("the executor is broken"))
        return future

    with pytest.raises(RunsFailed, match=r"4 times.*executor"):
        run_all(RUNS[:2], tmp_path, executor=SimpleNamespace(slots=1, submit=submit))
    assert submitted == [*[TINY] * 4, RUNS[1]]


def measured(run, *seconds):
    return RunState(run, Path("there"), tuple({"seconds": s} for s in seconds))


def test_the_estimate_of_the_time_left():
    sgd, sam = (Run(method, model="resnet8", epochs=10) for method in ("sgd", "sam"))
    eta = EtaEstimator([measured(sgd, 9.0, 1.0, 2.0), measured(sgd, 4.0)])
    assert eta.left(measured(sgd)) == 10 * 3.0  # the median of 1, 2, 4, 9
    assert eta.left(measured(sgd, 9.0, 1.0)) == 8 * 3.0
    assert eta.left(measured(sam)) == 2 * 10 * 3.0
    assert eta.left(measured(replace(sam, model="resnet18"))) is None
    assert eta.left(measured(replace(sam, weight_bits=4))) is None
    assert eta.left(replace(measured(sgd), diverged="nan")) == 0
    eta = EtaEstimator([measured(sgd, 1.0), measured(sam, 3.0)])
    assert eta.left(measured(sam)) == 10 * 3.0  # the same number of passes takes precedence
    states = [measured(sgd, *[1.0] * 8), measured(sam), measured(replace(sgd, model="resnet18"))]
    assert eta.total(states) == (2 * 1.0 + 10 * 3.0, 1)
