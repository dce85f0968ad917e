"""Methods and networks of the user: ``--method MODULE:CLASS`` and ``--model MODULE:FUNCTION``."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bsam
from bsam import BsamError
from bsam.lab import Machine, Run, cli, compare, fit, write_report
from bsam.lab.common import names
from bsam.lab.common.names import find_object
from bsam.lab.config import Method, method_title
from bsam.lab.inference import export_run, predict
from bsam.lab.inference.run_flatness import find_models, load_run
from bsam.lab.models import build
from bsam.lab.models.cifar import DigitsNet
from bsam.lab.recipes.compare import compared_runs, plan_comparison
from bsam.lab.training.run_dir import RunDir, run_dir_name
from finished_runs import write_run
from helpers import draw_images
from processes import Script

NUMBER = itertools.count()  # a module's name is imported once
SMALL = ("--epochs", "2", "--limit-train", "256", "--limit-test", "64", "--batch", "64", "--device", "cpu")
METHOD = """
import bsam

class PlainSAM(bsam.SharpnessAware):
    passes = 2

    def __init__(self, base, model, *, rho=0.05, share=1.0, **options):
        super().__init__(base, model, {"rho": rho}, **options)
        self.share = share

    def direction(self, L):
        g = L.grad()
        h = L.grad(at=self.epsilon(g, "rho"))
        return h if self.share == 1 else self.share * h + (1 - self.share) * g

class Titled(PlainSAM):
    title = "My SAM"
    passes = 3.5

class Still(bsam.SharpnessAware):
    def __init__(self, base, model, **options):
        super().__init__(base, model, {}, **options)

    def direction(self, L):
        return L.grad()

class Unfinished(bsam.SharpnessAware):
    pass

class Uncounted(PlainSAM):
    @classmethod
    def passes_with(cls, arguments):
        return "two"
"""
NETWORK = """
from torch import nn
from bsam.lab.models.cifar import DigitsNet

SEEN = []

def build(classes, channels, image_size, input_shape, width=32):
    SEEN.append((classes, channels, image_size, input_shape))
    inputs = channels * image_size**2
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, classes))

def digits(classes):
    return DigitsNet(classes=classes)

class Auxiliary(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Linear(64, 32)
        self.fc = nn.Linear(32, classes)
        self.aux = nn.Linear(64, 3)

    def forward(self, x):
        return self.fc(self.body(x.flatten(1)).relu())

def thousand():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1000))

def deep(depth):
    raise AssertionError

def number():
    return 3

def broken():
    return nn.Linear(3, 4, 5, 6, 7, 8)

class Pair(nn.Module):
    def forward(self, x):
        return x, x
