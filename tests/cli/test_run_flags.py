import argparse
import types
from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from bsam import cli
from bsam.cli.run_flags import add_run_flags, method_arguments, run_of
from bsam.training.config import Run


def run_from(*flags):
    parser = argparse.ArgumentParser()
    add_run_flags(parser)
    return run_of(parser.parse_args(flags))


def other(field, hint):
    """A value of the field's type that is not its default."""
    special = {"method": "sam", "data": "cifar10", "relief": 5}  # those that are looked up before the training
    if field.name in special:
        return special[field.name]
    if hint is bool:
        return not field.default
    if get_origin(hint) is Literal:
        return next(choice for choice in get_args(hint) if choice != field.default)
    if isinstance(hint, types.UnionType):
        hint = get_args(hint)[0]
    return {int: 3, float: 0.25, str: "something"}[hint]


@pytest.mark.parametrize(
    "field", [field for field in fields(Run) if field.name != "arguments"], ids=lambda field: field.name
)
def test_every_setting_of_a_run_is_a_flag(field):
    value = other(field, get_type_hints(Run)[field.name])
    flag = field.name.replace("_", "-")
    given = (f"--{flag}" if value else f"--no-{flag}",) if isinstance(value, bool) else (f"--{flag}", str(value))
    run = run_from(*(() if field.name == "method" else ("--method", "bsam")), *given)
    expected = {**Run("bsam").settings(), field.name: value, **({"model": "resnet18"} if field.name == "data" else {})}
    assert run.settings() == expected
    assert type(getattr(run, field.name)) is type(value)


def test_a_flag_may_be_taken_back_and_a_default_is_the_runs():
    assert run_from("--method", "sgd") == Run("sgd")
    assert run_from("--method", "sgd", "--held-out", "validation") == Run("sgd", eval_split="validation")
    assert not run_from("--method", "sgd", "--compile", "--no-compile").compile
    assert run_from("--method", "sgd", "--capture").capture


def test_arguments_of_the_method_are_json_or_text():
    run = run_from("--method", "bsam", "--set", "rho_max=0.1", "passes=2", "--set", "start_from_min=true")
    assert run.arguments == {"rho_max": 0.1, "passes": 2, "start_from_min": True}
    assert type(run.arguments["passes"]) is int
    found = method_arguments(["beta=[1,1,1]", "kind=two words", "k=", "e=a=b", "none=null"])
    assert found == {"beta": [1, 1, 1], "kind": "two words", "k": "", "e": "a=b", "none": None}


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "--help"])
    assert end.value.code == 0
    shown = "".join(capsys.readouterr().out.split())
    for field in fields(Run):
        if field.name != "arguments":
            assert f"--{field.name.replace('_', '-')}" in shown
            assert "".join(field.metadata["help"].split()) in shown
    words = ("(default:0.05)", "resnet18forcifar10", "runs/MODEL-DATA-METHOD-ARGUMENTS", "`bsamlistmodels`")
    assert all(word in shown for word in words)
