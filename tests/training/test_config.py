import json
import math
from dataclasses import fields

import numpy as np
import pytest

import bsam
from bsam.methods import METHODS
from bsam.training.config import Run, arguments_of, method_title
from bsam.training.loop import fit

NAMES = ("task", "model", "data", "augment")
COUNTS = ("epochs", "batch", "limit_train", "limit_test", "probe", "surface")
WRONG = {  # by setting: the values, and what the message says
    "method": [("adam", r"method must be one of base, sgd, sam, .*bsam; got 'adam'")],
    "arguments": [
        *((wrong, "arguments must be those of the method, by name") for wrong in (None, 5, "ab", [("rho", 0.1)])),
    ],
    **{name: [(wrong, f"{name} must be a name, got") for wrong in ([], 5, "", b"x")] for name in NAMES},
    "base": [("lbfgs", "base must be one of sgd, adam, adamw; got 'lbfgs'")],
    "schedule": [("linear", "schedule must be one of cosine, constant")],
    "precision": [("fp16", "precision must be one of fp32, bf16")],
    "eval_split": [("train", "eval_split must be one of validation, holdout, test")],
    **{name: [(wrong, name) for wrong in (0, -1, 1.5, True, "3")] for name in COUNTS},
    **{
        name: [(wrong, name) for wrong in (-0.1, math.nan, math.inf, "0.1", None)]
        for name in ("lr", "momentum", "weight_decay", "warmup")
    },
    **{name: [(wrong, name) for wrong in (-0.1, 1.1, math.nan)] for name in ("label_smoothing", "label_noise")},
    **{name: [(wrong, name) for wrong in (1, None, "yes")] for name in ("nesterov", "compile", "capture", "curvature")},
    "seed": [
        *((wrong, "seed") for wrong in (-1, 0.5)),
        *((wrong, f"seed must be a whole number between 0 and {2**63 - 1}") for wrong in (2**63, 2**64, 10**30)),
    ],
    "radius": [(wrong, "radius") for wrong in (-0.1, math.nan)],
}
TOGETHER = [
    ({"method": "sgd", "arguments": {"rho": 0.1}}, "the base optimizer alone takes no arguments"),
    ({"method": "sgd", "base": "adam"}, 'method "sgd" is SGD alone, and base is adam: set method to "base"'),
    *(({"method": name, "probe": 5}, "is not one: leave probe out") for name in ("sgd", "base", "saf", "mesa")),
    *(({name: None}, f"{name} must be a name, got None") for name in ("task", "model", "data")),
    *(({"surface": wrong}, "surface must be 3, 5, 7") for wrong in (1, 4)),
    ({"momentum": 1.0}, "momentum must be below 1"),
    ({"nesterov": True, "base": "adam"}, "nesterov is a kind of SGD's momentum"),
    ({"nesterov": True, "momentum": 0.0}, "nesterov is a kind of SGD's momentum"),
    ({"warmup": 5.5, "epochs": 5}, "warmup must be at most the 5 epochs"),
]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_by_its_name(name):
    for value, words in WRONG[name]:
        with pytest.raises(bsam.BsamError, match=words):
            Run(**{"method": "sam", name: value})


@pytest.mark.parametrize(("wrong", "words"), TOGETHER)
def test_settings_that_do_not_go_together_are_refused(wrong, words):
    with pytest.raises(bsam.BsamError, match=words):
        Run(**{"method": "sam", **wrong})


def test_the_base_optimizer_alone_is_one_run_under_two_names():
    run = Run("sgd", seed=3)
    assert run == Run("base", base="sgd", seed=3)
    assert Run(**run.settings()) == run
    assert {name: run.settings()[name] for name in ("method", "base")} == {"method": "base", "base": "sgd"}
    titles = [method_title(Run("base", base=base)) for base in ("sgd", "adam", "adamw")]
    assert titles == ["SGD", "Adam", "AdamW"]


