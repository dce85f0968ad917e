"""SANER."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..common.checks import check_count, check_number
from ..core import Modules, Objective, Vector
from ..core.scheduled_radius import RadiusOptions, ScheduledRadius


class SANER(ScheduledRadius):
    r"""Sharpness-Aware Noise-Explicit Reweighting: SAM that damps the gradient entries that fit wrong labels.

    .. math::
        d_i = \begin{cases}
        a\, \hat g_i & \text{if } 0 < \hat g_i / g_i < 1 \\
        \hat g_i & \text{otherwise}
        \end{cases}
        \qquad \hat g = \nabla L(w + \rho\, g / |g|), \qquad g = \nabla L(w)

    These are the entries of SAM's gradient that have the sign of the plain gradient's, but are smaller. According to
    the paper, samples with wrong labels dominate there. :math:`a` falls linearly from 1 to ``alpha`` in the first
    ``ramp`` steps.

    Args:
        rho: the radius, or its maximum if it follows the learning rate.
        rho_floor, lr_max, lr_min: the schedule of the radius, as in :class:`SAM`; without ``rho_floor``, it is fixed.
        alpha: the factor on these entries; 1 gives SAM.
        ramp: the number of steps until the factor is ``alpha``, counted from ``start``; the paper takes 50 epochs. With
            0, it is ``alpha`` from the first step on.
        base, model, m_sharpness, same_draws, warmup, start: see :class:`SharpnessAware`.

    Example:
        >>> import torch, bsam
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bsam.SANER(base, model, rho=0.05, ramp=100)
        >>> loss = optimizer.step(lambda: model(torch.ones(8, 3)).square().mean())

    Reference:
        Luong, Nguyen, Tran, Tran, "Understanding SAM's Robustness to Noisy Labels through Gradient Down-weighting",
        AISTATS 2026.

    Differences from the paper:
        None known with a suitable ``ramp``, which is 0 by default. The factor is that of the authors' released code;
        their README has ``1 - alpha``, which is the same at 0.5.
    """

    title = "SANER"
    reference = "Luong et al., AISTATS 2026"
    arxiv = "2411.17132"
    purpose = "SAM for wrong labels: damps the gradient entries that the perturbation makes smaller."
    memory = 2
    capturable = True

    def __init__(
        self,
        base: Optimizer,
        model: Modules,
        *,
        rho: float = 0.05,
        alpha: float = 0.5,
        ramp: int = 0,
        **options: Unpack[RadiusOptions],
    ) -> None:
        self.alpha, self.ramp = check_number("alpha", alpha, low=0, high=1), check_count("ramp", ramp, low=0)
        super().__init__(base, model, rho, **options)

    def step_kind(self) -> Hashable:
        return super().step_kind() or min(self.steps_since_start, self.ramp)  # equal kinds have equal factors

    def direction(self, L: Objective) -> Vector:
        g = L.grad()
        g_hat = L.grad(at=self.epsilon(g, "rho"))
        a = 1 + (self.alpha - 1) * (min(1.0, self.steps_since_start / self.ramp) if self.ramp else 1.0)

        def damped(_: int, up: Tensor, plain: Tensor) -> Tensor:
            smaller = (up.sign() * plain.sign() > 0) & (up.abs() < plain.abs())
            return torch.where(smaller, a * up, up)

        return g_hat.map_(damped, g)
