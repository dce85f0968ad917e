import json
import sys
from dataclasses import replace

import pytest
import torch

from bsam.lab import cli
from bsam.lab.config import Run
from bsam.lab.recipes import RECIPES
from bsam.lab.training import Machine, fit
from fake_fit import train_by


@pytest.fixture
def small(monkeypatch, small_measurements, demo_in_one_process):
    """Train in this process, with one thread as the workers do, and measure on less."""
    scales = {"demo": {**RECIPES["demo"].scales["demo"], "surface": 3}}
    monkeypatch.setitem(RECIPES, "demo", replace(RECIPES["demo"], scales=scales))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_base_install_needs_one_extra(tmp_path, error_of, monkeypatch):
    modules = ("sklearn", "pandas", "safetensors")
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    error = error_of("demo", "--out", tmp_path / "out")
    assert all(module in error for module in modules)
    assert "'.[demo]'" in error
    assert not (tmp_path / "out").exists()


def times_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("*/model.safetensors")}


def test_interrupted_and_resumed_its_numbers_follow_from_its_settings(tmp_path, small, capsys, monkeypatch):
    """Interrupt it after five runs, run it again, then train every final run once more."""
    folder = tmp_path / "demo"
    arguments = ["demo", "--out", str(folder), "--seed", "4", "--seeds", "1", "--epochs", "1"]
    arguments += ["--methods", "sgd", "bsam-2"]

    def interrupt(*given, **named):
        if len(times_of(folder)) == 5:
            raise KeyboardInterrupt
        return fit(*given, **named)

    with monkeypatch.context() as patch:
        train_by(interrupt, patch)
        assert cli.main(arguments) == 130
    saved = f"Epochs up to the last checkpoint are saved in {folder}; run the same command again to continue."
    assert capsys.readouterr().err.endswith(f"bsam: interrupted. {saved}\n")
    assert not (folder / "table.md").exists()
    kept = times_of(folder)
    assert len(kept) == 5
    assert cli.main(arguments) == 0
    assert kept.items() <= times_of(folder).items()
    assert len(times_of(folder)) == 9  # 6 to tune, 3 to report: none of them twice
    printed = capsys.readouterr().out
    assert printed.endswith(f"Open {folder / 'report.html'} in a browser.\n")

    rows = ["SGD", "BSAM (2 passes)", "SGD, tuned weight decay"]
    table = (folder / "table.md").read_text()
    assert all(f"| {title} |" in table for title in rows)
    results = json.loads((folder / "results.json").read_text())
    assert [row["row"] for row in results["table"]] == rows
    assert [run["about"]["trial"] for run in results["runs"] + results["tuning"]] == [False] * 3 + [True] * 6
    assert not any(name.startswith("test_") for trial in results["tuning"] for name in trial["last"])
    for run, row in zip(results["runs"], results["table"], strict=True):
        settings = Run.of(**run["settings"])
        trials = [trial for trial in results["tuning"] if trial["settings"]["method"] == settings.method]
        if row["row"] == "SGD":
            assert settings.weight_decay == 5e-4
        else:
            best = max(trials, key=lambda trial: trial["last"]["validation_accuracy"])["settings"]
            assert len(trials) == 3
            assert all(best[name] == run["settings"][name] for name in ("weight_decay", "arguments"))
        assert (settings.epochs, settings.seed, settings.curvature, settings.surface) == (1, 4, True, 3)
        result = fit(replace(settings, surface=None), machine=Machine("cpu"))
        names = ("test_accuracy", "memorised")
        assert [run["last"][name] for name in names] == [result.last.metrics[name] for name in names]
        assert [entry["eigenvalues"]["maximum"] for entry in run["flatness"]] == [result.top_eigenvalue]
        assert row["memorised"]["mean"] == 100 * result.last.metrics["memorised"]
