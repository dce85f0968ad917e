"""Quantization-aware training: float networks, then the same networks with 4 bits."""

from __future__ import annotations

from ..data import dataset_entry
from ..models import model_entry
from ..training.config import QUANTIZED, Run
from ..training.run_dir import run_dir_name
from .cells import TableCell
from .cifar import COMPARED
from .columns import TOP_EIGENVALUE, TOP_EIGENVALUE_NOTE
from .experiments import Recipe
from .paper import QUANTIZATION
from .scales import Scale, scale_of
from .variants import variant_of, variants

NETWORKS = ("resnet18", "mobilenet_v1")
BITS = 4  # of weights and activations
EPOCHS = {"smoke": 2, "short": 12, "paper": 60}  # of the quantized runs; float runs have those of the scale
SMOKE = {"limit_train": 12, "batch": 6}  # few samples, as Hessian products are slow; --tune holds out half of them
FULL_PRECISION = "Full precision"  # the row of the float network


def quantization(scale: Scale | str) -> list[Run]:
    """Return a float run with SGD for each network, each followed by the runs that quantize it and train it further."""
    scale = scale_of(scale)
    data, runs = scale.data[0], []
    common = {"curvature": True, **(SMOKE if scale.name == "smoke" else {})}
    quantized = {**QUANTIZED, **common, "epochs": EPOCHS[scale.name], "weight_bits": BITS}
    for network in NETWORKS:
        base = scale.run(variants()["sgd"], network, data, **common)
        init = run_dir_name(base)
        runs += [base, *(scale.run(variants()[name], network, data, init=init, **quantized) for name in COMPARED)]
    return runs


def by_precision(run: Run) -> TableCell:
    """Place a run: a section per data set, a row for the float network and one per method, a column per network."""
    row = FULL_PRECISION if run.weight_bits is None else variant_of(run).title
    return TableCell(f"{dataset_entry(run.data).title}, W{BITS}A{BITS}", row, model_entry(run.model).title)


def quantization_notes(run: Run) -> list[str]:
    """Return the lines below the table that contains this float run.

    Example:
        >>> quantization_notes(quantization("short")[0])[0]  # doctest: +ELLIPSIS
        'Full precision: the float network, trained with SGD. The rows below start from it and train 12 more ...'
    """
    more = {scale_of(name).settings.get("epochs", Run.epochs): epochs for name, epochs in EPOCHS.items()}[run.epochs]
    return [
        f"{FULL_PRECISION}: the float network, trained with SGD. The rows below start from it and train {more} more "
        f"epochs, with {BITS}-bit weights and layer inputs (8 bits in the first and the last layer) and learned scales "
        "(LSQ).",
        f"{TOP_EIGENVALUE_NOTE} For quantized networks it is computed at the quantized weights, with the "
        "straight-through estimator.",
    ]


QUANTIZATION_RECIPE = Recipe(
    "quantization",
    "Quantization-aware training with 4 bits",
    quantization,
    by_precision,
    published_table=QUANTIZATION,
    details=(TOP_EIGENVALUE,),
    notes=quantization_notes,
    tunable=True,
)
