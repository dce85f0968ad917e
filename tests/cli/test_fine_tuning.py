"""``bsam train`` on image files, and ``bsam predict``."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from bsam import cli
from bsam.data.images.decoding import Resize, decode
from bsam.models import build
from bsam.training.config import Run
from bsam.training.run_dir import RunDir, run_dir_name
from helpers import draw_images

ON_FOLDER = ("train", "--device", "cpu", "--batch", "6", "--epochs", "1", "--image-size", "32")
RESNET = ("--model", "timm:test_resnet")


@pytest.fixture
def images(tmp_path):
    return draw_images(tmp_path / "images", {"train": 4, "test": 2})


@pytest.fixture
def weights(tmp_path):
    """A file that says what network it is of, as ``tools/convert_weights.py`` writes them."""
    tensors = {k: t.contiguous() for k, t in build("timm:test_resnet", classes=9, seed=3).state_dict().items()}
    save_file(tensors, tmp_path / "resnet.safetensors", {"bsam_model": "timm:test_resnet"})
    return tmp_path / "resnet.safetensors"


def files(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".bsam-lock")
    return {path: path.read_bytes() for path in files}


def train(*arguments):
    return cli.main([*ON_FOLDER, *map(str, arguments)])


def test_a_folder_of_images_from_start_to_end(images, weights, tmp_path, capsys):
    out, cache = tmp_path / "out", tmp_path / "cache"
    command = ["--method", "bsam", "--weights", weights.name, "--data-dir", tmp_path, "--data", "folder:images"]
    assert train(*command, "--out", out, "--cache-dir", cache, "--lr", "0.002", "--head-lr", "0.02") == 0
    said, error = capsys.readouterr()
    assert error == "Decoding the images of images: 18 of 18\n"
    tensors = len(load_file(weights)) - 2
    assert f"Loaded {tensors} tensors from resnet.safetensors (SHA-256 " in said
    assert "its classifier was left out (fc.bias 9, fc.weight 9x" in said
    assert "test_resnet" in said
    assert "12 samples of images" in said
    written = said.splitlines()[-1]
    note = {name: json.loads((out / f"{name}.json").read_text()) for name in ("config", "data", "inputs", "weights")}
    assert all(f"{name}.json" in written for name in note)
    expected = {"model": "timm:test_resnet", "weights": "resnet.safetensors", "data": "folder:images"}
    expected |= {"weight_decay": 1e-4, "label_smoothing": 0.0, "lr": 0.002, "head_lr": 0.02, "epochs": 1}
    assert expected.items() <= note["config"].items()
    assert note["data"] == {"split": "folders train and test", "images": {"train": 12, "test": 6}, "left_out": []}
    assert note["inputs"]["class_names"] == ["cat", "dog", "owl"]
    assert len(note["weights"]["sha256"]) == 64
    assert len(list(cache.glob("*.npy"))) == 1
    end, start = load_file(out / "model.safetensors"), load_file(weights)
    assert end["fc.weight"].shape[0] == 3
    way = (end["layer4.0.conv1.weight"] - start["layer4.0.conv1.weight"]).norm() / start["layer4.0.conv1.weight"].norm()
    assert 0 < way < 0.5


def test_a_finished_run_needs_no_images(images, weights, tmp_path, capsys):
    command = [
        "--method",
        "sgd",
        *RESNET,
        "--weights",
        weights,
        "--data",
        f"folder:{images}",
        "--out",
        tmp_path / "out",
    ]
    assert train(*command) == 0
    before = files(tmp_path / "out")
    shutil.rmtree(images)
    assert train(*command) == 0
    assert "is finished." in capsys.readouterr().out
    assert files(tmp_path / "out") == before


def broken(images, tmp_path):
    """Folders with which no training may begin, and what is said of them."""
    for name in ("no-class", "empty", "no-image", "validation"):
        shutil.copytree(images, tmp_path / name)
    shutil.rmtree(tmp_path / "no-class/test/dog")
    for path in (tmp_path / "empty/train/owl").iterdir():
        path.unlink()
    (tmp_path / "no-image/train/cat/notes.txt").write_text("no image")
    (tmp_path / "no-image/test/dog/0.png").write_bytes((images / "test/dog/0.png").read_bytes()[:200])
    pets = tmp_path / "pets"
    (pets / "annotations").mkdir(parents=True)
    (pets / "images").mkdir()
    for part in ("trainval", "test"):
        names = [f"breed{i}_{part}" for i in range(1, 37)]
        lines = [f"{name} {i} 1 1\n" for i, name in enumerate(names, 1)]
        (pets / f"annotations/{part}.txt").write_text("".join(lines))
        for name in names:
            (pets / f"images/{name}.jpg").touch()
    return {
        ("--data", f"folder:{tmp_path}/no-class"): f"{tmp_path}/no-class/test has no class folder dog",
        ("--data", f"folder:{tmp_path}/empty"): f"{tmp_path}/empty/train/owl holds no images",
        ("--data", f"folder:{tmp_path}/no-image"): "2 of 19 files",
        ("--data", f"folder:{tmp_path}/nowhere"): f"{tmp_path}/nowhere is not a folder",
        ("--data", f"folder:{tmp_path}/validation", "--eval-split", "validation"): "has no validation set",
        ("--data", "oxford_pet", "--data-dir", pets): f"Oxford-IIIT Pet has 37 classes, and {pets} has 36",
        ("--data", "oxford_pet"): "say in which folder they are (--data-dir)",
        ("--data", "folder:nowhere", "--data-dir", tmp_path): f"{tmp_path}/nowhere is not a folder",
    }


def assert_refused(command, words, out, capsys):
    capsys.readouterr()
    assert train(*command, "--out", out) == 2
    said, error = capsys.readouterr()
    assert words in error
    assert "epoch 1" not in said
    assert "Traceback" not in error
    return error


def test_data_that_cannot_be_trained_on_is_refused_before_a_run_begins(images, tmp_path, capsys):
    for command, words in broken(images, tmp_path).items():
        error = assert_refused(
            ("--method", "sgd", *RESNET, "--weights", "random", *command), words, tmp_path / "out", capsys
        )
        assert files(tmp_path / "out") == {}
        if "2 of 19" in words:
            assert "  train/cat/notes.txt cannot be decoded: it is no image" in error
            assert "  test/dog/0.png cannot be decoded" in error
            assert "--skip-corrupt" in error


def test_settings_that_cannot_be_trained_with_are_refused_before_a_run_begins(images, weights, tmp_path, capsys):
    torch.save(build("resnet8", classes=4).state_dict(), tmp_path / "resnet8.pt")
    (tmp_path / "half.pt").write_bytes((tmp_path / "resnet8.pt").read_bytes()[:5000])
    ours = ("--model", "resnet8")
    for command, words in {
        (): "images does not say which network to train: name one with --model, as timm:resnet50, or",
        ("--weights", "pretrained"): "images does not say which network to train",
        ("--weights", tmp_path / "resnet8.pt"): "resnet8.pt does not say which network to train",
        (*RESNET, "--weights", "nowhere.pt"): "there is no nowhere.pt: give --weights the file",
        (*RESNET, "--weights", tmp_path / "resnet8.pt"): "resnet8.pt does not fit timm:test_resnet, nothing was loaded",
        (
            *ours,
            "--weights",
            weights,
        ): "holds weights of timm:test_resnet, not of resnet8: give another file",
        (*ours, "--weights", tmp_path / "half.pt"): "half.pt cannot be read as a file of weights",
        (*ours, "--weights", "pretrained"): "there is no download of pretrained weights for resnet8",
        ("--model", "timm:test_resnett", "--weights", "random"): "timm has no network 'test_resnett'",
        (*ours, "--lr", "0", "--head-lr", "0.1"): "set freeze_backbone",
        (*ours, "--freeze-backbone", "--layer-decay", "0.5"): "leave one of them out",
        (*ours, "--layer-decay", "0.5"): "layer decay needs a network of timm",
        (*ours, "--layer-decay", "1.5"): "layer_decay must be",
        (*ours, "--image-size", "0"): "image_size must be",
    }.items():
        assert_refused(("--method", "sgd", "--data", f"folder:{images}", *command), words, tmp_path / "out", capsys)
        assert files(tmp_path / "out") == {}


def test_a_refused_run_leaves_the_directory_as_it_was(images, weights, tmp_path, capsys, monkeypatch):
    command = ["--method", "sgd", "--weights", weights, "--data", f"folder:{images}"]
    monkeypatch.setattr("bsam.training.trainer.Trainer.evaluate", lambda _: 1 / 0)  # it stops in the first epoch
    with pytest.raises(ZeroDivisionError):
        train(*command, "--out", tmp_path / "out")
    before = files(tmp_path / "out")
    weights.rename(tmp_path / "elsewhere.safetensors")
    assert_refused(command, f"there is no {weights}", tmp_path / "out", capsys)
    (tmp_path / "elsewhere.safetensors").rename(weights)
    (images / "test/cat/1.png").write_text("no image")
    assert_refused(command, "test/cat/1.png cannot be decoded", tmp_path / "out", capsys)
    assert files(tmp_path / "out") == before


def test_corrupt_files_are_left_out_and_listed(images, tmp_path, capsys):
    (images / "train/cat/1.png").write_text("no image")
    (images / "test/owl/0.png").write_bytes(b"")
    command = ["--method", "sgd", *RESNET, "--weights", "random", "--data", f"folder:{images}", "--skip-corrupt"]
    assert train(*command, "--out", tmp_path / "out") == 0
    assert "Samples that are left out: 2; data.json says why." in capsys.readouterr().out
    note = json.loads((tmp_path / "out/data.json").read_text())
    assert note["images"] == {"train": 11, "test": 5}
    assert [one.partition(" cannot be decoded: ")[0] for one in note["left_out"]] == [
        "train/cat/1.png",
        "test/owl/0.png",
    ]


def test_predict(images, weights, tmp_path, capsys):
    out, grid = tmp_path / "out", tmp_path / "grid.png"
    assert train("--method", "sgd", "--weights", weights, "--data", f"folder:{images}", "--out", out) == 0
    shutil.copy(images / "test/owl/1.png", tmp_path / "a.png")
    shutil.copy(images / "test/owl/1.png", tmp_path / "b.png")
    Image.new("L", (60, 30), 90).save(tmp_path / "photograph.jpg")
    shutil.rmtree(images)
    weights.unlink()
    capsys.readouterr()
    shown = [str(tmp_path / name) for name in ("a.png", "photograph.jpg", "b.png")]
    assert cli.main(["predict", str(out), *shown, shown[0], "--top", "2", "--grid", str(grid), "--device", "cpu"]) == 0
    *lines, written = capsys.readouterr().out.splitlines()
    assert written == f"Written: {grid}"
    assert len(lines) == 3
    for line, path in zip(lines, shown, strict=True):
        found = re.fullmatch(r"(\S+) +(cat|dog|owl) ([\d.]+)%, (cat|dog|owl) ([\d.]+)%", line)
        assert found[1] == path
        assert found[2] != found[4]
        assert 100 / 3 <= float(found[3]) <= 100.1
        assert float(found[3]) >= float(found[5])
    assert lines[0].replace("a.png", "b.png") == lines[2]
    assert len({re.search(r"  (cat|dog|owl) ", line).start() for line in lines}) == 1  # below each other
    with Image.open(grid) as drawn:
        # three pictures of 2.6 inches, with their text, 150 dots an inch
        assert (drawn.format, drawn.size) == ("PNG", (3 * 390, 511))
        assert len(np.unique(np.asarray(drawn.convert("RGB")).reshape(-1, 3), axis=0)) > 200

    one = ["predict", "--device", "cpu", str(out), shown[1]]
    assert cli.main(one) == 0
    assert len(re.findall(r"[\d.]+%", capsys.readouterr().out)) == 3
    (tmp_path / "notes.txt").write_text("no image")
    for content in ("{", "[]"):
        shutil.copytree(out, tmp_path / "damaged", dirs_exist_ok=True)
        (tmp_path / "damaged/inputs.json").write_text(content)
        assert cli.main(["predict", "--device", "cpu", str(tmp_path / "damaged"), shown[1]]) == 2
        assert "inputs.json cannot be read" in capsys.readouterr().err
    for arguments, words in {
        (*one, tmp_path / "notes.txt"): "notes.txt cannot be decoded: it is no image",
        (*one, tmp_path / "nowhere.png"): "nowhere.png cannot be read: No such file",
        (*one, "--top", "0"): "top must be a whole number of at least 1",
        (*one, "--grid", tmp_path / "grid.gif"): "--grid must end in one of .png, .jpg, .jpeg, .pdf, .svg",
        ("predict", tmp_path, shown[0]): "is not a run directory of bsam train",
    }.items():
        assert cli.main(list(map(str, arguments))) == 2
        assert words in capsys.readouterr().err


def test_a_network_of_another_folder_does_not_go_into_a_run(images, tmp_path, capsys):
    """The settings of a run name its data: a second folder is another run."""
    command = ["--method", "sgd", *RESNET, "--weights", "random", "--out", tmp_path / "out"]
    assert train(*command, "--data", f"folder:{images}") == 0
    before = files(tmp_path / "out")
    shutil.copytree(images, tmp_path / "others")
    assert train(*command, "--data", f"folder:{tmp_path / 'others'}") == 2
    assert "holds results with other settings (data folder:" in capsys.readouterr().err
    assert files(tmp_path / "out") == before
    assert RunDir(tmp_path / "out").run().data == f"folder:{images}"


def test_flatness_reads_the_images_of_a_run_from_its_cache(images, tmp_path, monkeypatch):
    out, cache = tmp_path / "out", tmp_path / "cache"
    command = ["--method", "sgd", *RESNET, "--weights", "random", "--data", "folder:images", "--data-dir", tmp_path]
    assert train(*command, "--cache-dir", cache, "--out", out) == 0
    loaded = []

    def report(models, *_):
        loaded.append(models.load(models.paths[0], torch.device("cpu")))
        return []

    monkeypatch.setattr("bsam.report.measurements.flatness_report", report)
    places = ["--data-dir", str(tmp_path), "--cache-dir", str(cache)]
    assert cli.main(["flatness", str(out), "--images", "5", *places, "--device", "cpu"]) == 0
    ((network, _, ((x, y),)),) = loaded
    assert not (images / ".bsam-cache").exists()
    assert torch.equal(network.fc.bias, load_file(out / "model.safetensors")["fc.bias"])
    assert y.tolist() == [0, 0, 1, 1, 2]
    paths = [images / f"train/{name}.png" for name in ("cat/0", "cat/1", "dog/0", "dog/1", "owl/0")]
    pixels = np.stack([decode(path, Resize(32, 0.95)) for path in paths]).transpose(0, 3, 1, 2)
    torch.testing.assert_close(x, torch.from_numpy(pixels) / 127.5 - 1, atol=1e-5, rtol=0)


def test_bsam_run_trains_the_networks_of_files(tmp_path, monkeypatch, capsys):
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors", {"bsam_model": "resnet50"})
    asked = []
    monkeypatch.setattr("bsam.cli.run.run_all", lambda runs, out, *_, **options: asked.append((runs, options)) or [])
    command = ["run", "transfer", "--scale", "short", "--weights", "a.safetensors", "--data-dir", str(tmp_path)]
    command += ["--cache-dir", str(tmp_path / "cache"), "--data", "oxford_pet", "--out", str(tmp_path / "out")]
    assert cli.main(command) == 0
    ((runs, options),) = asked
    assert {(run.model, run.weights, run.data) for run in runs} == {("resnet50", "a.safetensors", "oxford_pet")}
    assert len(runs) == 7
    assert (options["data_dir"], options["cache_dir"]) == (tmp_path, tmp_path / "cache")
    table = (tmp_path / "out/table.md").read_text()
    assert "## ResNet-50" in table
    assert "93.11" in table  # the paper's, of SGD
    assert cli.main(["run", "transfer", "--scale", "smoke", "--weights", "a.safetensors", "--out", str(tmp_path)]) == 2
    assert "leave --weights out" in capsys.readouterr().err


def test_the_directory_of_a_run_has_the_name_of_the_folder():
    run = Run("sgd", model="timm:test_resnet", data="folder:/home/me/pictures/my birds")
    assert re.fullmatch(r"timm_test_resnet-my_birds-sgd-seed0-[0-9a-f]{8}", run_dir_name(run))
