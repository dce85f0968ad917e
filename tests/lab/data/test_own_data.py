"""A data set that a function of the user returns: ``--data MODULE:FUNCTION``."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import bsam
from bsam.lab import Machine, cli
from bsam.lab.cli.train import ConsoleLogger
from bsam.lab.common.names import name_of
from bsam.lab.data import Dataset, ImageFiles, LabelledFiles, PersonFiles, dataset_entry, entry_of_function
from bsam.lab.data.persons import LSP
from bsam.lab.inference.run_flatness import load_run
from bsam.lab.training import Run
from helpers import draw_images

GUIDE = (Path(__file__).parents[3] / "docs/guides/own-data.md").read_text(encoding="utf-8")
LOAD = GUIDE.partition("```python\n")[2].partition("```")[0]
NUMBER = itertools.count()  # a module's name is imported once


@pytest.fixture
def package(tmp_path, script_path, monkeypatch):
    """A function that writes the package ``NAME`` into the current folder, from which it can be imported."""
    monkeypatch.chdir(tmp_path)
    entry_of_function.cache_clear()

    def write(code):
        name = f"own_data_{next(NUMBER)}"
        Path(name).mkdir()
        Path(name, "__init__.py").write_text(code)
        return name

    yield write
    entry_of_function.cache_clear()


def write_pixels(seed=0):
    """Images of a colour per class, under noise."""
    random = np.random.default_rng(seed)
    y = np.arange(48) % 3
    x = random.integers(0, 60, (48, 8, 8, 3), np.uint8)
    x[np.arange(48), :, :, y] += 120
    Path("data").mkdir(exist_ok=True)
    np.savez("data/pictures.npz", x_train=x[:30], y_train=y[:30], x_test=x[30:], y_test=y[30:])
    return x


def command(name, out, *more):
    flags = ("--epochs", "2", "--batch", "15", "--data-dir", "data", "--device", "cpu", "--out", out, *more)
    flags += ("--checkpoint-every", "0")
    return ["train", "--method", "sam", "--data", f"{name}:load", "--model", "resnet8", *flags]


def test_a_run_from_start_to_end(package, monkeypatch, capsys):
    name, x = package(LOAD), write_pixels()
    assert cli.main(command(name, "whole")) == 0
    assert f"on 30 samples of {name}:load" in capsys.readouterr().out

    def interrupt(self, done, metrics):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ConsoleLogger, "epoch", interrupt)
        assert [cli.main(command(name, out)) for out in ("parts", "other")] == [130, 130]
    assert cli.main(command(name, "parts")) == 0
    assert Path("parts/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    network, _, ((inputs, labels),) = load_run(
        Path("whole"), 6, torch.device("cpu"), [f"{name}:load"], data_dir=Path("data")
    )
    normalised = torch.from_numpy((x - x[:30].mean((0, 1, 2))) / x[:30].std((0, 1, 2))).float().permute(0, 3, 1, 2)
    torch.testing.assert_close(inputs, normalised[:6], atol=1e-5, rtol=0)
    assert labels.tolist() == [0, 1, 2, 0, 1, 2]

    Image.fromarray(x[31]).save("new.png")
    capsys.readouterr()
    assert cli.main(["predict", "whole", "new.png", "--top", "1"]) == 0
    likely, probability = capsys.readouterr().out.split()[1:]
    best = network.eval()(normalised[31:32]).detach().softmax(1).max(1)
    assert likely == ("red", "green", "blue")[int(best.indices)]
    assert probability == f"{100 * float(best.values):.1f}%"

    write_pixels(seed=1)
    entry_of_function.cache_clear()
    assert cli.main(command(name, "other")) == 2
    assert "the data has changed" in capsys.readouterr().err


def test_image_files(package, tmp_path):
    draw_images(tmp_path / "birds", {"train": 4, "test": 2})
    name = package(
        "from bsam.lab.data import ImageFiles, LabelledFiles\n"
        "def load(data_dir):\n"
        "    sets = [LabelledFiles([f'{part}/{c}/{i}.png' for c in ('cat', 'dog') for i in range(n)],\n"
        "                          [label for label in (0, 1) for i in range(n)])\n"
        "            for part, n in (('train', 4), ('test', 2))]\n"
        "    return ImageFiles('birds', data_dir, ['cat', 'dog'], sets[0], None, sets[1], 'by hand')\n"
    )
    flags = ("--model", "resnet8", "--image-size", "8", "--epochs", "1", "--batch", "8", "--device", "cpu")
    assert cli.main(["train", "--method", "sgd", "--data", f"{name}:load", "--data-dir", "birds", *flags]) == 0
    (folder,) = Path("runs").iterdir()
    assert json.loads((folder / "data.json").read_text())["images"] == {"train": 8, "test": 4}


def test_persons_are_learned_as_poses(package, tmp_path):
    random = np.random.default_rng(0)
    for number in range(6):
        Image.fromarray(random.integers(0, 256, (24, 24, 3), np.uint8)).save(tmp_path / f"{number}.png")
    name = package(
        "import numpy as np\n"
        "from pathlib import Path\n"
        "from bsam.lab.data import PersonFiles\n"
        "from bsam.lab.data.persons import LSP\n"
        "def load(data_dir):\n"
        "    joints = np.random.default_rng(0).integers(4, 20, (6, 14, 3))\n"
        "    names = [f'{i}.png' for i in range(6)]\n"
        "    boxes = [[0, 0, 24, 24]] * 6\n"
        "    return PersonFiles('us', Path(), names, boxes, joints, None, LSP, range(4), [4, 5], 'by hand')\n"
    )
    flags = ("--model", "simcc_resnet8", "--image-size", "16", "--epochs", "1", "--batch", "4", "--device", "cpu")
    assert cli.main(["train", "--method", "sgd", "--base", "sgd", "--data", f"{name}:load", *flags]) == 0
    (folder,) = Path("runs").iterdir()
    assert json.loads((folder / "config.json").read_text())["task"] == "pose"


def images(shape, dtype=np.uint8):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    "shape", [(6, 8, 8), (6, 8, 8, 1), (6, 1, 8, 8), (6, 8, 8, 3), (6, 3, 8, 8), (6, 4, 8, 8), (6, 8, 8, 4)]
)
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, lambda array: array[::-1]])
def test_shapes_of_arrays(shape, kind):
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    pixels.flags.writeable = kind is not np.asarray  # as those of a memory map
    labels = np.arange(6) % 2
    data = Dataset.from_arrays(train=(kind(pixels), labels), test=(pixels, torch.from_numpy(labels)))
    expected = pixels.reshape(6, 8, 8, -1) if shape[1] == 8 else pixels.transpose(0, 2, 3, 1)
    assert np.array_equal(data.test.x.permute(0, 2, 3, 1), expected)
    assert (data.classes, data.class_names, data.test.y.tolist()) == (2, ("0", "1"), labels.tolist())
    np.testing.assert_allclose(data.mean, expected.mean((0, 1, 2)) / 255)
    np.testing.assert_allclose(data.std, expected.std((0, 1, 2)) / 255)
    scaled = Dataset.from_arrays(train=(pixels / 7, labels), test=(pixels / 7, labels))
    np.testing.assert_allclose(scaled.std, expected.std((0, 1, 2)) / 7, rtol=1e-6)
    assert scaled.train.x.dtype == torch.float32


Y = np.arange(6) % 3
GOOD = (images((6, 8, 8)), Y)


def files(labels=(0, 1), names=("a.png", "b.png"), classes=("cat", "dog")):
    part = LabelledFiles(names, labels)
    return ImageFiles("own", Path(), classes, part, None, part, "")


def persons(**changes):
    settings = {"images": ("a.png",), "boxes": np.ones((1, 4)), "joints": np.ones((1, 14, 3)), "head_sizes": None}
    rest = {"skeleton": LSP, "train": np.array([0]), "test": np.array([0]), "split": ""}
    return PersonFiles("own", Path(), **{**settings, **rest, **changes})


RETURNED = {
    "nothing": (lambda: None, "NoneType"),
    "a tuple": (lambda: (GOOD, GOOD), "tuple"),
    "a triple": (lambda: Dataset.from_arrays((*GOOD, Y), GOOD), "train"),
    "a list": (lambda: Dataset.from_arrays(([[0]], Y), GOOD), "list"),
    "oblong": (lambda: Dataset.from_arrays((images((6, 3, 8, 9)), Y), GOOD), "square"),
    "flat": (lambda: Dataset.from_arrays((images((6, 64)), Y), GOOD), "(6, 64)"),
    "empty": (lambda: Dataset.from_arrays((images((0, 8, 8)), Y[:0]), GOOD), "no images"),
    "integers": (lambda: Dataset.from_arrays((images((6, 8, 8), np.int64), Y), GOOD), "int64"),
    "NaN": (lambda: Dataset.from_arrays((images((6, 8, 8)) + np.nan, Y), GOOD), "finite"),
    "other sizes": (lambda: Dataset.from_arrays(GOOD, (images((6, 9, 9)), Y)), "test"),
    "other numbers": (lambda: Dataset.from_arrays(GOOD, (images((6, 8, 8), np.float32), Y)), "float32"),
    "few labels": (lambda: Dataset.from_arrays((GOOD[0], Y[:5]), GOOD), "(5,)"),
    "real labels": (lambda: Dataset.from_arrays((GOOD[0], Y / 1), GOOD), "float64"),
    "one-hot labels": (lambda: Dataset.from_arrays((GOOD[0], np.eye(3)[Y]), GOOD), "(6, 3)"),
    "words": (lambda: Dataset.from_arrays((GOOD[0], np.array(["cat"] * 6)), GOOD), "numbers"),
    "from 1": (lambda: Dataset.from_arrays((GOOD[0], Y + 1), GOOD), "from 0"),
    "below 0": (lambda: Dataset.from_arrays((GOOD[0], Y - 1), GOOD), "-1"),
    "too large": (lambda: Dataset.from_arrays(GOOD, (GOOD[0], Y + 1)), "test labels"),
    "few names": (lambda: Dataset.from_arrays(GOOD, GOOD, class_names=["cat", "dog"]), "between 0 and 1"),
    "one class": (lambda: Dataset.from_arrays((GOOD[0], 0 * Y), (GOOD[0], 0 * Y)), "2 classes"),
    "files that are missing": (files, "b.png"),
    "a file without a label": (lambda: files(labels=(0,)), "one label per file"),
    "a label without a class": (lambda: files(labels=(0, 2)), "between 0 and 1"),
    "one class of files": (lambda: files(classes=("cat",), labels=(0, 0)), "class_names"),
    "boxes": (lambda: persons(boxes=np.ones((1, 3))), "boxes"),
    "joints": (lambda: persons(joints=np.ones((1, 16, 3))), "joints"),
    "a joint at infinity": (lambda: persons(joints=np.full((1, 14, 3), np.inf)), "finite"),
    "a person who is not there": (lambda: persons(test=np.array([1])), "test"),
}


def named(function) -> str:
    """Pass a function to bsam under a name of its own."""
    function.__qualname__ = f"load_{next(NUMBER)}"
    return name_of(function, "data set")


@pytest.mark.parametrize("case", RETURNED)
def test_what_a_function_must_not_return(case, package):
    make, word = RETURNED[case]
    Path("a.png").touch()
    name = named(lambda folder: make())
    with pytest.raises(bsam.BsamError, match=f"{name}: ") as error:
        dataset_entry(name).resolve()
    assert word in str(error.value)


@pytest.mark.parametrize(
    ("code", "end", "word"),
    [
        ("", ":load", "'load'"),
        ("load = 3", ":load", "must be a function"),
        ("load = 3", ".inner:load", "cannot be imported"),
        ("import not_there_at_all", ":load", "not_there_at_all"),
        ("def load(:", ":load", "SyntaxError"),
        ("1 / 0", ":load", "ZeroDivisionError"),
        ("def load(): pass", ":load", "takes 0 positional arguments"),
        ("def load(folder):\n    return folder / 'x'", ":load", "__init__.py, line 2): give --data-dir"),
        ("import json\n\ndef load(folder):\n    return json.loads('')", ":load", "(__init__.py, line 4)"),
        ("def load(folder): assert folder", ":load", "AssertionError (__init__.py, line 1)"),
        ("", ".py:load", "for my_data.py write my_data"),
        ("", ":", "module:name"),
    ],
)
def test_modules_and_functions_that_cannot_be_used(code, end, word, package, capsys):
    name = package(code)
    assert cli.main(["train", "--method", "sgd", "--data", f"{name}{end}"]) == 2
    told = capsys.readouterr().err
    assert word in told
    assert name in told
    assert told.count("\n") == 1


def test_a_classifier_does_not_learn_persons(package):
    Path("a.png").touch()
    name = named(lambda folder: persons())
    with pytest.raises(bsam.BsamError, match="--task pose"):
        bsam.lab.training.fit(Run("sgd", data=name, model="resnet8"), "runs", Machine("cpu"))
