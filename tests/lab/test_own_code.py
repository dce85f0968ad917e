"""Code of the user that raises an error while it is used, or that has changed since a run began."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from bsam import BsamError
from bsam.lab import Machine, Run, RunCallbacks, cli, compare, fit
from bsam.lab.common.names import find_object
from bsam.lab.common.own_code import source_digest
from bsam.lab.inference import export_run, predict
from bsam.lab.training.run_dir import RunDir

NUMBER = itertools.count()  # a module's name is imported once
SMALL = ("--epochs", "3", "--limit-train", "256", "--limit-test", "64", "--batch", "64", "--device", "cpu")
CODE = """
import bsam
import torch
from torch import nn
from bsam.lab import Score, Splits, Task

FAILS = 0  # the number of the call that fails
CALLS = []

def tick():
    CALLS.append(1)
    if len(CALLS) == FAILS:
        raise KeyError("boom")

class Method(bsam.SharpnessAware):
    def __init__(self, base, model, *, rho=0.05, **more):
        super().__init__(base, model, {"rho": rho}, **more)

    def direction(self, L):
        g = L.grad()
        tick()
        return L.grad(at=self.epsilon(g, "rho"))

class Misused(Method):
    def direction(self, L):
        return self.remember('mean', L.grad())

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def forward(self, x):
        tick()
        return self.layer(x.flatten(1))

def points():
    x = torch.rand(320, 2, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True)
    return Splits(train=(x[:256], y[:256]), test=(x[256:], y[256:]))

class Points(Task):
    score = Score("error", "error", higher=False)
    datasets = {"points": points}
    networks = {"line": lambda: nn.Linear(2, 1)}

    def losses(self, outputs, y):
        tick()
        return (outputs - y).square().mean(1)

    def sums(self, outputs, y):
        return {"error": (outputs - y).abs().mean(1)}

    def read(self, path):
        return torch.tensor([float(number) for number in path.read_text().split()])

    def values(self, outputs):
        return [{"sum": float(row)} for row in outputs]

