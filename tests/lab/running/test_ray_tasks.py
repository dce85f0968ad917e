import contextlib
import functools
import os
import signal
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import bsam
from bsam.lab import Machine, cli
from bsam.lab.config import Run
from bsam.lab.recipes.plan import state_of
from bsam.lab.running import executors
from bsam.lab.running.executors import ray_tasks
from bsam.lab.running.job import Job
from bsam.lab.running.runner import StudyCallbacks, run_all
from helpers import draw_images

# Image files, since for the digits each worker would import scikit-learn, which takes more than a second.
ON_FILES = {"data": "folder:images", "image_size": 8, "batch": 12}
RUN = Run.of("sgd", **ON_FILES, model="digits_net", lr=0.1, label_smoothing=0.0, epochs=1)
LONG = replace(RUN, method="bsam", epochs=40)
NODE = {"Alive": True, "Resources": {"CPU": 2.0}}


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """A real Ray cluster with one CPU (test_executors has two runs at once).

    The cluster and each worker take seconds to start, so only one test uses it.
    """
    import ray

    monkeypatch.setenv("RAY_worker_niceness", "0")  # otherwise other tests would take all the cores
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ray, "init", functools.partial(ray.init, num_cpus=1))
    monkeypatch.setenv("RAY_AUTH_MODE", "")  # Ray sets it if it is missing; this restores it
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    handler = signal.getsignal(signal.SIGTERM)
    with ray_tasks(Machine(ray="")):
        assert signal.getsignal(signal.SIGTERM) == handler
        yield
    assert os.environ["RAY_AUTH_TOKEN"] == "mine"
    assert ray._private.ray_constants.ENABLE_RAY_CLUSTER


