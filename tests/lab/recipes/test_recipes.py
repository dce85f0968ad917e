"""The recipes: their methods, settings, scales and seeds."""

import inspect
import string
from dataclasses import replace

import pytest
import torch

import bsam
from bsam.lab.config import Run
from bsam.lab.models import MODELS
from bsam.lab.recipes import RECIPES
from bsam.lab.recipes.plan import select
from bsam.lab.recipes.variants import BSAMS, MATCHED, arguments_on, passes_of, variant_of, variants
from bsam.lab.training.run_dir import run_dir_name
from bsam.methods import METHODS

BOTH = ("cifar10", "cifar100")
COMPARED = ("sgd", "sam", "sam-sum", "sam-follow", *BSAMS)
FINE_TUNED = ("timm:efficientnet_b0", "timm:resnet50")
TRANSFER_DATA = ("cifar10", "cifar100", "flowers102", "stanford_cars", "oxford_pet")


def runs_of(name, scale="paper", seeds=1, **more):
    return [plan.run for plan in RECIPES[name](scale, seeds, **more).plans]


def built(run):
    """The optimizer that a run builds, on no parameters that matter."""
    base = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=run.lr)
    return {"sam": bsam.SAM, "bsam": bsam.BSAM}[run.method](base, None, **run.arguments)


def radii_of(run, lr):
    """The radii of SAM, or rho_max and rho_min, at a learning rate."""
    optimizer = built(run)
    optimizer.base.param_groups[0]["lr"] = lr
    return [optimizer.radii(name) for name in (("rho",) if run.method == "sam" else ("rho_max", "rho_min"))]


def test_every_method_is_a_variant_and_bsam_is_three():
    sam, *others = METHODS
    assert list(variants()) == ["sgd", sam, "sam-sum", "sam-follow", *others, "bsam-2", "bsam-released"]
    assert [variants()[name].arguments for name in BSAMS] == [{}, {"passes": 2}, {"start_from_min": True}]
    bases = [variant_of(Run("base", base=base)) for base in ("sgd", "adam", "adamw")]
    assert [(base.name, base.title) for base in bases] == [("sgd", "SGD"), ("adam", "Adam"), ("adamw", "AdamW")]
    assert [passes_of(Run("sgd")), *(passes_of(Run("bsam", variants()[name].arguments)) for name in BSAMS)] == [
        1,
        3,
        2,
        3,
    ]


@pytest.mark.parametrize("data", [*BOTH, "digits", "folder:pets"])
def test_a_run_finds_its_variant_again_and_repeats_no_default(data):
    for variant in variants().values():
        run = Run(variant.method, arguments_on(variant, data))
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
        (("asam",), {"rho": 0.5}, {"rho": 1.0}),
        (("msam",), {"rho": 3.0}, {"rho": 3.0}),
        (BSAMS, {"rho_max": 0.05, "rho_min": 0.05, "rho_min_floor": 0}, {"rho_max": 0.1, "rho_min": 0.1}),
    ],
)
def test_hyperparameters_as_in_the_papers(names, on_cifar10, on_cifar100):
    for name in names:
        variant = variants()[name]
        defaults = {name: p.default for name, p in inspect.signature(METHODS[variant.method]).parameters.items()}
        for data, expected in zip(BOTH, (on_cifar10, on_cifar100), strict=True):
            assert expected.items() <= {**defaults, **arguments_on(variant, data)}.items()


def test_the_classification_table_is_three_networks_two_data_sets_all_methods():
    runs = runs_of("classification")
    networks = ("resnet18", "wide_resnet28_10", "pyramidnet110")
    places = [(run.model, run.data, variant_of(run).name) for run in runs]
    assert places == [(model, data, name) for model in networks for data in BOTH for name in variants()]
    for run in runs:
        assert (run.lr, run.weight_decay) == ((0.1, 5e-4) if run.model == "pyramidnet110" else (0.05, 1e-3))
        assert (run.epochs, run.batch, run.momentum, run.nesterov, run.schedule) == (200, 128, 0.9, False, "cosine")
        assert (run.eval_split, run.task.label_noise, run.limit_train, run.task.label_smoothing) == (
            "test",
            0.0,
            None,
            0.1,
        )
    assert runs[0] == Run("sgd", model="resnet18", data="cifar10", precision="bf16", compile=True)


def test_the_other_grids_on_cifar():
    study, noise = runs_of("rho-min-study"), runs_of("label-noise")
    places = [(run.data, run.arguments["rho_min"], variant_of(run).name) for run in study]
    assert places == [(data, rho, name) for data in BOTH for rho in (0.01, 0.025, 0.05, 0.1, 0.25) for name in BSAMS]
    assert {(run.data, run.arguments.get("rho_max", 0.05)) for run in study} == {("cifar10", 0.05), ("cifar100", 0.1)}
    places = [(run.data, run.task.label_noise, variant_of(run).name) for run in noise]
    assert places == [(data, rate, name) for data in BOTH for rate in (0.2, 0.4, 0.6, 0.8) for name in COMPARED]
    assert {run.model for run in (*study, *noise)} == {"resnet18"}
    curves, sharpness, conflict = map(runs_of, ("training-curves", "sharpness-curves", "gradient-conflict"))
    assert {(run.model, run.data) for run in curves} == {("wide_resnet28_10", "cifar100")}
    assert [variant_of(run).name for run in curves] == ["sgd", "sam", *BSAMS]
    assert [(variant_of(run).name, run.probe) for run in sharpness] == [(name, 100) for name in ("sam", *BSAMS)]
    schedules = [(run.arguments["rho_min"], run.arguments["rho_min_floor"], variant_of(run).name) for run in conflict]
    assert schedules == [(0.1, floor, name) for floor in (0.1, 0.05, 0.0) for name in BSAMS]
    assert all(run.probe for run in conflict)


