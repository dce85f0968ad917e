import errno
import json
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest

import bsam
from bsam.lab.common import files
from bsam.lab.common.files import RunLocked
from bsam.lab.common.termination import Terminated
from bsam.lab.config import Run
from bsam.lab.recipes.plan import state_of
from bsam.lab.running import job
from bsam.lab.running.executors import Executor
from bsam.lab.running.job import Outcome
from bsam.lab.running.runner import RunsFailed, StudyCallbacks, run_all
from bsam.lab.training import Machine
from bsam.lab.training.run_dir import RunDir, run_dir_name
from fake_fit import FakeFit, train_by
from processes import Process

TINY = Run("sgd", epochs=2, batch=64, limit_train=128, limit_test=64)
RUNS = [TINY, replace(TINY, method="sam"), replace(TINY, seed=1), replace(TINY, method="sam", seed=1)]


@pytest.fixture
def fake(monkeypatch):
    return train_by(FakeFit(), monkeypatch)


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
    callbacks = StudyCallbacks(
        on_end=lambda state, progress, failed: failed and ended.append((state.path.name, failed))
    )
    with pytest.raises(RunsFailed, match=r"^3 of 5 runs failed: ") as failure:
        run_all(runs, tmp_path, callbacks=callbacks)
    first, second, third = map(run_dir_name, (*runs[1:3], runs[4]))
    assert ended == list(failure.value.failed.items())
    why = failure.value.failed[first]
    assert "FakeFit.__call__ raised RuntimeError: out of\nmemory (fake_fit.py, line " in why
    assert failure.value.failed == {
        first: why,
        second: "the file is damaged",
        third: f"it starts from {first}, which failed",
    }
    assert f"{first}: {' '.join(why.split())}; {second}: the file is damaged" in str(failure.value)
    assert "Traceback" in (tmp_path / first / "log.txt").read_text()
    assert words(state_of(run, tmp_path) for run in runs) == ["done", "missing", "missing", "done", "missing"]
    assert words(run_all(runs, tmp_path)) == ["done"] * 5


def test_a_folder_that_cannot_be_written_is_one_error_before_the_first_run(fake, tmp_path, monkeypatch):
    """Not one for each run, as from worker processes."""
    (tmp_path / "file").touch()
    executor = Executor(lambda: 4, lambda *_: pytest.fail("submitted"))

    def read_only(dir):
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(bsam.BsamError, match=r"runs cannot be used .*Not a directory"):
        run_all(RUNS, tmp_path / "file" / "runs", executor=executor)
    with monkeypatch.context() as patch:
        patch.setattr(files.tempfile, "TemporaryFile", read_only)
        with pytest.raises(bsam.BsamError, match=f"{tmp_path} cannot be used .*Permission denied"):
            run_all(RUNS, tmp_path, executor=executor)
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
    assert words(run_all(runs, tmp_path, callbacks=StudyCallbacks(on_message=messages.append))) == ["done"] * 5
    assert fake.asked == [*RUNS, RUNS[0], runs[4]]
    assert len(messages) == 1
    assert run_dir_name(RUNS[0]) in messages[0]


def test_runs_finished_by_another_process_are_skipped(fake, tmp_path):
    def others(state, *_):
        if state.run == RUNS[0]:
            FakeFit()(RUNS[1], tmp_path / run_dir_name(RUNS[1]))

    run_all(RUNS, tmp_path, callbacks=StudyCallbacks(on_end=others))
    assert fake.asked == [RUNS[0], *RUNS[2:]]