@pytest.mark.parametrize("method", METHODS)
def test_an_unknown_argument_of_a_method_is_refused_with_the_known_ones(method):
    with pytest.raises(bsam.BsamError) as refusal:
        Run(method, {"rhoo": 0.1})
    known = arguments_of(method)
    assert str(refusal.value) == f"{method} has no argument 'rhoo': it takes {', '.join(known)}"
    assert known
    for name in known:
        assert Run(method, {name: 0.5}).arguments == {name: 0.5}
    for name in ("base", "model", "optimizer", "samples", "classes", "reduction", "label_smoothing"):  # from the run
        with pytest.raises(bsam.BsamError, match=name):
            Run(method, {name: 1})


def test_the_defaults_are_the_papers():
    run = Run("bsam")
    expected = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "batch": 128, "epochs": 200, "schedule": "cosine"}
    assert {**expected, "label_smoothing": 0.1}.items() <= run.settings().items()


def test_settings_are_all_fields_as_plain_values():
    run = Run("bsam", {"rho_max": 0.1, "passes": 2}, base="adamw", seed=3, probe=4, radius=0.1, augment="crop-flip")
    assert Run(**json.loads(json.dumps(run.settings()))) == run
    assert list(run.settings()) == [field.name for field in fields(Run)]


def test_numbers_of_numpy_and_tuples_become_plain_values():
    numbers = {"epochs": np.int64(2), "batch": np.uint8(64), "lr": np.float32(0.25), "momentum": np.float64(0.9)}
    given = {**numbers, "nesterov": np.bool_(True), "seed": np.int32(3), "model": np.str_("resnet8")}
    plain = {"epochs": 2, "batch": 64, "lr": 0.25, "momentum": 0.9, "nesterov": True, "seed": 3, "model": "resnet8"}
    run = Run("gam", {"beta": np.array([1, 2, 3]), "gamma": np.float32(0.5), "rho": np.int64(1)}, **given)
    expected = Run("gam", {"beta": [1, 2, 3], "gamma": 0.5, "rho": 1}, **plain)
    assert run == expected
    assert json.dumps(run.settings()) == json.dumps(expected.settings())
    assert Run("gam", {"beta": (np.float64(1.0), 2, 3)}).arguments == {"beta": [1.0, 2, 3]}


def test_a_run_may_be_a_key():
    assert {Run("sam", {"rho": 0.1}): 1}[Run("sam", {"rho": np.float64(0.1)})] == 1
    assert len({Run("sam", {"rho": 0.1}), Run("sam", {"rho": 0.2}), Run("sgd"), Run("sam", {"rho": 0.1})}) == 3


def test_the_largest_seed_trains():
    run = Run("rst", epochs=1, limit_train=128, limit_test=50, label_noise=0.1, augment="crop-flip", seed=2**63 - 1)
    assert fit(run, device="cpu").score >= 0


@pytest.mark.parametrize("steps", [1, 7])
def test_cosine_leads_from_lr_to_almost_nothing_step_by_step(steps):
    run = Run("sgd", lr=0.3, epochs=5)
    total = 5 * steps
    expected = [0.3 * math.cos(math.pi / 2 * t / total) ** 2 for t in range(total)]  # (1 + cos 2a) / 2 = cos² a
    assert [run.learning_rate(t, steps) for t in range(total)] == pytest.approx(expected, rel=1e-12)
    assert run.learning_rate(0, steps) == 0.3


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_warm_up_rises_in_a_straight_line_and_the_schedule_begins_where_it_ends(schedule):
    run, steps = Run("sgd", lr=0.4, epochs=6, warmup=1.5, schedule=schedule), 4
    found = [run.learning_rate(t, steps) for t in range(24)]
    assert found[:6] == pytest.approx([0.4 * (t + 1) / 6 for t in range(6)], rel=1e-12)
    down = [0.4 * math.cos(math.pi / 2 * t / 18) ** 2 for t in range(18)] if schedule == "cosine" else [0.4] * 18
    assert found[6:] == pytest.approx(down, rel=1e-12)
    assert max(found) == pytest.approx(0.4)


def test_warm_up_may_last_the_whole_run():
    run = Run("sgd", lr=0.4, epochs=2, warmup=2)
    assert [run.learning_rate(t, 2) for t in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
