"""Published numbers, as printed, and the runs that they are shown beside."""

import math
from dataclasses import replace

import pandas as pd
import pytest

from bsam.lab.analysis.runs_table import COLUMNS, read_runs
from bsam.lab.config import Run
from bsam.lab.paper import join, of_paper, published_number, published_tables
from bsam.lab.recipes import RECIPES, Plan, recipe
from bsam.lab.report.recipe_results import runs_of
from bsam.lab.report.recipe_table import cells_of
from finished_runs import write_run

COUNTS = {"classification": 54, "rho-min": 10, "label-noise": 24, "transfer": 2 * 5 * 3, "pose": 24, "quantization": 8}
TRANSFER_DATA = ("cifar10", "cifar100", "flowers102", "stanford_cars", "oxford_pet")
TRANSFER = {  # test accuracy in %, mean and standard deviation, on these
    ("timm:efficientnet_b0", "sgd"): "97.32 0.07  87.05 0.11  77.11 0.36  74.47 0.55  87.89 0.43",
    ("timm:efficientnet_b0", "sam"): "97.48 0.07  87.27 0.21  78.04 0.37  75.75 0.41  88.30 0.16",
    ("timm:efficientnet_b0", "bsam"): "97.52 0.04  87.40 0.21  79.02 1.10  77.54 0.62  89.42 0.25",
    ("timm:resnet50", "sgd"): "97.28 0.05  86.20 0.18  86.74 0.16  80.02 0.24  93.11 0.17",
    ("timm:resnet50", "sam"): "97.78 0.02  87.48 0.04  87.53 0.13  83.69 0.19  93.14 0.14",
    ("timm:resnet50", "bsam"): "97.81 0.06  87.51 0.05  88.22 0.20  84.36 0.16  93.06 0.15",
}
POSE = {  # PCKh@0.5 in %: head, shoulder, elbow, wrist, hip, knee, ankle, mean
    "adam": "96.828 95.771 89.654 84.272 88.679 85.151 81.436 89.318",
    "sam": "96.965 95.703 89.637 84.222 88.402 85.513 81.862 89.388",
    "bsam": "96.794 95.584 89.995 85.317 89.008 85.392 81.082 89.552",
}
LITE = "timm:tf_efficientnet_lite1"
CIFAR = Run("sam", model="resnet18", data="cifar10")


def test_a_given_number_wins_against_that_of_the_table(tmp_path):
    sgd, sam = Run("sgd", model="resnet18", data="cifar10", epochs=2), replace(CIFAR, epochs=2)
    made = recipe("Two", scales={"paper": {}}, published="classification")(lambda: [Plan(sgd, published=50.0), sam])
    experiment = made()
    for plan in experiment.plans:
        write_run(plan.run, tmp_path)
    runs = join(runs_of(experiment.plans, tmp_path))
    assert runs["published"].tolist() == join(read_runs(tmp_path))["published"].tolist() == [50.0, 96.74]
    cells = cells_of(runs, "classification")
    assert [(cell["paper"]["mean"], cell["paper"]["std"]) for cell in cells] == [(50.0, None), (96.74, 0.05)]


def numbers(name):
    return published_tables()[name]["numbers"]


@pytest.mark.parametrize(
    ("table", "place", "mean", "std"),
    [
        ("classification", ("resnet18", "cifar100", "asam"), 81.68, 0.12),
        ("classification", ("wide_resnet28_10", "cifar100", "bsam"), 85.51, 0.14),
        ("classification", ("pyramidnet110", "cifar10", "sgd"), 97.1, 0.08),
        ("classification", ("pyramidnet110", "cifar100", "looksam"), 83.76, 0.45),
        ("rho-min", ("cifar10", 0.25), 96.18, 0.09),
        ("rho-min", ("cifar100", 0.05), 81.65, 0.04),
        ("label-noise", ("cifar10", "bsam", 0.8, "all"), 78.27, None),
        ("label-noise", ("cifar100", "sgd", 0.6, "all"), 31.46, None),
        ("quantization", ("resnet18", "cifar10", "sgd", None), 88.72, None),
        ("quantization", ("mobilenet_v1", "cifar10", "bsam", 4), 84.76, 0.1),
    ],
)
def test_numbers_as_printed(table, place, mean, std):
    assert (numbers(table)[place]["mean"], numbers(table)[place]["std"]) == (mean, std)


def test_the_tables_are_complete():
    assert {name: len(numbers(name)) for name in published_tables()} == COUNTS
    for (network, method), printed in TRANSFER.items():
        values = [float(number) for number in printed.split()]
        for data, mean, std in zip(TRANSFER_DATA, values[::2], values[1::2], strict=True):
            assert numbers("transfer")[network, data, method] == {"mean": mean, "std": std, "note": ""}
    for method, printed in POSE.items():
        found = [f"{number['mean']:.3f}" for key, number in numbers("pose").items() if key[1] == method]
        assert found == printed.split()
    for data, rho_min in (("cifar10", 0.05), ("cifar100", 0.1)):  # the study contains runs of the first table
        assert numbers("rho-min")[data, rho_min] == numbers("classification")["resnet18", data, "bsam"]


