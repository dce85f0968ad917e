import argparse
import re
import types
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from safetensors.torch import save_file

from bsam import BsamError
from bsam.lab import cli
from bsam.lab.cli.run_flags import add_run_flags, run_of
from bsam.lab.common.names import named_values
from bsam.lab.config import ClassificationSettings, PoseSettings, Run
from bsam.lab.recipes.variants import variants

QUANTIZED = {"epochs": 60, "lr": 0.01, "weight_decay": 1e-4}
OF_QUANTIZATION = ("activation_bits", "first_last_bits", "quantizer", "fold_batch_norm", "perturb_scales")
FINE_TUNING = {"epochs": 30, "lr": 0.01, "weight_decay": 1e-4, "label_smoothing": 0.0}  # as the paper has them
ADAMW = {"lr": 1e-3, "weight_decay": 0.05, "decay": "weights"}
POSE = {"base": "adam", "lr": 1e-3, "weight_decay": 0.0, "batch": 64, "epochs": 140}
POSE_WITH_SGD = {**POSE, "base": "sgd", "lr": 0.05, "weight_decay": 1e-3}
DEFAULTS = {"data": {"model": "resnet18"}, "weights": FINE_TUNING, "weight_bits": QUANTIZED, "task": POSE}
NEEDED = {  # settings without which a setting has no meaning
    "method": {},
    "noise_labels": {"method": "bsam", "label_noise": 0.2},
    **{key: {"method": "bsam", "weight_bits": 4} for key in OF_QUANTIZATION},
    **{key: {"method": "bsam", "task": "pose"} for key in ("simcc_k", "simcc_sigma", "flip_test")},
}
SETTINGS = (Run, ClassificationSettings, PoseSettings)
FIELDS = {field.name: field for cls in SETTINGS for field in fields(cls)}
HINTS = {name: hint for cls in SETTINGS for name, hint in get_type_hints(cls).items() if name in FIELDS}


def run_from(*flags):
    parser = argparse.ArgumentParser()
    add_run_flags(parser)
    parser.add_argument("--data-dir", type=Path)
    return run_of(parser.parse_args(flags))


def other(field, hint):
    """A value of the field's type that is not its default."""
    special = {"method": "sam", "data": "cifar10", "surface": 5, "weights": "pretrained"}  # values that are checked
    special |= {"base": "rmsprop", "accumulate": 4, "task": "pose"}
    if field.name in special:
        return special[field.name]
    if hint is bool:
        return not field.default
    if get_origin(hint) is Literal:
        return next(choice for choice in get_args(hint) if choice != field.default)
    if isinstance(hint, types.UnionType):
        hint = get_args(hint)[0]
    return {int: 3, float: 0.25, str: "something"}[hint]


@pytest.mark.parametrize("name", [name for name in HINTS if name not in ("arguments", "base_arguments", "init")])
def test_every_setting_of_a_run_is_a_flag(name):
    value, needed = other(FIELDS[name], HINTS[name]), NEEDED.get(name, {"method": "bsam"})
    given = [f"--{other_name.replace('_', '-')}={entry}" for other_name, entry in needed.items()]
    flag = name.replace("_", "-")
    given += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    run, settings = run_from(*given), {**needed, name: value}
    defaults = {key: entry for setting in settings for key, entry in DEFAULTS.get(setting, {}).items()}
    assert run == Run.of(**{**defaults, **settings})
    assert type(run.settings()[name]) is type(value)


def test_a_flag_may_be_taken_back_and_a_default_is_the_runs():
    assert run_from("--method", "sgd") == Run("sgd")
    assert not run_from("--method", "sgd", "--compile", "--no-compile").compile
    assert run_from("--method", "sgd", "--capture").capture


def test_weights_choose_the_network_and_the_settings_of_fine_tuning(tmp_path):
    """Unless others are given; a timm network is pretrained unless its weights are random."""
    for name in ("timm:test_resnet", None):
        metadata = {} if name is None else {"bsam_model": name}
        save_file({"a": torch.zeros(1)}, tmp_path / f"{name and name[5:]}.safetensors", metadata)
    named, unnamed = str(tmp_path / "test_resnet.safetensors"), str(tmp_path / "None.safetensors")
    pretrained = {"model": "timm:test_vit", "weights": "pretrained", **FINE_TUNING}
    of_file = {"model": "timm:test_resnet", "weights": named, **FINE_TUNING}
    for flags, expected in {
        ("--model", "timm:test_vit"): pretrained,
        ("--model", "timm:test_vit", "--epochs", "200", "--lr", "0.05"): {**pretrained, "epochs": 200, "lr": 0.05},
        ("--model", "timm:test_vit", "--weights", "random"): {"model": "timm:test_vit"},
        ("--weights", "random"): {},
        ("--weights", named): of_file,
        ("--weights", named, "--data", "oxford_pet"): {
            **of_file,
            "data": "oxford_pet",
            "augment": "resized-crop-flip",
        },
        ("--weights", named, "--model", "timm:test_resnet"): of_file,
        ("--weights", unnamed, "--model", "resnet8"): {"model": "resnet8", "weights": unnamed, **FINE_TUNING},
    }.items():
        assert run_from("--method", "bsam", *flags) == Run.of("bsam", **expected)
    run = run_from("--method", "sgd", "--weights", "test_resnet.safetensors", "--data-dir", str(tmp_path))
    assert (run.model, run.weights) == ("timm:test_resnet", "test_resnet.safetensors")
    for path in ("photos/", "./photos", "photos"):
        assert run_from("--method", "sgd", "--data", f"folder:{path}", "--model", "resnet8").data == "folder:photos"
    assert "~" not in run_from("--method", "sgd", "--data", "folder:~/photos", "--model", "resnet8").data
    for flags in (("--weights", unnamed, "--data", "cifar10"), ("--data", "oxford_pet")):
        with pytest.raises(BsamError, match="--model"):
            run_from("--method", "sgd", *flags)