def listening():
    """Return the names and the addresses of the processes of the cluster that accept connections."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    session = ray_session()
    processes += [each for each in psutil.process_iter(["cmdline"]) if session in " ".join(each.info["cmdline"] or ())]
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((process.name(), connection.laddr.ip))
    return found


def ray_session():
    import ray

    return ray._private.worker.global_worker.node.get_session_dir_path()


def last_start(state):
    """Return the id of the last process that trained a run, and the number of epochs that it finished."""
    text = (state.path / "log.txt").read_text().rpartition("process ")[2]
    return int(text.split()[0]), text.count("train_loss")


@pytest.mark.usefixtures("at_once")
def test_after_a_killed_worker_and_an_interruption_runs_continue_bit_for_bit(cluster, tmp_path):
    draw_images(tmp_path / "images", {"train": 8, "test": 2}, size=(8, 8))
    machine = Machine("cpu", data_dir=tmp_path, cache_dir=tmp_path / "cache", checkpoint_every=0)
    runs, out = [LONG, *(replace(RUN, seed=seed) for seed in range(2))], tmp_path / "out"
    killed, seen = [], set()

    def kill_then_interrupt(progress):
        state = state_of(LONG, out)
        if not state.epochs:
            return
        pid, epochs = last_start(state)
        if epochs and not killed:
            killed.append(pid)
            seen.update(listening())
            os.kill(pid, signal.SIGKILL)
        if epochs and pid not in killed:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ray_tasks(Machine("cpu", ray="")) as executor:
        run_all(runs, out, machine, StudyCallbacks(on_progress=kill_then_interrupt), executor)
    assert 2 <= len(state_of(LONG, out).epochs) < LONG.epochs
    assert {"gcs_server", "raylet"} <= {name for name, _ in seen}
    assert {address for _, address in seen} <= {"127.0.0.1", "::ffff:127.0.0.1"}
    token = os.environ["RAY_AUTH_TOKEN"]
    assert len(token) == 64
    assert not list(tmp_path.rglob("auth_token"))
    with ray_tasks(Machine("cpu", ray="")) as executor:
        assert executor.slots() == 1
        states = run_all(runs, out, machine, executor=executor)
    assert (states[0].path / "log.txt").read_text().count("process ") >= 3
    for one, other in zip(states, run_all(runs, tmp_path / "here", machine), strict=True):
        assert one.finished
        assert [{**a, "seconds": 0} for a in one.epochs] == [{**b, "seconds": 0} for b in other.epochs]
        assert (one.path / "model.safetensors").read_bytes() == (other.path / "model.safetensors").read_bytes()


def test_the_resources_and_the_options_of_a_task(tmp_path, monkeypatch):
    import ray

    calls, cancelled, future = [], [], Future()
    task = SimpleNamespace(future=lambda: future)

    def options(**named):
        calls.append(named)
        return SimpleNamespace(remote=lambda *arguments: calls.append(arguments) or task)

    nodes = [{**NODE, "Resources": {"CPU": 2.0, "GPU": gpus}} for gpus in (1.0, 0.25)]
    nodes.append({**nodes[0], "Alive": False})
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 1.25})
    monkeypatch.setattr(ray, "remote", lambda function: calls.append(function) or SimpleNamespace(options=options))
    monkeypatch.setattr(ray, "cancel", lambda *task, force: cancelled.append((*task, force)))
    monkeypatch.setattr(executors, "train_in_worker", lambda job: os.getcwd())
    job = Job(RUN, Path("out"), Machine("auto", data_dir="data", cache_dir="/cache", ray=""))
    for gpus, slots in ((None, 1), (0.5, 2), (0.25, 3), (0, 4)):
        monkeypatch.chdir(tmp_path)
        with ray_tasks(Machine(ray="", gpus_per_run=gpus)) as executor:
            assert executor.slots() == slots
            assert executor.submit(job) is future
        train, resources, arguments = calls[-3:]
        assert resources == {"num_cpus": 1, "num_gpus": 1 if gpus is None else gpus, "max_retries": 3}
        device = "cpu" if gpus == 0 else "cuda"
        there = Machine(device, data_dir=tmp_path / "data", cache_dir="/cache")
        assert arguments[1:] == (Job(RUN, tmp_path / "out", there),)
        monkeypatch.chdir("/")
        assert train(*arguments) == str(tmp_path)  # on a node
    assert cancelled == [(task, True)] * 4


def test_a_cluster_that_cannot_be_used(monkeypatch):
    import ray

    stopped, tokens = [], []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: stopped.append(True))
    monkeypatch.setattr(ray, "init", lambda *_, **options: tokens.append(os.environ.get("RAY_AUTH_TOKEN")))
    monkeypatch.setattr(ray, "nodes", lambda: [NODE])
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    for options in ({"gpus_per_run": 0.5}, {"device": "cuda"}):
        with pytest.raises(bsam.BsamError, match="GPU"), ray_tasks(Machine(ray="", **options)):
            pass
    assert stopped == [True, True]
    assert len({*tokens}) == 2  # one for each cluster that we start
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with ray_tasks(Machine("cpu", ray="")):
        assert tokens[2:] == [None]  # that of a cluster that somebody else started is the user's
    assert "RAY_AUTH_TOKEN" not in os.environ
    monkeypatch.setattr(ray, "init", fail_to_connect)
    for address, reason in (("auto", "no cluster"), ("nowhere", "invalid"), ("127.0.0.1:1", "refused")):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(bsam.BsamError, match=f"{address} .*{reason}"), ray_tasks(Machine(ray="")):
            pass


def fail_to_connect(*_, **options):
    raise ConnectionError("no\ncluster")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--ray", "--gpus-per-run", "1.5"], "gpus_per_run"),
        (["--ray", "--gpus-per-run", "-1"], "gpus_per_run"),
        (["--ray", "--device", "cuda:1"], "device"),
        (["--ray", "--jobs", "2"], "--jobs"),
        (["--gpus-per-run", "0.5"], "--ray"),
    ],
)
def test_refusals(arguments, word, tmp_path, capsys):
    assert cli.main(["run", "label-noise", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert word in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
