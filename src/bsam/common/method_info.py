"""Class attributes that describe a method."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar


class Need(Enum):
    """Requirements of a method beyond a closure that returns the mean loss."""

    PER_SAMPLE_LOSSES = "a closure that takes sample indices"
    MOMENTUM = "a base optimizer with momentum"
    TOTAL_STEPS = "total number of steps"
    SAMPLE_IDS = "sample indices"
    INPUTS = "inputs"
    EPOCHS = "epoch number"
    FORWARD_PASS = "extra forward pass"
    OUTPUTS = "a closure that returns outputs, too"


class MethodInfo:
    """The class attributes that describe a method, with defaults."""

    title: ClassVar[str] = ""  # the name in tables
    reference: ClassVar[str] = ""  # authors, venue and year
    purpose: ClassVar[str] = ""  # what the method is for
    arxiv: ClassVar[str] = ""  # the paper's number on arXiv; empty if it is not there
    passes: float = 2  # per step, on average, with the default arguments; instances may override it
    memory: ClassVar[float] = 1  # in a step on a GPU, beyond that of the base optimizer; 1 is the size of the weights
    memory_kept: ClassVar[float] = 0  # of it, between steps
    needs: tuple[Need, ...] = ()  # with the default arguments; instances may override it
    is_loss: ClassVar[bool] = False  # a loss, not an optimizer
    capturable: ClassVar[bool] = False  # whether steps of one kind launch the same kernels on the same memory

    # For bsam.lab.training.
    set_by_training: ClassVar[tuple[str, ...]] = ("base", "model", "warmup", "start")  # arguments that training sets
    counts_of_batch: ClassVar[tuple[str, ...]] = ()  # arguments that are divided by the number of processes
    single_process: ClassVar[str] = ""  # why the method needs a single process; empty if it does not

    @classmethod
    def passes_with(cls, arguments: Mapping[str, Any]) -> float:
        """Return the passes per step with these arguments, on average if steps differ."""
        return cls.passes

    @classmethod
    def memory_in_words(cls) -> str:
        """Describe the extra memory of the method.

        Example:
            >>> import bsam
            >>> bsam.SAM.memory_in_words(), bsam.LookSAM.memory_in_words()
            ('1', '3, 1 kept')
        """
        return f"{cls.memory:g}" + (f", {cls.memory_kept:g} kept" if cls.memory_kept else "")

    @classmethod
    def needs_in_words(cls) -> str:
        """Describe the requirements of the method; empty if it has none."""
        return ", ".join(need.value for need in cls.needs)
