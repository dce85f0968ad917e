"""Commands that cannot work end with status 2 and a message that names the culprit, and leave nothing behind.

One command per kind of error: the tests of what raises it have its other cases.
"""

import json
import shlex
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from bsam.lab.models import build
from pose_runs import draw_figures

TRAIN = {  # flags of `bsam train --method bsam --epochs 3 --batch 64`: a word of the message
    "--method bsma-2": "Did you mean 'bsam-2'?",
    "--method sam-sum": "'sam-sum'",  # for recipes
    "--model resnet9": "model",
    "--model resnet8 --data mnist": "data",
    "--device abacus": "device",
    "--batch 641": "batch",
    "--data cifar10 --data-dir nowhere": "nowhere",
    "--download": "--download",
    "--data cifar10 --download": "--data-dir",
    "--set rho_min=0,1": "rho_min",
    "--out mine": "thesis.tex",
    "--out mine/thesis.tex": "thesis.tex",
    "--init digits --model digits_net": "--model resnet8",
    "--init nowhere": "nowhere",
    "--init digits --data cifar100": "10 classes",
}
IMAGES = {  # of `bsam train ... --data folder:images`
    "": "--model",
    "--model timm:test_resnet --weights nowhere.pt": "nowhere.pt",
    "--model timm:test_resnet --weights resnet8.pt": "resnet8.pt",
    "--model resnet8 --weights half.pt": "half.pt",
    "--model resnet8 --data folder:no-class": "no-class/test",
    "--model resnet8 --data folder:nowhere --data-dir mine": "mine/nowhere",
    "--model resnet8 --data oxford_pet --data-dir pets": "37",
}
POSE = {  # of `bsam train ... --data stick_figures`
    "--label-noise 0.1": "label_noise",
    "--data digits --weights simcc_resnet8.safetensors": "simcc_resnet8",
    "--data mpii --download --data-dir mine": "--data-dir",
}
OTHERS = {
    "list papers": "'papers'",
    "demo --epochs 0": "epochs",
    "demo --seed -1": "seed",
    "run nothing": "recipe",
    "run label-noise --device tpu": "'tpu'",
    "run label-noise --jobs 0": "jobs",
    "run label-noise --jobs 2 --ray": "--ray",
    "run label-noise --scale short --device cpu --jobs 2 --data-dir nowhere": "nowhere",
    "run label-noise --scale short --device cpu --jobs 2 --data-dir mine": "CIFAR-10",
    "run label-noise --out mine/thesis.tex --report": "thesis.tex",
    "run label-noise --out mine/thesis.tex/further": "thesis.tex",
    "flatness other.pt --loader no_nets:load": "'no_nets'",
    "flatness other.pt --loader math:sqrt --device abacus": "'abacus'",
    "flatness other.pt --loader math:sqrt --images 10": "--images",
    "flatness other.pt": "--loader",
    "flatness digits mine": "mine",
    "flatness digits begun": "begun",
    "flatness digits other.pt": "other.pt",
    "flatness digits nowhere": "nowhere",
    "flatness own-task": "--loader",
    "flatness digits --loader math:sqrt": "loader",
    "flatness digits --images 0": "images",
    "predict images-run b.png --box 0 0 9 9": "--box",
    "predict images-run b.png --flip-test": "--flip-test",
    "predict images-run b.png --no-flip-test": "--flip-test",
    "predict images-run b.png --out new/a.csv": "--out",
    "predict images-run b.png --grid grid.gif": "--grid",
    "predict images-run mine": "mine",  # holds no images
    "predict damaged b.png": "inputs.json",
    "predict unfinished b.png": "unfinished",
    "predict pose-run b.png --top 2": "--top",
    "predict pose-run b.png --box 90 0 99 9": "box",
    "predict pose-run b.png nowhere.png --out drawn": "nowhere.png",
    "predict pose-run b.png notes.txt --grid grid.png": "notes.txt",
    "predict pose-run b.png --out .": "b.png",  # which is there
    "predict pose-run b.png --out b.png": "b.png",
    "predict pose-run b.png --out b.png/drawn": "b.png",
    "export w4 --out net.pt": "net.pt",
    "export w4 --out nowhere/net.onnx": "nowhere",
    "export w4 --out folder.onnx": "folder.onnx",
    "export w4 --out net.onnx --images 0": "images",
    "export mine --out net.onnx": "mine",
    "export float --out net.safetensors": "--weight-bits",
}
GROUPS = {
    "train --method bsam --epochs 3 --batch 64 --device cpu": TRAIN,
    "train --method sgd --data folder:images --epochs 1 --batch 6": IMAGES,
    "train --method sgd --base sgd --data stick_figures --epochs 1 --batch 6": POSE,
    "": OTHERS,
}
ROWS = [(f"{start} {rest}", word) for start, rows in GROUPS.items() for rest, word in rows.items()]


