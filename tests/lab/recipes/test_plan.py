"""What a run is, in words and numbers, and the runs of other seeds."""

from dataclasses import replace

import pytest

from bsam.common.errors import BsamValueError
from bsam.lab.config import Run
from bsam.lab.recipes import Plan, describe
from bsam.lab.recipes.plan import with_seed
from bsam.lab.training.run_dir import run_dir_name

KEYS = {"experiment", "row", "place", "section", "column", "variant", "radius", "passes", "tuned", "trial", "shared"}
CIFAR = Run("sam", model="resnet18", data="cifar10")


def test_a_description_has_these_keys_and_no_others():
    """What the paper says about a run is no part of it."""
    assert describe(CIFAR).keys() == KEYS
    assert describe(CIFAR, row="mine", published=1.0) == {**describe(CIFAR), "row": "mine", "published": 1.0}
    with pytest.raises(BsamValueError, match="rwo"):
        describe(CIFAR, rwo="mine")


def test_a_plan_describes_its_run_in_its_own_words_or_in_those_given():
    own = describe(CIFAR, section="ResNet-18", column="CIFAR-10")
    assert Plan(CIFAR).about == own
    words = {"experiment": "Mine", "row": "Ours", "section": "", "column": "", "chosen": "", "published_table": "pose"}
    given = {**words, "published": 0.0, "tuned": True, "trial": True}
    assert Plan(CIFAR, order=0, **given).about == {**own, **given, "place": 0}
    assert own["place"] > 0
    changed = replace(Plan(CIFAR, row="Ours"), run=replace(CIFAR, lr=0.1, arguments={"rho": 0.3}))
    assert changed.about == describe(changed.run, row="Ours", section="ResNet-18", column="CIFAR-10")


@pytest.mark.parametrize(
    ("run", "title"),
    [
        (CIFAR, "ResNet-18, CIFAR-10, 200 epochs"),
        (replace(CIFAR, seed=3, compile=True, curvature=True, probe=5), "ResNet-18, CIFAR-10, 200 epochs"),
        (replace(CIFAR, batch=64, precision="bf16"), "ResNet-18, CIFAR-10, 200 epochs, batch 64, bf16"),
        (replace(CIFAR, nesterov=True, lr=0.1), "ResNet-18, CIFAR-10, 200 epochs, lr 0.1, nesterov"),
        (replace(CIFAR, limit_train=1000, eval_split="holdout"), "1,000 training samples, scored on holdout"),
        (CIFAR.changed(label_noise=0.4), "40 % of labels drawn from all classes: 36.0 % wrong"),
        (
            Run.of("sam", model="resnet18", weight_bits=4, init="a"),
            "4 bits, from a trained network, 60 epochs",
        ),
        (Run.of("sam", model="timm:resnet50", weights="pretrained"), "Digits, pretrained, 30 epochs"),
        (Run.of("sam", model="resnet50", weights="/a/resnet50.pt"), "Digits, pretrained, 30 epochs"),
        (Run.of("sam", model="resnet50", weights="/a/mine.pt"), "pretrained mine.pt"),
        (Run.of("sam", task="pose", model="simcc_resnet50", data="mpii"), "MPII Human Pose, 140 epochs"),
        (replace(CIFAR, base="adamw"), "base adamw"),
        (Run("sam", base="adamw"), "base adamw, lr 0.001, weight decay 0.05, decay weights"),
        (Run.of("sam", task="pose", base="sgd"), "base sgd, lr 0.05, weight decay 0.001"),
        (replace(CIFAR, head_lr=0.1, momentum=0.8, augment="none"), "head lr 0.1, augment none, momentum 0.8"),
        (CIFAR.changed(label_smoothing=0.0, augment="none", lr=0.1), "augment none, label smoothing 0, lr 0.1"),
    ],
)
def test_titles_name_what_differs_from_the_defaults(run, title):
    found = describe(run)["experiment"]
    assert found.endswith(title) or f", {title}, " in found


def test_runs_that_cannot_be_compared_have_different_titles():
    changes = (
        {},
        {"lr": 0.1},
        {"ema": 0.9},
        {"init": "a"},
        {"augment": "none"},
        {"base_arguments": {"dampening": 0.1}},
    )
    assert len({describe(CIFAR.changed(**change))["experiment"] for change in changes}) == len(changes)


@pytest.mark.parametrize(
    ("method", "arguments", "row", "variant", "radius"),
    [
        ("base", {}, "SGD", "sgd", None),
        ("sam", {}, "SAM", "sam", 0.05),
        ("sam", {"rho": 0.05}, "SAM", "sam", 0.05),
        ("sam", {"rho": 0.2}, "SAM, rho 0.2", "sam", 0.2),
        ("sam", {"rho": 0.1, "rho_floor": 0.1}, "SAM (sum)", "sam-sum", 0.1),
        ("bsam", {"passes": 2, "rho_min": 0.1}, "BSAM (2 passes), rho_min 0.1", "bsam-2", 0.05 + 0.1),
        ("saf", {"lam": 1.0}, "SAF, lam 1", "saf", None),
    ],
)
def test_rows_name_the_arguments_that_differ(method, arguments, row, variant, radius):
    about = describe(replace(CIFAR, method=method, arguments=arguments))
    assert (about["row"], about["variant"], about["radius"]) == (row, variant, radius)
    assert describe(replace(CIFAR, method=method, arguments=arguments), tuned=True)["row"] == row.partition(",")[0]


def test_only_tuning_says_that_a_run_is_a_trial():
    assert not describe(Run("sam", eval_split="holdout", seed=10_000))["trial"]
    assert describe(Run("sam"), trial=True)["trial"]


def test_seeds_keep_what_they_start_from():
    """The name of a run directory contains the seed; runs elsewhere stay as they are."""
    base = Run("sgd")
    runs = [
        base,
        Run.of("sam", init=run_dir_name(base), weight_bits=4),
        Run.of("sam", init="/elsewhere", weight_bits=4),
    ]
    found = with_seed([Plan(run) for run in runs], 7, surface=5)
    assert [plan.run.init for plan in found] == [None, found[0].name, "/elsewhere"]
    assert {(plan.run.seed, plan.run.surface) for plan in found} == {(7, 5)}