def test_numbers_from_elsewhere_have_a_note():
    notes = {(model, method): cell["note"] for (model, _, method), cell in numbers("classification").items()}
    longer = {place for place, note in notes.items() if "300 epochs" in note}
    assert longer == {("pyramidnet110", method) for method in ("asam", "fisher_sam", "friendly_sam")}
    taken = {"asam", "fisher_sam", "friendly_sam", "esam", "saf"}
    assert {method for (_, method), note in notes.items() if note} == taken
    lite = published_number("transfer", Run("sam", model=LITE, data="oxford_pet"))
    assert (lite["mean"], "EfficientNet-B0" in lite["note"]) == (88.30, True)
    assert published_number("transfer", Run("sam", model="resnet50", data="oxford_pet"))["mean"] == 93.14


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("classification", 6 * 11),
        ("rho-min-study", 30),
        ("label-noise", 40),
        ("training-curves", 5),
        ("sharpness-curves", 4),
        ("transfer", 2 * 5 * 5),
        ("pose", 5),
        ("quantization", 2 * 6),
        ("radius", 0),
    ],
)
def test_published_numbers_stand_where_they_belong(name, count):
    def published(scale):
        plans = RECIPES[name](scale, 1).plans
        return [of_paper(plan.run, table=plan.about.get("published_table", ""))["published"] for plan in plans]

    assert sum(number is not None for number in published("paper")) == count
    assert set(published("smoke")) == {None}  # the paper has no digits


@pytest.mark.parametrize(
    ("change", "published", "claimed", "word"),
    [
        ({}, 96.74, 96.74, ""),
        ({"epochs": 60}, None, None, ""),
        ({"ema": 0.999}, None, None, ""),
        ({"limit_train": 100}, None, None, ""),
        ({"eval_split": "holdout"}, None, None, ""),
        ({"arguments": {"rho": 0.1}}, None, None, ""),  # SAM at the sum of the radii, which the paper does not have
        ({"method": "bsam", "arguments": {"rho_min": 0.25}}, 96.18, None, ""),  # of the study of rho_min
        ({"method": "bsam", "arguments": {"rho_min": 0.25, "rho_max": 0.1}}, None, None, ""),
        ({"label_noise": 0.4}, 79.71, 79.71, ""),
        ({"label_noise": 0.4, "noise_labels": "other"}, None, 79.71, "all classes"),
        ({"weight_bits": 4}, 89.75, 89.75, ""),
        ({"task": "pose", "model": "simcc_resnet50", "data": "lspet", "base": "adam"}, None, 89.388, "MPII"),
    ],
)
def test_a_run_has_a_published_number_only_with_the_papers_protocol(change, published, claimed, word):
    about = of_paper(Run.of(**{"method": "sam", "model": "resnet18", "data": "cifar10", **change}))
    assert (about["published"], about["claimed"]) == (published, claimed)
    assert word in about["note"]
    assert bool(about["note"]) == bool(word)


def test_a_tuned_run_has_the_number_of_its_method():
    run = replace(CIFAR, arguments={"rho": 0.2})
    assert (of_paper(run)["published"], of_paper(run, tuned=True)["published"]) == (None, 96.74)


def test_how_the_radius_was_chosen():
    radii = {"sam": {}, "sam-sum": {"rho": 0.1}, "by hand": {"rho": 0.3}}
    chosen = [of_paper(replace(CIFAR, arguments=radius))["chosen"] for radius in radii.values()]
    assert chosen == ["the paper's", "BSAM's total radius", "set by hand"]
    assert of_paper(Run("sam"))["chosen"] == "default"
    assert of_paper(Run("sgd"))["chosen"] == ""
    assert of_paper(CIFAR, tuned=True)["chosen"] == ""  # the run says on which samples


def test_what_is_stored_stays():
    stored = [
        {"chosen": "", "published": 1.0},
        {"chosen": "tuned", "tuned": True},
        {"settings": None, "chosen": ""},
        {},
    ]
    runs = pd.DataFrame([{**COLUMNS, "settings": CIFAR.settings(), **values} for values in stored])
    found = join(runs)
    assert found["chosen"].tolist() == ["", "tuned", "", "the paper's"]
    assert found["published"].tolist() == pytest.approx([1.0, 96.74, math.nan, 96.74], nan_ok=True)
    assert found["claimed"].tolist() == pytest.approx([96.74, 96.74, math.nan, 96.74], nan_ok=True)
    assert found["note"].tolist() == [""] * 4
    assert join(runs.iloc[:0]).columns.tolist() == found.columns.tolist()
    assert not {"claimed", "note"} & {*runs}


def test_settings_of_any_type_have_no_number():
    """A page shows runs of others, whose settings may be anything that JSON has."""
    for value in ([1], {"a": 1}, "x", None):
        run = Run("bsam", {"rho_min": value}, model="resnet18", data="cifar10")
        assert of_paper(run, table="rho-min") == {**of_paper(run), "published": None}


def test_a_recipe_shows_its_table_at_any_number_of_epochs():
    run = replace(CIFAR, epochs=24)
    assert of_paper(run)["published"] is None
    assert of_paper(run, table="classification")["published"] == 96.74
    assert of_paper(run, table="of another version")["published"] is None
    assert of_paper(Run("sam", model="resnet18"), table="classification")["published"] is None  # on digits
