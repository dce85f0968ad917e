"""The guide "Fine-tune your own images": its commands and its code run on a folder of drawn images, in small."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from docs_guides import first_commands, in_small, run_commands

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/guides/fine-tune.md").read_text(encoding="utf-8")
SMALL = {  # what differs from the commands of the guide
    "timm:resnet50": "timm:test_resnet --weights random --image-size 32 --lr 0.02 --label-smoothing 0",
    "--epochs 5 --batch 32": "--epochs 3 --batch 12 --device cpu",
    "--images 100 --k 5 --points 11": "--images 6 --k 1 --points 3 --trace-samples 6 --density-steps 3 "
    "--density-probes 1 --tol 0.5 --device cpu",
    "new/*.jpg": "new/*.png",
}
SMALL_CODE = {
    'model="timm:resnet50"': 'model="timm:test_resnet"',
    'weights="pretrained"': "image_size=32, lr=0.01, weight_decay=1e-4, label_smoothing=0.0",
    "epochs=5": "epochs=1",
    "batch=32": "batch=40",
    "new/cat.jpg": "new/circle.png",
}
SHAPES = ["circle", "square", "triangle"]
pytestmark = pytest.mark.usefixtures("rough_eigenvalues")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with photos/ of drawn shapes, and new/ with one more of each."""
    monkeypatch.chdir(tmp_path)
    draw = runpy.run_path(str(ROOT / "examples/fine_tune.py"))["draw_folder"]
    draw("photos", images=31)
    Path("new").mkdir()
    for name in SHAPES:
        Path(f"photos/{name}/030.png").rename(f"new/{name}.png")
    return tmp_path


def test_the_first_commands_of_the_guide(folder, capsys):
    printed = run_commands(in_small(first_commands(TEXT), SMALL), capsys, draw=False)
    assert list(printed) == ["train", "predict", "flatness"]

    last = json.loads(Path("runs/photos/metrics.jsonl").read_text().splitlines()[-1])
    assert last["test_accuracy"] > 0.7  # chance: 0.33
    assert f"After epoch 3: train loss {last['train_loss']:.4f}" in printed["train"]
    assert "on 72 samples of photos" in printed["train"]
    assert json.loads(Path("runs/photos/data.json").read_text())["images"] == {"train": 72, "test": 18}

    lines = printed["predict"].splitlines()
    first = [re.match(r"new/(\w+)\.png +(\w+) [\d.]+%, ", line).groups() for line in lines[:3]]
    assert [name for name, _ in first] == SHAPES
    assert sum(name == predicted for name, predicted in first) >= 2
    assert lines[3:] == ["Written: runs/photos.png"]
    assert Path("runs/photos.png").stat().st_size > 1000

    (model,) = json.loads(Path("runs/photos-flatness/flatness.json").read_text())["models"]
    assert model["metrics"]["test_accuracy"] == last["test_accuracy"]
    assert len(model["eigenvalues"]["values"]) == 1
    assert model["eigenvalues"]["values"][0] > 0
    assert np.isfinite(model["sharpness"]["bilateral"])


def test_the_code_of_the_guide(folder, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(code.partition("result =")[0], names)
    assert names["run"].settings().items() >= {"lr": 0.01, "weight_decay": 1e-4, "label_smoothing": 0.0}.items()
    exec(in_small(code, SMALL_CODE), names)
    *told, accuracy, predicted = capsys.readouterr().out.splitlines()
    assert told == ["The initial weights are random; to load pretrained ones, use --weights."]
    assert accuracy == f"test accuracy {names['result'].score:.1%}"
    assert re.fullmatch(rf"new/circle\.png ({'|'.join(SHAPES)}) [\d.]+%", predicted)
