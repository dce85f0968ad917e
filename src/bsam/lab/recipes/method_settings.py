"""Settings of the methods in recipes, by method; a method without an entry gets the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Arguments: TypeAlias = Mapping[str, Any]

# Arguments that are set to SAM's radius for the data set.
SAM_RADII: Mapping[str, tuple[str, ...]] = {
    "bsam": ("rho_max", "rho_min"),
    **dict.fromkeys(("sam", "gsam", "looksam", "esam", "ksam", "aesam", "rst"), ("rho",)),
}

# Arguments for some data sets.
DATA_ARGUMENTS: Mapping[str, Mapping[str, Arguments]] = {
    "asam": {"cifar100": {"rho": 1.0}},
    "friendly_sam": {"cifar100": {"rho": 0.2, "decay": 0.6}},
    "ksam": {"digits": {"k": 32}},  # half of a batch, as on CIFAR
    "mesa": {"digits": {"start_epoch": 0}},  # the default is for 200 epochs
    "msam": {"digits": {"rho": 0.3}},  # the default is for networks a thousand times as large
    "saf": {"digits": {"start_epoch": 0, "epochs_back": 1}},  # the default is for 200 epochs
}

# The candidates of the demo: three for each method that has an entry or an argument rho.
DEFAULT_CANDIDATES: tuple[Arguments, ...] = ({"rho": 0.1}, {"rho": 0.2}, {"rho": 0.4})
CANDIDATES: Mapping[str, tuple[Arguments, ...]] = {
    "asam": ({"rho": 0.5}, {"rho": 1.0}, {"rho": 2.0}),
    "bsam": tuple({"rho_max": rho, "rho_min": rho} for rho in (0.05, 0.1, 0.2)),
    "gam": ({"rho_norm": 0.1}, {"rho_norm": 0.2}, {"rho_norm": 0.4}),
    "ksam": tuple({"rho": rho, "k": 32} for rho in (0.1, 0.2, 0.4)),
    "mesa": tuple({"lam": lam, "start_epoch": 1, "decay": 0.95} for lam in (0.3, 0.8, 2.0)),
    "msam": ({"rho": 0.3}, {"rho": 1.0}, {"rho": 3.0}),
    "saf": tuple({"lam": lam, "start_epoch": 1, "epochs_back": 2} for lam in (0.3, 1.0, 3.0)),
}

# The variants of each method in tables, as name: (title, arguments). A method without an entry is its only variant.
VARIANTS: Mapping[str, Mapping[str, tuple[str, Arguments]]] = {
    "bsam": {
        "bsam": ("BSAM (Algorithm 1)", {}),
        "bsam-2": ("BSAM (2 passes)", {"passes": 2}),
        "bsam-released": ("BSAM (as released)", {"start_from_min": True}),
    },
}
