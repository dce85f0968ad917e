"""Check that the loss of a batch is the mean of the losses of its samples."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..common.errors import BsamValueError
from ..core.undo import Undo

Samples: TypeAlias = tuple[bool, Any, Any]  # whether the next are outputs, outputs or inputs, targets

ROUNDING = 16.0  # tolerance for rounding, in machine epsilons times the mean size of the loss or the outputs
MAX_SAMPLES, MAX_ENTRIES = 16, 1 << 22  # samples of different batches that are compared at once, and their size


@dataclass(eq=False)
class MeanCheck:
    """Compares the losses of batches with the losses of their parts, in one pass over the data.

    The loss of each batch is compared with the losses of its halves, and the joint loss of samples from different
    batches with their single losses, for batches of one sample or one class. Samples of different shapes cannot be
    joined; each is then joined with itself, which does not show different weights of samples. With a single batch any
    loss is well defined, so errors are raised only after the second batch.

    The losses of parts are computed from the outputs. If these do not have one row per sample, the model runs again on
    the inputs of the parts; with ``mode="train"``, such batches are not checked. Neither are batches that cannot be
    split, nor losses that accept whole batches only.
    """

    model: Callable[[Any], Any]
    batch_loss: Callable[[Any, Any], Tensor]  # for outputs and targets
    mode: str  # as in HessianOperator
    batches: int = 0
    problem: str = ""  # the first one found
    collected: list[tuple[Samples, float]] = field(default_factory=list)  # a sample of each batch, and its loss

    def add(self, loss: Tensor, x: Any, out: Any, y: Any, n: int) -> None:
        """Check a batch of ``n`` samples."""
        self.batches += 1
        leaves = tree_leaves(out)
        # a second output with one row, such as a penalty, may not belong to the sample
        from_outputs = all(_has_rows(t, n) for t in leaves) and (n > 1 or len(leaves) == 1)
        samples = from_outputs, out if from_outputs else x, y
        if (from_outputs or self.mode == "eval") and _can_be_split(samples, n):
            self._run(partial(self._check_batch, loss, out, samples, n))

    def finish(self) -> None:
        """Check the samples that remain at the end of the pass."""
        self._run(self._compare_collected)

    def _check_batch(self, loss: Tensor, out: Any, samples: Samples, n: int) -> None:
        one = tree_map(lambda t: t.detach().clone() if _has_rows(t, 1) else t, _rows(samples, n, slice(1)))
        if n > 1:
            halves = (slice(0, n // 2), slice(n // 2, n))
            losses = [float(self._evaluate(*_rows(samples, n, half))[1]) for half in halves]
            self._compare(loss, out, [(losses[0], n // 2), (losses[1], n - n // 2)], samples[0])
            _, loss = self._evaluate(*one)
        if self.collected and not _can_be_joined(self.collected[0][0], one):
            self._compare_collected()
            self.collected = []
        self.collected.append((one, float(loss)))
        size = sum(t.numel() for t in tree_leaves(one) if isinstance(t, Tensor))
        if len(self.collected) >= max(2, min(MAX_SAMPLES, MAX_ENTRIES // size)):
            self._compare_collected()

    def _run(self, check: Callable[[], object]) -> None:
        """Run a check. Ignore failures of the loss; then, if there are several batches, raise the problem found."""
        with Undo() as undo, undo:
            undo.set_grad_enabled(False)
            undo.catch_warnings()
            warnings.simplefilter("ignore")  # a loss may warn about the shapes of a single sample
            with contextlib.suppress(RuntimeError, ValueError, IndexError, TypeError):  # for whole batches only
                check()
        if self.problem and self.batches > 1:
            raise BsamValueError(self.problem)

    def _compare_collected(self) -> None:
        """Compare the collected samples, and keep the last one to compare it with the next."""
        collected = self.collected * 2 if len(self.collected) == 1 else self.collected
        self.collected = collected[-1:]
        if collected:
            joined = _join([one for one, _ in collected])
            out, loss = self._evaluate(*joined)
            self._compare(loss, out, [(single, 1) for _, single in collected], joined[0])

    def _evaluate(self, from_outputs: bool, part: Any, y: Any) -> tuple[Any, Tensor]:
        out = part if from_outputs else self.model(part)
        return out, self.batch_loss(out, y)

    def _compare(self, loss: Tensor, out: Any, parts: Sequence[tuple[float, int]], from_outputs: bool) -> None:
        n = sum(m for _, m in parts)
        mean, full = sum(part * (m / n) for part, m in parts), float(loss)
        floats = [t for t in (loss, *tree_leaves(out)) if isinstance(t, Tensor) and t.is_floating_point()]
        scale = max(float(t.float().abs().nan_to_num(0.0, 0.0).mean()) for t in floats)
        if from_outputs:
            allowed = ROUNDING * torch.finfo(loss.dtype).eps
        else:  # the model rounds differently when it runs again
            allowed = max(torch.finfo(t.dtype).eps for t in floats) ** 0.5
        if math.isclose(mean, full, abs_tol=scale * allowed) or (math.isnan(mean) and math.isnan(full)):
            return
        self.problem = self.problem or (
            f"loss_fn is not a mean over samples: it gives {full:.6g} for {n} samples, but the mean over parts of them "
            f"is {mean:.6g} (reduction='sum'? class weights? ignore_index?). Use a mean, pass one single batch, or "
            "pass batch_weight, such as lambda x, y: (y != -100).sum()"
        )


def _has_rows(leaf: Any, n: int) -> bool:
    """Return whether ``leaf`` is a dense tensor with a row for each of ``n`` samples."""
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.shape[:1] == (n,)


def _rows(samples: Samples, n: int, rows: slice) -> Samples:
    """Return these rows of ``n`` samples; values without a row per sample stay as they are."""
    return tree_map(lambda t: t[rows] if _has_rows(t, n) else t, samples)


def _can_be_split(samples: Samples, n: int) -> bool:
    """Return whether, in each part, at least one tensor has a row per sample and all other leaves are scalars."""
    for part in samples[1:]:
        if isinstance(part, (list, tuple)) and len(part) == n:
            return False  # its entries may be samples, but only the rows of tensors can be split
        leaves = tree_leaves(part)
        others = [t for t in leaves if not _has_rows(t, n)]
        if len(others) == len(leaves) or any(isinstance(t, Tensor) and t.dim() > 0 for t in others):
            return False
    return True


def _can_be_joined(first: Samples, second: Samples) -> bool:
    """Return whether two samples, each a batch of one, can be one batch."""

    def leaves_fit(s: Any, t: Any) -> bool:
        if not (isinstance(s, Tensor) and isinstance(t, Tensor)):
            return bool(s == t)
        return s.shape == t.shape and s.dtype == t.dtype and (_has_rows(s, 1) or torch.equal(s, t))

    (a, structure), (b, other) = tree_flatten(first), tree_flatten(second)
    return structure == other and all(map(leaves_fit, a, b))


def _join(samples: Sequence[Samples]) -> Samples:
    """Return samples, each a batch of one, as one batch; they must fit according to :func:`_can_be_joined`."""
    return tree_map(lambda *leaves: torch.cat(leaves) if _has_rows(leaves[0], 1) else leaves[0], *samples)
