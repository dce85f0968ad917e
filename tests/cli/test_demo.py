"""``bsam demo``."""

import json
import os
import signal
import sys
import time

import pytest

from bsam import cli
from bsam.flatness import Sharpness
from bsam.methods import METHODS
from bsam.training.config import Run
from bsam.training.loop import fit

KEYS = {"method", "label_noise", "seed", "test_accuracy", "train_loss", "max_sharpness", "min_sharpness", "bilateral"}
KEYS |= {"top_eigenvalue", "seconds_per_step", "lr", "arguments"}


@pytest.mark.parametrize(
    ("arguments", "word"), [(["--epochs", "0"], "epochs"), (["--seeds", "0"], "seeds"), (["--seed", "-1"], "seed")]
)
def test_a_refusal_is_one_sentence_and_status_2(arguments, word, tmp_path, capsys):
    assert cli.main(["demo", "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bsam: ")
    assert word in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", ["rich", "sklearn", "matplotlib"])
def test_a_missing_package_is_said_before_anything_runs(module, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    assert cli.main(["demo", "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'bsam[" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_unknown_method_is_refused_with_the_list(tmp_path, capsys):
    assert cli.main(["demo", "--out", str(tmp_path / "out"), "--methods", "sgd", "adam"]) == 2
    error = capsys.readouterr().err
    assert "'adam'" in error
    assert all(name in error for name in ("sgd", "bsam-2", *METHODS))
    assert not (tmp_path / "out").exists()


def test_the_demo_takes_any_methods_and_a_folder_gathers_them(tmp_path, capsys):
    folder = tmp_path / "demo"
    for methods, title, runs in (("esam", "ESAM", 18), ("saf", "SAF", 36)):
        assert cli.main(["demo", "--out", str(folder), "--seeds", "1", "--epochs", "1", "--methods", methods]) == 0
        assert (folder / "runs.jsonl").read_text().count("\n") == 1 + runs
        assert [row["method"] for row in json.loads((folder / "results.json").read_text())] == [methods] * 2
        assert f"{title} on digits" in capsys.readouterr().out


def test_interrupted_and_resumed_it_gives_the_numbers_of_its_settings(tmp_path, command):
    """Ctrl-C as a terminal sends it, to the whole group; then the same command again; then every row computed once
    more, here.
    """
    folder = tmp_path / "demo"
    arguments = ("--seed", "4", "--seeds", "1", "--epochs", "1")
    first = command("demo", "--out", str(folder), *arguments)
    deadline = time.monotonic() + 100
    while (
        not ((folder / "runs.jsonl").exists() and (folder / "runs.jsonl").read_text().count("\n") > 5)
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGINT)
    _, error = first.communicate(timeout=60)
    assert first.returncode == 130
    assert error.startswith("bsam: interrupted.")
    assert "Traceback" not in error
    kept = (folder / "runs.jsonl").read_text()
    assert 5 < kept.count("\n") < 73
    assert not (folder / "results.json").exists()

    second = command("demo", "--out", str(folder), *arguments)
    out, error = second.communicate(timeout=100)
    assert (second.returncode, error) == (0, "")
    assert str(folder / "results.json") in out
    assert all((folder / name).stat().st_size > 10_000 for name in ("figure.png", "landscape.png"))
    after = (folder / "runs.jsonl").read_text()
    assert after.startswith(kept)
    assert after.count("\n") == 73  # settings, 64 to tune, 8 to report: none was run twice

    found = json.loads((folder / "results.json").read_text())
    assert all(set(row) >= KEYS for row in found)
    assert [(row["method"], row["label_noise"], row["seed"]) for row in found] == [
        (method, noise, 4) for noise in (0.0, 0.4) for method in ("sgd", "sam", "bsam", "bsam-2")
    ]
    assert all(0 <= row["test_accuracy"] <= 1 and row["seconds_per_step"] > 0 for row in found)
    assert all(row["bilateral"] == pytest.approx(row["max_sharpness"] + row["min_sharpness"]) for row in found)

    same = {"batch": 64, "epochs": 1, "label_smoothing": 0.0, "seed": 4, "radius": 0.05, "curvature": True}
    for row in found:
        method = row["method"].removesuffix("-2")
        own = {name: row[name] for name in ("lr", "weight_decay", "label_noise")}
        result = fit(Run(method, row["arguments"], **own, **same), device="cpu")
        last = result.last
        assert row["test_accuracy"] == result.score
        assert row["top_eigenvalue"] == result.top_eigenvalue
        assert (
            Sharpness(
                row["train_loss"], *(row[name] for name in ("max_sharpness", "min_sharpness", "bilateral", "cosine"))
            )
            == last.sharpness
        )

    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert (
        cli.main(["demo", "--out", str(folder), "--seed", "4", "--seeds", "1", "--epochs", "2"]) == 2
    )  # other settings: refused, untouched
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
