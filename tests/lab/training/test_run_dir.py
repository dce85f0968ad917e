"""Read a run directory: the state of a run, and files that cannot be read."""

import hashlib
import io
import json
import re
import shutil

import numpy as np
import pytest

import bsam
from bsam.lab.config import Run
from bsam.lab.models.cifar import DigitsNet
from bsam.lab.training import trainer
from bsam.lab.training.flatness_numbers import largest_eigenvalue
from bsam.lab.training.run_dir import RunDir, run_dir_name

RUN = Run("sam", epochs=2, batch=32, limit_train=64, limit_test=50, probe=1, curvature=True, surface=3)


@pytest.fixture
def quick():
    """The shared runs are compared with runs of this module, so the search for eigenvalues must be the same."""


@pytest.fixture(scope="module", autouse=True)
def _few_samples():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "CURVATURE_SAMPLES", 16)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory, runs):
    folder = tmp_path_factory.mktemp("finished") / "run"
    runs.train(RUN, folder)
    return folder


@pytest.fixture
def folder(finished, tmp_path, no_training):
    """A copy of a finished run, which must not be trained again."""
    return shutil.copytree(finished, tmp_path / "run")


def test_a_name_describes_the_run_and_is_unique():
    others = [{"lr": 0.1}, {"epochs": 4}, {"seed": 1}, {"limit_train": None}, {"arguments": {"rho": 0.1}}]
    names = [run_dir_name(Run.of(**{**RUN.settings(), **other})) for other in ({}, *others)]
    assert len(set(names)) == len(names)
    assert names[0].startswith("digits_net-digits-sam-seed0-")
    assert names[-1].startswith("digits_net-digits-sam-rho0.1-seed0-")
    assert run_dir_name(Run("sgd")) == run_dir_name(Run("base")) != run_dir_name(Run("base", base="adam"))
    assert run_dir_name(Run("sgd")).startswith("digits_net-digits-sgd-seed0-")
    assert run_dir_name(Run("base", base="adam")).startswith("digits_net-digits-adam-seed0-")
    for run in (Run("gam", {"beta": [1, 2, 3]}), Run("bsam", {"start_from_min": True})):
        assert re.fullmatch(r"[a-z0-9_.-]+", run_dir_name(run))


def test_names_of_runs_from_before_noise_labels_are_kept():
    """As an earlier version made them: labels were drawn from the other classes."""
    settings = {"data": "cifar10", "label_noise": 0.4, "seed": 1}
    name = "digits_net-cifar10-bsam-passes2-noise40-seed1-e2096c1b"
    assert run_dir_name(Run.of("bsam", {"passes": 2}, **settings, noise_labels="other")) == name
    assert run_dir_name(Run("sgd", model="resnet18")) == "resnet18-digits-sgd-seed0-6e921909"
    assert run_dir_name(Run.of("bsam", {"passes": 2}, **settings)).startswith(
        "digits_net-cifar10-bsam-passes2-noise40-all-seed1-"
    )


@pytest.mark.parametrize("noise", [{}, {"label_noise": 0.4, "noise_labels": "other"}], ids=["clean", "noise"])
def test_a_run_stored_before_noise_labels_continues_with_labels_of_the_other_classes(noise, tmp_path, runs):
    run = Run.of("sgd", epochs=2, batch=32, limit_train=64, limit_test=50, **noise)
    runs.train(run, tmp_path / "whole")
    runs.train(run, tmp_path / "stopped", stop=1)
    config = tmp_path / "stopped" / "config.json"
    stored = json.loads(config.read_text())
    del stored["noise_labels"]
    config.write_text(json.dumps(stored))
    assert RunDir(tmp_path / "stopped").run() == run
    if noise:
        with pytest.raises(bsam.BsamError, match="noise_labels other there, all here"):
            runs.train(Run.of(**{**run.settings(), "noise_labels": "all"}), tmp_path / "stopped")
    runs.train(run, tmp_path / "stopped")
    assert runs.same(runs.end(tmp_path / "whole"), runs.end(tmp_path / "stopped"))


# config.json of the last version that stored the settings of all tasks with each run: one of pose
OLDER = """{"model": "simcc_resnet8", "weights": null, "init": null, "freeze_backbone": false, "head_lr": null,
"layer_decay": 1.0, "data": "stick_figures", "image_size": null, "skip_corrupt": false, "augment": null,
"limit_train": null, "limit_test": null, "eval_split": "test", "seed": 0, "simcc_k": 2.0, "simcc_sigma": 6.0,
"flip_test": true, "label_smoothing": 0.0, "label_noise": 0.0, "noise_labels": "all", "weight_bits": null,
"activation_bits": null, "first_last_bits": 8, "quantizer": "lsq", "fold_batch_norm": false, "perturb_scales": false,
"method": "sam", "arguments": {"rho": 0.1}, "task": "pose", "base": "adam", "base_arguments": {}, "lr": 0.001,
"schedule": "cosine", "warmup": 0.0, "momentum": 0.9, "nesterov": false, "weight_decay": 0.0, "epochs": 140,
"batch": 64, "accumulate": 1, "clip_norm": null, "ema": null, "precision": "fp32", "compile": false, "capture": true,
"probe": null, "radius": null, "curvature": false, "surface": null}"""


