"""Reading a run directory: the state of a run, and files that cannot be read, which ``fit`` restores."""

import io
import json
import pickle
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

import bsam
from bsam.models.digits_net import DigitsNet
from bsam.tasks import Task
from bsam.tasks.classification import Classification
from bsam.training import loop, trainer
from bsam.training.config import Run
from bsam.training.run_dir import RunDir, run_dir_name

RUN = Run("sam", epochs=3, batch=64, limit_train=128, limit_test=50, probe=1, curvature=True, surface=3)


@pytest.fixture(scope="module", autouse=True)
def _few_samples():
    """For the curvature, which most tests compute again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "CURVATURE_SAMPLES", 16)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory, runs):
    folder = tmp_path_factory.mktemp("finished") / "run"
    runs.train(RUN, folder)
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of a finished run."""
    return shutil.copytree(finished, tmp_path / "run")


def test_a_name_describes_the_run_and_no_other_run_has_it():
    others = [{"lr": 0.1}, {"epochs": 4}, {"seed": 1}, {"limit_train": None}, {"arguments": {"rho": 0.1}}]
    names = [run_dir_name(Run(**{**RUN.settings(), **other})) for other in ({}, *others)]
    assert len(set(names)) == len(names)
    assert names[0].startswith("digits_net-digits-sam-seed0-")
    assert names[-1].startswith("digits_net-digits-sam-rho0.1-seed0-")
    assert run_dir_name(Run("sgd")) == run_dir_name(Run("base")) != run_dir_name(Run("base", base="adam"))
    assert run_dir_name(Run("sgd")).startswith("digits_net-digits-sgd-seed0-")
    assert run_dir_name(Run("base", base="adam")).startswith("digits_net-digits-adam-seed0-")
    for run in (Run("gam", {"beta": [1, 2, 3]}), Run("bsam", {"start_from_min": True})):
        assert re.fullmatch(r"[a-z0-9_.-]+", run_dir_name(run))


def test_the_state_follows_the_run(tmp_path, runs):
    def state():
        found = RunDir(tmp_path / "run").state(RUN)
        return str(found), len(found.epochs), found.left, found.ended, found.finished, found.diverged

    assert state() == ("missing", 0, 3, False, False, None)
    runs.train(RUN, tmp_path / "run", stop=2)
    assert state() == ("epoch 2 of 3", 2, 1, False, False, None)
    runs.train(RUN, tmp_path / "run")
    assert state() == ("done", 3, 0, True, True, None)
    with pytest.raises(bsam.BsamError, match=r"other settings \(seed 0 there, 1 here\)"):
        RunDir(tmp_path / "run").state(Run(**{**RUN.settings(), "seed": 1}))


def test_results_are_read_as_they_were_found(folder, runs, monkeypatch):
    monkeypatch.setattr(trainer.Trainer, "train_epoch", lambda *_: pytest.fail("it trains"))
    result, run_dir = runs.train(RUN, folder), RunDir(folder)
    assert (run_dir.run(), run_dir.top_eigenvalue(), run_dir.surface()) == (RUN, result.top_eigenvalue, result.surface)
    assert run_dir.metrics() == [epoch.metrics for epoch in result.epochs]
    assert run_dir.last_metrics() == result.last.metrics
    assert [reading["step"] for reading in run_dir.probe()] == [*range(6)]
    assert run_dir.weights().keys() == DigitsNet().state_dict().keys()
    (folder / "curvature.json").unlink()
    assert (run_dir.top_eigenvalue(), run_dir.surface()) == (None, None)


def test_a_run_that_is_not_there_or_not_finished_is_refused(folder, tmp_path):
    assert RunDir(tmp_path).metrics() == []
    huge = json.dumps({**RUN.settings(), "lr": 10**400})
    other = json.dumps({**RUN.settings(), "held_out": "test"})
    for content, why in (
        (None, "cannot be read"),
        ("[1]", "cannot be read"),
        (other, r"not describe a run of this version .*held_out.*: choose another folder"),
        (huge, "lr must be a finite number"),
    ):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(bsam.BsamError, match=f"config.json .*{why}"):
            RunDir(tmp_path).run()
    (folder / "model.safetensors").unlink()
    with pytest.raises(bsam.BsamError, match=r"is not finished \(3 of 3 epochs are\)"):
        RunDir(folder).finished_run()


READERS = {
    "metrics.jsonl": lambda run_dir: run_dir.state(RUN),
    "probe.jsonl": RunDir.probe,
    "curvature.json": RunDir.top_eigenvalue,
    "predictions.npz": RunDir.predictions,
    "model.safetensors": RunDir.weights,
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_cannot_be_read_is_named_and_written_again_from_the_checkpoint(name, folder, monkeypatch, runs):
    file, whole = folder / name, (folder / name).read_bytes()
    monkeypatch.setattr(trainer.Trainer, "train_epoch", lambda *_: pytest.fail("it trains"))
    file.write_bytes(whole[:100])
    again = "then run the command that trained it again, which writes the file from the checkpoint"
    with pytest.raises(bsam.BsamError, match=rf"run/{name} cannot be read \(\w+\): remove it.*, {again}"):
        READERS[name](RunDir(folder))
    file.unlink()
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert not RunDir(folder).state(RUN).finished
    runs.train(RUN, folder)
    assert RunDir(folder).state(RUN).finished
    if name == "predictions.npz":  # an archive holds the time
        assert len(RunDir(folder).predictions()) > 0
    else:
        assert file.read_bytes() == whole


ARRAYS = {"pixels": np.arange(300, dtype=np.uint8).reshape(10, 10, 3), "found": np.linspace(0, 1, 10).reshape(5, 2)}


class Loaded:
    """Says so when it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


def saved(save, *arguments, **arrays):
    buffer = io.BytesIO()
    save(buffer, *arguments, **arrays)
    return buffer.getvalue()


def test_predictions_are_read_and_nothing_is_unpickled(tmp_path):
    run_dir, file = RunDir(tmp_path), tmp_path / "predictions.npz"
    assert run_dir.predictions() == {}
    file.write_bytes(saved(np.savez_compressed, **ARRAYS))
    found = run_dir.predictions()
    assert list(found) == list(ARRAYS)
    assert all(np.array_equal(found[name], ARRAYS[name]) and found[name].dtype == ARRAYS[name].dtype for name in found)
    pickled = np.array([Loaded()], dtype=object)
    for content in (pickle.dumps(Loaded()), saved(np.savez, found=pickled, allow_pickle=True)):
        file.write_bytes(content)
        with pytest.raises(bsam.BsamError, match=r"predictions\.npz cannot be read"):
            run_dir.predictions()


def test_a_task_without_predictions_writes_none(tmp_path, runs):
    class Silent(Classification):
        predictions = Task.predictions

    runs.train(replace(RUN, epochs=1, curvature=False, surface=None), tmp_path, task=Silent)
    assert not (tmp_path / "predictions.npz").exists()
    assert RunDir(tmp_path).predictions() == {}