"""


@pytest.fixture
def module(tmp_path: Path, script_path: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A function that writes a module into the current folder, from which it can be imported, and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(code: str) -> str:
        name = f"own_names_{next(NUMBER)}"
        Path(f"{name}.py").write_text(code)
        return name

    return write


def weights(folder: str) -> torch.Tensor:
    return torch.cat([tensor.flatten().double() for tensor in RunDir(folder).weights().values()])


def train(out: str, *flags: str) -> int:
    return cli.main(["train", "--data", "digits", *SMALL, "--out", out, *flags])


def test_a_method_of_the_user_trains_like_the_same_method_of_bsam(module: Callable[[str], str]) -> None:
    own = f"{module(METHOD)}:PlainSAM"
    assert train("own", "--method", own, "--set", "rho=0.1") == 0
    assert train("ours", "--method", "sam", "--set", "rho=0.1") == 0
    assert train("other", "--method", own, "--set", "rho=0.1", "share=0.5") == 0
    assert torch.equal(weights("own"), weights("ours"))
    assert not torch.equal(weights("other"), weights("ours"))
    about = json.loads(Path("own/run.json").read_text())
    assert (about["row"], about["passes"], about["radius"]) == ("PlainSAM, rho 0.1", 2, 0.1)
    assert json.loads(Path("own/config.json").read_text())["method"] == own


def test_a_network_of_the_user_trains_like_the_same_network_of_bsam(module: Callable[[str], str]) -> None:
    own = f"{module(NETWORK)}:digits"
    assert train("own", "--method", "sam", "--model", own) == 0
    assert train("ours", "--method", "sam", "--model", "digits_net") == 0
    assert torch.equal(weights("own"), weights("ours"))


def test_a_function_gets_what_its_signature_names(module: Callable[[str], str]) -> None:
    name = module(NETWORK)
    fit(Run("sgd", model=f"{name}:build", epochs=1, limit_train=128), machine=Machine("cpu"))
    assert set(sys.modules[name].SEEN) == {(10, 1, 8, (1, 8, 8))}


def test_an_interrupted_run_continues(module: Callable[[str], str]) -> None:
    run = Run(f"{module(METHOD)}:PlainSAM", model=f"{module(NETWORK)}:build", epochs=2, limit_train=128, batch=64)
    fit(run, "whole", Machine("cpu"))
    fit(run, "parts", Machine("cpu", checkpoint_every=0), until=1)
    fit(run, "parts", Machine("cpu"))
    assert torch.equal(weights("whole"), weights("parts"))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("nowhere_to_be_found:SAM", "the method's module 'nowhere_to_be_found' cannot be imported"),
        ("{}:Misspelled", "has no 'Misspelled': check the name"),
        ("{}:bsam", "must be a class derived from bsam.SharpnessAware"),
        ("bsam:BsamError", "must be a class derived from bsam.SharpnessAware"),
        ("{}:Unfinished", "has no direction: add it to the class"),
        ("{}:Uncounted", "must say how many gradient passes a step takes"),
        ("PlainSAM", "method must be one of base, "),
    ],
)
def test_wrong_methods_are_named(
    method: str, message: str, module: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run", "--method", method.format(module(METHOD))) == 2
    assert message in capsys.readouterr().err
    assert not Path("run").exists()


def test_wrong_arguments_are_named_before_training(
    module: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    own = f"{module(METHOD)}:PlainSAM"
    run = Run(own, {"gama": 1})  # the module is not imported yet
    with pytest.raises(BsamError, match="PlainSAM has no argument 'gama': it takes rho, share"):
        fit(run, "run")
    assert train("run", "--method", own, "--set", "gama=1") == 2
    assert "has no argument 'gama'" in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("misspelled", "has no 'misspelled': check the name"),
        ("SEEN", "must be a function, got list"),
        ("deep", "asks for 'depth'; it can get classes, channels, image_size, input_shape"),
        ("number", "must return a torch.nn.Module, got int"),
        ("broken", r"raised TypeError: .* \(own_names_\d+.py, line \d+\): correct the function"),
        ("thousand", r"returns outputs of shape \(2, 1000\) for 2 samples and 10 classes: use its argument classes"),
        ("Pair", "must return a tensor of logits, got tuple"),
    ],
)
def test_wrong_networks_are_named(function: str, message: str, module: Callable[[str], str]) -> None:
    with pytest.raises(BsamError, match=message):
        fit(Run("sgd", model=f"{module(NETWORK)}:{function}", epochs=1), "run")


def test_comparisons_take_methods_with_arguments_and_classes(module: Callable[[str], str]) -> None:
    name = module(METHOD)
    own = f"{name}:PlainSAM"
    runs = compared_runs(["base", f"{own}:rho=0.2,share=0.5", "sam:rho=0.1", f"{name}:Titled"], {"data": "cifar100"})
    assert [(run.method, dict(run.arguments)) for run in runs.values()] == [
        ("base", {}),
        (own, {"rho": 0.2, "share": 0.5}),
        ("sam", {"rho": 0.1}),
        (f"{name}:Titled", {}),
    ]
    cls: Method = sys.modules[name].PlainSAM
    assert [run.method for run in compared_runs(["base", cls], {}).values()] == ["base", own]
    with pytest.raises(BsamError, match="PlainSAM has no argument 'gama'"):
        compared_runs(["base", f"{own}:gama=1"], {})


def test_two_processes_compare_and_tune_a_method_of_the_user(module: Callable[[str], str]) -> None:
    name, network = module(METHOD), f"{module(NETWORK)}:build"
    methods = ["base", f"{name}:Titled", f"{name}:Still"]
    settings = {"epochs": 1, "limit_train": 300, "batch": 50}
    result = compare(
        "digits", network, methods, seeds=1, tune=True, out="out", machine=Machine("cpu", jobs=2), **settings
    )
    assert result.table["row"].tolist() == ["SGD", "My SAM, tuned", "Still"]
    assert result.table["passes"].tolist() == [1, 3.5, 2]
    plans = plan_comparison(methods, {"model": network, **settings}, tune=True, seeds=1).plans
    radii = [[candidate["arguments"]["rho"] for candidate in plan.candidates] for plan in plans]
    assert radii == [[], [0.025, 0.05, 0.1, 0.2], []]


WITHOUT = """
import sys
sys.modules |= dict.fromkeys(sys.argv[1:])  # importing them is an error
from bsam.lab import write_report
write_report("out", "there.html")
"""


def test_a_page_is_written_without_the_modules(module: Callable[[str], str]) -> None:
    """A report imports nothing: in a process in which the modules cannot be imported, the page is the same."""
    name, network = module(METHOD), f"{module(NETWORK)}:build"
    compare(
        "digits",
        network,
        ["base", f"{name}:Titled"],
        seeds=2,
        out="out",
        machine=Machine("cpu"),
        epochs=1,
        limit_train=128,
    )
    write_report("out", "here.html")
    script = Path("without.py")
    script.write_text(WITHOUT)
    process = Script(script, name, network.partition(":")[0], output=Path("printed.txt"))
    assert process.wait() == 0, Path("printed.txt").read_text()
    here, there = (Path(f"{page}.html").read_text() for page in ("here", "there"))
    assert "My SAM" in here
    assert here.replace("here.html", "") == there.replace("there.html", "")


def test_run_directories_have_plain_names() -> None:
    name = run_dir_name(Run("some.module:Method", model="some.module:network"))
    assert name.startswith("some.module_network-digits-some.module_Method-seed0-")


def test_classes_and_functions_are_passed_in_python(module: Callable[[str], str]) -> None:
    run = Run.of(bsam.SAM, {"rho": 0.1}, model=DigitsNet)
    assert (run.method, run.model) == ("bsam.methods.sam:SAM", "bsam.lab.models.cifar:DigitsNet")
    assert run == Run(run.method, {"rho": 0.1}, model=run.model)
    assert fit(run.changed(epochs=1, limit_train=128), machine=Machine("cpu")).score > 0

    def inner(classes: int) -> nn.Module:
        raise AssertionError

    for wrong in (inner, lambda classes: None, DigitsNet()):
        with pytest.raises(BsamError, match="the model must be a name, or a class or function at the top level"):
            Run.of("sam", model=wrong)


def test_objects_of_a_script_are_named_after_its_file(module: Callable[[str], str]) -> None:
    """So that another process, and the command line, can import them."""
    script = module(
        METHOD
        + NETWORK
        + """
