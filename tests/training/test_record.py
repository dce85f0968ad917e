import json
import resource
from dataclasses import replace

import pytest

import bsam
from bsam.flatness.sharpness import Sharpness
from bsam.training.config import Run
from bsam.training.record import Record
from bsam.training.result import Epoch, LossSurface, Result

SETTINGS = {"seed": 0, "epochs": 2}
RUN = Run("bsam", {"rho_max": 0.1, "rho_min": 0.1, "passes": 2}, seed=1, radius=0.05)
RELIEF = LossSurface((-1.0, 0.0, 1.0), ((1.0, 1 / 3, 2.0), (0.5, 0.1, 0.5), (1.0, 0.3, 2.0)))
NEAR = Sharpness(1.0, 0.2, 0.1, 0.3, 1 / 3)
EPOCHS = (Epoch({"test_accuracy": 0.1, "lr": 1 / 9}, NEAR), Epoch({"test_accuracy": 0.7}, NEAR))
RESULT = Result(RUN, EPOCHS, 0.00123, 1 / 7, RELIEF)


def test_what_was_added_is_found_again(tmp_path):
    record = Record(tmp_path / "new" / "folder", SETTINGS)
    assert RUN not in record
    record.add(RESULT)
    again = Record(tmp_path / "new" / "folder", SETTINGS)
    assert again[RUN] == RESULT == record[RUN]
    assert Run("bsam", {"rho_max": 0.1, "rho_min": 0.1}, seed=1, radius=0.05) not in again
    assert Run("bsam", {"rho_max": 0.1, "rho_min": 0.1, "passes": 2}, seed=1, radius=None) not in again


def test_a_run_is_not_taken_for_one_that_measures_more(tmp_path):
    Record(tmp_path, SETTINGS).add(RESULT)
    record = Record(tmp_path, SETTINGS)
    assert replace(RUN, curvature=True) not in record
    assert replace(RUN, relief=13) not in record
    assert replace(RUN, probe=1) not in record


@pytest.mark.parametrize("half", ["", '{"run": {"meth'])
def test_runs_of_an_earlier_version_are_refused_and_stay(tmp_path, half):
    """Their order of samples was drawn otherwise: their numbers are not those of equal settings now."""
    run = {
        name: RUN.settings()[name]
        for name in ("method", "arguments", "lr", "momentum", "weight_decay", "epochs", "batch", "label_noise", "seed")
    }
    line = {"run": run, "epochs": [{"accuracy": 0.5, "sharpness": None}], "seconds_per_step": 0.1}
    content = f"{json.dumps(SETTINGS)}\n{json.dumps(line)}\n{half}"
    (tmp_path / "runs.jsonl").write_text(content)
    with pytest.raises(bsam.BsamError, match=r"line 2 of .* of another version.*choose another folder, or remove"):
        Record(tmp_path, SETTINGS)
    assert (tmp_path / "runs.jsonl").read_text() == content


def test_half_a_line_is_dropped_and_the_next_one_is_whole(tmp_path):
    Record(tmp_path, SETTINGS).add(RESULT)
    file = tmp_path / "runs.jsonl"
    with file.open("a") as f:
        f.write('{"run": {"meth')
    record = Record(tmp_path, SETTINGS)
    assert record[RUN] == RESULT
    other = Result(Run("sgd"), (Epoch({"test_accuracy": 0.5}),), 0.1)
    record.add(other)
    again = Record(tmp_path, SETTINGS)
    assert again[RUN] == RESULT
    assert again[Run("sgd")] == other


def test_other_settings_are_refused_and_nothing_is_touched(tmp_path):
    Record(tmp_path, SETTINGS).add(RESULT)
    before = (tmp_path / "runs.jsonl").read_bytes()
    with pytest.raises(bsam.BsamError, match="epochs 2 there, 3 here"):
        Record(tmp_path, {"seed": 0, "epochs": 3})
    assert (tmp_path / "runs.jsonl").read_bytes() == before
    assert json.loads(before.splitlines()[0]) == SETTINGS


