"""Reading a run directory: the state of a run, and damaged files, each of which is named, and restored by ``fit``."""

import io
import json
import os
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

RUN = Run("sam", epochs=3, batch=64, limit_train=128, limit_test=50, probe=1, curvature=True, relief=3)
PLAIN = replace(RUN, curvature=False, relief=None)


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


@pytest.fixture(scope="module")
def without_curvature(tmp_path_factory, runs):
    folder = tmp_path_factory.mktemp("without") / "run"
    runs.train(PLAIN, folder)
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
        found = RunDir(tmp_path / "run").state(RUN, verify=True)
        return str(found), len(found.epochs), found.left, found.ended, found.finished, found.damaged, found.diverged

    assert state() == ("missing", 0, 3, False, False, None, None)
    runs.train(RUN, tmp_path / "run", stop=2)
    assert state() == ("epoch 2 of 3", 2, 1, False, False, None, None)
    runs.train(RUN, tmp_path / "run")
    assert state() == ("done", 3, 0, True, True, None, None)
    with pytest.raises(bsam.BsamError, match=r"other settings \(seed 0 there, 1 here\)"):
        RunDir(tmp_path / "run").state(Run(**{**RUN.settings(), "seed": 1}))


def test_results_are_read_as_they_were_found(folder, runs, monkeypatch):
    monkeypatch.setattr(trainer.Trainer, "train_epoch", lambda *_: pytest.fail("it trains"))
    result, run_dir = runs.train(RUN, folder), RunDir(folder)
    assert (run_dir.run(), run_dir.top_eigenvalue(), run_dir.surface()) == (RUN, result.top_eigenvalue, result.relief)
    assert run_dir.metrics() == [epoch.metrics for epoch in result.epochs]
    assert run_dir.last_metrics() == result.last.metrics
    assert [reading["step"] for reading in run_dir.probe()] == [*range(6)]
    assert run_dir.weights().keys() == DigitsNet().state_dict().keys()
    (folder / "curvature.json").unlink()
    assert (run_dir.top_eigenvalue(), run_dir.surface()) == (None, None)


def test_a_run_that_is_not_there_or_not_finished_is_refused(folder, tmp_path):
    assert RunDir(tmp_path).metrics() == []
    huge = json.dumps({**RUN.settings(), "lr": 10**400})
    for content, why in ((None, ""), ('{"architectures": 1}', ""), ("[1]", ""), (huge, "lr must be a finite number")):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(bsam.BsamError, match=f"is not a run directory: .*{why}"):
            RunDir(tmp_path).run()
    (folder / "model.safetensors").unlink()
    with pytest.raises(bsam.BsamError, match=r"no model\.safetensors: the run is not finished"):
        RunDir(folder).load_into(DigitsNet())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            json.dumps({**RUN.settings(), "held_out": "test"}),
            r"another version .* \(unknown settings: held_out\)",
        ),
        ("[1]", "config.json is damaged"),
    ],
    ids=["another version", "damaged"],
)
def test_settings_that_cannot_be_read_are_a_damaged_state_and_stay(content, words, folder, runs):
    (folder / "config.json").write_text(content)
    state = RunDir(folder).state(RUN)
    assert not state.finished
    assert re.search(words, state.damaged)
    before = runs.contents(folder)
    with pytest.raises(bsam.BsamError, match=words):
        runs.train(RUN, folder)
    assert runs.contents(folder) == before


def test_a_directory_whose_name_is_no_text_is_read(folder):
    name = folder.with_name(os.fsdecode(b"r\xff"))
    folder.rename(name)
    assert RunDir(name).state(RUN, verify=True).finished


def edit(pattern, text):
    return lambda file: file.write_text(re.sub(pattern, text, file.read_text()))


LOSS, SECONDS, TOP = r'"train_loss": [^,]*', r'"seconds": [^,}]*', r'"top_eigenvalue": [^,]*'
BROKEN = {
    "half a line": lambda file: file.write_text('{"epoch": 1\n'),
    "no object": lambda file: file.write_text("1\n2\n3\n"),
    "no text": lambda file: file.write_bytes(b"\xff\xfe\n"),
    "empty": lambda file: file.write_text(""),
    "without end": lambda file: file.write_text("[" * 100_000),
}
METRICS = {
    **BROKEN,
    "texts": edit(LOSS, '"train_loss": "low"'),
    "a list as a loss": edit(LOSS, '"train_loss": []'),
    "an object as a loss": edit(LOSS, '"train_loss": {}'),
    "a huge number": edit(LOSS, f'"train_loss": {10**400}'),
    "a list as time": edit(SECONDS, '"seconds": []'),
    "no time": edit(SECONDS, '"seconds": null'),
    "another name": lambda file: file.write_text(file.read_text().replace("test_accuracy", "tezt_accuracy", 1)),
    "no score": edit("test_accuracy", "tezt_accuracy"),
    "an epoch twice": edit('"epoch": 3', '"epoch": 2'),
    "an epoch gone": lambda file: file.write_text("".join(file.read_text().splitlines(keepends=True)[:2])),
    "gone": lambda file: file.unlink(),
}


