import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bsam
from bsam import cli
from bsam.flatness import Sharpness
from bsam.recipes.variants import variants
from bsam.training.config import Run
from bsam.training.loop import fit


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the workers
    yield
    torch.set_num_threads(threads)


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
    assert all(name in error for name in variants())
    assert not (tmp_path / "out").exists()


def finished(folder):
    return {path.parent.name for path in folder.glob("*/model.safetensors")}


def test_interrupted_and_resumed_it_gives_the_numbers_of_its_settings(tmp_path, one_thread, capsys):
    """Ctrl-C as a terminal sends it, to the whole group; then the same command again; then every final run, here."""
    folder = tmp_path / "demo"
    arguments = ["demo", "--out", str(folder), "--seed", "4", "--seeds", "1", "--epochs", "1"]
    arguments += ["--methods", "saf", "bsam-2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(bsam.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    first = subprocess.Popen([sys.executable, "-m", "bsam", *arguments], env=environment, **streams)
    deadline = time.monotonic() + 100
    while len(finished(folder)) <= 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGINT)
    _, error = first.communicate(timeout=60)
    assert (first.returncode, error) == (
        130,
        f"bsam: interrupted. Finished runs are saved in {folder}; run the same command again to continue.\n",
    )
    kept = finished(folder)
    assert 5 < len(kept) < 36
    assert not (folder / "results.json").exists()

    before = {name: (folder / name / "model.safetensors").stat().st_mtime_ns for name in kept}
    assert cli.main(arguments) == 0
    assert str(folder / "results.json") in capsys.readouterr().out.replace("\n", "")
    assert all((folder / f"{name}.png").stat().st_size > 10_000 for name in ("accuracy_and_sharpness", "landscape"))
    assert {name: (folder / name / "model.safetensors").stat().st_mtime_ns for name in kept} == before
    assert len(finished(folder)) == 36  # 32 to tune, 4 to report: none of them twice

    results = json.loads((folder / "results.json").read_text())
    titles = [variants()[name].title for name in ("saf", "bsam-2")]
    assert [(run["title"], run["settings"]["label_noise"], run["settings"]["seed"]) for run in results["runs"]] == [
        (title, noise, 4) for noise in (0.0, 0.4) for title in titles
    ]
    for run in results["runs"]:
        tried = [
            trial
            for trial in results["tuning"]
            if (trial["title"], trial["settings"]["label_noise"]) == (run["title"], run["settings"]["label_noise"])
        ]
        best = max(tried, key=lambda trial: trial["last"]["validation_accuracy"])["settings"]
        assert len(tried) == 8
        assert all(best[name] == run["settings"][name] for name in ("lr", "weight_decay", "arguments"))
        settings = Run(**run["settings"])
        assert (settings.epochs, settings.radius, settings.curvature, settings.relief) == (1, 0.05, True, 13)
        result = fit(replace(settings, relief=None), device="cpu")
        assert run["last"]["test_accuracy"] == result.score
        assert run["top_eigenvalue"] == result.top_eigenvalue
        assert Sharpness(**run["last"]["sharpness"]) == result.last.sharpness
