"""The recipes on CIFAR: their methods, settings and published numbers."""

import inspect
import string
from dataclasses import replace

import pytest

from bsam.lab.data import DATASETS
from bsam.lab.models import MODELS
from bsam.lab.recipes import RECIPES
from bsam.lab.recipes.run_settings import select
from bsam.lab.recipes.variants import BSAMS, arguments, passes_of, variant_of, variants
from bsam.lab.training.config import Run
from bsam.lab.training.run_dir import run_dir_name
from bsam.methods import METHODS

CIFAR = [
    recipe
    for recipe in RECIPES.values()
    if "paper" in recipe.scales and recipe.name not in ("pose", "quantization", "radius")
]
PAPER = {"data": "cifar10", "precision": "bf16", "compile": True}  # with Run's defaults, ResNet-18 on CIFAR-10
BOTH = ("cifar10", "cifar100")


def test_every_method_is_a_variant_and_bsam_is_three():
    sam, *others = METHODS
    assert list(variants()) == ["sgd", sam, "sam-sum", "sam-follow", *others, "bsam-2", "bsam-released"]
    assert [variants()[name].title for name in BSAMS] == ["BSAM (Algorithm 1)", "BSAM (2 passes)", "BSAM (as released)"]
    assert [variants()[name].arguments for name in BSAMS] == [{}, {"passes": 2}, {"start_from_min": True}]
    bases = [variant_of(Run("base", base=base)) for base in ("sgd", "adam", "adamw")]
    assert [(base.name, base.title) for base in bases] == [("sgd", "SGD"), ("adam", "Adam"), ("adamw", "AdamW")]


@pytest.mark.parametrize("data", [*BOTH, "digits"])
def test_a_run_finds_its_variant_again_and_repeats_no_default(data):
    for variant in variants().values():
        run = Run(variant.method, arguments(variant, data))
        assert variant_of(run) == variant
        for name, value in run.arguments.items():
            if name not in ("rho_max", "rho_min"):  # rho_floor has no default
                assert inspect.signature(METHODS[run.method]).parameters[name].default != value


@pytest.mark.parametrize(
    ("names", "on_cifar10", "on_cifar100"),
    [
        (("sam", "gsam", "looksam", "esam", "ksam", "aesam", "rst"), {"rho": 0.05}, {"rho": 0.1}),
        (("sam-sum",), {"rho": 0.1, "rho_floor": 0.1}, {"rho": 0.2, "rho_floor": 0.2}),
        (("sam-follow",), {"rho": 0.1, "rho_floor": 0.05}, {"rho": 0.2, "rho_floor": 0.1}),
        (("asam",), {"rho": 0.5, "eta": 0.01}, {"rho": 1.0, "eta": 0.01}),
        (("friendly_sam",), {"rho": 0.05, "decay": 0.9}, {"rho": 0.2, "decay": 0.6}),
        (("fisher_sam",), {"rho": 0.1, "eta": 0.2}, {"rho": 0.1, "eta": 0.2}),
        (("pgn",), {"rho": 0.1, "alpha": 0.8}, {"rho": 0.1, "alpha": 0.8}),
        (("msam",), {"rho": 3.0}, {"rho": 3.0}),
        (BSAMS, {"rho_max": 0.05, "rho_min": 0.05, "rho_min_floor": 0}, {"rho_max": 0.1, "rho_min": 0.1}),
    ],
)
def test_hyperparameters_as_in_the_papers(names, on_cifar10, on_cifar100):
    for name in names:
        variant = variants()[name]
        defaults = {name: p.default for name, p in inspect.signature(METHODS[variant.method]).parameters.items()}
        for data, expected in zip(BOTH, (on_cifar10, on_cifar100), strict=True):
            assert expected.items() <= {**defaults, **arguments(variant, data)}.items()


def test_the_classification_table_is_three_networks_two_data_sets_all_methods():
    runs = RECIPES["classification"].runs("paper")
    networks = ("resnet18", "wide_resnet28_10", "pyramidnet110")
    places = [(run.model, run.data, variant_of(run).name) for run in runs]
    assert places == [(model, data, name) for model in networks for data in BOTH for name in variants()]
    for run in runs:
        pyramid = run.model == "pyramidnet110"
        assert (run.lr, run.weight_decay) == ((0.1, 5e-4) if pyramid else (0.05, 1e-3))
        assert (run.epochs, run.batch, run.momentum, run.nesterov) == (200, 128, 0.9, False)
        assert (run.schedule, run.label_smoothing) == ("cosine", 0.1)
        assert (run.eval_split, run.label_noise, run.limit_train, run.probe) == ("test", 0.0, None, None)
    assert runs[0] == Run("sgd", model="resnet18", **PAPER)


