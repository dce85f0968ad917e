"""The guide "From images to skeletons": its commands and its code run on drawn figures in files, in small."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from bsam.lab.data.persons import LSP, joint_boxes
from bsam.lab.data.stick_figures import stick_figures
from docs_guides import first_commands, in_small, run_commands
from helpers import write_lspet

TEXT = (Path(__file__).parents[2] / "docs/guides/pose.md").read_text(encoding="utf-8")
DRAW, TRAIN = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
SMALL = {  # what differs from the commands of the guide
    "--weights resnet50.safetensors --epochs 30": "--model simcc_resnet8 --image-size 16 --simcc-sigma 1.5 "
    "--augment none --lr 0.015 --epochs 25 --batch 11 --set rho_max=0.01 rho_min=0.01 --device cpu",
    "--images 100 --k 5 --points 11": "--images 6 --k 1 --points 3 --trace-samples 6 --density-steps 3 "
    "--density-probes 1 --tol 0.5 --device cpu",
}
SMALL_CODE = {
    'model="simcc_resnet50"': 'model="simcc_resnet8"',
    'weights="resnet50.safetensors"': "image_size=16, simcc_sigma=1.5",
    "epochs=30": "epochs=1, batch=11",
    "photos/a.jpg": "photos/0.jpg",
}
FIGURES, PHOTOS = 12, 4
pytestmark = pytest.mark.usefixtures("rough_eigenvalues")


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """Drawn figures, each of which fills its image, in data/ in the layout of LSP Extended; some of them in photos/.

    Returns the joints (n, 14, 2) of all, in pixels of their images, and the longer sides of these.
    """
    monkeypatch.chdir(tmp_path)
    drawn = stick_figures(FIGURES, side=48).train
    joints = drawn.y.double().numpy()
    boxes = joint_boxes(joints, margin=0.05).round().astype(int)
    joints[:, :, :2] -= boxes[:, None, :2]
    pixels = drawn.x.permute(0, 2, 3, 1).numpy()
    cut = [
        one[top : bottom + 1, left : right + 1] for one, (left, top, right, bottom) in zip(pixels, boxes, strict=True)
    ]
    write_lspet(Path("data/lspet"), cut, joints.transpose(1, 2, 0))
    Path("photos").mkdir()
    for number in range(PHOTOS):
        shutil.copy(f"data/lspet/images/im{number + 1:05d}.jpg", f"photos/{number}.jpg")
    return joints[:, :, :2], np.array([max(one.shape) for one in cut])


def joints_in(printed: list[str]) -> np.ndarray:
    """The joints (14, 2) in lines of `bsam predict`, whose first has the name of the image."""
    found = [re.fullmatch(r"  ([\w ]+?) +(-?[\d.]+) +(-?[\d.]+)", line).groups() for line in printed[1:15]]
    assert [name for name, *_ in found] == list(LSP.joints)
    return np.array([[float(x), float(y)] for _, x, y in found])


def test_the_first_commands_of_the_guide(figures, capsys):
    printed = run_commands(in_small(first_commands(TEXT), SMALL), capsys, draw=False)
    assert list(printed) == ["train", "predict", "flatness"]

    last = json.loads(Path("runs/pose/metrics.jsonl").read_text().splitlines()[-1])
    baseline = json.loads(Path("runs/pose/baseline.json").read_text())["scores"]
    assert {name.removeprefix("test_") for name in last if name.startswith("test_pck")} == set(baseline)
    assert f"After epoch 25: train loss {last['train_loss']:.4f}" in printed["train"]
    assert "on 11 samples of LSP Extended" in printed["train"]
    assert json.loads(Path("runs/pose/data.json").read_text())["images"] == {"train": 11, "test": 1}

    lines, (truth, sides) = printed["predict"].splitlines(), figures
    assert lines[0:60:15] == [f"photos/{number}.jpg" for number in range(PHOTOS)]
    assert lines[60] == "The whole image was used as the person's box; set --box to change it."
    assert lines[61:] == ["Written: runs/pose.png", *(f"Written: runs/drawn/{number}.png" for number in range(PHOTOS))]
    relative, found = truth / sides[:, None, None], np.stack([joints_in(lines[i:]) for i in (0, 15, 30, 45)])
    errors = np.linalg.norm(found / sides[:PHOTOS, None, None] - relative[:PHOTOS], axis=2)
    of_mean_pose = np.linalg.norm(relative.mean(axis=0) - relative[:PHOTOS], axis=2)
    assert errors.mean() < 0.9 * of_mean_pose.mean()  # of figures that it was trained on
    assert Path("runs/pose.png").stat().st_size > 10_000

    (model,) = json.loads(Path("runs/pose-flatness/flatness.json").read_text())["models"]
    assert model["metrics"]["test_pck"] == last["test_pck"]
    assert model["eigenvalues"]["values"][0] > 0
    assert np.isfinite(model["sharpness"]["bilateral"])
    assert np.isfinite(model["trace"]["value"])

    names: dict[str, object] = {}
    exec(DRAW, names)
    command = re.search(r"\$ (bsam predict .*)", TEXT)[1]
    lines = run_commands(in_small(command, {"runs/figures": "runs/pose --device cpu"}), capsys)["predict"].splitlines()
    assert lines[0] == "figure.png"
    assert "was drawn at {:.1f} and {:.1f}.".format(*names["drawn"].y[0, 0, :2].tolist()) in TEXT
    assert ((joints_in(lines) > 0) & (joints_in(lines) < 176)).all()


def test_the_code_of_the_guide(figures, capsys):
    names: dict[str, object] = {}
    exec(in_small(TRAIN, SMALL_CODE), names)
    expected = {"base": "adam", "lr": 1e-3, "batch": 11, "weight_decay": 0.0}
    assert names["run"].settings().items() >= expected.items()
    told, score, *joints = capsys.readouterr().out.splitlines()
    assert told == "The initial weights are random; to load pretrained ones, use --weights."
    assert score == f"PCK {names['result'].score:.1%}"
    assert [re.fullmatch(r"([\w ]+) -?[\d.]+ -?[\d.]+", line)[1] for line in joints] == list(LSP.joints)


def test_the_order_of_the_joints_is_that_of_the_files():
    *first, last = LSP.joints
    assert f"The rows are {', '.join(first)} and {last}." in " ".join(TEXT.split())
