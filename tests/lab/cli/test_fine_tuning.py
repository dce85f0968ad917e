"""``bsam train`` on image files; ``bsam flatness`` and ``bsam run`` with them."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bsam.lab import cli
from bsam.lab.config import Run
from bsam.lab.data.images import Resize, decode
from bsam.lab.models import build
from bsam.lab.training.run_dir import RunDir, run_dir_name

ON_FOLDER = ("train", "--method", "sgd", "--device", "cpu", "--batch", "6", "--epochs", "1", "--image-size", "32")
RANDOM = ("--model", "timm:test_resnet", "--weights", "random")


@pytest.fixture
def photos(tmp_path, images):
    """A copy of the images, to change."""
    return shutil.copytree(images, tmp_path / "images", ignore=shutil.ignore_patterns(".bsam-cache"))


@pytest.fixture
def weights(tmp_path):
    """A file that contains the name of its network, as ``tools/convert_weights.py`` writes it."""
    tensors = {k: t.contiguous() for k, t in build("timm:test_resnet", classes=9, seed=3).state_dict().items()}
    save_file(tensors, tmp_path / "resnet.safetensors", {"bsam_model": "timm:test_resnet"})
    return tmp_path / "resnet.safetensors"


def files(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".bsam-lock")
    return {path: path.read_bytes() for path in files}


def train(*arguments):
    return cli.main([*ON_FOLDER, *map(str, arguments)])


def test_a_folder_of_images_from_start_to_end(photos, weights, tmp_path, capsys):
    out, cache = tmp_path / "out", tmp_path / "cache"
    command = ["--method", "bsam", "--weights", weights.name, "--data-dir", tmp_path, "--data", "folder:images"]
    command += ["--out", out, "--cache-dir", cache, "--lr", "0.002", "--head-lr", "0.02"]
    assert train(*command) == 0
    printed, error = capsys.readouterr()
    assert "18 of 18" in error
    assert f"Loaded {len(load_file(weights)) - 2} tensors from resnet.safetensors" in printed
    note = {name: json.loads((out / f"{name}.json").read_text()) for name in ("config", "data", "inputs", "weights")}
    assert all(f"{name}.json" in printed.splitlines()[-1] for name in note)
    expected = {"model": "timm:test_resnet", "weights": "resnet.safetensors", "data": "folder:images"}
    expected |= {"weight_decay": 1e-4, "label_smoothing": 0.0, "lr": 0.002, "head_lr": 0.02, "epochs": 1}
    assert expected.items() <= note["config"].items()
    assert note["data"]["images"] == {"train": 12, "test": 6}
    assert note["inputs"]["class_names"] == ["cat", "dog", "owl"]
    assert len(note["weights"]["sha256"]) == 64
    assert len(list(cache.glob("*.npy"))) == 1
    end, start = load_file(out / "model.safetensors"), load_file(weights)
    assert end["fc.weight"].shape[0] == 3
    way = (end["layer4.0.conv1.weight"] - start["layer4.0.conv1.weight"]).norm() / start["layer4.0.conv1.weight"].norm()
    assert 0 < way < 0.5

    before = files(out)
    shutil.rmtree(photos)
    assert train(*command) == 0  # a finished run needs no images
    assert "is finished." in capsys.readouterr().out
    assert files(out) == before


def test_an_interrupted_run_whose_data_or_weights_are_gone_stays_as_it_is(
    photos, weights, tmp_path, error_of, monkeypatch
):
    command = ["--weights", weights, "--data", f"folder:{photos}", "--out", tmp_path / "out"]
    monkeypatch.setattr("bsam.lab.training.trainer.Trainer.evaluate", lambda _: 1 / 0)  # it stops in the first epoch
    with pytest.raises(ZeroDivisionError):
        train(*command)
    before = files(tmp_path / "out")
    weights.rename(tmp_path / "elsewhere.safetensors")
    assert str(weights) in error_of(*ON_FOLDER, *command)
    (tmp_path / "elsewhere.safetensors").rename(weights)
    (photos / "test/cat/1.png").write_text("no image")
    assert "test/cat/1.png" in error_of(*ON_FOLDER, *command)
    assert files(tmp_path / "out") == before


def test_corrupt_files_are_an_error_or_left_out_and_listed(photos, tmp_path, capsys, error_of):
    (photos / "train/cat/1.png").write_text("no image")
    (photos / "test/owl/0.png").write_bytes((photos / "test/owl/0.png").read_bytes()[:200])
    command = [*RANDOM, "--data", f"folder:{photos}", "--out", tmp_path / "out"]
    error = error_of(*ON_FOLDER, *command)
    assert all(words in error for words in ("2 of 18", "train/cat/1.png", "test/owl/0.png", "--skip-corrupt"))
    assert files(tmp_path / "out") == {}
    assert train(*command, "--skip-corrupt") == 0
    assert "data.json" in capsys.readouterr().out
    note = json.loads((tmp_path / "out/data.json").read_text())
    assert note["images"] == {"train": 11, "test": 5}
    assert [reason.split()[0] for reason in note["left_out"]] == ["train/cat/1.png", "test/owl/0.png"]


def test_duplicates_of_files_and_the_size_of_the_test_set_are_on_console_page_and_in_data_json(
    photos, tmp_path, capsys
):
    for name in ("cat/0", "cat/1", "owl/1"):
        shutil.copy(photos / f"train/{name}.png", photos / f"test/{name}.png")
    shutil.copy(photos / "train/dog/0.png", photos / "train/cat/0.png")
    command = [*RANDOM, "--data", f"folder:{photos}", "--out", tmp_path / "out"]
    assert train(*command) == 0
    printed = capsys.readouterr().out
    assert "Evaluated on 6 test samples." in printed
    assert json.loads((tmp_path / "out/data.json").read_text())["duplicates"] == {"train and test": 2, "classes": 2}
    assert cli.main(["report", str(tmp_path / "out"), "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "; evaluated on 6 test samples" in page
    for sentence in ("2 images of the test set are also in the train set", "2 images are in more than one class"):
        assert sentence in printed
        assert sentence in page
    (tmp_path / "out/data.json").write_text('{"duplicates": {"train and test": "1"}}')
    (tmp_path / "out/identity.json").write_text("[]")
    assert cli.main(["report", str(tmp_path / "out"), "--out", str(tmp_path / "report.html")]) == 0
    assert "evaluated on" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("*/*/*.png", "class cat in the train set"),
        ("train/dog/*.png", "class dog in the train set"),
        ("test/owl/*.png", "class owl in the test set"),
        ("test/*/*.png", "class cat in the test set"),
    ],
)
def test_a_class_without_an_image_is_an_error_also_with_skip_corrupt(photos, tmp_path, error_of, pattern, words):
    for path in photos.glob(pattern):
        path.write_text("no image")
    command = [*RANDOM, "--data", f"folder:{photos}", "--out", tmp_path / "out", "--skip-corrupt"]
    assert words in error_of(*ON_FOLDER, *command)
    assert files(tmp_path / "out") == {}


def test_another_folder_is_another_run(images_run, images, tmp_path, error_of):
    before = files(images_run)
    shutil.copytree(images, tmp_path / "others")
    command = (*ON_FOLDER, "--model", "resnet8", "--weights", "random", "--image-size", "28", "--out", images_run)
    assert "data" in error_of(*command, "--data", f"folder:{tmp_path / 'others'}")
    assert files(images_run) == before
    assert RunDir(images_run).run().data == f"folder:{images}"


def test_flatness_reads_the_images_of_a_run_from_its_cache(photos, tmp_path, measured):
    out, cache = tmp_path / "out", tmp_path / "cache"
    command = [*RANDOM, "--data", "folder:images", "--data-dir", tmp_path, "--cache-dir", cache, "--out", out]
    assert train(*command) == 0
    places = ["--data-dir", str(tmp_path), "--cache-dir", str(cache)]
    assert cli.main(["flatness", str(out), "--images", "5", *places, "--device", "cpu"]) == 0
    models = measured.pop()
    network, _, ((x, y),) = models.load(models.paths[0], torch.device("cpu"))
    assert not (photos / ".bsam-cache").exists()
    assert torch.equal(network.fc.bias, load_file(out / "model.safetensors")["fc.bias"])
    assert y.tolist() == [0, 0, 1, 1, 2]
    paths = [photos / f"train/{name}.png" for name in ("cat/0", "cat/1", "dog/0", "dog/1", "owl/0")]
    pixels = np.stack([decode(path, Resize(32, 0.95)) for path in paths]).transpose(0, 3, 1, 2)
    torch.testing.assert_close(x, torch.from_numpy(pixels) / 127.5 - 1, atol=1e-5, rtol=0)


def test_a_recipe_trains_the_networks_of_files(tmp_path, monkeypatch):
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors", {"bsam_model": "resnet50"})
    asked = []
    monkeypatch.setattr(
        "bsam.lab.study_run.run_all", lambda runs, out, machine, *_: asked.append((runs, machine)) or []
    )
    command = ["run", "transfer", "--scale", "short", "--weights", "a.safetensors", "--data-dir", str(tmp_path)]
    command += ["--cache-dir", str(tmp_path / "cache"), "--data", "oxford_pet", "--out", str(tmp_path / "out")]
    assert cli.main(command) == 0
    ((runs, machine),) = asked
    assert {(state.run.model, state.run.weights, state.run.data) for state in runs} == {
        ("resnet50", "a.safetensors", "oxford_pet")
    }
    assert len(runs) == 7
    assert (machine.data_dir, machine.cache_dir) == (tmp_path, tmp_path / "cache")
    table = json.loads((tmp_path / "out/results.json").read_text())["table"]
    assert [cell["paper"]["mean"] for cell in table if (cell["row"], cell["column"]) == ("SGD", "Oxford-IIIT Pet")] == [
        93.11
    ]


def test_the_directory_of_a_run_has_the_name_of_the_folder():
    run = Run("sgd", model="timm:test_resnet", data="folder:/home/me/pictures/my birds")
    assert re.fullmatch(r"timm_test_resnet-my_birds-sgd-seed0-[0-9a-f]{8}", run_dir_name(run))
