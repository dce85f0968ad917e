import json
import math
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import bsam
from bsam.lab.config import ClassificationSettings, PoseSettings, Run, arguments_of, method_title
from bsam.lab.training import Machine, fit
from bsam.methods import METHODS

WRONG = [  # settings, and values that they refuse
    ("method", ["adam", None]),
    ("arguments", [5, "ab", [("rho", 0.1)]]),
    ("task model data", [[], 5, "", b"x", None]),
    ("augment", [[], 5, "", b"x"]),
    ("base schedule precision eval_split", ["lbfgs", "linear", "fp8", "train"]),
    ("base", ["muon", "rprop", "SparseAdam", "optimizer", "sgdd", None]),
    ("base_arguments", [None, 5, "ab", {"lr": 1}, {"momentum": 0.5}, {"fused": True}, {"betas": [0.9, 0.99]}]),
    ("clip_norm ema", [0, -0.1, math.nan, "1"]),
    ("ema", [1, 1.5]),
    ("epochs batch accumulate limit_train limit_test probe image_size", [0, -1, 1.5, True, "3"]),
    ("layer_decay", [0, 1.5, math.nan]),
    ("task", ["pos"]),
    ("surface", [0, 1, 4, 1.5, True, "3"]),
    ("lr weight_decay warmup", [-0.1, math.nan, math.inf, "0.1", None]),
    ("momentum", [-0.1, 1.0, math.nan, math.inf, "0.1", None]),
    ("label_smoothing label_noise", [-0.1, 1.1, math.nan]),
    ("noise_labels", ["uniform", None, True]),
    ("nesterov compile capture curvature", [1, None, "yes"]),
    ("seed", [-1, 0.5, 2**63, 2**64, 10**30]),
    ("sharpness_rho", [-0.1, math.nan]),
    ("weight_bits", [1, 9]),
]
TOGETHER = [  # settings that do not fit together, and a word of the message
    ({"method": "sgd", "arguments": {"rho": 0.1}}, "arguments"),
    ({"method": "sgd", "base": "adam"}, "base"),
    *(({"method": name, "probe": 5}, "probe") for name in ("sgd", "base", "saf", "mesa")),
    ({"nesterov": True, "base": "adam"}, "nesterov"),
    ({"nesterov": True, "momentum": 0.0}, "nesterov"),
    ({"base": "adagrad", "momentum": 0.8}, "momentum"),
    *(({"base": "adam", "base_arguments": {"betas": betas}}, "betas") for betas in ([0.9], "xy", 3, [0.9, 2])),
    ({"batch": 64, "accumulate": 3}, "accumulate"),
    ({"warmup": 5.5, "epochs": 5}, "warmup"),
    ({"lr": 0.0, "head_lr": 0.1}, "head_lr"),
    ({"init": "run", "weights": "a.pt"}, "weights"),
    ({"noise_labels": "other"}, "label_noise"),
    ({"activation_bits": 4}, "activation_bits"),
    ({"quantizer": "minmax"}, "quantizer"),
    ({"weight_bits": 4, "quantizer": "minmax", "perturb_scales": True}, "perturb_scales"),
    ({"freeze_backbone": True, "layer_decay": 0.5}, "layer_decay"),
    ({"weight_bits": 4, "freeze_backbone": True}, "freeze_backbone"),
    ({"weight_bits": 4, "head_lr": 0.1}, "head_lr"),
]


REFUSED = [({name: value}, name) for names, values in WRONG for name in names.split() for value in values]


@pytest.mark.parametrize(("settings", "word"), [*REFUSED, *TOGETHER])
def test_refusals(settings, word):
    with pytest.raises(bsam.BsamError, match=word):
        Run.of(**{"method": "sam", **settings})


def test_a_setting_given_twice_is_refused():
    assert Run.of("sam", Lr=0.4).lr == 0.4
    with pytest.raises(bsam.BsamError, match="lr is given twice"):
        Run.of("sam", Lr=0.4, lr=0.2)


def test_an_unknown_task_is_refused():
    with pytest.raises(bsam.BsamError, match="task"):
        Run.of("sam", task=int)
    with pytest.raises(bsam.BsamError, match="task"):
        fit(Run.of("sgd", task="juggling"), machine=Machine("cpu"))


def test_the_base_optimizer_alone_is_one_run_with_two_names():
    run = Run("sgd", seed=3)
    assert run == Run("base", base="sgd", seed=3)
    assert Run.of(**run.settings()) == run
    assert {name: run.settings()[name] for name in ("method", "base")} == {"method": "base", "base": "sgd"}
    titles = [method_title(Run("base", base=base)) for base in ("sgd", "adam", "adamw", "RMSprop")]
    assert titles == ["SGD", "Adam", "AdamW", "RMSprop"]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_takes_its_arguments_and_no_others(method):
    assert arguments_of(method)
    for name in arguments_of(method):
        assert Run(method, {name: 0.5}).arguments == {name: 0.5}
    supplied_by_training = ("base", "model", "optimizer", "samples", "classes", "reduction", "label_smoothing")
    for name in ("rhoo", *supplied_by_training):
        with pytest.raises(bsam.BsamError, match=name):
            Run(method, {name: 1})


def test_the_defaults_are_the_papers():
    run = Run("bsam")
    expected = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "batch": 128, "epochs": 200, "schedule": "cosine"}
    assert {**expected, "label_smoothing": 0.1}.items() <= run.settings().items()


def test_settings_are_all_fields_as_plain_values():
    run = Run(
        "bsam", {"rho_max": 0.1, "passes": 2}, base="adamw", seed=3, probe=4, sharpness_rho=0.1, augment="crop-flip"
    )
    assert Run.of(**json.loads(json.dumps(run.settings()))) == run
    names = [field.name for cls in (Run, ClassificationSettings) for field in fields(cls)]
    assert sorted(run.settings()) == sorted(names)


