import inspect
import string
from dataclasses import replace

import pytest

from bsam.data import DATASETS
from bsam.methods import METHODS
from bsam.models import MODELS
from bsam.recipes import RECIPES
from bsam.recipes.selection import select
from bsam.recipes.variants import BSAMS, arguments, passes_of, variant_of, variants
from bsam.training.config import Run
from bsam.training.run_dir import run_dir_name

CIFAR = [
    recipe
    for recipe in RECIPES.values()
    if "paper" in recipe.scales and recipe.name not in ("pose", "quantization", "radius")
]
PAPER = {"data": "cifar10", "precision": "bf16", "compile": True}  # with Run's defaults, ResNet-18 on CIFAR-10


def test_every_method_is_a_column_and_bsam_is_three():
    sam, *others = METHODS
    assert list(variants()) == ["sgd", sam, "sam-sum", "sam-follow", *others, "bsam-2", "bsam-released"]
    assert {column.method for column in variants().values()} >= set(METHODS)
    assert [variants()[name].title for name in BSAMS] == ["BSAM (Algorithm 1)", "BSAM (2 passes)", "BSAM (as released)"]
    assert [variants()[name].arguments for name in BSAMS] == [{}, {"passes": 2}, {"start_from_min": True}]


def test_a_base_optimizer_without_a_method_has_its_own_title():
    found = [variant_of(Run("base", base=base)) for base in ("sgd", "adam", "adamw")]
    assert [(one.name, one.title) for one in found] == [("sgd", "SGD"), ("adam", "Adam"), ("adamw", "AdamW")]
    assert found[0] == variants()["sgd"]


@pytest.mark.parametrize("data", ["cifar10", "cifar100", "digits"])
def test_a_run_finds_its_column_again_and_repeats_no_default(data):
    for column in variants().values():
        run = Run(column.method, arguments(column, data))
        assert variant_of(run) == column
        for name, value in run.arguments.items():
            if name not in ("rho_max", "rho_min"):  # rho_floor has no default
                assert inspect.signature(METHODS[run.method]).parameters[name].default != value


def test_hyperparameters():
    """As the papers have them."""

    def full(name, data):
        column = variants()[name]
        signature = inspect.signature(METHODS[column.method]).parameters
        return {**{n: p.default for n, p in signature.items()}, **arguments(column, data)}

    for data, radius in (("cifar10", 0.05), ("cifar100", 0.1), ("digits", 0.05)):
        total = sum(full("bsam", data)[name] if data != "digits" else radius for name in ("rho_max", "rho_min"))
        assert [full("sam-sum", data)[name] for name in ("rho", "rho_floor")] == [total, total]
        assert [full("sam-follow", data)[name] for name in ("rho", "rho_floor")] == [total, radius]
    for name in ("sam", "gsam", "looksam", "esam", "ksam", "aesam", "rst"):
        assert (full(name, "cifar10")["rho"], full(name, "cifar100")["rho"]) == (0.05, 0.1)
    assert (full("asam", "cifar10")["rho"], full("asam", "cifar100")["rho"]) == (0.5, 1.0)
    assert {full("asam", data)["eta"] for data in ("cifar10", "cifar100")} == {0.01}
    assert [full("friendly_sam", data)[name] for data in ("cifar10", "cifar100") for name in ("rho", "decay")] == [
        0.05,
        0.9,
        0.2,
        0.6,
    ]
    for data in ("cifar10", "cifar100"):
        assert (full("fisher_sam", data)["rho"], full("fisher_sam", data)["eta"]) == (0.1, 0.2)
        assert (full("pgn", data)["rho"], full("pgn", data)["alpha"]) == (0.1, 0.8)
        assert full("msam", data)["rho"] == 3.0
        for name in BSAMS:
            own = full(name, data)
            assert own["rho_max"] == own["rho_min"] == {"cifar10": 0.05, "cifar100": 0.1}[data]
            assert own["rho_min_floor"] == 0


def test_the_classification_table_is_three_networks_two_data_sets_all_methods():
    runs = RECIPES["classification"].runs("paper")
    assert len(runs) == 3 * 2 * 21
    assert {(run.model, run.data, variant_of(run).name) for run in runs} == {
        (model, data, name)
        for model in ("resnet18", "wide_resnet28_10", "pyramidnet110")
        for data in ("cifar10", "cifar100")
        for name in variants()
    }
    for run in runs:
        pyramid = run.model == "pyramidnet110"
        assert (run.lr, run.weight_decay) == ((0.1, 5e-4) if pyramid else (0.05, 1e-3))
        assert (run.epochs, run.batch, run.momentum, run.nesterov, run.schedule, run.label_smoothing) == (
            200,
            128,
            0.9,
            False,
            "cosine",
            0.1,
        )
        assert (run.eval_split, run.label_noise, run.limit_train, run.probe) == ("test", 0.0, None, None)
    assert runs[0] == Run("sgd", model="resnet18", **PAPER)