def repaired(folder, run_dir_says, runs, monkeypatch, run=RUN):
    """Whether a run with a damaged file is not finished, and ``fit`` writes the file again without training."""
    state = RunDir(folder).state(run, verify=True)
    assert not state.finished
    assert re.search(run_dir_says, state.damaged)
    assert "run the command that trained it again to restore the file from the checkpoint" in state.damaged
    monkeypatch.setattr(trainer.Trainer, "train_epoch", lambda *_: pytest.fail("it trains"))
    runs.train(run, folder)
    return RunDir(folder).state(run, verify=True).finished


@pytest.mark.parametrize("name", METRICS)
def test_damaged_metrics_are_named_and_written_again(name, without_curvature, tmp_path, monkeypatch, runs):
    folder = shutil.copytree(without_curvature, tmp_path / "run")
    METRICS[name](folder / "metrics.jsonl")
    short = {"empty": 0, "an epoch gone": 2, "gone": 0}
    if name in short:
        assert len(RunDir(folder).metrics()) == short[name]
        message = r"run/metrics\.jsonl does not hold the run's 3 epochs"
    else:
        message = r"run/metrics\.jsonl is damaged: "
        if name != "no score":
            with pytest.raises(bsam.BsamError, match=message):
                RunDir(folder).metrics()
    assert repaired(folder, message, runs, monkeypatch, PLAIN)
    assert (folder / "metrics.jsonl").read_bytes() == (without_curvature / "metrics.jsonl").read_bytes()


def test_epochs_of_an_older_version_may_lack_the_memorised_labels(folder):
    file = folder / "metrics.jsonl"
    *older, last = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in (*older, {**last, "memorised": 0.25})))
    assert RunDir(folder).metrics() == [*({**row, "memorised": None} for row in older), {**last, "memorised": 0.25}]


CURVATURES = {
    **BROKEN,
    "a list": lambda file: file.write_text("[1]"),
    "a list as a number": edit(TOP, '"top_eigenvalue": []'),
    "a huge number": edit(TOP, f'"top_eigenvalue": {10**400}'),
    "another name": edit("top_e", "tup_e"),
    "texts": edit(r"-?\d+\.[\de-]+", '"abc"'),
    "a row gone": edit(r'"axis": \[\s*-1\.0,', '"axis": ['),
}


@pytest.mark.parametrize("damage", CURVATURES.values(), ids=CURVATURES)
def test_damaged_curvature_is_named_and_computed_again(damage, folder, finished, monkeypatch, runs):
    damage(folder / "curvature.json")
    assert repaired(folder, r"run/curvature\.json is damaged: ", runs, monkeypatch)
    assert (folder / "curvature.json").read_bytes() == (finished / "curvature.json").read_bytes()


def flip_bit(content, place):
    return content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :]