def test_fine_tuning_and_poses_use_the_radii_of_cifar10():
    transfer, pose = runs_of("transfer"), runs_of("pose")
    places = [(run.model, run.data, variant_of(run).name) for run in transfer]
    assert places == [(network, data, name) for network in FINE_TUNED for data in TRANSFER_DATA for name in COMPARED]
    for run in transfer:
        assert (run.epochs, run.batch, run.lr, run.task.label_smoothing, run.weights) == (
            30,
            128,
            0.01,
            0.0,
            "pretrained",
        )
        assert run.weight_decay == {"timm:efficientnet_b0": 1e-5, "timm:resnet50": 1e-4}[run.model]
        assert run.augment == (None if run.data in ("cifar10", "cifar100") else "resized-crop-flip")
    assert {run.augment for run in runs_of("transfer", "smoke")} == {None}
    assert [variant_of(run).name for run in pose] == ["adam", *COMPARED[1:]]
    for run in pose:
        assert (run.model, run.data, run.epochs, run.weights) == ("simcc_resnet50", "mpii", 210, "pretrained")
        assert (run.base, run.lr, run.batch, run.weight_decay, run.task.flip_test) == ("adam", 1e-3, 64, 0.0, True)
    expected = {"sam": [0.05], "sam-sum": [0.1], "sam-follow": [0.1]}
    for run in (*transfer, *pose):
        if run.method != "base":
            assert radii_of(replace(run, base="sgd"), run.lr) == expected.get(variant_of(run).name, [0.05, 0.05])


@pytest.mark.parametrize(("scale", "epochs"), [("short", (24, 12)), ("paper", (200, 60))])
def test_quantized_runs_start_from_the_float_network_of_their_seed(scale, epochs):
    runs = runs_of("quantization", scale, 3)
    by_name = {run_dir_name(run): run for run in runs}
    assert len(by_name) == len(runs) == 3 * 2 * 8
    for run in runs:
        if run.task.weight_bits is None:
            assert (run.method, run.lr, run.epochs, run.init) == ("base", 0.05, epochs[0], None)
            continue
        base = by_name[run.init]
        assert (base.seed, base.model, base.task.weight_bits) == (run.seed, run.model, None)
        assert (run.task.weight_bits, run.task.quantizer, run.epochs, run.lr, run.curvature) == (
            4,
            "lsq",
            epochs[1],
            0.01,
            True,
        )
    plans = RECIPES["quantization"](scale, 2).plans
    chosen = select(plans, ["bsam-2"], ["mobilenet_v1"])
    assert [(plan.run.task.weight_bits, plan.run.seed) for plan in chosen] == [(None, 0), (None, 1), (4, 0), (4, 1)]
    assert select(chosen) == chosen


@pytest.mark.parametrize("scale", ["smoke", "short", "paper"])
def test_every_method_has_every_total_radius_and_the_same_schedule(scale):
    """By the optimizers that the runs build, at the start, in the middle and at the end of training."""
    sgd, *plans = RECIPES["radius"](scale, 1).plans
    data = "digits" if scale == "smoke" else "cifar10"
    assert sgd.run.method == "base"
    found = []
    for plan in plans:
        run, total = plan.run, plan.about["radius"]
        assert (run.data, run.task.label_noise, run.task.noise_labels, run.curvature) == (data, 0.4, "other", True)
        radii = [sum(radii_of(run, lr)) for lr in (run.lr, run.lr / 2, 0.0)]
        name = variant_of(run).name
        assert radii == pytest.approx([total] * 3 if name == "sam" else [total, 0.75 * total, 0.5 * total])
        assert plan.about["row"] == f"{variant_of(run).title}, total radius {total:g}"
        found.append((total, name))
    totals = (0.1, 0.2, 0.4, 0.6) if data == "digits" else (0.05, 0.1, 0.2, 0.4)
    assert found == [(total, name) for total in totals for name in ("sam", "sam-follow", "bsam", "bsam-2")]


