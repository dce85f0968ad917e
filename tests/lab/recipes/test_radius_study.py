"""The study of the total radius: its runs, its numbers, and the differences at equal radii."""

import json

import pytest
import torch

import bsam
from bsam.lab import cli
from bsam.lab.recipes import RECIPES, scales
from bsam.lab.recipes.radius_study import TOTALS, radius_findings, total_radius
from bsam.lab.recipes.scales import scale_of
from bsam.lab.recipes.variants import variant_of
from bsam.lab.report.figures.setting_figures import METRICS, radius_lines_info
from bsam.lab.training import loop
from bsam.lab.training.run_dir import RunState

RECIPE = RECIPES["radius"]
NAMES = ("sam", "sam-follow", "bsam", "bsam-2")


@pytest.mark.parametrize("scale", ["smoke", "short", "paper"])
def test_every_method_has_every_total_radius_and_the_same_schedule(scale):
    """By the optimizers that the runs build, at the start and at the end of training."""
    runs = RECIPE.runs(scale)
    assert runs[0].method == "base"
    data = "digits" if scale == "smoke" else "cifar10"
    assert {(run.data, run.label_noise, run.noise_labels, run.curvature) for run in runs} == {
        (data, 0.4, "other", True)
    }
    found = {}
    for run in runs[1:]:
        base = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=run.lr)
        optimizer = {"sam": bsam.SAM, "bsam": bsam.BSAM}[run.method](base, None, **run.arguments)
        names = ("rho",) if run.method == "sam" else ("rho_max", "rho_min")
        radii = []
        for lr in (run.lr, run.lr / 2, 0.0):
            base.param_groups[0]["lr"] = lr
            radii.append(sum(optimizer.radii(name) for name in names))
        assert total_radius(run) == pytest.approx(radii[0])
        found[variant_of(run).name, total_radius(run)] = radii
    totals = (0.1, 0.2, 0.4, 0.6) if data == "digits" else (0.05, 0.1, 0.2, 0.4)
    assert list(found) == [(name, total) for total in totals for name in NAMES]
    for (name, total), radii in found.items():
        expected = [total] * 3 if name == "sam" else [total, 0.75 * total, 0.5 * total]
        assert radii == pytest.approx(expected)


def states(scores):
    """Finished runs of the study with these scores, by method, total radius and seed."""
    for run in RECIPE.runs("paper", seeds=3):
        key = variant_of(run).name, total_radius(run), run.seed
        if key in scores:
            epochs = ({"test_accuracy": scores[key] / 100, "memorised": 0.1},)
            yield RunState(run, RECIPE_PATH, epochs, finished=True)


@pytest.fixture(autouse=True)
def _no_folder(tmp_path):
    global RECIPE_PATH
    RECIPE_PATH = tmp_path / "none"


def test_differences_are_paired_over_the_seeds_that_both_have():
    scores = {("bsam", 0.2, seed): value for seed, value in enumerate((90.0, 91.0, 95.0))}
    scores |= {("sam-follow", 0.2, seed): value for seed, value in enumerate((89.0, 88.0))}
    scores |= {("sam", 0.1, seed): 80.0 for seed in range(3)}
    header, line = radius_findings((), list(states(scores)))
    assert "standard error" in header
    # by hand: differences 1 and 3, standard deviation sqrt(2), error 1; 10, 11 and 15, error 1.53
    assert line == (
        "BSAM (Algorithm 1), total radius 0.2: minus SAM (follow) +2.0 ± 1.0 (2); minus SAM at rho_max +12.0 ± 1.5 (3)."
    )
    assert radius_findings((), list(states({("sam", 0.1, 0): 80.0}))) == []


def test_the_lines_of_the_figure():
    scores = {("sgd", 0.0, 0): 66.0, ("sam", 0.2, 0): 90.0, ("sam", 0.05, 0): 80.0, ("sam", 0.05, 1): 84.0}
    lines = radius_lines_info(list(states(scores)))
    assert {title: list(line) for title, line in lines.items()} == {"SGD": [0.0], "SAM": [0.05, 0.2]}
    accuracy, memorised, eigenvalue = zip(*lines["SAM"].values(), strict=True)
    assert [(point.mean, point.n) for point in accuracy] == [(pytest.approx(82.0), 2), (pytest.approx(90.0), 1)]
    assert [point.mean for point in memorised] == pytest.approx([10.0, 10.0])
    assert eigenvalue == (None, None)  # there is no file
    assert list(METRICS)[2] == "λmax, cross-entropy, at most 256 training samples"


def test_smoke(tmp_path, monkeypatch, capsys):
    """Really trained, for an epoch, at one radius."""
    monkeypatch.setitem(TOTALS, "digits", (0.2,))
    monkeypatch.setattr(loop, "CURVATURE_SAMPLES", 16)
    exact = loop.top_eigenvalues
    monkeypatch.setattr(loop, "top_eigenvalues", lambda *given, **named: exact(*given, **{**named, "tol": 0.1}))
    demo = scale_of("demo")
    small = {**demo.settings, "epochs": 1, "warmup": 0, "limit_train": 64, "limit_test": 50, "batch": 32}
    less = scales.Scale("demo", "", demo.networks, demo.data, settings=small, threads=1)
    monkeypatch.setattr(scales, "SCALES", {**scales.SCALES, "demo": less})
    command = [
        "run",
        "radius",
        "--scale",
        "smoke",
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
        "--only",
        "sam-follow",
        "bsam-2",
    ]
    assert cli.main(command) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert sorted(run["state"] for run in results["runs"]) == ["done"] * 2 + ["missing"] * 3
    assert (tmp_path / "radius.png").stat().st_size > 10_000
    table = (tmp_path / "table.md").read_text()
    assert "smoke" not in table  # the whole study on digits
    assert table.count("## DigitsNet, Digits, 40 % of labels drawn from other classes: 40.0 % wrong, total radius") == 1
    assert "| method | Digits | memorised, % | λmax, cross-entropy, at most 256 training samples |" in table
    assert "BSAM (2 passes), total radius 0.2: minus SAM (follow) " in " ".join(capsys.readouterr().out.split())
