"""A network with what trains it: every method of METHODS behind one step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.distillation import Distillation
from ..core.optimizer import SharpnessAware
from ..methods import METHODS
from ..methods.mesa import MESA
from ..methods.saf import SAF


@dataclass(frozen=True)
class Learner:
    """A network, the optimizer that moves its weights, and the loss that it lowers.

    Args:
        model: the network.
        optimizer: sharpness-aware or any other.
        loss: SAF or MESA, giving one loss per sample; None is the cross-entropy.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 3)
        >>> learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> learner.step(torch.ones(4, 2), torch.tensor([0, 1, 2, 0]), torch.arange(4))
    """

    model: Callable[[Tensor], Tensor]
    optimizer: Optimizer
    loss: Distillation | None = None

    def begin_epoch(self, epoch: int) -> None:
        """To call before each epoch, counted from 0."""
        if self.loss is not None:
            self.loss.set_epoch(epoch)

    def losses(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """The loss of each sample; ``index`` is its place in the training set."""
        logits = self.model(x)
        match self.loss:
            case SAF():
                return self.loss(logits, y, index)
            case MESA():
                return self.loss(logits, y, x)
        return F.cross_entropy(logits, y, reduction="none")

    def backward(self, x: Tensor, y: Tensor, index: Tensor) -> None:
        """Add the optimizer's direction on this batch to ``p.grad``."""

        def closure(chosen: Tensor | slice = slice(None)) -> Tensor:
            return self.losses(x[chosen], y[chosen], index[chosen])

        if isinstance(self.optimizer, SharpnessAware):
            self.optimizer.backward(closure)
        else:
            closure().mean().backward()

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> None:
        """One step on one batch."""
        self.optimizer.zero_grad()
        self.backward(x, y, index)
        self.optimizer.step()


def equip(method: str, arguments: Mapping[str, Any], base: Optimizer, model: nn.Module, **known: Any) -> Learner:
    """A network with ``base`` alone for the method ``"sgd"``; with a method of METHODS around it; or, for SAF and MESA, with ``base`` on their loss.

    Args:
        method: its name.
        arguments: of the method, by name.
        base: the optimizer that takes the step.
        model: the network.
        known: what the training knows and some methods ask for, under the names of their arguments: ``seed``, ``total_steps``, ``samples``, ``classes``. A
            method gets what it asks for.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 3)
        >>> equip("rst", {"p": 0.25}, torch.optim.SGD(model.parameters(), lr=0.1), model, seed=7, total_steps=100).optimizer.seed
        7
    """
    if method == "sgd":
        return Learner(model, base)
    cls: Any = METHODS[method].cls
    known = {"base": base, "optimizer": base, "model": model, "reduction": "none", **known}
    own = cls(**{**{name: known[name] for name in inspect.signature(cls).parameters if name in known}, **arguments})
    return Learner(model, base, own.to(next(model.parameters()).device)) if METHODS[method].is_loss else Learner(model, own)