@pytest.mark.parametrize("scale", ["smoke", "paper"])
def test_transformers_train_with_adamw_at_equal_radii_and_twice_as_long(scale):
    plans = RECIPES["transformers"](scale, 1).plans
    size = {"smoke": ("vit-nano", 32, 2, ["digits"]), "paper": ("vit-tiny", 512, 100, ["cifar100", "cifar10"])}[scale]
    model, batch, epochs, data = size
    assert list(dict.fromkeys(plan.run.data for plan in plans)) == data
    for name in data:
        first, twice, *others = [plan for plan in plans if plan.run.data == name]
        assert (first.run.method, first.run.base, first.run.decay, first.run.clip_norm) == (
            "base",
            "adamw",
            "weights",
            1,
        )
        assert (first.run.model, first.run.batch, first.run.epochs) == (model, batch, epochs)
        assert 0 < first.run.warmup < epochs / 3
        assert twice.run == replace(first.run, epochs=2 * epochs)
        assert (twice.about["row"], twice.about["experiment"]) == ("AdamW, twice the epochs", first.about["experiment"])
        found = {}
        for plan in others:
            run = plan.run
            same = replace(run, method="base", arguments={}, rho_warmup=0.0)
            assert same == first.run  # nothing but the method differs
            assert plan.about["experiment"] == first.about["experiment"]
            assert run.rho_warmup in (0, epochs / 4)
            assert plan.about["row"].endswith(", warm-up") == (run.rho_warmup > 0)
            found.setdefault(variant_of(run).name, []).append((plan.about["radius"], run.rho_warmup))
        for variant, unit in {"sam": 1, "bsam-2": 1, "bsam": 1, "asam": 10, "msam": 15, "looksam": 1}.items():
            expected = [(unit * radius, w) for radius in (0.05, 0.1, 0.2, 0.4) for w in (0, epochs / 4)]
            assert [pair for each in found.pop(variant) for pair in each] == pytest.approx(
                [pair for each in expected for pair in each]
            )
        assert not found


CIFAR = ("classification", "rho-min-study", "label-noise", "training-curves", "sharpness-curves", "gradient-conflict")


@pytest.mark.parametrize("name", [*CIFAR, "transfer"])
def test_short_is_the_paper_with_fewer_epochs(name):
    epochs = 30 if name == "transfer" else 24  # of which the paper has no more: short has fewer data sets
    paper = [replace(run, epochs=epochs, probe=None) for run in runs_of(name)]
    short = [replace(run, probe=None) for run in runs_of(name, "short")]
    assert {run.epochs for run in short} == {epochs}
    assert all(run in paper for run in short)
    assert len(short) == {"classification": 2 * len(variants()), "transfer": 2 * 2 * 7}.get(name, len(paper))


@pytest.mark.parametrize("name", [*CIFAR, "transfer", "pose", "transformers"])
def test_smoke_has_every_row_in_small(name):
    small = {"timm:test_efficientnet", "timm:test_resnet", "simcc_resnet8"}
    small |= {model for model, entry in MODELS.items() if entry.parameters < 120_000}
    smoke, paper = (RECIPES[name](scale, 1) for scale in ("smoke", "paper"))
    assert all(plan.run.model in small and plan.run.weights is None and plan.run.epochs < 5 for plan in smoke.plans)
    assert {plan.about["row"] for plan in smoke.plans} == {plan.about["row"] for plan in paper.plans}
    assert "smoke" in smoke.title
    assert "smoke" not in RECIPES["radius"]("smoke").title  # the whole study on digits


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_directories_and_rows_are_unique_and_seeds_come_one_after_the_other(recipe):
    for scale in recipe.scales:
        plans = recipe(scale, 3).plans
        assert len({plan.name for plan in plans}) == len(plans)
        assert all(set(plan.name) <= set(string.ascii_letters + string.digits + "-_.") for plan in plans)
        assert [plan.run.seed for plan in plans] == sorted(plan.run.seed for plan in plans)
        assert len({(plan.about["experiment"], plan.about["row"], plan.run.seed) for plan in plans}) == len(plans)


@pytest.mark.parametrize(
    ("name", "scale", "expected"),
    [
        ("classification", "smoke", (1, 1)),
        ("classification", "paper", (None, 1)),
        ("radius", "smoke", (1, 2)),
        ("radius", "short", (None, 1)),
        ("demo", None, (1, 2)),
    ],
)
def test_small_networks_train_with_one_thread_and_those_of_real_studies_two_at_a_time(name, scale, expected):
    study = RECIPES[name](scale)
    assert (study.threads, study.workers) == expected


def test_arguments_of_a_scale_may_be_changed():
    study = RECIPES["label-noise"]("paper", networks=("resnet8", "resnet20"), data=("digits",), epochs=3)
    assert {(plan.run.model, plan.run.data, plan.run.epochs) for plan in study.plans} == {
        ("resnet8", "digits", 3),
        ("resnet20", "digits", 3),
    }
    assert study.settings == {"epochs": 3, "precision": "bf16", "compile": True}  # what a folder holds: no lists


def test_a_selection():
    plans = RECIPES["classification"]("paper", 2).plans
    assert select(plans) == plans
    chosen = select(plans, models=["resnet18"], data=["cifar10"])
    assert chosen == [plan for plan in plans if (plan.run.model, plan.run.data) == ("resnet18", "cifar10")]
    assert [plan.run.seed for plan in select(plans, ["bsam-2"], ["pyramidnet110"], ["cifar100"])] == [0, 1]
    assert MATCHED == ("sam-sum", "sam-follow")
