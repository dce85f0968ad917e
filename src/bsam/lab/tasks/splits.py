"""The data of a task of the user, which samples are held out, and which processes evaluate them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from ...common.errors import BsamError, BsamRuntimeError, BsamTypeError, BsamValueError
from ..common.names import call_with, describe_error
from ..config import to_json_value

Arrays: TypeAlias = tuple[Tensor, ...]
# The split "holdout" takes a fifth of the training samples and at least 200, but never more than half of them. An
# accuracy of 90 % on 200 samples has a standard error of 2 points.
HOLDOUT = 0.2
MIN_HOLDOUT = 200
MAX_HOLDOUT = 0.5
_HOLDOUT_STREAM = 0x401D  # makes this random choice independent of that of the label noise


@dataclass(frozen=True)
class Splits:
    """The data of a task.

    Each split is a tuple ``(x, *targets)`` of equally long arrays, tensors or memory maps, or a map-style dataset of
    such tuples, which is read into memory. Numbers with 64 bits after the point become 32-bit ones.

    Args:
        train: the training samples.
        test: the test samples.
        validation: the validation samples; without them, tuning holds out training samples.
        facts: plain values that networks and predictions need, such as the number of classes.
    """

    train: Any
    test: Any = None
    validation: Any = None
    facts: Mapping[str, Any] = field(default_factory=dict)


_LAST_DATA: dict[str, dict[str, Any]] = {}  # consecutive runs share the data


def load_splits(
    read: Callable[..., Splits], name: str, given: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the checked splits that a function returns, by name, as tuples of tensors, and its ``facts``.

    Args:
        read: the function.
        name: its name, for errors.
        given: ``data_dir``, ``cache_dir`` and ``image_size``; None if they are not given.
        settings: the settings of the task, by name.
    """
    named = inspect.signature(read).parameters
    if given["image_size"] is not None and "image_size" not in named:
        raise BsamValueError(f"{name} does not use image_size: leave it out")
    if given["data_dir"] is None and "data_dir" in named and named["data_dir"].default is inspect.Parameter.empty:
        raise BsamRuntimeError(f"{name} is read from files: give their folder with --data-dir (data_dir)")
    offered = {**settings, **{key: value for key, value in given.items() if value is not None}}
    key = repr((name, id(read), offered))
    if key not in _LAST_DATA:
        _LAST_DATA.clear()
        try:
            splits = call_with(read, offered, name, given)
        except BsamError:
            raise
        except Exception as error:
            described = describe_error(error, getattr(read, "__module__", None))
            raise BsamRuntimeError(f"{name} raised {described}: correct the function, or the folder") from error
        if not isinstance(splits, Splits):
            raise BsamTypeError(f"{name} must return bsam.lab.Splits, got {type(splits).__name__}")
        parts = {part: getattr(splits, part) for part in ("train", "test", "validation")}
        loaded: dict[str, Any] = {
            part: _tensors(value, f"{part} of {name}") for part, value in parts.items() if value is not None
        }
        facts = {"input_shape": list(loaded["train"][0].shape[1:]), **splits.facts}
        try:
            loaded["facts"] = json.loads(json.dumps(to_json_value(facts)))  # as predictions will read them
        except TypeError as error:
            raise BsamTypeError(f"facts of {name} must be plain values: {error}") from error
        _LAST_DATA[key] = loaded
    return _LAST_DATA[key]


def _tensors(part: Any, name: str) -> Arrays:
    """Return a split as tensors in host memory."""
    if not isinstance(part, (tuple, list)):
        if not (hasattr(part, "__getitem__") and hasattr(part, "__len__")) or isinstance(part, (np.ndarray, Tensor)):
            raise BsamTypeError(f"{name} must be a tuple (x, *targets) or a dataset, got {type(part).__name__}")
        part = default_collate([part[i] for i in range(len(part))])
    tensors = tuple(_tensor(array) for array in part)
    if any(tensor.ndim == 0 for tensor in tensors):
        raise BsamTypeError(f"{name} must be a tuple (x, *targets) of arrays, got {part!r:.80}")
    if not tensors or len({len(array) for array in tensors}) > 1 or not len(tensors[0]):
        lengths = ", ".join(str(len(array)) for array in tensors)
        raise BsamValueError(f"{name} must have arrays of the same length, at least 1; got lengths {lengths}")
    return tensors


def _tensor(array: Any) -> Tensor:
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        array = np.array(array)  # torch warns of those that cannot be changed
    tensor = torch.as_tensor(array).cpu()
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def holdout_size(samples: int) -> int:
    """Return how many training samples are held out.

    Example:
        >>> [holdout_size(samples) for samples in (20, 300, 640, 50_000)]
        [10, 150, 200, 10000]
    """
    return max(1, min(max(round(HOLDOUT * samples), MIN_HOLDOUT), int(MAX_HOLDOUT * samples)))


def holdout_mask(samples: int, seed: int) -> Tensor:
    """Return a random mask of the training samples that are held out.

    Example:
        >>> mask = holdout_mask(640, seed=0)
        >>> int(mask.sum())
        200
    """
    mask = torch.zeros(samples, dtype=torch.bool)
    mask[np.random.default_rng((seed, _HOLDOUT_STREAM)).permutation(samples)[: holdout_size(samples)]] = True
    return mask


@dataclass(frozen=True)
class Shares:
    """Every ``size``-th batch is this process's, beginning with number ``rank``. By default, there is one process.

    Args:
        rank: the number of this process.
        size: the number of processes.
        gather: returns the results of all processes, by rank.

    Example:
        >>> [list(Shares(rank, 2).of("abcde")) for rank in range(2)]
        [['a', 'c', 'e'], ['b', 'd']]
    """

    rank: int = 0
    size: int = 1
    gather: Callable[[list[Tensor]], list[list[Tensor]]] = field(default=lambda results: [results], repr=False)

    def of(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Return this process's batches."""
        return batches[self.rank :: self.size]

    def in_order(self, results: list[Tensor]) -> list[Tensor]:
        """Return the results for all batches, in the order of the batches; all processes call this.

        With several processes, the tensors are on the CPU.
        """
        if self.size == 1:
            return results
        parts = self.gather([result.cpu() for result in results])
        return [result for turn in zip_longest(*parts) for result in turn if result is not None]


WHOLE = Shares()