def test_the_study_is_five_radii_on_both_data_sets():
    runs = RECIPES["rho-min-study"].runs("paper")
    assert {(run.data, run.arguments["rho_min"], variant_of(run).name) for run in runs} == {
        (data, rho, name)
        for data in ("cifar10", "cifar100")
        for rho in (0.01, 0.025, 0.05, 0.1, 0.25)
        for name in BSAMS
    }
    assert len(runs) == 30
    assert {run.model for run in runs} == {"resnet18"}
    assert {(run.data, run.arguments.get("rho_max", 0.05)) for run in runs} == {("cifar10", 0.05), ("cifar100", 0.1)}


def test_label_noise_is_four_rates_on_both_data_sets():
    runs = RECIPES["label-noise"].runs("paper")
    assert {(run.data, run.label_noise, variant_of(run).name) for run in runs} == {
        (data, rate, name)
        for data in ("cifar10", "cifar100")
        for rate in (0.2, 0.4, 0.6, 0.8)
        for name in ("sgd", "sam", "sam-sum", "sam-follow", *BSAMS)
    }
    assert len(runs) == 56


def test_the_curves():
    curves = RECIPES["training-curves"].runs("paper")
    assert [(run.model, run.data, variant_of(run).name) for run in curves] == [
        ("wide_resnet28_10", "cifar100", name) for name in ("sgd", "sam", *BSAMS)
    ]
    sharpness = RECIPES["sharpness-curves"].runs("paper")
    assert [variant_of(run).name for run in sharpness] == ["sam", *BSAMS]
    assert {run.probe for run in sharpness} == {100}
    conflict = RECIPES["gradient-conflict"].runs("paper")
    courses = {(run.arguments["rho_min"], run.arguments["rho_min_floor"], variant_of(run).name) for run in conflict}
    assert courses == {(0.1, floor, name) for floor in (0.1, 0.05, 0.0) for name in BSAMS}
    assert all(run.probe for run in conflict)


@pytest.mark.parametrize("recipe", CIFAR, ids=lambda recipe: recipe.name)
def test_short_is_the_paper_with_fewer_epochs(recipe):
    epochs = 30 if recipe.name == "transfer" else 24  # of which the paper has no more: short has fewer data sets
    paper = [replace(run, epochs=epochs, probe=None) for run in recipe.runs("paper")]
    short = [replace(run, probe=None) for run in recipe.runs("short")]
    assert {run.epochs for run in short} == {epochs}
    assert all(run in paper for run in short)
    assert len(short) == {"classification": 42, "transfer": 2 * 2 * 7}.get(recipe.name, len(paper))


@pytest.mark.parametrize("recipe", CIFAR, ids=lambda recipe: recipe.name)
def test_smoke_has_every_row_in_small(recipe):
    name, smoke = recipe.name, recipe.runs("smoke")
    assert {run.data for run in smoke} == {"digits"}
    small = {"timm:test_efficientnet", "timm:test_resnet"} if name == "transfer" else set()
    small |= {model for model, entry in MODELS.items() if entry.parameters < 120_000}
    assert all(run.model in small and run.weights is None and run.epochs < 5 for run in smoke)
    assert {recipe.cell(run).row for run in smoke} == {recipe.cell(run).row for run in recipe.runs("paper")}
    assert all(recipe.cell(run).column == DATASETS["digits"].title for run in smoke if name != "label-noise")
    assert all(recipe.published(run) is None for run in smoke)  # the paper has no digits


@pytest.mark.parametrize(("name", "scale"), [(each.name, scale) for each in RECIPES.values() for scale in each.scales])
def test_directories_and_cells_are_unique_and_seeds_come_one_after_the_other(name, scale):
    recipe = RECIPES[name]
    runs = recipe.runs(scale, seeds=3)
    folders = [run_dir_name(run) for run in runs]
    assert len(set(folders)) == len(runs)
    assert all(set(folder) <= set(string.ascii_letters + string.digits + "-_.") for folder in folders)
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    assert len({(recipe.cell(run), run.seed) for run in runs}) == len(runs)


def test_published_numbers_stand_where_they_belong():
    for recipe in CIFAR:
        beside = [run for run in recipe.runs("paper") if recipe.published(run) is not None]
        expected = {
            "classification": 6 * 11,
            "rho-min-study": 30,
            "label-noise": 40,
            "training-curves": 5,
            "sharpness-curves": 4,
            "gradient-conflict": 0,
            "transfer": 2 * 5 * 5,
        }
        assert len(beside) == expected[recipe.name]
    run = RECIPES["label-noise"].runs("paper")[6]
    assert (variant_of(run).name, RECIPES["label-noise"].published(run).mean) == ("bsam-released", 93.34)


def test_passes():
    assert [
        passes_of(Run(column.method, arguments(column, "cifar10")))
        for column in variants().values()
        if column.name == "sgd" or column.method in ("gam", "bsam")
    ] == [1, 4, 3, 2, 3]


def test_a_selection():
    runs = RECIPES["classification"].runs("paper", seeds=2)
    assert select(runs) == runs
    chosen = select(runs, models=["resnet18"], data=["cifar10"])
    assert len(chosen) == 2 * len(variants())
    assert {(run.model, run.data) for run in chosen} == {("resnet18", "cifar10")}
    assert [run.seed for run in select(runs, ["bsam-2"], ["pyramidnet110"], ["cifar100"])] == [0, 1]
