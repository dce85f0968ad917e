"""Tasks of the user: ``--task MODULE:CLASS`` and ``Run.of(task=...)``, with the example of segmentation."""

from __future__ import annotations

import itertools
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from bsam import BsamError
from bsam.lab import (
    Machine,
    Preset,
    Run,
    RunCallbacks,
    Score,
    Splits,
    Task,
    TaskSettings,
    cli,
    compare,
    fit,
    read_runs,
    setting,
    write_report,
)
from bsam.lab.analysis.outcome import failure
from bsam.lab.analysis.significance import compare_rows
from bsam.lab.common.names import find_object
from bsam.lab.inference import predict
from bsam.lab.inference.pictures import GAP, SIDE
from bsam.lab.quantization import run_onnx
from bsam.lab.recipes.compare import tuning_split
from bsam.lab.tasks import task_class
from bsam.lab.training.run_dir import RunDir, run_dir_name
from processes import Script

EXAMPLES = Path(__file__).parents[2] / "examples"
NAME = "segmentation:Segmentation"
SMALL = ["--limit-train", "48", "--limit-test", "16", "--width", "4", "--batch", "8", "--device", "cpu"]
NUMBER = itertools.count()  # a module's name is imported once

MODULE = """
from dataclasses import dataclass
import torch
from torch import nn
from bsam.lab import Machine, Preset, Score, Splits, Task, TaskSettings, setting

def points(count=90):
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(0)) * 4 - 2
    y = x.prod(1, keepdim=True).sin()
    return Splits(train=(x[:60].double().numpy(), y[:60]), test=(x[60:80], y[60:80]), validation=(x[80:], y[80:]))

def net(input_shape, width):
    return nn.Sequential(nn.Linear(*input_shape, width), nn.Tanh(), nn.Linear(width, 1))

@dataclass(frozen=True, kw_only=True)
class PointSettings(TaskSettings):
    width: int = setting(8, "width")
    delta: float = setting(1.0, "where the loss becomes linear")

class Points(Task):
    settings_type = PointSettings
    score = Score("error", "mean absolute error", higher=False)
    datasets = {"points": points}
    networks = {"net": net}
    presets = (Preset(base="adam", epochs=3, batch=20, lr=0.02, weight_decay=0.0),)

    def losses(self, outputs, y):
        return nn.functional.huber_loss(outputs, y, reduction="none", delta=self.settings.delta).mean(1)

    def sums(self, outputs, y):
        return {"error": (outputs - y).abs().mean(1)}

    def chance(self):
        return float(self.evaluation[1].abs().mean())

class NoSums(Task):
    score, datasets, networks = Points.score, Points.datasets, Points.networks
    losses = Points.losses

class Pixels(Points):
    def losses(self, outputs, y):
        return (outputs - y).abs()

class Raising(Points):
    def losses(self, outputs, y):
        return outputs[:, 3]

def other():
    return points()

def untested():
    return Splits(train=points().train)
"""


def line():
    return Splits(train=(torch.arange(8.0)[:, None],) * 2, test=(torch.ones(2, 1),) * 2)


class Moved(Task):
    score = Score("error", "error", higher=False)
    datasets: ClassVar = {"line": line}
    networks: ClassVar = {"one": partial(nn.Linear, 1, 1)}

    def losses(self, outputs, y):
        return (outputs - y).square().mean(1)

    def sums(self, outputs, y):
        return {"error": (outputs - y).abs().mean(1)}

    def augment(self, x, y, *, generator):
        return x + torch.rand(x.shape, generator=generator), y


