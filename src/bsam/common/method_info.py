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
    """The class attributes that describe a method; each method sets those whose default does not fit."""

    title: ClassVar[str] = ""  # its name in a table
    reference: ClassVar[str] = ""  # authors, place and year
    purpose: ClassVar[str] = ""  # what it is for
    arxiv: ClassVar[str] = ""  # the number of its paper on arXiv; empty if it is not there
    passes: float = 2  # per step with the default arguments, on average if steps differ; an instance may have others
    memory: ClassVar[str] = "2"  # extra, during a step, and what of it is kept, in units of the parameters' size
    needs: ClassVar[tuple[Need, ...]] = ()
    is_loss: ClassVar[bool] = False  # and not an optimizer
    capturable: ClassVar[bool] = False  # in a CUDA graph: all steps launch the same kernels, on the same memory

    # Used in training.
    set_by_training: ClassVar[tuple[str, ...]] = ("base", "model")  # arguments that the training sets
    counts_of_batch: ClassVar[tuple[str, ...]] = ()  # arguments that count samples of the whole batch, over processes
    single_process: ClassVar[str] = ""  # why the method cannot be trained in several processes; empty if it can

    @classmethod
    def passes_with(cls, arguments: Mapping[str, Any]) -> float:
        """Return the passes per step with these arguments, on average if steps differ."""
        return cls.passes

    @classmethod
    def needs_in_words(cls) -> str:
        """Return what the method needs beyond a closure that returns the loss; empty if nothing."""
        return ", ".join(["is a loss"] * cls.is_loss + [need.value for need in cls.needs])
