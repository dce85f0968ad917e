"""Quantization-aware training: float networks, then the same networks with few bits."""

from __future__ import annotations

from ..data import dataset_entry
from ..models import model_entry
from ..training.config import QUANTIZED, Run
from ..training.run_dir import run_dir_name
from .cifar import COMPARED
from .columns import TOP_EIGENVALUE
from .experiments import Recipe, TableCell
from .paper import QUANTIZATION
from .scales import Scale, scale_of
from .variants import variant_of, variants

NETWORKS = ("resnet18", "mobilenet_v1")
BITS = 4  # of weights and activations
EPOCHS = {"smoke": 2, "short": 12, "paper": 60}  # with quantization; without, those of the scale
SMOKE = {"limit_train": 12, "batch": 10}  # Hessian products take most of the time; --tune holds one image out
FULL_PRECISION = "Full precision"  # the row of the float network


def quantization(scale: Scale | str) -> list[Run]:
    """Return float networks, trained by SGD, and after each the runs that quantize it and train it further."""
    scale = scale_of(scale)
    data, runs = scale.data[0], []
    common = {"curvature": True, **(SMOKE if scale.name == "smoke" else {})}
    own = {**QUANTIZED, **common, "epochs": EPOCHS[scale.name], "weight_bits": BITS}
    for network in NETWORKS:
        base = scale.run(variants()["sgd"], network, data, **common)
        init = run_dir_name(base)
        runs += [base, *(scale.run(variants()[name], network, data, init=init, **own) for name in COMPARED)]
    return runs


def by_precision(run: Run) -> TableCell:
    """A section for each data set, a row for the float network and one for each method, a column for each network."""
    row = FULL_PRECISION if run.weight_bits is None else variant_of(run).title
    return TableCell(f"{dataset_entry(run.data).title}, W{BITS}A{BITS}", row, model_entry(run.model).title)


def quantization_notes(run: Run) -> list[str]:
    """Return the lines below the table of which a float run is this one.

    Example:
        >>> quantization_notes(quantization("short")[0])[0]  # doctest: +ELLIPSIS
        'Full precision: the float network, trained by SGD. The rows below begin with it and have 12 epochs more: ...'
    """
    more = {scale_of(name).settings.get("epochs", Run.epochs): epochs for name, epochs in EPOCHS.items()}[run.epochs]
    return [
        f"{FULL_PRECISION}: the float network, trained by SGD. The rows below begin with it and have {more} epochs "
        f"more: weights and inputs of layers with {BITS} bits, those of the first and the last layer with 8, learned "
        "scales (LSQ).",
        "λmax: the largest eigenvalue of the Hessian of the training loss; of a quantized network the straight-through "
        "one, at its quantized weights.",
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
