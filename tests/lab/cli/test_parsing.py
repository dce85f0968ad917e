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
    "train --method sam --radius 0.1": ["has no flag --radius.", "--sharpness-rho 0.1,", "--set rho=0.1"],
    "compare --data digits --radius=0.1": ["`bsam compare` has no flag --radius.", "--sharpness-rho 0.1"],
    "train --metod sam": ["`bsam train` has no flag --metod. Did you mean --method?"],
    "train --method sam --label-smoth 0.1": ["--label-smoth. Did you mean --label-smoothing?"],
    "train --method sam --lr -1 --epoch_s 3": ["--epoch_s. Did you mean --epochs?"],
    "train --method sam --xyz 1": ["`bsam train` has no flag --xyz.", "`bsam train --help`"],
    "train --method sam --weight-d 0": ["has no flag --weight-d. Did you mean --weight-decay?"],
    "train --method sam --wei 0": ["has no flag --wei. Did you mean --weights or", "--weight-decay"],
    "train --method sam --start 5": ["has no flag --start. Did you mean --rho-start?"],
    "flatness x --rh 1": ["has no flag --rh. Did you mean --rho?"],
    "compare --mixup 0.8": ["has no flag --mixup. Write --augment timm:mixup=0.8"],
    "train --method sam --model-ema": ["has no flag --model-ema. Did you mean --model-ema-decay?"],
    "train --method sam --mixup 0.8": ["has no flag --mixup. Write --augment timm:mixup=0.8"],
    "train --method sam --opt-eps=1e-6": ["has no flag --opt-eps. Write --base-set eps=1e-6"],
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


def test_values_that_look_like_flags():
    given = ["train", "--method", "sam", "--weight-decay", "-0.001", "--no-nesterov", "--set", "a=-1", "b=--c"]
    parsed, rest = cli.parser_of(given).parse_known_args(given)
    assert (parsed.weight_decay, parsed.nesterov, parsed.set, rest) == (-0.001, False, ["a=-1", "b=--c"], [])


def test_compare_without_its_extra_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(bsam.BsamError, match=r"safetensors.*'\.\[demo\]'"):
        bsam.lab.compare("digits", methods=["sgd", "sam"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