def test_options_reach_the_training_and_callbacks_are_called(monkeypatch, tmp_path):
    passed, calls, machine = [], [], Machine("cpu", data_dir="there")
    about = {run_dir_name(run): {"row": run.method} for run in RUNS}

    def record(run, folder, machine, *, about, **options):
        passed.append((machine, about))
        FakeFit()(run, folder, machine, **options)

    train_by(record, monkeypatch)
    callbacks = StudyCallbacks(
        on_end=lambda state, progress, failed: calls.append((str(state), failed)),
        on_progress=lambda progress: calls.append((progress.running, words(progress.states))),
    )
    run_all(RUNS[:2], tmp_path, machine, callbacks, about=about)
    assert passed == [(machine, {"row": run.method}) for run in RUNS[:2]]
    half = "epoch 1 of 2"
    first = [(1, [half, "missing"]), (1, ["epoch 2 of 2", "missing"]), ("done", None), (0, ["done", "missing"])]
    second = [(1, ["done", half]), (1, ["done", "epoch 2 of 2"]), ("done", None), (0, ["done", "done"])]
    assert calls == [*first, *second]


def test_a_closed_output_ends_all_runs(fake, tmp_path):
    def close(*_):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_all(RUNS, tmp_path, callbacks=StudyCallbacks(on_progress=close))
    assert len(fake.asked) == 1


def test_two_processes_share_the_work(tmp_path):
    runs = [replace(TINY, seed=seed) for seed in range(4)]
    two = [Process(run_all, runs, tmp_path) for _ in range(2)]
    assert [process.wait(100) for process in two] == [0, 0]
    states = [state_of(run, tmp_path) for run in runs]
    assert words(states) == ["done"] * 4
    assert all([metrics["epoch"] for metrics in state.epochs] == [1, 2] for state in states)


def test_compiled_graphs_of_other_runs_are_dropped(fake, tmp_path, monkeypatch):
    resets = []
    monkeypatch.setattr(job.torch.compiler, "reset", lambda: resets.append(len(fake.asked)))
    run_all([TINY, replace(TINY, compile=True), replace(TINY, compile=True, seed=1)], tmp_path)
    assert resets == [1, 2]  # before each of the two


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("end", [BrokenProcessPool(), Terminated(15)], ids=["killed", "terminated"])
def test_the_progress_of_runs_in_other_processes(end, tmp_path):
    """One process is killed and its run continues, another command finishes a locked run, one fails, others finish."""
    runs, futures, messages, history = [replace(TINY, seed=seed) for seed in range(4)], {}, [], []

    def submit(job):
        run = job.run
        futures[run] = Future()
        return futures[run]

    def finish(run):
        FakeFit()(run, tmp_path / run_dir_name(run))

    def look(progress):
        done = sum(state.finished for state in progress.states)
        history.append((done, progress.running, len(progress.failed)))
        step = len(history)
        if step == 1:
            assert list(futures) == runs[:2]
            futures.pop(runs[0]).set_exception(end)
        if step == 2:
            assert list(futures) == runs[1:2]
        if step == 3:
            assert list(futures) == [runs[1], runs[0]]
            futures[runs[1]].set_result(Outcome(locked=True, messages=("it is locked",)))
            finish(runs[1])
        if step == 5:
            assert list(futures)[2:] == runs[2:3]
            futures[runs[2]].set_result(Outcome("no memory"))
            finish(runs[0])
            futures[runs[0]].set_result(Outcome(messages=("it was slow",)))
        if step == 7:
            finish(runs[3])
            futures[runs[3]].set_result(Outcome())

    callbacks = StudyCallbacks(on_progress=look, on_message=messages.append)
    with pytest.raises(RunsFailed, match=f"{run_dir_name(runs[2])}.*memory"):
        run_all(runs, tmp_path, callbacks=callbacks, executor=Executor(lambda: 2, submit))
    killed, *others = messages
    assert run_dir_name(runs[0]) in killed
    assert ("was terminated" in killed) == isinstance(end, Terminated)
    assert others == ["it is locked", "it was slow"]
    assert history[:5] == [(0, 2, 0), (0, 1, 0), (0, 2, 0), (1, 1, 0), (1, 2, 0)]
    assert history[5:] == [(2, 0, 1), (2, 1, 1), (3, 0, 1), (3, 0, 1)]


def test_a_run_whose_process_is_killed_every_time_fails(tmp_path):
    submitted = []

    def submit(job):
        run = job.run
        submitted.append(run)
        future = Future()
        future.set_exception(BrokenProcessPool() if run == TINY else OSError("the executor is broken"))
        return future

    with pytest.raises(RunsFailed, match=r"4 times.*executor"):
        run_all(RUNS[:2], tmp_path, executor=Executor(lambda: 1, submit))
    assert submitted == [*[TINY] * 4, RUNS[1]]