class Wrong(Points):
    def sums(self, outputs, y):
        return {"error": (outputs - y).abs().men(1)}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """A function that writes a module into the current folder, from which it can be imported, and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as of the console script
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write() -> str:
        name = f"own_code_{next(NUMBER)}"
        Path(f"{name}.py").write_text(CODE)
        return name

    return write


def edit(name: str) -> None:
    path = Path(f"{name}.py")
    path.write_text(f"{path.read_text()}\n# changed\n")


def fit_parts(run: Run, *ends: int | None, edited: str = "") -> list[str]:
    """Train a run up to each epoch; the module is edited after the first time. Return the messages."""
    messages: list[str] = []
    for end in ends:
        callbacks = RunCallbacks(on_message=messages.append)
        fit(run, "run", Machine("cpu", checkpoint_every=0), until=end, callbacks=callbacks)
        if edited:
            edit(edited)
            edited = ""
    return messages


# ---- errors


@pytest.mark.parametrize(
    ("flags", "member", "fails"),
    [
        ("--data digits --method {}:Method", "Method.direction", 6),
        ("--data digits --method sam --model {}:Net", "Net.forward", 15),
        ("--task {}:Points --method sam", "Points.losses", 15),
    ],
)
def test_the_command_shows_the_code_of_the_user_and_the_run_continues(
    flags: str, member: str, fails: int, module: Callable[[], str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = module()
    given = flags.format(name).split()
    find_object(f"{name}:Method", "method")
    own = sys.modules[name]
    own.FAILS = fails
    words = ["train", *given, *SMALL, "--checkpoint-every", "0", "--out"]
    assert cli.main([*words, "run"]) == 1
    *shown, sentence = capsys.readouterr().err.splitlines()
    line = 1 + CODE.splitlines().index('        raise KeyError("boom")')
    assert shown[0] == "Traceback (most recent call last):"
    assert shown[1].startswith(f'  File "{Path(f"{name}.py").absolute()}", line ')
    assert shown[1].endswith(f", in {member.rpartition('.')[2]}")
    assert not any("bsam/" in line for line in shown)
    assert sentence.startswith(f"bsam: {name}:{member} raised KeyError: 'boom' ({name}.py, line {line}): correct it.")
    assert sentence.endswith("run; run the same command again to continue.")
    own.FAILS = 0  # the number of the call that fails
    assert cli.main([*words, "run"]) == 0
    assert cli.main([*words, "whole"]) == 0
    for before, after in zip(RunDir("whole").weights().values(), RunDir("run").weights().values(), strict=True):
        assert torch.equal(before, after)


def test_errors_before_training_show_the_code_of_the_user(
    module: Callable[[], str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = module()
    assert cli.main(["train", "--task", f"{name}:Wrong", "--method", "sam", *SMALL, "--out", "run"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n")
    assert '    return {"error": (outputs - y).abs().men(1)}\n' in err
    assert f"\nbsam: sums of {name}:Wrong raised AttributeError: " in err


def test_errors_of_bsam_show_the_call_in_the_code_of_the_user(
    module: Callable[[], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "--method", f"{module()}:Misused", *SMALL, "--out", "run"]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert shown[2] == "    return self.remember('mean', L.grad())"
    assert shown[-1].startswith("bsam: ")
    assert not any("bsam/" in line for line in shown)


def test_python_raises_the_error_of_the_user(module: Callable[[], str]) -> None:
    name = module()
    run = Run.of(find_object(f"{name}:Method", "method"), epochs=3, limit_train=256, batch=64)
    sys.modules[name].FAILS = 6
    with pytest.raises(KeyError, match="boom"):
        fit(run, "run", Machine("cpu"))
    sys.modules[name].CALLS.clear()
    with pytest.raises(BsamError, match=rf"{name}:Method.direction raised KeyError: 'boom' \({name}.py, line 13\)"):
        compare(
            methods=["base", run.method],
            seeds=1,
            out="out",
            machine=Machine("cpu"),
            epochs=3,
            limit_train=256,
            batch=64,
        )


def test_lack_of_memory_is_no_error_of_the_user(
    module: Callable[[], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = module()
    find_object(f"{name}:Method", "method")

    def raise_error() -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(sys.modules[name], "tick", raise_error)
    with pytest.raises(torch.OutOfMemoryError):
        cli.main(["train", "--method", f"{name}:Method", *SMALL, "--out", "run"])


# ---- changes


@pytest.mark.parametrize("role", ["method", "model", "task"])
def test_a_run_that_continues_with_other_code_warns_once(role: str, module: Callable[[], str]) -> None:
    name = module()
    method = f"{name}:Method" if role == "method" else "sam"
    settings = {
        "method": {"model": "digits_net"},
        "model": {"model": f"{name}:Net"},
        "task": {"task": find_object(f"{name}:Points", "task"), "model": "line"},
    }
    run = Run.of(method, epochs=4, limit_train=128, batch=64, **settings[role])
    (warning,) = fit_parts(run, 1, 2, 3, edited=name)
    assert warning.startswith(f"The code of {name} has changed since this run began: ")
    assert fit_parts(run, None) == []


def test_the_modules_of_a_run_are_named_together(module: Callable[[], str]) -> None:
    method, network = module(), module()
    run = Run(f"{method}:Method", model=f"{network}:Net", epochs=2, limit_train=128, batch=64)
    fit_parts(run, 1)
    edit(method)
    edit(network)
    (warning,) = fit_parts(run, None)
    assert f"The code of {method} and {network} has changed" in warning


def test_unchanged_code_and_ours_say_nothing(module: Callable[[], str]) -> None:
    run = Run(f"{module()}:Method", epochs=2, limit_train=128, batch=64)
    assert fit_parts(run, 1, None) == []
    fit(Run("sam", epochs=1, limit_train=128), "ours", Machine("cpu"))
    assert "modules" not in json.loads(Path("ours/identity.json").read_text())


@pytest.mark.usefixtures("operators_once")
def test_commands_that_use_a_network_warn_if_its_code_has_changed(
    module: Callable[[], str], capsys: pytest.CaptureFixture[str]
) -> None:
    method, task = module(), module()
    kind = find_object(f"{task}:Points", "task")
    fit(Run.of(f"{method}:Method", task=kind, epochs=1, batch=64), "run", Machine("cpu"))
    Path("a.txt").write_text("0.1 0.2")
    messages: list[str] = []

    def use() -> None:
        predict("run", "a.txt", task=kind, device="cpu", on_message=messages.append)
        export_run("run", "net.onnx", device="cpu", task=kind, on_message=messages.append)
        flags = ["--images", "8", "--k", "1", "--points", "3", "--density-steps", "2", "--device", "cpu"]
        assert cli.main(["flatness", "run", "--task", f"{task}:Points", *flags]) == 0
        messages.extend(line for line in capsys.readouterr().out.splitlines() if "has changed" in line)

    edit(method)  # which only the training used
    use()
    assert messages == []
    edit(task)
    use()
    assert len(messages) == 3
    assert set(messages) == {messages[0]}
    assert messages[0].startswith(f"The code of {task} has changed since the run in run was trained: ")


def test_a_module_without_a_source_file_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ModuleType("own_code_typed")
    exec(CODE, typed.__dict__)
    monkeypatch.setitem(sys.modules, "own_code_typed", typed)
    run = Run("own_code_typed:Method", epochs=2, limit_train=128, batch=64)
    assert fit_parts(run, 1, None) == []
    assert "modules" not in json.loads(Path("run/identity.json").read_text())
    assert source_digest("sys") is None
    assert source_digest("own_code_nowhere") is None


def test_nothing_is_imported_to_see_whether_code_has_changed(module: Callable[[], str]) -> None:
    name = module()
    settings = {"epochs": 1, "limit_train": 128}
    fit(Run("sgd", **settings), "run", Machine("cpu"))
    identity = json.loads(Path("run/identity.json").read_text())
    Path("run/identity.json").write_text(json.dumps({**identity, "modules": {name: "0" * 64}}))
    run = Run(f"{name}:Method", model=f"{name}:Net", **settings)
    assert RunDir("run").changed_modules(run) == ""
    assert name not in sys.modules
    find_object(f"{name}:Net", "model")
    assert RunDir("run").changed_modules(run) == name


def test_a_damaged_list_of_modules_is_named(module: Callable[[], str]) -> None:
    run = Run(f"{module()}:Method", epochs=2, limit_train=128, batch=64)
    fit_parts(run, 1)
    identity = json.loads(Path("run/identity.json").read_text())
    Path("run/identity.json").write_text(json.dumps({**identity, "modules": 3}))
    with pytest.raises(BsamError, match=r"identity.json cannot be read"):
        fit_parts(run, None)


def test_a_method_may_call_its_options_as_it_likes(module: Callable[[], str]) -> None:
    method = find_object(f"{module()}:Method", "method")
    optimizer = method(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), None, warmup=3)
    assert optimizer.param_groups[0]["sharpness_warmup"] == 3
    assert Run.of(method).method == f"{method.__module__}:Method"  # no argument is missing
