"""Wrong flags and commands: one line that names them and offers what was meant."""

import sys

import pytest

import bsam
from bsam.lab import cli

WRONG = {
    "train --method sam --rho 0.1": ["`bsam train` has no flag --rho.", "--set rho=0.1"],
    "train --method bsam --rho-max=0.2": ["has no flag --rho-max.", "--set rho_max=0.2"],
    "train --method sam --roh 0.1": ["has no flag --roh.", "--set rho=0.1"],
    "train --method sam --rho": ["has no flag --rho.", "--set rho=VALUE"],
    "train --metod sam": ["`bsam train` has no flag --metod. Did you mean --method?"],
    "train --method sam --label-smoth 0.1": ["--label-smoth. Did you mean --label-smoothing?"],
    "train --method sam --lr -1 --epoch_s 3": ["--epoch_s. Did you mean --epochs?"],
    "train --method sam --xyz 1": ["`bsam train` has no flag --xyz.", "`bsam train --help`"],
    "train --method sam -x": ["`bsam train` has no flag -x."],
    "compare --metod sam": ["`bsam compare` has no flag --metod. Did you mean --methods?"],
    "compare --rho 0.1": ["`bsam compare` has no flag --rho.", "`bsam train`", "--set rho=0.1"],
    "run --list": ["`bsam run` has no flag --list.", "`bsam list`"],
    "--list": ["`bsam` has no flag --list.", "`bsam list`"],
    "trian --method sam": ["command must be one of list, demo, train", "'trian'", "Did you mean 'train'?"],
    "train": ["--method", "required", "`bsam train --help`"],
    "run": ["RECIPE", "required"],
    "train --method sam --epochs ten": ["--epochs", "'ten'"],
    "train --method sam extra": ["unrecognized arguments: extra"],
}


@pytest.mark.parametrize("command", WRONG)
def test_one_line_says_what_is_wrong_and_what_to_write(command, capsys):
    assert cli.main(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bsam: ")
    assert [part for part in WRONG[command] if part not in line] == []


def test_values_and_abbreviations_that_argparse_takes_are_not_wrong_flags():
    given = ["train", "--method", "sam", "--weight-d", "-0.001", "--no-nesterov", "--set", "a=-1", "b=--c"]
    parsed, rest = cli._parser().parse_known_args(given)
    assert (parsed.weight_decay, parsed.nesterov, parsed.set, rest) == (-0.001, False, ["a=-1", "b=--c"], [])
    with pytest.raises(bsam.BsamError, match="ambiguous"):
        cli._parser().parse_known_args(["train", "--method", "sam", "--wei", "1"])


def test_compare_without_its_extra_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(bsam.BsamError, match=r"rich.*'\.\[demo\]'"):
        bsam.lab.compare("digits", methods=["sgd", "sam"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
