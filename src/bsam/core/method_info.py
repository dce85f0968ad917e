"""What the rest of the package reads from the class of a method."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar


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
