import os
import signal
import socket
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import bsam
from bsam import cli
from bsam.data import check_data
from bsam.recipes import ray_tasks, run_job, runner
from bsam.recipes.ray_tasks import RayTasks
from bsam.recipes.run_job import RunJob, state_of
from bsam.recipes.runner import Callbacks, run_all
from bsam.training.config import Run
from helpers import draw_images
from processes import Process

# on image files: for the digits, each worker would import scikit-learn, which takes more than a second
ON_FILES = {"data": "folder:images", "image_size": 8, "batch": 12}
RUN = Run("sgd", **ON_FILES, model="digits_net", lr=0.1, label_smoothing=0.0, epochs=1)
LONG = replace(RUN, method="bsam", epochs=60)


@pytest.fixture(scope="module")
def cluster():
    """A real Ray with two CPUs; its address."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # with it, Ray writes a token into the home folder
    import ray

    before = signal.getsignal(signal.SIGTERM)
    with RayTasks(cpus=2):
        assert signal.getsignal(signal.SIGTERM) == before
        yield ray.get_runtime_context().gcs_address
    del os.environ["RAY_AUTH_MODE"]


def last_start(state):
    """Return the process that began last to train a run, and the epochs that it finished."""
    text = (state.path / "log.txt").read_text().rpartition("process ")[2]
    return int(text.split()[0]), text.count("train_loss")


def same_end(one, other):
    assert one.finished
    assert [{**a, "seconds": 0} for a in one.epochs] == [{**b, "seconds": 0} for b in other.epochs]
    assert (one.path / "model.safetensors").read_bytes() == (other.path / "model.safetensors").read_bytes()


def drive(address, out, given):
    with RayTasks(address, device="cpu") as executor:
        run_all([LONG], out, executor=executor, **given)


def test_a_driver_dies_and_another_goes_on_where_a_worker_is_killed(cluster, tmp_path, monkeypatch):
    """8 runs, one of them begun by a driver that is killed, and killed again with its worker by SIGKILL."""
    draw_images(tmp_path / "images", {"train": 8, "test": 2}, size=(8, 8))
    given = {"data_dir": tmp_path, "cache_dir": tmp_path / "cache"}
    first = Process(drive, cluster, tmp_path / "there", given)
    while not state_of(LONG, tmp_path / "there").epochs:
        assert first.returncode is None
        time.sleep(0.02)
    first.kill()
    orphan, _ = last_start(state_of(LONG, tmp_path / "there"))
    begun = len(state_of(LONG, tmp_path / "there").epochs)
    assert 0 < begun < LONG.epochs

    runs = [LONG, *(replace(RUN, seed=seed) for seed in range(7))]
    killed, progress = [], []
    monkeypatch.setattr(runner, "LOOK", 0.05)

    def kill(found):
        progress.append(found)
        state = state_of(LONG, tmp_path / "there")
        pid, epochs = last_start(state)
        if pid != orphan and epochs and len(state.epochs) < LONG.epochs and not killed:  # the orphan may go on a while
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    callbacks = Callbacks(on_progress=kill, on_end=lambda state, found: kill(found))
    with RayTasks(device="cpu") as executor:
        assert executor.slots == 2
        executor.check(partial(check_data, [RUN.data], tmp_path), tmp_path / "there")
        there = run_all(runs, tmp_path / "there", callbacks, executor, **given)
    assert len(killed) == 1
    assert (there[0].path / "log.txt").read_text().count("process ") >= 3
    assert max(found.running for found in progress) == 2
    for one, other in zip(there, run_all(runs, tmp_path / "here", device="cpu", **given), strict=True):
        same_end(one, other)


def test_what_no_node_can_meet_is_refused(cluster, tmp_path):
    with pytest.raises(bsam.BsamError, match=r"1 CPU and 0.5 GPUs.*the largest has 0 GPUs"), RayTasks(gpus_per_run=0.5):
        pass
    with pytest.raises(bsam.BsamError, match="the largest has 0 GPUs"), RayTasks(device="cuda"):
        pass


def test_a_data_folder_that_a_node_does_not_have_is_named(cluster, tmp_path):
    check = partial(check_data, ["cifar10"], tmp_path / "no")
    with RayTasks() as executor, pytest.raises(bsam.BsamError, match=rf"^node .*no folder {tmp_path / 'no'} on"):
        executor.check(check, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_node_that_is_up_is_checked(cluster, tmp_path, monkeypatch):
    import ray

    (node,) = ray.nodes()
    monkeypatch.setattr(ray, "nodes", lambda: [node, {**node, "Alive": False}, {**node, "NodeManagerAddress": "two"}])
    out = tmp_path / "out"

    def check():
        with (tmp_path / "calls").open("a") as calls:
            calls.write("called\n")

    with RayTasks() as executor:
        assert executor.slots == 4
        executor.check(check, out)
        assert (tmp_path / "calls").read_text() == "called\n" * 2
        with pytest.raises(bsam.BsamError, match=r"^node .*: a task failed there \(.*division.*Is bsam installed"):
            executor.check(lambda: 1 / 0, out)
    assert "--out must be on a file system that all nodes share" in ray_tasks._check_node(lambda: None, tmp_path / "no")


def test_that_no_node_is_left_is_said_once(cluster, monkeypatch):
    told = []
    with RayTasks(tell=told.append) as executor:
        assert executor.slots == 2
        monkeypatch.setattr(ray_tasks, "_nodes", list)
        assert [executor.slots for _ in range(3)] == [0] * 3
    assert [sentence[:21] for sentence in told] == ["No node that can trai"]


def test_what_a_task_is_given_and_that_it_is_cancelled(cluster, tmp_path, monkeypatch):
    import ray

    asked, cancelled, future = [], [], Future()
    task = SimpleNamespace(future=lambda: future)

    def options(**named):
        asked.append(named)
        return SimpleNamespace(remote=lambda *arguments: asked.append(arguments) or task)

    (node,) = ray_tasks._nodes()
    nodes = [{**node, "Resources": {**node["Resources"], "GPU": 1.0}}]
    monkeypatch.setattr(ray_tasks, "_nodes", lambda: nodes)
    monkeypatch.setattr(ray, "remote", lambda function: asked.append(function) or SimpleNamespace(options=options))
    monkeypatch.setattr(ray, "cancel", lambda *task, force: cancelled.append((*task, force)))
    monkeypatch.chdir(tmp_path)
    given = {"data_dir": Path("data"), "cache_dir": Path("/cache"), "device": "auto"}
    with RayTasks(gpus_per_run=0.5) as executor:
        assert executor.submit(RunJob(RUN, Path("out"), given), print, print) is future
    train, resources, (job, folder) = asked
    assert resources == {"num_cpus": 1, "num_gpus": 0.5, "max_retries": 3}
    assert job.options == {"data_dir": tmp_path / "data", "cache_dir": Path("/cache"), "device": "cuda"}
    assert (job.out, folder) == (tmp_path / "out", str(tmp_path))
    assert cancelled == [(task, True)]

    with RayTasks(gpus_per_run=0) as executor:  # the node has a GPU
        executor.submit(RunJob(RUN, Path("out"), given), print, print)
    assert asked[-2]["num_gpus"] == 0
    assert asked[-1][0].options["device"] == "cpu"

    monkeypatch.setattr(run_job, "fit", lambda *_, **options: print(f"in {os.getcwd()}"))  # as on a node
    monkeypatch.chdir("/")
    train(job, folder)
    assert f"in {tmp_path}\n" in job.log.read_text()


def test_ray_is_stopped_where_its_cluster_is_refused(cluster, monkeypatch):
    import ray

    stopped = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: stopped.append(True))
    monkeypatch.setattr(ray, "init", lambda *_, **options: None)
    with pytest.raises(bsam.BsamError, match="no node of the cluster has them"), RayTasks(gpus_per_run=8):
        pass
    assert stopped == [True]
    monkeypatch.setattr(ray, "init", fail_to_connect)
    with pytest.raises(bsam.BsamError, match=r"Ray at auto cannot be used \(no cluster\): start one"), RayTasks("auto"):
        pass
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    with pytest.raises(bsam.BsamError, match="must be HOST:PORT of its head node, or auto; got 'nowhere'"), RayTasks():
        pass


def fail_to_connect(*_, **options):
    raise ConnectionError("no\ncluster")


@pytest.mark.parametrize("is_on", [False, True])
def test_runs_that_share_a_gpu_without_mps_are_told_of(cluster, tmp_path, monkeypatch, is_on):
    (node,) = ray_tasks._nodes()
    nodes = [{**node, "Resources": {**node["Resources"], "GPU": 1.0}}, {"Resources": {"CPU": 4.0}}]
    monkeypatch.setattr(ray_tasks, "_nodes", lambda: nodes)
    monkeypatch.setattr(ray_tasks, "mps_runs", lambda: is_on)
    told = []
    for share in (0.5, 1.0):
        with RayTasks(gpus_per_run=share, tell=told.append) as executor:
            assert executor.slots == 1 / share
            executor.check(lambda: None, tmp_path)
    assert len(told) == (not is_on)
    assert all(sentence.startswith("NVIDIA MPS is not on at node ") for sentence in told)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ray", "nowhere"], "must be HOST:PORT of its head node, or auto; got 'nowhere'"),
        (["--ray", "ray://host:10001"], "must be HOST:PORT"),
        (["--ray", "--gpus-per-run", "1.5"], "gpus_per_run must be between 0 and 1, or a whole number; got 1.5"),
        (["--ray", "--gpus-per-run", "-1"], "gpus_per_run must be"),
        (["--ray", "--device", "cuda:1"], "device must be auto, cpu or cuda, got 'cuda:1'"),
        (["--ray", "--jobs", "2"], "give one of them"),
        (["--gpus-per-run", "0.5"], "is for --ray"),
    ],
)
def test_refusals(arguments, words, tmp_path, capsys):
    assert cli.main(["run", "label-noise", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_address_where_nothing_listens(tmp_path, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    assert cli.main(["run", "label-noise", "--out", str(tmp_path / "out"), "--ray", address]) == 2
    assert f"no Ray cluster answers at {address}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
