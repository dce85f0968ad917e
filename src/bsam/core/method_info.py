"""What the rest of the package reads from the class of a method."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar


class Need(Enum):
    """What a method needs beyond a closure that returns the mean loss."""

    PER_SAMPLE_LOSSES = "per-sample losses by index"
    MOMENTUM = "a base with momentum"
    TOTAL_STEPS = "total_steps"
    SAMPLE_IDS = "sample ids"
    INPUTS = "the inputs"
    EPOCHS = "set_epoch"
    FORWARD_PASS = "an extra forward"


class MethodInfo:
    """The class attributes that describe a method; each method sets those whose default does not fit.

    ``title`` to ``capturable`` are described by :class:`bsam.methods.Method`.
    """

    title: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    purpose: ClassVar[str] = ""
    passes: float = 2  # an instance may have another number
    memory: ClassVar[str] = "2"
    needs: ClassVar[tuple[Need, ...]] = ()
    capturable: ClassVar[bool] = True

    # Used in training.
    set_by_training: ClassVar[tuple[str, ...]] = ("base", "model")  # arguments that the training sets
    counts_of_batch: ClassVar[tuple[str, ...]] = ()  # arguments that count samples of the whole batch, over processes
    single_process: ClassVar[str] = ""  # why the method cannot be trained in several processes; empty if it can

    # Used in the recipes.
    sam_radii: ClassVar[tuple[str, ...]] = ()  # arguments that are set to SAM's radius for the data set
    data_settings: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # arguments for some data sets, by data set
    # the arguments that the demo tries: for every method three
    tuning: ClassVar[tuple[Mapping[str, Any], ...]] = ({"rho": 0.1}, {"rho": 0.2}, {"rho": 0.4})
    # the variants that tables list, name: (title, arguments); if empty, they list only the method itself
    variants: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]]] = {}
