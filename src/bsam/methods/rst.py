"""RST."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Unpack

import numpy as np
from torch.optim import Optimizer

from ..common.checks import check_count, check_number
from ..core import Modules, Objective, SharpnessAware, StepOptions, Vector


class RST(SharpnessAware):
    r"""Randomized Sharpness-Aware Training: SAM with probability ``p``, otherwise the plain gradient.

    .. math::
        d = \begin{cases}
        (1 - \gamma)\, g + \gamma\, \nabla L(w + \rho\, g / |g|) & \text{with probability } p \\
        g & \text{otherwise}
        \end{cases}
        \qquad g = \nabla L(w)

    Args:
        rho: the radius.
        p: the probability of SAM's gradient; a step costs 1 + p passes on average.
        gamma: the weight of SAM's gradient; 1 gives RST, other values give G-RST.
        seed: the seed of the random choice, which depends only on the seed and the step.
        base, model, m_sharpness, same_draws, warmup, start: see :class:`SharpnessAware`.

    Example:
        >>> import torch, bsam
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bsam.RST(base, model, p=0.5)
        >>> loss = optimizer.step(lambda: model(torch.ones(8, 3)).square().mean())

    Reference:
        Zhao, Zhang, Hu, "Randomized Sharpness-Aware Training for Boosting Computational Efficiency in Deep Learning",
        2022.

    Differences from the paper:
        None known.
    """

    title = "RST"
    reference = "Zhao et al., 2022"
    arxiv = "2203.09962"
    purpose = "SAM on a random share of the steps, with a cost that you choose."
    passes: float = 1.5
    capturable = True

    def __init__(
        self,
        base: Optimizer,
        model: Modules,
        *,
        rho: float = 0.05,
        p: float = 0.5,
        gamma: float = 1.0,
        seed: int = 0,
        **options: Unpack[StepOptions],
    ) -> None:
        self.p, self.gamma = check_number("p", p, low=0, high=1), check_number("gamma", gamma)
        self.seed = check_count("seed", seed, low=0)
        super().__init__(base, model, {"rho": rho}, **options)

    @classmethod
    def passes_with(cls, arguments: Mapping[str, Any]) -> float:
        return 1 + arguments["p"] if "p" in arguments else cls.passes

    def step_kind(self) -> Hashable:
        return super().step_kind() or bernoulli(self.seed, self.t, 1, self.p)[0]

    def direction(self, L: Objective) -> Vector:
        g = L.grad()
        if not self.step_kind():
            return g
        if self.gamma == 1:
            return L.grad(at=self.epsilon(g, "rho"), keep=())
        return (1 - self.gamma) * g + self.gamma * L.grad(at=self.epsilon(g, "rho"))


def bernoulli(seed: int, t: int, n: int, p: float) -> list[bool]:
    """Draw ``n`` Bernoulli variables, each True with probability ``p``.

    They depend only on the seed and the step ``t``, and so agree on all ranks and after a resume.

    Example:
        >>> bernoulli(0, 3, 4, p=0.5) == bernoulli(0, 3, 4, p=0.5)
        True
        >>> sum(bernoulli(0, t, 1, p=0.25)[0] for t in range(1000))
        243
    """
    return [bool(number < p) for number in np.random.default_rng((seed, t)).random(n)]
