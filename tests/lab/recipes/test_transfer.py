"""The transfer table, as the paper has it."""

import torch

import bsam
from bsam.lab.recipes import RECIPES
from bsam.lab.recipes.image_recipes import transfer
from bsam.lab.recipes.paper import TRANSFER
from bsam.lab.recipes.scales import scale_of
from bsam.lab.recipes.variants import variant_of

DATA = ("cifar10", "cifar100", "flowers102", "stanford_cars", "oxford_pet")
COLUMNS = ("sgd", "sam", "sam-sum", "sam-follow", "bsam", "bsam-2", "bsam-released")
SAM_RADII = {"sam": [0.05, None], "sam-sum": [0.1, 0.1], "sam-follow": [0.1, 0.05]}  # rho and rho_floor
PRINTED = {  # test accuracy in %, mean and standard deviation, on DATA
    ("timm:efficientnet_b0", "sgd"): "97.32 0.07  87.05 0.11  77.11 0.36  74.47 0.55  87.89 0.43",
    ("timm:efficientnet_b0", "sam"): "97.48 0.07  87.27 0.21  78.04 0.37  75.75 0.41  88.30 0.16",
    ("timm:efficientnet_b0", "bsam"): "97.52 0.04  87.40 0.21  79.02 1.10  77.54 0.62  89.42 0.25",
    ("timm:resnet50", "sgd"): "97.28 0.05  86.20 0.18  86.74 0.16  80.02 0.24  93.11 0.17",
    ("timm:resnet50", "sam"): "97.78 0.02  87.48 0.04  87.53 0.13  83.69 0.19  93.14 0.14",
    ("timm:resnet50", "bsam"): "97.81 0.06  87.51 0.05  88.22 0.20  84.36 0.16  93.06 0.15",
}
LITE = [f"timm:tf_efficientnet_lite{i}" for i in range(3)]


def printed(network, method):
    numbers = [float(number) for number in PRINTED[network, method].split()]
    return dict(zip(DATA, zip(numbers[::2], numbers[1::2], strict=True), strict=True))


def test_every_published_number():
    for network, method in PRINTED:
        for data, (mean, std) in printed(network, method).items():
            number = TRANSFER.numbers[network, data, method]
            assert (number.mean, number.std, number.note) == (mean, std, "")
            for other in LITE if "efficientnet" in network else ["resnet50"]:
                beside = TRANSFER.numbers[other, data, method]
                assert (beside.mean, beside.std) == (mean, std)
                assert ("published for EfficientNet-B0" in beside.note) == (other in LITE)


def test_the_papers_runs():
    runs = transfer(scale_of("paper"))
    assert [(run.model, run.data, variant_of(run).name) for run in runs] == [
        (network, data, name)
        for network in ("timm:efficientnet_b0", "timm:resnet50")
        for data in DATA
        for name in COLUMNS
    ]
    for run in runs:
        assert (run.epochs, run.batch, run.lr, run.schedule, run.momentum) == (30, 128, 0.01, "cosine", 0.9)
        assert run.weight_decay == {"timm:efficientnet_b0": 1e-5, "timm:resnet50": 1e-4}[run.model]
        assert (run.label_smoothing, run.label_noise, run.weights, run.precision) == (0.0, 0.0, "pretrained", "bf16")
        assert (run.head_lr, run.layer_decay, run.freeze_backbone, run.warmup, run.augment) == (None, 1, False, 0, None)
        cls = {"sam": bsam.SAM, "bsam": bsam.BSAM}.get(run.method)
        if cls is not None:
            made = cls(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), None, **run.arguments)
            names = ("rho", "rho_floor") if run.method == "sam" else ("rho_max", "rho_min")
            expected = SAM_RADII.get(variant_of(run).name, [0.05, 0.05])
            assert [made.param_groups[0][name] for name in names] == expected
    numbers = {(run.model, run.data): RECIPES["transfer"].published(run).mean for run in runs if run.method == "base"}
    assert numbers["timm:resnet50", "stanford_cars"] == 80.02


def test_short_is_two_data_sets():
    assert {run.data for run in transfer(scale_of("short"))} == {"flowers102", "oxford_pet"}
    assert transfer(scale_of("short")) == [
        run for run in transfer(scale_of("paper")) if run.data in ("flowers102", "oxford_pet")
    ]


def test_smoke_needs_no_download():
    runs = transfer(scale_of("smoke"))
    assert {(run.model, run.data, run.weights) for run in runs} == {
        (model, "digits", None) for model in ("timm:test_efficientnet", "timm:test_resnet")
    }
    assert {(run.image_size, run.epochs, run.lr, run.label_smoothing) for run in runs} == {(32, 2, 0.01, 0.0)}
    assert len(runs) == 14