def test_data_of_persons_chooses_task_network_and_settings(tmp_path):
    """Unless others are given. Weights of a backbone are for the network that finds joints with it."""
    for name in ("resnet50", "simcc_resnet8", "resnet18"):
        save_file({"a": torch.zeros(1)}, tmp_path / f"{name}.safetensors", {"bsam_model": name})
    weights = {name: str(tmp_path / f"{name}.safetensors") for name in ("resnet50", "simcc_resnet8", "resnet18")}
    for flags, model, expected in (
        (("--data", "lspet"), "simcc_resnet50", {}),
        (("--data", "lspet", "--weights", "random"), "simcc_resnet50", {}),
        (("--data", "mpii", "--simcc-k", "3", "--flip-test"), "simcc_resnet50", {"simcc_k": 3.0, "flip_test": True}),
        (
            ("--data", "stick_figures", "--epochs", "3", "--base", "sgd"),
            "simcc_resnet8",
            {**POSE_WITH_SGD, "epochs": 3},
        ),
        (("--data", "stick_figures", "--weights", weights["resnet50"]), "simcc_resnet50", {}),
        (("--data", "lspet", "--weights", weights["simcc_resnet8"]), "simcc_resnet8", {}),
        (("--data", "lspet", "--weights", weights["resnet18"], "--model", "simcc_resnet8"), "simcc_resnet8", {}),
        (("--data", "digits", "--task", "pose", "--model", "simcc_resnet8"), "simcc_resnet8", {}),
    ):
        given = dict(zip(flags[::2], flags[1::2], strict=False))
        initial = {} if given.get("--weights", "random") == "random" else {"weights": given["--weights"]}
        settings = {"task": "pose", "data": given["--data"], "model": model, **POSE, **initial, **expected}
        assert run_from("--method", "bsam", *flags) == Run.of("bsam", **settings), flags
    for flags, expected in (
        (("--data", "lspet", "--task", "classification"), {"data": "lspet", "model": "simcc_resnet50"}),
        (("--weights", weights["resnet50"]), {"model": "resnet50", "weights": weights["resnet50"], **FINE_TUNING}),
    ):
        assert run_from("--method", "bsam", *flags) == Run.of("bsam", **expected), flags


def test_photographs_are_cropped_at_random_in_fine_tuning():
    """Not small images, not without pretrained weights, and not if another augmentation is given."""
    start = ("--method", "sgd", "--model", "resnet50", "--weights", "resnet50.pt")
    for flags, expected in (
        (("--data", "folder:photos"), "resized-crop-flip"),
        (("--data", "oxford_pet", "--image-size", "96"), "resized-crop-flip"),
        (("--data", "oxford_pet", "--image-size", "95"), None),
        (("--data", "folder:photos", "--augment", "none"), "none"),
        (("--data", "folder:photos", "--weights", "random"), None),
        (("--data", "folder:photos", "--model", "resnet8"), None),  # 32 pixels
        (("--data", "folder:photos", "--weight-bits", "4"), None),
        (("--data", "cifar10"), None),
        (("--data", "digits"), None),
    ):
        assert run_from(*start, *flags).augment == expected, flags


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("BSAM",), Run("bsam")),
        (("Sam", "--set", "rho=0.1"), Run("sam", {"rho": 0.1})),
        (("SGD",), Run("base")),
        (("bsam-2",), Run("bsam", {"passes": 2})),
        (
            ("BSAM-released", "--set", "rho_max=0.1"),
            Run("bsam", {**variants()["bsam-released"].arguments, "rho_max": 0.1}),
        ),
    ],
)
def test_names_of_methods(flags, expected):
    assert run_from("--method", *flags) == expected


def test_arguments_of_the_method_are_json_or_text():
    run = run_from("--method", "bsam", "--set", "rho_max=0.1", "passes=2", "--set", "start_from_min=true")
    assert run.arguments == {"rho_max": 0.1, "passes": 2, "start_from_min": True}
    assert type(run.arguments["passes"]) is int
    values = named_values(["beta=[1,1,1]", "kind=two words", "k=", "e=a=b", "none=null"])
    assert values == {"beta": [1, 1, 1], "kind": "two words", "k": "", "e": "a=b", "none": None}


