"""``torch.compile``, where it works."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.errors import BsamRuntimeError


@functools.cache
def compiler_trouble(device: torch.device) -> str | None:
    """Why ``torch.compile`` does not work on this device, tried once on a small layer, forward and backward; None where
    it does.
    """

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).relu().sum()

    try:
        torch.compile(layer)(
            torch.ones(2, 2, device=device), torch.ones(2, 2, device=device, requires_grad=True)
        ).backward()
    except (
        RuntimeError,
        OSError,
    ) as error:  # RuntimeErrors are all of torch._dynamo's, and that of a Python it does not know; an OSError that of its cache
        return _reason(error)
    return None


@contextlib.contextmanager
def compiling(name: str) -> Iterator[None]:
    """What the compiler cannot do with the network ``name`` is refused in a sentence."""
    from torch._dynamo.exc import TorchDynamoException  # here: it takes seconds, and most runs do without

    try:
        yield
    except TorchDynamoException as error:
        raise BsamRuntimeError(
            f"compile is set, and torch.compile cannot take {name} ({_reason(error)}): leave compile out"
        ) from error


def _reason(error: Exception) -> str:
    """The first line, of what the compiler stumbled over where it says so."""
    inner = getattr(error, "inner_exception", error)
    return str(inner).strip().partition("\n")[0] or type(inner).__name__