if __name__ == "__main__":
    from bsam.lab import Machine, compare
    settings = {"epochs": 1, "limit_train": 128}
    compare("digits", build, ["base", PlainSAM], seeds=1, out="out", machine=Machine("cpu"), **settings)
"""
    )
    process = Script(Path(f"{script}.py"), output=Path("printed.txt"))
    assert process.wait() == 0, Path("printed.txt").read_text()
    settings = [json.loads(file.read_text()) for file in Path("out").glob("*/config.json")]
    assert {each["method"] for each in settings} == {"base", f"{script}:PlainSAM"}
    assert {each["model"] for each in settings} == {f"{script}:build"}
    words = ["compare", "--data", "digits", "--model", f"{script}:build", "--methods", "base", f"{script}:PlainSAM"]
    words += ["--seeds", "1", "--epochs", "1", "--limit-train", "128", "--device", "cpu", "--out", "out"]
    times = {path: path.stat().st_mtime_ns for path in Path("out").rglob("model.safetensors")}
    assert cli.main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in Path("out").rglob("model.safetensors")} == times


@pytest.mark.usefixtures("operators_once")
def test_the_network_of_a_stored_run_must_be_named_again(
    module: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    own = f"{module(NETWORK)}:build"
    assert train("run", "--method", "sgd", "--model", own) == 0
    commands = {
        "flatness": ["flatness", "run", "--images", "8", "--k", "1", "--points", "3", "--density-steps", "2"],
        "export": ["export", "run", "--out", "net.onnx"],
        "start": ["train", "--method", "sgd", "--init", "run", *SMALL, "--out", "next"],
    }
    for name, command in commands.items():
        assert cli.main(command) == 2
        assert f"if you trust it, add --model {own}" in capsys.readouterr().err
        assert cli.main([*command, "--model", own]) == 0, (name, capsys.readouterr().err)
    function = find_object(own, "model")
    (path,) = find_models([Path("run")], images=8, models=[function]).paths
    assert load_run(path, 8, torch.device("cpu"), models=[function])[1] is not None
    assert export_run("run", "again.onnx", device="cpu", model=function).path == Path("again.onnx")


def test_the_head_of_a_network_of_the_user_is_trained_alone(module: Callable[[str], str]) -> None:
    """Although another linear layer is registered last."""
    own = f"{module(NETWORK)}:Auxiliary"
    fit(Run("sgd", model=own, epochs=1, limit_train=128), "all", Machine("cpu"))
    settings = {"model": own, "epochs": 1, "limit_train": 128, "weights": "all/model.safetensors", "seed": 1}
    start = build(own, 10, seed=1).state_dict() | RunDir("all").weights()
    fit(Run("sgd", freeze_backbone=True, head_lr=0.1, **settings), "head", Machine("cpu"))
    after = RunDir("head").weights()
    assert {name for name in after if not torch.equal(after[name], start[name])} == {"fc.weight", "fc.bias"}


def test_images_are_classified_by_a_network_of_the_user(module: Callable[[str], str]) -> None:
    own, photographs = f"{module(NETWORK)}:build", draw_images(Path("photographs"), {"train": 4, "test": 2})
    fit(Run("sgd", data=f"folder:{photographs}", model=own, image_size=8, epochs=1, batch=4), "run", Machine("cpu"))
    with pytest.raises(BsamError, match=f"add --model {own}"):
        predict("run", photographs, device="cpu")
    for model in (own, find_object(own, "model")):
        assert len(predict("run", photographs, device="cpu", model=model)) > 0


@pytest.mark.parametrize(
    ("role", "given", "words"),
    [
        ("model", DigitsNet, "model resnet8, not bsam.lab.models.cifar:DigitsNet"),
        ("task", "pose", "task classification, not pose"),
        ("data", "cifar10", "data digits, not cifar10"),
    ],
)
def test_what_a_run_does_not_have_is_refused_in_the_same_words(
    role: str, given: Any, words: str, tmp_path: Path
) -> None:
    """By predict, export and flatness."""
    run = write_run(Run("sgd", epochs=1, model="resnet8"), tmp_path).path
    kinds = {"model": "models", "task": "tasks", "data": "data"}
    sentence = re.escape(f"the run in {run} has the {words}: leave out --{role} {words.split()[-1]}")
    with pytest.raises(BsamError, match=sentence):
        export_run(run, tmp_path / "x.onnx", **{role: given})
    with pytest.raises(BsamError, match=sentence):
        find_models([run], **{kinds[role]: [given]})
    if role != "data":
        with pytest.raises(BsamError, match=sentence):
            predict(run, tmp_path / "a.png", **{role: given})
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    with pytest.raises(BsamError, match=f"none of the runs has the {role} {words.split()[-1]}: leave out --{role}"):
        find_models([run, copy], **{kinds[role]: [given]})


def test_titles_of_methods() -> None:
    assert method_title(Run("bsam")) == "BSAM"
    assert method_title(Run("not.imported:Method")) == "Method"


def test_names_of_weights_are_repeated(
    module: Callable[[str], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of a run's weights names its network, too."""
    own = f"{module(NETWORK)}:build"
    assert train("run", "--method", "sgd", "--model", own) == 0
    monkeypatch.setattr(names, "_OWN", {})  # as in another process
    assert train("next", "--method", "sgd", "--weights", "run/model.safetensors") == 2
    assert f"add --model {own}" in capsys.readouterr().err
    assert own not in names._OWN
    assert train("next", "--method", "sgd", "--weights", "run/model.safetensors", "--model", own) == 0


def test_build_draws_the_same_weights_for_the_same_seed(module: Callable[[str], str]) -> None:
    own = f"{module(NETWORK)}:build"
    first, second = (build(own, 10, 1, seed, image_size=8)[1].weight for seed in (0, 0))
    assert torch.equal(first, second)