def test_settings_of_a_task_are_given_side_by_side_or_in_an_object():
    run = Run("sam", {"rho": 0.1}, task=PoseSettings(simcc_k=3.0), base="adam")
    assert run == Run.of("sam", {"rho": 0.1}, task="pose", simcc_k=3.0, base="adam") == Run.of(**run.settings())
    assert run.changed(flip_test=True, lr=0.2) == Run(
        "sam", {"rho": 0.1}, task=PoseSettings(simcc_k=3.0, flip_test=True), base="adam", lr=0.2
    )
    noisy = Run("sam", task=ClassificationSettings(label_noise=0.4))
    assert noisy.changed(weight_bits=4).task == ClassificationSettings(label_noise=0.4, weight_bits=4)
    with pytest.raises(bsam.BsamError, match="label_noise is a setting of classification"):
        run.changed(label_noise=0.4)
    with pytest.raises(bsam.BsamError, match="flip_test is a setting of pose"):
        Run.of("sam", flip_test=False)
    with pytest.raises(bsam.BsamError, match="Did you mean 'label_noise'"):
        Run.of("sam", label_nois=0.4)


def test_numpy_numbers_and_tuples_become_plain_values():
    numbers = {"epochs": np.int64(2), "batch": np.uint8(64), "lr": np.float32(0.25), "momentum": np.float64(0.9)}
    settings = {**numbers, "nesterov": np.bool_(True), "seed": np.int32(3), "model": np.str_("resnet8")}
    plain = {"epochs": 2, "batch": 64, "lr": 0.25, "momentum": 0.9, "nesterov": True, "seed": 3, "model": "resnet8"}
    run = Run.of("gam", {"beta": np.array([1, 2, 3]), "gamma": np.float32(0.5), "rho": np.int64(1)}, **settings)
    expected = Run.of("gam", {"beta": [1, 2, 3], "gamma": 0.5, "rho": 1}, **plain)
    assert run == expected
    assert json.dumps(run.settings()) == json.dumps(expected.settings())
    assert Run("gam", {"beta": (np.float64(1.0), 2, 3)}).arguments == {"beta": [1.0, 2, 3]}


def test_a_run_is_hashable():
    assert {Run("sam", {"rho": 0.1}): 1}[Run("sam", {"rho": np.float64(0.1)})] == 1
    assert len({Run("sam", {"rho": 0.1}), Run("sam", {"rho": 0.2}), Run("sgd"), Run("sam", {"rho": 0.1})}) == 3


def test_the_largest_seed_trains():
    run = Run.of("rst", epochs=1, limit_train=128, limit_test=50, label_noise=0.1, augment="crop-flip", seed=2**63 - 1)
    assert fit(run, machine=Machine("cpu")).score >= 0


@pytest.mark.parametrize("steps", [1, 7])
def test_cosine_decays_from_lr_to_almost_zero(steps):
    run = Run("sgd", lr=0.3, epochs=5)
    total = 5 * steps
    expected = [0.3 * math.cos(math.pi / 2 * t / total) ** 2 for t in range(total)]  # (1 + cos 2a) / 2 = cos² a
    assert [run.learning_rate(t, steps) for t in range(total)] == pytest.approx(expected, rel=1e-12)
    assert run.learning_rate(0, steps) == 0.3


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_the_warm_up_is_linear_and_the_schedule_starts_where_it_ends(schedule):
    run = Run("sgd", lr=0.4, epochs=6, warmup=1.5, schedule=schedule)
    rates = [run.learning_rate(t, 4) for t in range(24)]
    assert rates[:6] == pytest.approx([0.4 * (t + 1) / 6 for t in range(6)], rel=1e-12)
    decay = [0.4 * math.cos(math.pi / 2 * t / 18) ** 2 for t in range(18)] if schedule == "cosine" else [0.4] * 18
    assert rates[6:] == pytest.approx(decay, rel=1e-12)
    whole_run = Run("sgd", lr=0.4, epochs=2, warmup=2)
    assert [whole_run.learning_rate(t, 2) for t in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_the_guarantees_state_the_tolerances_of_the_gpu_tests():
    tests = Path(__file__).parents[2]
    stated = (tests.parent / "docs/guarantees.md").read_text(encoding="utf-8")
    for file, name in (
        ("test_training_cuda.py", "^TOLERANCE ="),
        ("test_training_cuda.py", "^WIDE_TOLERANCE ="),
        ("test_pose_cuda.py", '"bsam on adam":'),
    ):
        (tolerance,) = re.findall(
            rf"{name} (\d[\de.-]*)", (tests / "gpu" / file).read_text(encoding="utf-8"), re.MULTILINE
        )
        assert re.search(rf"(?<![\d.]){100 * float(tolerance):g} %", stated), tolerance


def test_settings_are_copies():
    run = Run("gam", {"beta": [1, 1, 1]})
    run.settings()["arguments"]["beta"].append(1)
    assert run.arguments == {"beta": [1, 1, 1]}


def test_warm_ups_are_given_in_epochs():
    with pytest.raises(bsam.BsamError, match="rho_start plus rho_warmup"):
        Run("sam", epochs=4, rho_start=2.0, rho_warmup=3.0)
    assert Run("sam", epochs=4, rho_start=2.0, rho_warmup=2.0).rho_start == 2
    with pytest.raises(bsam.BsamError, match="rho_start must be below the 4 epochs"):
        Run("sam", epochs=4, rho_start=4.0)
    with pytest.raises(bsam.BsamError, match="set rho_warmup"):
        Run("sam", {"warmup": 5})
