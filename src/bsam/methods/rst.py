"""RST."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from ..core.bernoulli import bernoulli
from ..core.checks import check_count, check_number
from ..core.objective import Objective
from ..core.optimizer import SharpnessAware
from ..core.vector import Vector


class RST(SharpnessAware):
    r"""Randomized Sharpness-Aware Training: a coin decides between SAM and the plain gradient. G-RST by ``gamma``.

    .. math::  \text{heads: } d = (1 - \gamma)\, g + \gamma\, \nabla L(w + \rho\, g / |g|), \qquad \text{tails: } d = g

    Args:
        base: the optimizer that takes the step.
        model: the network that the closure calls (its DDP, FSDP or compiled wrapper will do); None if it has no batch
            norm. If the closure runs other modules, too, a list of all of them, this one first.
        rho: the radius.
        p: the probability of heads; a step costs 1 + p passes on average.
        gamma: the weight of SAM's gradient; RST has 1.
        seed: of the bernoulli, which depend on it and on the step alone.
        m_sharpness: each rank of DDP perturbs along its own gradient.
        same_draws: all passes of a step see the same random draws (dropout, noise).

    Example:
        >>> import torch, bsam
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = bsam.RST(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, p=0.5)
        >>> x, y = torch.ones(8, 3), torch.ones(8, 1)
        >>> losses = [optimizer.step(lambda: torch.nn.functional.mse_loss(model(x), y)) for _ in range(50)]
        >>> bool(losses[-1] < losses[0] / 10)
        True

    Reference: Zhao, Zhang, Hu, "Randomized Sharpness-Aware Training for Boosting Computational Efficiency in Deep
        Learning", 2022.
    """

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module | Sequence[nn.Module] | None,
        *,
        rho: float = 0.05,
        p: float = 0.5,
        gamma: float = 1.0,
        seed: int = 0,
        m_sharpness: bool = False,
        same_draws: bool = True,
    ) -> None:
        self.p, self.gamma, self.seed = (
            check_number("p", p, low=0, high=1),
            check_number("gamma", gamma),
            check_count("seed", seed, low=0),
        )
        super().__init__(base, model, {"rho": rho}, m_sharpness=m_sharpness, same_draws=same_draws)

    def direction(self, L: Objective) -> Vector:
        g = L.grad()
        (heads,) = bernoulli(self.seed, self.t, 1, self.p)
        return (1 - self.gamma) * g + self.gamma * L.grad(at=self.epsilon(g, "rho")) if heads else g