def test_the_grids_of_the_other_recipes():
    study, noise, curves, sharpness, conflict = (
        RECIPES[name].runs("paper")
        for name in ("rho-min-study", "label-noise", "training-curves", "sharpness-curves", "gradient-conflict")
    )
    places = [(run.data, run.arguments["rho_min"], variant_of(run).name) for run in study]
    assert places == [(data, rho, name) for data in BOTH for rho in (0.01, 0.025, 0.05, 0.1, 0.25) for name in BSAMS]
    assert {(run.data, run.arguments.get("rho_max", 0.05)) for run in study} == {("cifar10", 0.05), ("cifar100", 0.1)}
    names = ("sgd", "sam", "sam-sum", "sam-follow", *BSAMS)
    places = [(run.data, run.label_noise, variant_of(run).name) for run in noise]
    assert places == [(data, rate, name) for data in BOTH for rate in (0.2, 0.4, 0.6, 0.8) for name in names]
    assert {run.model for run in (*study, *noise)} == {"resnet18"}
    assert {(run.model, run.data) for run in curves} == {("wide_resnet28_10", "cifar100")}
    assert [variant_of(run).name for run in curves] == ["sgd", "sam", *BSAMS]
    assert [(variant_of(run).name, run.probe) for run in sharpness] == [(name, 100) for name in ("sam", *BSAMS)]
    schedules = [(run.arguments["rho_min"], run.arguments["rho_min_floor"], variant_of(run).name) for run in conflict]
    assert schedules == [(0.1, floor, name) for floor in (0.1, 0.05, 0.0) for name in BSAMS]
    assert all(run.probe for run in conflict)


@pytest.mark.parametrize("recipe", CIFAR, ids=lambda recipe: recipe.name)
def test_short_is_the_paper_with_fewer_epochs(recipe):
    epochs = 30 if recipe.name == "transfer" else 24  # of which the paper has no more: short has fewer data sets
    paper = [replace(run, epochs=epochs, probe=None) for run in recipe.runs("paper")]
    short = [replace(run, probe=None) for run in recipe.runs("short")]
    assert {run.epochs for run in short} == {epochs}
    assert all(run in paper for run in short)
    assert len(short) == {"classification": 2 * len(variants()), "transfer": 2 * 2 * 7}.get(recipe.name, len(paper))


@pytest.mark.parametrize("recipe", CIFAR, ids=lambda recipe: recipe.name)
def test_smoke_has_every_row_in_small(recipe):
    name, smoke = recipe.name, recipe.runs("smoke")
    small = {"timm:test_efficientnet", "timm:test_resnet"} if name == "transfer" else set()
    small |= {model for model, entry in MODELS.items() if entry.parameters < 120_000}
    assert all(run.model in small and run.weights is None and run.epochs < 5 for run in smoke)
    assert {recipe.cell(run).row for run in smoke} == {recipe.cell(run).row for run in recipe.runs("paper")}
    assert all(recipe.cell(run).column == DATASETS["digits"].title for run in smoke if name != "label-noise")
    assert all(recipe.published(run) is None for run in smoke)  # the paper has no digits


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_directories_and_cells_are_unique_and_seeds_come_one_after_the_other(recipe):
    for scale in recipe.scale_names:
        runs = recipe.runs(scale, seeds=3)
        folders = [run_dir_name(run) for run in runs]
        assert len(set(folders)) == len(runs)
        assert all(set(folder) <= set(string.ascii_letters + string.digits + "-_.") for folder in folders)
        assert [run.seed for run in runs] == sorted(run.seed for run in runs)
        assert len({(recipe.cell(run), run.seed) for run in runs}) == len(runs)


def test_published_numbers_stand_where_they_belong():
    published = {recipe.name: [recipe.published(run) for run in recipe.runs("paper")] for recipe in CIFAR}
    assert {name: sum(number is not None for number in numbers) for name, numbers in published.items()} == {
        "classification": 6 * 11,
        "rho-min-study": 30,
        "label-noise": 40,
        "training-curves": 5,
        "sharpness-curves": 4,
        "gradient-conflict": 0,
        "transfer": 2 * 5 * 5,
    }
    assert published["label-noise"][6].mean == 93.34  # as released, which has the number of BSAM


def test_passes():
    methods = [variant for variant in variants().values() if variant.name == "sgd" or variant.method in ("gam", "bsam")]
    assert [passes_of(Run(each.method, arguments(each, "cifar10"))) for each in methods] == [1, 4, 3, 2, 3]


def test_a_selection():
    runs = RECIPES["classification"].runs("paper", seeds=2)
    assert select(runs) == runs
    chosen = select(runs, models=["resnet18"], data=["cifar10"])
    assert chosen == [run for run in runs if (run.model, run.data) == ("resnet18", "cifar10")]
    assert [run.seed for run in select(runs, ["bsam-2"], ["pyramidnet110"], ["cifar100"])] == [0, 1]
