"""Scales: the paper's protocol, the same with fewer epochs, or small networks on small data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import Run
from .variants import MethodVariant, arguments

NETWORKS = ("resnet18", "wide_resnet28_10", "pyramidnet110")  # the paper's
NETWORK_SETTINGS: Mapping[str, Mapping[str, Any]] = {  # where the paper's differ from those of the other networks
    "pyramidnet110": {"lr": 0.1, "weight_decay": 5e-4},
    "timm:efficientnet_b0": {"weight_decay": 1e-5},
}
STANDS_FOR = {  # networks whose weights can be converted: the paper's networks that they replace
    "resnet50": "timm:resnet50",
    **dict.fromkeys((f"timm:tf_efficientnet_lite{i}" for i in range(3)), "timm:efficientnet_b0"),
}


@dataclass(frozen=True)
class Scale:
    """The size of an experiment: which networks and data sets, and settings that all runs share.

    Args:
        name: its name on the command line.
        about: a description in one sentence.
        networks: the names of the networks.
        data: the names of the data sets; figures show the last one.
        probe: the number of steps between two readings, for recipes with a probe.
        settings: settings of every run.
        stand_ins: small networks that replace large ones, by the name of the large one.
        weights: files with initial weights, by the name of their network, from ``--weights``.
        threads: the number of torch's threads on a CPU; None leaves it unchanged.
        workers: the number of processes that train at the same time on a CPU.
    """

    name: str
    about: str
    networks: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    probe: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    workers: int = 1

    def run(self, variant: MethodVariant, network: str, data: str, radii: str | None = None, **more: Any) -> Run:
        """Return the run of a method on a network and a data set.

        Args:
            variant: one of :func:`variants`.
            network: the name of the network; a stand-in replaces it.
            data: the name of the data set.
            radii: another data set whose radii it uses.
            more: settings of the run; ``arguments`` are added to those of the method.
        """
        method_arguments = {**arguments(variant, radii or data), **more.pop("arguments", {})}
        settings = {**self.settings, **NETWORK_SETTINGS.get(network, {}), **more}
        return Run.of(
            variant.method, method_arguments, model=self.stand_ins.get(network, network), data=data, **settings
        )


FAST = {"precision": "bf16", "compile": True}  # the paper does not state its precision
CIFAR = ("cifar10", "cifar100")
SMALL = {
    "resnet18": "resnet8",
    "wide_resnet28_10": "wide_resnet10_1",
    "pyramidnet110": "pyramidnet8",
    "mobilenet_v1": "mobilenet_v1_small",
    "timm:efficientnet_b0": "timm:test_efficientnet",
    "timm:resnet50": "timm:test_resnet",
}

SCALES: Mapping[str, Scale] = {
    scale.name: scale
    for scale in (
        Scale(
            "smoke",
            "small networks on digits or drawings: a test that everything runs, in a minute on two cores",
            NETWORKS,
            ("digits",),
            settings={"epochs": 2, "batch": 64, "limit_train": 128, "limit_test": 80},
            stand_ins=SMALL,
            threads=1,  # a second thread would mostly wait
        ),
        Scale(
            "short",
            "the paper's protocol with fewer epochs, 24 on CIFAR: about an hour on a large GPU",
            ("resnet18",),
            CIFAR,
            probe=20,
            settings={**FAST, "epochs": 24},
        ),
        Scale("paper", "the paper's protocol: 200 epochs on CIFAR", NETWORKS, CIFAR, probe=100, settings=FAST),
        Scale(
            "demo",
            "a small network on digits, 22 epochs: the demo's only scale",
            ("digits_net",),
            ("digits",),
            settings={
                "lr": 0.04,
                "warmup": 3,
                "weight_decay": 5e-4,
                "epochs": 22,
                "batch": 64,
                "label_smoothing": 0.0,
                "label_noise": 0.4,
                "noise_labels": "other",
            },
            threads=1,
            workers=2,
        ),
    )
}
