import os
import signal
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import bsam
from bsam import cli
from bsam.recipes.states import state_of
from bsam.running import job as run_job
from bsam.running import runner
from bsam.running.job import RunJob
from bsam.running.ray_tasks import ray_tasks
from bsam.running.runner import Callbacks, run_all
from bsam.training.config import Run
from helpers import draw_images

# on image files: for the digits, each worker would import scikit-learn, which takes more than a second
ON_FILES = {"data": "folder:images", "image_size": 8, "batch": 12}
RUN = Run("sgd", **ON_FILES, model="digits_net", lr=0.1, label_smoothing=0.0, epochs=1)
LONG = replace(RUN, method="bsam", epochs=60)


NODE = {"Alive": True, "Resources": {"CPU": 2.0}}


@pytest.fixture
def cluster(monkeypatch):
    """A real Ray with two CPUs. It takes seconds to start, so one test has it."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # with it, Ray writes a token into the home folder
    monkeypatch.setenv("RAY_worker_niceness", "0")  # beside other tests, workers would get no share of the cores
    before = signal.getsignal(signal.SIGTERM)
    with ray_tasks(cpus=2):
        assert signal.getsignal(signal.SIGTERM) == before
        yield


def last_start(state):
    """Return the process that began last to train a run, and the epochs that it finished."""
    text = (state.path / "log.txt").read_text().rpartition("process ")[2]
    return int(text.split()[0]), text.count("train_loss")


def same_end(one, other):
    assert one.finished
    assert [{**a, "seconds": 0} for a in one.epochs] == [{**b, "seconds": 0} for b in other.epochs]
    assert (one.path / "model.safetensors").read_bytes() == (other.path / "model.safetensors").read_bytes()


def test_interrupted_it_goes_on_where_a_worker_is_killed(cluster, tmp_path, monkeypatch):
    """3 runs; the first one is interrupted with its command, and then its worker is killed."""
    draw_images(tmp_path / "images", {"train": 8, "test": 2}, size=(8, 8))
    given = {"data_dir": tmp_path, "cache_dir": tmp_path / "cache"}
    runs, killed, progress = [LONG, *(replace(RUN, seed=seed) for seed in range(2))], [], []
    monkeypatch.setattr(runner, "LOOK", 0.05)

    def interrupt(found):
        if state_of(LONG, tmp_path / "there").epochs:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ray_tasks(device="cpu") as executor:
        run_all([LONG], tmp_path / "there", Callbacks(on_progress=interrupt), executor, **given)
    first, _ = last_start(state_of(LONG, tmp_path / "there"))

    def kill(found):
        progress.append(found)
        state = state_of(LONG, tmp_path / "there")
        pid, epochs = last_start(state)
        if pid != first and epochs and len(state.epochs) < LONG.epochs and not killed:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    callbacks = Callbacks(on_progress=kill, on_end=lambda state, found, failed: kill(found))
    with ray_tasks(device="cpu") as executor:
        assert executor.slots == 2
        there = run_all(runs, tmp_path / "there", callbacks, executor, **given)
    assert len(killed) == 1
    assert (there[0].path / "log.txt").read_text().count("process ") >= 3
    assert max(found.running for found in progress) == 2
    for one, other in zip(there, run_all(runs, tmp_path / "here", device="cpu", **given), strict=True):
        same_end(one, other)


def test_what_no_node_can_meet_is_refused(monkeypatch):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: [NODE])
    for wanted in ({"gpus_per_run": 0.5}, {"device": "cuda"}):
        with pytest.raises(bsam.BsamError, match=r"a run takes 1 CPU and .* GPUs, and no node"), ray_tasks(**wanted):
            pass


def test_what_a_task_is_given_and_that_it_is_cancelled(tmp_path, monkeypatch):
    import ray

    asked, cancelled, future = [], [], Future()
    task = SimpleNamespace(future=lambda: future)

    def options(**named):
        asked.append(named)
        return SimpleNamespace(remote=lambda *arguments: asked.append(arguments) or task)

    nodes = [{**NODE, "Resources": {"CPU": 2.0, "GPU": gpus}} for gpus in (1.0, 0.25)]
    nodes.append({**nodes[0], "Alive": False})
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 1.25})
    monkeypatch.setattr(ray, "remote", lambda function: asked.append(function) or SimpleNamespace(options=options))
    monkeypatch.setattr(ray, "cancel", lambda *task, force: cancelled.append((*task, force)))
    monkeypatch.chdir(tmp_path)
    given = {"data_dir": Path("data"), "cache_dir": Path("/cache"), "device": "auto"}
    for gpus, slots in ((None, 1), (0.5, 2), (0.25, 3), (0, 4)):
        with ray_tasks(gpus_per_run=gpus) as executor:
            assert executor.slots == slots
            assert executor.submit(RunJob(RUN, Path("out"), given), print, print) is future
        train, resources, (job, folder) = asked[-3:]
        assert resources == {"num_cpus": 1, "num_gpus": 1 if gpus is None else gpus, "max_retries": 3}
        assert job.options == {**given, "data_dir": tmp_path / "data", "device": "cpu" if gpus == 0 else "cuda"}
        assert (job.out, folder) == (tmp_path / "out", str(tmp_path))
    assert cancelled == [(task, True)] * 4

    monkeypatch.setattr(run_job, "fit", lambda *_, **options: print(f"in {os.getcwd()}"))  # as on a node
    monkeypatch.chdir("/")
    train(job, folder)
    assert f"in {tmp_path}\n" in job.log.read_text()


def test_ray_is_stopped_where_its_cluster_is_refused(monkeypatch):
    import ray

    stopped = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: stopped.append(True))
    monkeypatch.setattr(ray, "init", lambda *_, **options: None)
    monkeypatch.setattr(ray, "nodes", lambda: [NODE])
    with pytest.raises(bsam.BsamError, match="no node of the cluster has them"), ray_tasks(gpus_per_run=8):
        pass
    assert stopped == [True]
    monkeypatch.setattr(ray, "init", fail_to_connect)
    for address, reason in (("auto", "no cluster"), ("nowhere", "invalid"), ("127.0.0.1:1", "refused")):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(bsam.BsamError, match=rf"Ray at {address} .*{reason}.*: give HOST:PORT"), ray_tasks():
            pass


def fail_to_connect(*_, **options):
    raise ConnectionError("no\ncluster")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ray", "--gpus-per-run", "1.5"], "gpus_per_run must be between 0 and 1, or a whole number; got 1.5"),
        (["--ray", "--gpus-per-run", "-1"], "gpus_per_run must be"),
        (["--ray", "--device", "cuda:1"], "device must be auto, cpu or cuda, got 'cuda:1'"),
        (["--ray", "--jobs", "2"], "--jobs"),
        (["--gpus-per-run", "0.5"], "--ray"),
    ],
)
def test_refusals(arguments, words, tmp_path, capsys):
    assert cli.main(["run", "label-noise", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