def test_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(bsam.BsamError, match=r"thesis\.tex"):
        Record(tmp_path, SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(bsam.BsamError, match="cannot be used"):
        Record(tmp_path / "thesis.tex", SETTINGS)


@pytest.mark.parametrize(
    ("line", "text", "words"),
    [
        (0, '{"epochs": 2', r"line 1 of .*runs\.jsonl is damaged: it holds no JSON object; choose another folder"),
        (0, "[1]", r"line 1 of .* is damaged"),
        (1, '{"run": {"meth', r"line 2 of .*runs\.jsonl is damaged: it holds no JSON object; .* remove that line"),
        (1, "\udcff", r"line 2 of .* is damaged"),
        (1, "{}", r"line 2 of .* is damaged, or of another version .* remove that line"),
        (1, ("0.7", '"high"'), r"line 2 of .* is damaged.*something else than numbers.*remove that line"),
        (1, ('"epochs": [{', '"epochs": {"a": [{'), r"line 2 of .* is damaged"),
        (1, ('"test_accuracy": 0.7', '"tezt": 0.7'), r"line 2 of .*it has no 'test_accuracy'.*remove that line"),
        (1, ('"test_accuracy": 0.7', '"test_accuracy": null'), r"line 2 of .*it lacks the score.*remove that line"),
        (1, ("0.7", "[]"), r"line 2 of .*something else than numbers.*remove that line"),
        (1, ("0.00123", "{}"), r"line 2 of .*something else than numbers.*remove that line"),
        (1, ("0.00123", str(10**400)), r"line 2 of .*something else than numbers.*remove that line"),
        (1, ('"bilateral"', '"bilaterel"'), r"line 2 of .*something else than numbers.*remove that line"),
        (1, ('"axis": [-1.0', '"axis": [[]'), r"line 2 of .*something else than numbers.*remove that line"),
        (1, ('"lr": 0.05', '"lr": -1'), r"line 2 of .*lr must be a finite number.*got -1.*remove that line"),
        (1, ('"lr": 0.05', f'"lr": {10**400}'), r"line 2 of .*lr must be a finite number.*remove that line"),
        (1, ('"lr": 0.05', '"lx": 0.05'), r"line 2 of .*'lx'.*remove that line"),
    ],
)
def test_damaged_lines_are_named_and_stay(line, text, words, tmp_path):
    Record(tmp_path, SETTINGS).add(RESULT)
    file = tmp_path / "runs.jsonl"
    lines = file.read_text().splitlines()
    lines[line] = lines[line].replace(*text) if isinstance(text, tuple) else text
    before = ("\n".join(lines) + "\n").encode(errors="surrogateescape")
    file.write_bytes(before)
    with pytest.raises(bsam.BsamError, match=words):
        Record(tmp_path, SETTINGS)
    assert file.read_bytes() == before


@pytest.mark.parametrize("lost", ["sharpness", "relief", "a place of the relief"])
def test_a_line_without_what_the_run_measured_is_named(lost, tmp_path):
    Record(tmp_path, SETTINGS).add(replace(RESULT, run=replace(RUN, relief=3)))
    file = tmp_path / "runs.jsonl"
    first, second = map(json.loads, file.read_text().splitlines())
    if lost == "sharpness":
        second["epochs"][-1]["sharpness"] = None
    elif lost == "relief":
        second["relief"] = None
    else:
        del second["relief"]["loss"][1][0]
    file.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    with pytest.raises(bsam.BsamError, match=r"line 2 of .* is damaged.*lacks what the run measured.*remove that line"):
        Record(tmp_path, SETTINGS)


def test_the_measure_of_another_task_is_read_again(tmp_path):
    result = Result(Run("sgd"), (Epoch({"test_explained": 0.5}),), 0.1, measure="explained")
    Record(tmp_path, SETTINGS).add(result)
    assert Record(tmp_path, SETTINGS)[Run("sgd")] == result


def test_on_a_full_disk_what_was_finished_stays(tmp_path):
    record = Record(tmp_path, SETTINGS)
    record.add(RESULT)
    size, before = (tmp_path / "runs.jsonl").stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
    try:
        with pytest.raises(
            bsam.BsamError, match=r"runs.jsonl could not be written \(File too large\); what was there before is kept"
        ):
            record.add(replace(RESULT, run=Run("sgd")))
        with pytest.raises(bsam.BsamError, match=r"runs.jsonl could not be written"):
            Record(tmp_path / "other", {"long": "x" * 2 * size})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    again = Record(tmp_path, SETTINGS)
    assert again[RUN] == RESULT
    assert Run("sgd") not in again
