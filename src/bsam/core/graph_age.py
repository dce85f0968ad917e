"""Finding parts of a loss that were computed before the pass, at other weights."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from .refusal import Refusal

_MEND = "Every pass must compute the whole loss anew: move the forward pass into the closure, or detach parts of it"


def now() -> int:
    """The number that the next node of the autograd graph of this thread gets."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def check_age(loss: Tensor, since: int, params: Collection[Tensor] | None) -> None:
    """Refuse a loss whose graph is older than ``since``.

    Args:
        loss: what the closure returned.
        since: what :func:`now` gave before the closure ran.
        params: look through the whole graph, and refuse if one of these is behind a node that is older. None looks at
            the loss alone.

    Nodes are numbered by thread. The closure runs in this one, and on the CPU so do the backward passes in it (as those
    of a gradient penalty); those of CUDA have threads of their own, so ``params`` are for graphs of the CPU.
    """
    root = loss.grad_fn
    if root is None:
        return
    if root._sequence_nr() < since:
        raise Refusal(f"the closure returned a loss that was computed before this pass began. {_MEND}")
    if params is None:
        return
    todo, seen = [(root, False)], {(root, False)}
    while todo:
        node, behind_old = todo.pop()
        if type(node).__name__ == "AccumulateGrad":
            if behind_old and node.variable in params:  # type: ignore[attr-defined]
                shape = tuple(node.variable.shape)  # type: ignore[attr-defined]
                where = "behind a part of the loss that was computed before this pass began"
                raise Refusal(f"a parameter of the shape {shape} is {where}. {_MEND}")
            continue
        old = node._sequence_nr() < since
        for following, _ in node.next_functions:
            if following is not None and (following, old) not in seen:
                seen.add((following, old))
                todo.append((following, old))