NETWORKS = {
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "no text": lambda content: b"\xff\xfe{",
    "one bit": lambda content: flip_bit(content, len(content) - 5),
    "one bit of the header": lambda content: flip_bit(content, content.index(b'lr\\": 0.05') + 9),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_damaged_network_is_named_and_written_again(name, without_curvature, tmp_path, monkeypatch, runs):
    folder = shutil.copytree(without_curvature, tmp_path / "run")
    file, content = folder / "model.safetensors", (without_curvature / "model.safetensors").read_bytes()
    file.write_bytes(NETWORKS[name](content))
    assert RunDir(folder).state(PLAIN).finished == name.startswith("one bit")  # the size alone
    assert repaired(folder, r"run/model\.safetensors is damaged: ", runs, monkeypatch, PLAIN)
    assert file.read_bytes() == content


def test_a_flipped_bit_anywhere_in_the_header_of_the_network_is_refused(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    for place in [*range(0, end, 7), end, (end + len(whole)) // 2, len(whole) - 1]:
        file.write_bytes(flip_bit(whole, place))
        with pytest.raises(bsam.BsamError, match=r"model\.safetensors is damaged"):
            RunDir(folder).weights()


@pytest.mark.parametrize("name", ["curvature.json", "metrics.jsonl", "model.safetensors"])
def test_damage_without_a_checkpoint_is_refused_and_nothing_is_changed(name, folder, runs):
    (folder / "checkpoint.pt").unlink()
    assert RunDir(folder).state(RUN, verify=True).finished
    (folder / name).write_bytes((folder / name).read_bytes()[:100])
    before = runs.contents(folder)
    assert f"run/{name} " in RunDir(folder).state(RUN, verify=True).damaged
    message = r"no checkpoint, .* remove model\.safetensors there to train from the start, or choose another folder"
    with pytest.raises(bsam.BsamError, match=message):
        runs.train(RUN, folder)
    assert runs.contents(folder) == before


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("environment.json", "[1", "environment.json is damaged: it holds no JSON array; remove the file"),
        ("environment.json", '[{"torch": "2"}]', "environment.json is damaged: device and torch and bsam and date"),
        ("probe.jsonl", '{"step"\n', "probe.jsonl is damaged: it holds no JSON object; remove model.safetensors"),
        ("probe.jsonl", '{"step": 0}\n', "probe.jsonl is damaged: it does not hold all numbers"),
        ("probe.jsonl", None, "probe.jsonl cannot be read (No such file or directory)"),
    ],
)
def test_damaged_machines_and_readings_are_named(name, text, words, folder):
    (folder / name).unlink() if text is None else (folder / name).write_text(text)
    with pytest.raises(bsam.BsamError, match=re.escape(words)):
        RunDir(folder).machines() if name == "environment.json" else RunDir(folder).probe()


def test_what_cannot_be_read_is_not_taken_for_damage(folder):
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    with pytest.raises(bsam.BsamError, match=r"metrics\.jsonl cannot be read \(Is a directory\)"):
        RunDir(folder).state(RUN)


ARRAYS = {"pixels": np.arange(300, dtype=np.uint8).reshape(10, 10, 3), "found": np.linspace(0, 1, 10).reshape(5, 2)}


class Loaded:
    """Says so when it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


def saved(save, *arguments, **arrays):
    buffer = io.BytesIO()
    save(buffer, *arguments, **arrays)
    return buffer.getvalue()


def test_predictions_are_read_and_damaged_ones_are_named(tmp_path):
    run_dir, file = RunDir(tmp_path), tmp_path / "predictions.npz"
    assert run_dir.predictions() == {}
    content = saved(np.savez_compressed, **ARRAYS)
    file.write_bytes(content)
    found = run_dir.predictions()
    assert list(found) == list(ARRAYS)
    assert all(np.array_equal(found[name], ARRAYS[name]) and found[name].dtype == ARRAYS[name].dtype for name in found)
    words = r"predictions\.npz is damaged; remove model\.safetensors beside it, then run the command that trained it"
    pickled = np.array([Loaded()], dtype=object)
    middle = len(content) // 4  # in the compressed pixels
    for damaged in (
        b"",
        b"no zip",
        content[:-1],
        content[: len(content) // 2],
        content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :],
        content.replace(b"PK\x03\x04", b"PK\x03\x05"),
        saved(np.save, ARRAYS["found"]),
        saved(np.save, pickled, allow_pickle=True),
        pickle.dumps(Loaded()),
        saved(np.savez, found=pickled, allow_pickle=True),
    ):
        file.write_bytes(damaged)
        with pytest.raises(bsam.BsamError, match=words):
            run_dir.predictions()


def test_a_flipped_bit_in_predictions_is_named_or_changes_no_number(tmp_path):
    content, random = saved(np.savez_compressed, **ARRAYS), np.random.default_rng(0)
    named = 0
    for place in random.integers(0, len(content), 200):
        flipped = content[:place] + bytes([content[place] ^ 1 << random.integers(8)]) + content[place + 1 :]
        (tmp_path / "predictions.npz").write_bytes(flipped)
        try:
            found = RunDir(tmp_path).predictions()
        except bsam.BsamError:
            named += 1
        else:
            assert all(np.array_equal(found[name], ARRAYS[name]) for name in found.keys() & ARRAYS.keys())
    assert named > 100


def test_predictions_that_cannot_be_read_are_not_taken_for_damage(tmp_path):
    (tmp_path / "predictions.npz").mkdir()
    with pytest.raises(bsam.BsamError, match=r"predictions\.npz cannot be read \(Is a directory\)"):
        RunDir(tmp_path).predictions()


def test_a_task_without_predictions_writes_none(tmp_path, runs):
    class Silent(Classification):
        predictions = Task.predictions

    runs.train(replace(PLAIN, epochs=1), tmp_path, task=Silent)
    assert not (tmp_path / "predictions.npz").exists()
    assert RunDir(tmp_path).predictions() == {}