@pytest.fixture(scope="module")
def place(tmp_path_factory, images, digits_run, images_run, pose_run, quantized_run):
    """The current folder of the commands."""
    place = tmp_path_factory.mktemp("place")
    for name in ("images", "no-class"):
        shutil.copytree(images, place / name)
    shutil.rmtree(place / "no-class/test/dog")
    (place / "pets/images").mkdir(parents=True)
    (place / "pets/annotations").mkdir()
    for part in ("trainval", "test"):
        names = [f"breed{i}_{part}" for i in range(1, 37)]
        lines = [f"{name} {i} 1 1\n" for i, name in enumerate(names, 1)]
        (place / f"pets/annotations/{part}.txt").write_text("".join(lines))
        for name in names:
            (place / f"pets/images/{name}.jpg").touch()
    (place / "mine").mkdir()
    (place / "mine/thesis.tex").write_text("years of work")
    (place / "folder.onnx").mkdir()
    for name in ("notes.txt", "net.onnx"):
        (place / name).write_text("old")
    for name in ("a.png", "b.png"):
        Image.fromarray(np.zeros((62, 80, 3), np.uint8)).save(place / name)

    for name in ("timm:test_resnet", "simcc_resnet8"):
        tensors = {key: t.contiguous() for key, t in build(name, classes=5).state_dict().items()}
        save_file(tensors, place / f"{name.removeprefix('timm:')}.safetensors", {"bsam_model": name})
    torch.save(build("resnet8", classes=4).state_dict(), place / "resnet8.pt")
    torch.save(build("digits_net").state_dict(), place / "other.pt")
    (place / "half.pt").write_bytes((place / "resnet8.pt").read_bytes()[:5000])

    runs = {
        "digits": digits_run,
        "own-task": digits_run,
        "images-run": images_run,
        "pose-run": pose_run,
        "w4": quantized_run,
    }
    for name, run in {**runs, "damaged": images_run, "unfinished": pose_run, "float": quantized_run}.items():
        shutil.copytree(run, place / name)
    (place / "damaged/inputs.json").write_text("{")
    (place / "unfinished/model.safetensors").unlink()
    settings = json.loads((place / "w4/config.json").read_text())
    (place / "float/config.json").write_text(json.dumps({**settings, "weight_bits": None}))
    settings = json.loads((place / "own-task/config.json").read_text())
    (place / "own-task/config.json").write_text(json.dumps({**settings, "task": "chess"}))
    (place / "begun").mkdir()
    shutil.copy(digits_run / "config.json", place / "begun")
    return place


def contents(folder):
    files = (path for path in folder.rglob("*") if ".bsam" not in str(path.relative_to(folder)))  # locks and caches
    return {path: path.stat().st_mtime_ns for path in files if path.is_file()}


@pytest.mark.parametrize(("command", "word"), ROWS, ids=lambda value: value if " " in value else "")
@pytest.mark.usefixtures("script_path")
def test_the_message_names_the_culprit(command, word, place, tmp_path, monkeypatch, error_of):
    monkeypatch.chdir(place)
    draw_figures(12, monkeypatch)
    before = contents(place)
    words = shlex.split(command)
    if "--out" not in words and words[0] not in ("predict", "list"):
        words += ["--out", tmp_path / "out"]
    assert word in error_of(*words)
    assert contents(place) == before
    assert not (tmp_path / "out").exists()