@pytest.fixture
def own(tmp_path, script_path, monkeypatch):
    """The name of a module with tasks, in the current folder."""
    name = f"own_tasks_{next(NUMBER)}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return name


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of the example, trained by the command."""
    folder = tmp_path_factory.mktemp("segmentation") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(EXAMPLES)
        patch.setattr(sys, "path", [*sys.path])
        words = ["train", "--task", NAME, "--method", "sam", "--epochs", "6", *SMALL, "--out", str(folder)]
        assert cli.main(words) == 0
    return folder


@pytest.fixture
def command(script_path, monkeypatch, capsys):
    """A function that runs a command in this process, in the folder of the examples or another one."""

    def run(*words, cwd=EXAMPLES, status=0):
        monkeypatch.chdir(cwd)
        capsys.readouterr()
        assert cli.main([str(word) for word in words]) == status
        out, err = capsys.readouterr()
        return out if status == 0 else err

    return run


def sentence(function, *arguments, **settings) -> str:
    with pytest.raises(BsamError) as caught:
        function(*arguments, **settings)
    return str(caught.value)


def test_the_example_learns_and_its_presets_hold(trained):
    run = RunDir(trained).run()
    assert (run.task.name, run.data, run.model, run.base, run.lr, run.weight_decay, run.task.width) == (
        *(NAME, "shapes", "unet", "adamw", 3e-3, 0.01, 4),
    )
    note = RunDir(trained).note("task")
    assert note["facts"] == {
        "input_shape": [3, 32, 32],
        "classes": 4,
        "names": ["background", "disc", "square", "triangle"],
    }
    assert note["settings"] == {"width": {"default": 8, "help": "channels of the U-Net's first stage"}}
    rows = RunDir(trained).metrics()
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    parts = [rows[-1][f"test_miou_{name}"] for name in note["facts"]["names"]]
    assert rows[-1]["test_miou"] == pytest.approx(np.mean(parts), rel=1e-6)
    assert RunDir(trained).predictions()["pictures"].shape == (6, 32, 96, 3)


def test_the_score_is_that_of_all_pixels_together(trained):
    """The mean IoU by hand, from the picture of each class over all test images, not the mean over images."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import segmentation
    finally:
        sys.path.remove(str(EXAMPLES))
    run = RunDir(trained).run()
    task = segmentation.Segmentation(run, torch.device("cpu"))
    network = RunDir(trained).load_into(task.network()).eval()
    splits = segmentation.shapes()
    x, y = (torch.from_numpy(array)[np.linspace(0, 79, 16).round().astype(int)] for array in splits.test)
    with torch.no_grad():
        found = network(x.float() / 255).argmax(1)
    shares = [float(((found == k) & (y == k)).sum() / ((found == k) | (y == k)).sum()) for k in range(4)]
    assert task.evaluate(network)["test_miou"] == pytest.approx(np.mean(shares), rel=1e-5)
    assert task.evaluate(network)["test_miou"] == RunDir(trained).last_metrics()["test_miou"]
    assert task.chance() == pytest.approx(max(float((y == k).float().mean()) for k in range(4)) / 4, rel=1e-5)


WITHOUT = """
import sys
sys.modules["segmentation"] = None  # importing it is an error
from bsam.lab import write_report
write_report(*sys.argv[1:])
"""


def test_what_only_a_file_names_is_not_imported(trained, tmp_path):
    """The page is the same with and without the module."""
    write_report(trained, tmp_path / "with.html")
    (tmp_path / "without.py").write_text(WITHOUT)
    printed = tmp_path / "printed.txt"
    process = Script(tmp_path / "without.py", trained, tmp_path / "without.html", output=printed)
    assert process.wait() == 0, printed.read_text()
    pages = [(tmp_path / name).read_text() for name in ("with.html", "without.html")]
    pages = [re.sub(r"Made on [^<]*", "", page) for page in pages]
    assert pages[0] == pages[1]
    assert "mean IoU in %" in pages[0]
    assert "as the task draws them" in pages[0]


def test_the_task_must_be_named_again(trained, tmp_path, command):
    Image.fromarray(np.zeros((40, 30, 3), dtype=np.uint8)).save(tmp_path / "x.png")
    out = ("--out", tmp_path / "x.onnx")
    for words in (["predict", trained, tmp_path / "x.png"], ["flatness", trained, *out], ["export", trained, *out]):
        error = command(*words, status=2)
        assert f"has the task {NAME}, a name from its files: if you trust that module, add --task {NAME}" in error


def test_predict_and_flatness_with_the_task(trained, tmp_path, command):
    images = tmp_path / "images"
    images.mkdir()
    for number in range(2):
        Image.fromarray(np.full((40, 30, 3), 90 * number, dtype=np.uint8)).save(images / f"{number}.png")
    named = ("--task", NAME)
    out = command("predict", trained, images, *named, "--out", tmp_path / "p.json")
    rows = json.loads((tmp_path / "p.json").read_text())
    assert [Path(row.pop("file")).name for row in rows] == ["0.png", "1.png"]
    assert all(sum(row.values()) == pytest.approx(1) and list(row)[1] == "disc" for row in rows)
    assert "0.png  background" in out
    command("predict", trained, images, *named, "--out", tmp_path / "drawn")
    with Image.open(tmp_path / "drawn/1.png") as picture:
        assert picture.size == (64, 32)
    command("predict", trained, images, *named, "--grid", tmp_path / "g.png")
    with Image.open(tmp_path / "g.png") as picture:
        assert picture.width == GAP + 2 * (GAP + SIDE)
    error = command("predict", trained, images, *named, "--top", "2", status=2)
    assert f"has the task {NAME}: leave out top (--top)" in error
    few = ("--images", "8", "--k", "1", "--points", "3", "--trace-samples", "6", "--density-steps", "2")
    command("flatness", trained, *named, *few, "--out", tmp_path / "flat")
    (entry,) = json.loads((tmp_path / "flat/flatness.json").read_text())["models"]
    assert entry["sharpness"]["loss"] > 0