@pytest.mark.parametrize(("pairs", "word"), [(["rho_max"], "'rho_max'"), (["=1"], "'=1'"), (["k=1", "k=2"], "k twice")])
def test_arguments_that_are_not_given_once_by_name(pairs, word):
    with pytest.raises(BsamError, match=f"--set .*{word}"):
        named_values(pairs)


def test_arguments_of_the_base_optimizer():
    given = ("--base", "AdamW", "--base-set", "betas=[0.9,0.99]", "--base-set", "eps=1e-6", "amsgrad=true")
    expected = Run("sam", base="adamw", base_arguments={"betas": [0.9, 0.99], "eps": 1e-6, "amsgrad": True}, **ADAMW)
    assert run_from("--method", "sam", *given) == expected
    with pytest.raises(BsamError, match=r"--base-set .*eps=1e-6"):
        run_from("--method", "sam", "--base-set", "eps")


def test_flags_of_timm():
    """As for timm's train.py, where ours have other names."""
    ours = (
        "--base",
        "adamw",
        "--base-set",
        "betas=[0.9,0.95]",
        "--warmup",
        "2",
        "--clip-norm",
        "1.5",
        "--batch",
        "256",
    )
    ours += ("--label-smoothing", "0.2", "--image-size", "16", "--ema", "0.99")
    theirs = ("--opt", "adamw", "--opt-betas", "0.9", "0.95", "--warmup-epochs", "2", "--clip-grad", "1.5")
    theirs += ("--batch-size", "256", "--smoothing", "0.2", "--img-size", "16", "--model-ema-decay", "0.99")
    assert run_from("--method", "sam", *ours) == run_from("--method", "sam", *theirs)
    assert run_from("--method", "sam", "--optimizer", "AdamW", "--betas", "0.8", "0.9").base_arguments["betas"] == [
        0.8,
        0.9,
    ]
    with pytest.raises(BsamError, match="--betas"):
        run_from("--method", "sam", "--base", "adamw", "--betas", "0.8", "0.9", "--base-set", "betas=[0.9,0.9]")


def test_adamw_has_other_defaults():
    for name in ("adamw", "AdamW"):
        assert run_from("--method", "sam", "--base", name) == Run("sam", base="adamw", **ADAMW)
    assert run_from("--method", "sam", "--base", "adam").lr == Run.lr
    kept = run_from("--method", "sam", "--base", "adamw", "--lr", "0.01", "--decay", "all")
    assert (kept.lr, kept.weight_decay, kept.decay) == (0.01, 0.05, "all")
    tuned = run_from("--method", "sam", "--base", "adamw", "--model", "timm:test_vit")
    assert {**FINE_TUNING, **ADAMW}.items() <= tuned.settings().items()


def test_flags_are_grouped_by_subject(capsys):
    shown = {}
    for command in ("train", "compare", "run"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        sections = re.split(r"^(\w[^\n]*):$", capsys.readouterr().out, flags=re.M)
        shown[command] = {
            title: re.findall(r"^  (--[\w-]+)", text, re.M)
            for title, text in zip(sections[1::2], sections[2::2], strict=True)
        }
        titles = [title for title in shown[command] if title not in ("options", "positional arguments")]
        assert titles[-1] == "Output"
        assert len(titles) == {"train": 9, "compare": 10, "run": 4}[command]
        assert not shown[command]["options"]  # --help has a short form
        assert max(map(len, shown[command].values())) <= 20
    train = shown["train"]
    assert train["Method"] == ["--method", "--set", "--rho-warmup", "--rho-start"]
    assert train["Optimization"][:3] == ["--base", "--base-set", "--betas"]
    assert {"--accumulate", "--clip-norm", "--ema", "--head-lr", "--seed"} <= set(train["Optimization"])
    assert train["Precision and speed"] == ["--precision", "--compile", "--capture", "--device"]
    assert train["Pose"] == ["--simcc-k", "--simcc-sigma", "--flip-test"]
    assert {"--data", "--data-dir", "--download", "--label-noise"} <= set(train["Data"])
    assert train["Output"] == ["--out", "--checkpoint-every"]
    same = ("Model", "Pose", "Quantization", "Measurement")
    assert [shown["compare"][title] for title in same] == [train[title] for title in same]
    assert shown["run"]["Output"] == ["--out", "--dry-run", "--report", "--checkpoint-every"]


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "--help"])
    assert end.value.code == 0
    shown = "".join(capsys.readouterr().out.split())
    for field in FIELDS.values():
        assert field.metadata.get("flag", f"--{field.name.replace('_', '-')}") in shown
        assert "".join(field.metadata["help"].split()) in shown
    assert "(default:0.05;0.01withpretrainedweights;0.01withquantization;0.001forposewithadam;0.001withadamw)" in shown