DAMAGE = {  # a file of the run directory, its content, and what is said of it
    "config.json": ("{", "config.json cannot be read"),
    "metrics.jsonl": ("not JSON\n", "metrics.jsonl cannot be read"),
    "diverged.json": ("[]", "diverged.json cannot be read"),
}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("name", [*DAMAGE, "other settings", "no seconds"])
def test_a_damaged_directory_does_not_stop_the_others(name, fake, tmp_path):
    """It is not trained and stays as it is; its run and the one that starts from it fail."""
    folder = tmp_path / run_dir_name(RUNS[1])
    folder.mkdir()
    files = {"config.json": json.dumps(RUNS[1].settings())}
    if name == "other settings":
        files, words = {"config.json": json.dumps(RUNS[0].settings())}, "holds results with other settings"
    elif name == "no seconds":
        files, words = {**files, "metrics.jsonl": '{"epoch": 1}\n'}, "it has no 'seconds'"
    else:
        files, words = {**files, name: DAMAGE[name][0]}, DAMAGE[name][1]
    for file, content in files.items():
        (folder / file).write_text(content)
    runs, ended = [*RUNS, replace(TINY, init=run_dir_name(RUNS[1]))], []
    callbacks = StudyCallbacks(on_end=lambda state, progress, failed: ended.append((state.run, failed)))
    with pytest.raises(RunsFailed, match=words) as failure:
        run_all(runs, tmp_path, callbacks=callbacks)
    assert fake.asked == [RUNS[0], *RUNS[2:]]
    assert list(failure.value.failed) == [run_dir_name(RUNS[1]), run_dir_name(runs[4])]
    assert failure.value.failed == {run_dir_name(run): failed for run, failed in ended if failed}
    assert {file: (folder / file).read_text() for file in files} == files


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), bsam.BsamError("x cannot be read")])
def test_a_transient_read_error_while_runs_train_elsewhere_is_harmless(error, tmp_path, monkeypatch):
    """One file system error in each look at the runs, and two at the start and the end of each."""
    futures, seen, read = {}, [], RunDir.state
    errors = dict.fromkeys(map(run_dir_name, RUNS), 2)

    def state(self, *arguments):
        if errors[self.path.name] > 0:
            errors[self.path.name] -= 1
            raise error
        return read(self, *arguments)

    monkeypatch.setattr(RunDir, "state", state)

    def submit(job):
        run = job.run
        futures[run] = Future()
        return futures[run]

    def look(progress):
        seen.append([str(state) for state in progress.states])
        for run, future in futures.items():
            if not future.done():
                FakeFit()(run, tmp_path / run_dir_name(run))
                future.set_result(Outcome())
        errors.update(dict.fromkeys(errors, 2))

    states = run_all(RUNS, tmp_path, callbacks=StudyCallbacks(on_progress=look), executor=Executor(lambda: 2, submit))
    assert list(futures) == RUNS
    assert len(seen) > 2
    assert words(states) == ["done"] * 4


@pytest.mark.usefixtures("at_once")
def test_a_directory_that_cannot_be_read_after_the_training_fails_at_the_end(tmp_path, monkeypatch):
    def submit(job):
        run = job.run
        FakeFit()(run, tmp_path / run_dir_name(run))
        if run == RUNS[0]:
            (tmp_path / run_dir_name(run) / "metrics.jsonl").write_text("damaged\n")
        future = Future()
        future.set_result(Outcome())
        return future

    with pytest.raises(RunsFailed, match=r"metrics\.jsonl cannot be read") as failure:
        run_all(RUNS, tmp_path, executor=Executor(lambda: 1, submit))
    assert list(failure.value.failed) == [run_dir_name(RUNS[0])]
    assert words(state_of(run, tmp_path) for run in RUNS) == ["unreadable", "done", "done", "done"]