def test_files_that_the_task_cannot_read(trained, tmp_path, command, monkeypatch):
    """Those found in a folder are left out; for one that is named, a sentence says why it cannot be read."""
    Image.fromarray(np.zeros((40, 30, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    notes = tmp_path / "notes.txt"
    notes.write_text("no image")
    told = []
    found = predict(trained, tmp_path, task=NAME, on_message=told.append)
    assert [one.path.name for one in found] == ["a.png"]
    assert told == [f"left out 1 of 2 files (cannot be read by {NAME}): {notes}"]
    text = sentence(predict, trained, notes, task=NAME)
    assert re.fullmatch(
        rf"{NAME} cannot read .*notes.txt: UnidentifiedImageError: .* \(segmentation.py, line \d+\)", text
    )

    def wrong(self, *given):
        raise KeyError("names")

    for member in ("draw", "values"):
        monkeypatch.setattr(task_class(NAME), member, wrong)
        text = sentence(predict, trained, tmp_path / "a.png", task=NAME, pictures=True)
        assert text.startswith(f"{member} of {NAME} raised KeyError: 'names'")


@pytest.mark.usefixtures("operators_once")
def test_export_with_the_task(trained, tmp_path, command):
    """The file takes bytes as the data has them; its score is that of the network."""
    out = command("export", trained, "--task", NAME, "--out", tmp_path / "x.onnx")
    score = f"{100 * RunDir(trained).last_metrics()['test_miou']:.4g}"
    assert out.startswith(f"Mean IoU in % on 16 test samples: {score} (trained network), {score} (exported file).\n")
    assert float(re.search(r"Largest difference between two outputs: (\S+)\.\n", out)[1]) < 1e-3
    assert "Input: uint8 (n, 3, 32, 32), samples as they are in the data" in out
    some = command("export", trained, "--task", NAME, "--images", "4", "--out", tmp_path / "x.onnx")
    assert some.startswith("Mean IoU in % on 4 test samples: ")
    x = torch.arange(2 * 3 * 32 * 32).remainder(256).byte().view(2, 3, 32, 32)
    task = task_class(NAME)(RunDir(trained).run(), torch.device("cpu"))
    with torch.no_grad():
        expected = RunDir(trained).load_into(task.network()).eval()(x / 255)
    torch.testing.assert_close(run_onnx(tmp_path / "x.onnx", x), expected, atol=1e-4, rtol=1e-4)


def test_compare_with_tuning_in_two_processes(tmp_path, command, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)  # an earlier test imported the module, so the command does not add it
    out = tmp_path / "compared"
    words = ["compare", "--task", NAME, "--methods", "base", "sam", "--tune", "--jobs", "2", "--seeds", "1"]
    text = command(*words, *SMALL, "--epochs", "2", "--out", out)
    assert "Test mean IoU in %, after the last of 2 epochs" in text
    assert "score on held-out samples" in text
    assert "- The score is not the share of samples that are right" in " ".join(text.split())
    results = json.loads((out / "results.json").read_text())
    assert {run["task"]["score"]["name"] for run in results["runs"]} == {"miou"}
    assert len(results["tuning"]) == 4
    runs = read_runs([out])
    assert (len(runs), set(runs["state"]), set(runs["unit"])) == (2, {"finished"}, {"test mean IoU in %"})


@pytest.mark.parametrize("form", ["class", "name"])
def test_it_goes_on_bit_for_bit(form, own, tmp_path):
    task = find_object(f"{own}:Points", "task")
    run = Run.of("bsam", task=task if form == "class" else f"{own}:Points", width=4, seed=3)
    assert (run.base, run.epochs, run.lr, run.data, run.model) == ("adam", 3, 0.02, "points", "net")
    whole = fit(run, tmp_path / "whole", Machine("cpu"))

    def stop(done, metrics):
        raise InterruptedError

    for _ in range(2):
        with pytest.raises(InterruptedError):
            fit(run, tmp_path / "parts", Machine("cpu", checkpoint_every=0), callbacks=RunCallbacks(on_epoch=stop))
    assert fit(run, tmp_path / "parts", Machine("cpu")).score == whole.score
    files = [tmp_path / name / "model.safetensors" for name in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert ":" not in run_dir_name(run)
    assert run_dir_name(run) != run_dir_name(run.changed(delta=0.5))
    assert failure(run, RunDir(tmp_path / "whole")) is None or whole.score > 0.3


def test_augmentation_depends_on_seed_and_epoch_alone():
    task = Moved(Run.of("sam", task=Moved, batch=4), torch.device("cpu"))
    first = task.batch(torch.arange(4))[0]
    torch.rand(3)
    assert torch.equal(first, task.batch(torch.arange(4))[0])
    task.begin_epoch(1)
    assert not torch.equal(first, task.batch(torch.arange(4))[0])


def test_lower_scores_are_better(own, tmp_path):
    """In verdicts, tuning and the sentence about the best constant answer."""
    result = compare(
        task=f"{own}:Points",
        methods=["base", "sam:rho=3.0"],
        seeds=3,
        out=tmp_path / "c",
        epochs=20,
        machine=Machine("cpu"),
    )
    runs = read_runs([tmp_path / "c"])
    means = runs.groupby("row")["score"].mean()
    (row,) = (row for _, row in result.table.iterrows() if row["row"] != row["against"])
    assert means[row["row"]] > means[row["against"]]  # with a radius of 3, SAM is worse
    verdict = compare_rows(runs.assign(failure=""))
    assert verdict.set_index("row").loc[row["row"], "verdict"] == "worse"
    higher = compare_rows(runs.assign(failure="", higher=True))
    assert higher.set_index("row").loc[row["row"], "verdict"] == "better"
    assert tuning_split(Run.of("sam", task=f"{own}:Points")) == "validation"
    text = sentence(Run.of, "sam", task=f"{own}:Elsewhere")
    assert "For a task of your own, pass its class" in text


def test_a_run_no_better_than_a_constant_says_so(own, tmp_path):
    compare(
        task=f"{own}:Points",
        methods=["base", "sam"],
        seeds=1,
        out=tmp_path / "c",
        epochs=1,
        lr=0.0,
        machine=Machine("cpu"),
    )
    runs = read_runs([tmp_path / "c"])
    run = RunDir(runs["path"].iloc[0])
    chance = run.note("task")["chance"]
    run_settings, rows = run.run(), run.metrics()
    worse, better = ([{**rows[0], "test_error": chance * factor}] for factor in (1.01, 0.5))
    assert "no better than the best constant answer: mean absolute error" in failure(run_settings, run, worse)
    assert failure(run_settings, run, better) is None


def test_errors_are_sentences(own, tmp_path, command):
    def train(*words):
        return command("train", "--method", "sam", *words, "--out", tmp_path / "r", cwd=tmp_path, status=2)

    points = ("--task", f"{own}:Points")
    assert f"{own}:Points does not use augment: leave it out" in train(*points, "--augment", "flip")
    assert "must be one of points, MODULE:FUNCTION; got 'petz'" in train(*points, "--data", "petz")
    assert "derived from bsam.lab.Task, got a function: check the name" in train("--task", f"{own}:net")
    assert "derived from bsam.lab.Task, got the class PointSettings" in train("--task", f"{own}:PointSettings")
    assert "NoSums has no sums(outputs, *targets): add it" in train("--task", f"{own}:NoSums")
    error = train("--task", f"{own}:Pixels")
    assert "must return a loss per sample, shape (2,) for 2 samples; got (2, 1)" in error
    assert "IndexError" in (error := train("--task", f"{own}:Raising"))
    assert error.rstrip().endswith("correct it")
    assert "does not use image_size" in train(*points, "--image-size", "8")
    whose = "It is a flag of the task classification: leave it out, or choose another --task"
    for flag in ("--label-smoothing", "--smoothing"):
        assert f"has no flag {flag}. {whose}" in train(*points, flag, "0.1")
    assert "has no flag --widht. Did you mean --width?" in train(*points, "--widht", "4")
    assert "limit_train must be at most 60" in train(*points, "--limit-train", "61")
    assert "has no test samples: set eval_split to holdout" in train(*points, "--data", f"{own}:untested")
    assert not (tmp_path / "r").exists()


def test_other_data_and_networks_by_name(own, tmp_path, command):
    words = ("--task", f"{own}:Points", "--data", f"{own}:other", "--epochs", "1", "--out", tmp_path / "r")
    assert f"samples of {own}:other" in command("train", "--method", "sam", *words, cwd=tmp_path)
    error = command("flatness", tmp_path / "r", "--task", f"{own}:Points", cwd=tmp_path, status=2)
    assert f"add --data {own}:other" in error


def test_a_task_starts_from_another_run(own, tmp_path, command):
    first, second = tmp_path / "first", tmp_path / "second"
    words = ("--task", f"{own}:Points", "--method", "sam", "--epochs", "1")
    command("train", *words, "--out", first, cwd=tmp_path)
    out = command("train", *words, "--lr", "0", "--init", first, "--out", second, cwd=tmp_path)
    assert "Training begins with the network of" in out
    scores = [RunDir(folder).last_metrics()["test_error"] for folder in (first, second)]
    assert scores[0] == scores[1]


def test_runs_of_a_task_whose_settings_grew_are_read_together(own, tmp_path, command):
    command("train", "--task", f"{own}:Points", "--method", "sam", "--epochs", "1", "--out", "a", cwd=tmp_path)
    for name, value in (("task.json", lambda d: d["settings"].pop("delta")), ("config.json", lambda d: d.pop("delta"))):
        content = json.loads((tmp_path / "a" / name).read_text())
        value(content)
        (tmp_path / "a" / name).write_text(json.dumps(content))
    command("train", "--task", f"{own}:Points", "--method", "base", "--epochs", "1", "--out", "b", cwd=tmp_path)
    write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "page.html")
    runs = read_runs([tmp_path / "a", tmp_path / "b"])
    assert list(runs["state"]) == ["finished", "finished"]
    assert {settings["width"] for settings in runs["settings"]} == {8}


def test_the_public_names():
    assert Preset(base="adam").values == {"base": "adam"}
    assert issubclass(Task.settings_type, TaskSettings)
    assert setting(1, "help").metadata["help"] == "help"


def test_the_example_reads_the_layout_of_oxford_pet(tmp_path, command):
    data, rng = tmp_path / "pet", np.random.default_rng(0)
    for folder in ("images", "annotations/trimaps"):
        (data / folder).mkdir(parents=True)
    for split, count in (("trainval", 10), ("test", 4)):
        names = [f"cat_{split}_{number}" for number in range(count)]
        (data / f"annotations/{split}.txt").write_text("".join(f"{name} 1 1 1\n" for name in names))
        for name in names:
            Image.fromarray(rng.integers(0, 255, (50, 40, 3), dtype=np.uint8)).save(data / f"images/{name}.jpg")
            trimap = rng.integers(1, 4, (50, 40), dtype=np.uint8)
            Image.fromarray(trimap).save(data / f"annotations/trimaps/{name}.png")
    words = ["train", "--task", NAME, "--method", "base", "--data", "pets", "--image-size", "16", "--width", "2"]
    words += ["--epochs", "1", "--batch", "5", "--device", "cpu"]
    assert "read from files: give their folder with --data-dir" in command(*words, "--out", tmp_path / "a", status=2)
    command(*words, "--data-dir", data, "--out", tmp_path / "b")
    facts = RunDir(tmp_path / "b").note("task")["facts"]
    assert (facts["classes"], facts["input_shape"]) == (3, [3, 16, 16])
    assert set(RunDir(tmp_path / "b").last_metrics()) >= {"test_miou_animal", "test_miou_border"}


WRONG = """
from {own} import Points, Splits, nn

class OtherName(Points):
    def scores(self, means):
        return {{"rmse": means["error"]}}

class Unmoved(Points):
    def augment(self, x, y, *, generator):
        return x

class Words(Points):
    def chance(self):
        return "high"

class Missing(Points):
    datasets = {{"points": lambda: None}}

class Deep(Points):
    networks = {{"net": lambda depth: nn.Linear(2, 1)}}

class Number(Points):
    networks = {{"net": lambda: 5}}
"""
MEMBERS = {
    "OtherName": "must return a dictionary with 'error', as its score says; got rmse",
    "Unmoved": "must return (x, *targets), got Tensor",
    "Words": "must return a number or None, got 'high'",
    "Missing": "must return bsam.lab.Splits, got NoneType",
    "Deep": "asks for 'depth'; it can get",
    "Number": "must return a torch.nn.Module, got int",
}


@pytest.mark.parametrize("name", MEMBERS)
def test_what_members_return_is_checked_before_training(name, own, tmp_path):
    (tmp_path / f"wrong_{own}.py").write_text(WRONG.format(own=own))
    task = find_object(f"wrong_{own}:{name}", "task")
    assert MEMBERS[name] in sentence(fit, Run.of("sam", task=task), tmp_path / "run", Machine("cpu"))
