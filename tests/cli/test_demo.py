import json
import os
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch

from bsam import cli
from bsam.recipes import digits_demo, experiments
from bsam.recipes.scales import scale_of
from bsam.recipes.variants import variants
from bsam.training import loop
from bsam.training.config import Run
from bsam.training.loop import fit


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the workers
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--epochs", "0"], "epochs"),
        (["--epochs", "-1"], "epochs"),
        (["--seeds", "0"], "seeds"),
        (["--seed", "-1"], "seed"),
        (["--methods", "sgd", "adam"], ", ".join(variants()) + "; got 'adam'"),
    ],
)
def test_a_refusal_is_one_sentence_and_status_2(arguments, word, tmp_path, capsys):
    assert cli.main(["demo", "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bsam: ")
    assert word in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_base_install_is_told_one_extra(tmp_path, refused, monkeypatch):
    for module in ("rich", "sklearn", "matplotlib", "safetensors"):
        monkeypatch.setitem(sys.modules, module, None)
    error = refused("demo", "--out", tmp_path / "out")
    modules = "rich and safetensors and matplotlib and sklearn"
    line = "pip install -c constraints.txt '.[demo]' in a clone of bsam"
    assert error == f"bsam: this needs {modules}, which are not installed: {line}\n"
    assert not (tmp_path / "out").exists()


def finished(folder):
    return {path.parent.name for path in folder.glob("*/model.safetensors")}


def test_interrupted_and_resumed_it_gives_the_numbers_of_its_settings(
    tmp_path, one_thread, capsys, monkeypatch, command
):
    """Ctrl-C as a terminal sends it, to the whole group; then the same command again; then every final run, here."""
    folder = tmp_path / "demo"
    arguments = ["demo", "--out", str(folder), "--seed", "4", "--seeds", "1", "--epochs", "2"]
    arguments += ["--methods", "sgd", "bsam-2"]
    first = command(*arguments)
    deadline = time.monotonic() + 100
    while not finished(folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(first.pid, signal.SIGINT)
    _, error = first.communicate(timeout=60)
    assert (first.returncode, error) == (
        130,
        f"bsam: interrupted. Finished runs are saved in {folder}; run the same command again to continue.\n",
    )
    kept = finished(folder)
    assert 0 < len(kept) < 9
    assert not (folder / "results.json").exists()

    before = {name: (folder / name / "model.safetensors").stat().st_mtime_ns for name in kept}
    # the rest in this process, and measured on less: faster
    alone = replace(scale_of("demo"), workers=1)
    monkeypatch.setattr(experiments, "scale_of", lambda name: alone)
    monkeypatch.setattr(digits_demo, "LANDSCAPE_POINTS", 3)
    monkeypatch.setattr(loop, "CURVATURE_SAMPLES", 32)
    assert cli.main(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "One seed has no spread" in printed
    assert printed.replace(" ", "").endswith(str(folder / "demo.png"))
    table = (folder / "table.md").read_text()
    assert all(f"| {title} |" in table for title in ("SGD", "BSAM (2 passes)", "SGD, tuned weight decay"))
    assert "Nothing is chosen on the test set" in table
    assert (folder / "demo.png").stat().st_size > 10_000
    assert {name: (folder / name / "model.safetensors").stat().st_mtime_ns for name in kept} == before
    assert len(finished(folder)) == 9  # 6 to tune, 3 to report: none of them twice

    results = json.loads((folder / "results.json").read_text())
    assert [row["row"] for row in results["table"]] == ["SGD", "BSAM (2 passes)", "SGD, tuned weight decay"]
    assert not any(name.startswith("test_") for trial in results["tuning"] for name in trial["last"])
    for run, row in zip(results["runs"], results["table"], strict=True):
        settings = Run(**run["settings"])
        tried = [trial for trial in results["tuning"] if trial["settings"]["method"] == settings.method]
        if row["row"] == "SGD":
            assert settings.weight_decay == 5e-4
        else:
            best = max(tried, key=lambda trial: trial["last"]["validation_accuracy"])["settings"]
            assert len(tried) == 3
            assert all(best[name] == run["settings"][name] for name in ("weight_decay", "arguments"))
        assert (settings.epochs, settings.seed, settings.curvature, settings.surface) == (2, 4, True, 3)
        result = fit(replace(settings, surface=None), device="cpu")
        names = ("test_accuracy", "memorised")
        assert [run["last"][name] for name in names] == [result.last.metrics[name] for name in names]
        assert run["top_eigenvalue"] == result.top_eigenvalue
        assert row["memorised"]["mean"] == 100 * result.last.metrics["memorised"]