def test_a_run_of_a_version_that_stored_the_settings_of_all_tasks(tmp_path, runs):
    persons = {"data": "stick_figures", "model": "simcc_resnet8", "flip_test": True}
    pose = Run.of("sam", {"rho": 0.1}, task="pose", **persons)
    (tmp_path / "config.json").write_text(OLDER)
    assert RunDir(tmp_path).run() == pose
    assert run_dir_name(pose) == "simcc_resnet8-stick_figures-sam-rho0.1-seed0-7d4d13b7"
    assert str(RunDir(tmp_path).state(pose)) == "missing"
    with pytest.raises(bsam.BsamError, match="flip_test True there, False here"):
        RunDir(tmp_path).state(pose.changed(flip_test=False))
    run = Run.of("sgd", epochs=2, batch=32, limit_train=64, limit_test=50, label_noise=0.25)
    runs.train(run, tmp_path / "whole")
    runs.train(run, tmp_path / "stopped", stop=1)
    (tmp_path / "stopped/config.json").write_text(json.dumps({**json.loads(OLDER), **run.settings(), "simcc_k": 4.0}))
    runs.train(run, tmp_path / "stopped")
    assert runs.same(runs.end(tmp_path / "whole"), runs.end(tmp_path / "stopped"))


def test_the_state_of_a_run(tmp_path, runs):
    run = Run("sgd", epochs=2, batch=32, limit_train=64, limit_test=50)

    def state():
        current = RunDir(tmp_path / "run").state(run)
        return str(current), len(current.epochs), current.left, current.ended, current.finished, current.diverged

    assert state() == ("missing", 0, 2, False, False, None)
    runs.train(run, tmp_path / "run", stop=1)
    assert state() == ("epoch 1 of 2", 1, 1, False, False, None)
    runs.train(run, tmp_path / "run")
    assert state() == ("done", 2, 0, True, True, None)
    (tmp_path / "run/diverged.json").write_text('{"reason": "on another machine"}')
    assert state() == ("done", 2, 0, True, True, None)
    with pytest.raises(bsam.BsamError, match="seed 0 there, 1 here"):
        RunDir(tmp_path / "run").state(Run.of(**{**run.settings(), "seed": 1}))


def test_results_are_read(folder, runs):
    result, run_dir = runs.train(RUN, folder), RunDir(folder)
    (entry,) = run_dir.flatness()
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert run_dir.run() == RUN
    assert (entry["run_dir"], entry["sha256"], entry["samples"]) == (
        run_dir_name(RUN),
        weights,
        16,
    )  # as in the shared runs
    assert entry["eigenvalues"]["maximum"] == largest_eigenvalue(entry) == result.top_eigenvalue
    assert (entry["landscape"]["axis"], entry["landscape"]["loss"]) == (
        result.surface.axes[0].tolist(),
        result.surface.loss.tolist(),
    )
    assert run_dir.metrics() == [epoch.metrics for epoch in result.epochs]
    assert run_dir.last_metrics() == result.last.metrics
    assert [reading["step"] for reading in run_dir.probe()] == [*range(4)]
    assert run_dir.weights().keys() == DigitsNet().state_dict().keys()
    (folder / "flatness.json").unlink()
    assert run_dir.flatness() == []


def test_a_folder_without_a_finished_run(folder, tmp_path):
    assert RunDir(tmp_path).metrics() == []
    assert RunDir(tmp_path).predictions() == {}
    huge = json.dumps({**RUN.settings(), "lr": 10**400})
    other = json.dumps({**RUN.settings(), "held_out": "test"})
    for content, word in (
        (None, "read"),
        ("[1]", "read"),
        ("{}", "method is missing"),
        (other, "held_out"),
        (huge, "lr"),
    ):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(bsam.BsamError, match=f"config.json .*{word}"):
            RunDir(tmp_path).run()
    (folder / "model.safetensors").unlink()
    with pytest.raises(bsam.BsamError, match="not finished"):
        RunDir(folder).finished_run()


READERS = {
    "metrics.jsonl": lambda run_dir: run_dir.state(RUN),
    "probe.jsonl": RunDir.probe,
    "flatness.json": RunDir.flatness,
    "predictions.npz": RunDir.predictions,
    "model.safetensors": RunDir.weights,
}


def test_damaged_files_are_restored_from_the_checkpoint(folder, runs):
    contents, predictions = runs.contents(folder), RunDir(folder).predictions()
    for name, read in READERS.items():
        (folder / name).write_bytes(contents[name][:100])
        with pytest.raises(bsam.BsamError, match=rf"run/{name}.*remove"):
            read(RunDir(folder))
    for name in READERS:
        (folder / name).unlink()
    assert not RunDir(folder).state(RUN).finished
    runs.train(RUN, folder)
    assert RunDir(folder).state(RUN).finished
    for name in READERS.keys() - {"predictions.npz"}:  # an archive holds the time
        assert (folder / name).read_bytes() == contents[name]
    restored = RunDir(folder).predictions()
    assert list(restored) == list(predictions)
    assert all(np.array_equal(restored[name], predictions[name]) for name in predictions)


class Loaded:
    """Fails the test when it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


def test_predictions_are_not_unpickled(tmp_path):
    buffer = io.BytesIO()
    np.savez(buffer, found=np.array([Loaded()], dtype=object), allow_pickle=True)
    (tmp_path / "predictions.npz").write_bytes(buffer.getvalue())
    with pytest.raises(bsam.BsamError, match="predictions"):
        RunDir(tmp_path).predictions()


@pytest.mark.parametrize("value", ["x", {}, [1.0]])
def test_metrics_are_numbers(tmp_path, value):
    rows = [{"epoch": 1, "seconds": 1.0, "rho_min": None}, {"epoch": 2, "seconds": 1.0, "train_loss": value}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(bsam.BsamError, match="train_loss is no number"):
        RunDir(tmp_path).metrics()
