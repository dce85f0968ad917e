"""CR-SAM."""

from __future__ import annotations

from typing import Unpack

from torch.optim import Optimizer

from ..common.checks import check_flag, check_number
from ..core import Modules, Objective, Vector
from ..core.scheduled_radius import RadiusOptions, ScheduledRadius


class CRSAM(ScheduledRadius):
    r"""Curvature Regularized SAM: SAM with penalties on the curvature along the gradient and on the gradient norm.

    .. math::
        d = g_+ + \gamma\, (g_+ + g_- - 2 g) + \beta\, (g_+ - g_-), \qquad
        g_\pm = \nabla L(w \pm \rho\, g / |g|), \qquad g = \nabla L(w)

    Args:
        rho: the radius, or its maximum if it follows the learning rate.
        rho_floor, lr_max, lr_min: the schedule of the radius, as in :class:`SAM`; without ``rho_floor``, it is fixed.
        gamma: the weight of the second difference, the gradient of an estimate of the curvature along :math:`g`.
        beta: the weight of the first difference, the gradient of an estimate of the gradient norm.
        side_by_side: compute both gradients at the same time in a captured step, as in :class:`BSAM`.
        base, model, m_sharpness, same_draws, warmup, start: see :class:`SharpnessAware`.

    Example:
        >>> import torch, bsam
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bsam.CRSAM(base, model, rho=0.1)
        >>> loss = optimizer.step(lambda: model(torch.ones(8, 3)).square().mean())

    Reference:
        Wu, Luo, Wunsch, "CR-SAM: Curvature Regularized Sharpness-Aware Minimization", AAAI 2024.

    Differences from the paper:
        The paper's regularizer is a normalized Hessian trace. As in the authors' released code, ``gamma`` and ``beta``
        weight the differences of gradients that estimate its parts. That code trains with ``beta=0.01``; the default
        here is 0.1. It updates the statistics of batch norm in the first and the third pass; here, only the first pass
        does.
    """

    title = "CR-SAM"
    reference = "Wu et al., AAAI 2024"
    arxiv = "2312.13555"
    purpose = "SAM that also reduces the curvature along the gradient, in three passes."
    passes: float = 3
    memory = 2
    capturable = True

    def __init__(
        self,
        base: Optimizer,
        model: Modules,
        *,
        rho: float = 0.1,
        gamma: float = 0.1,
        beta: float = 0.1,
        side_by_side: bool = False,
        **options: Unpack[RadiusOptions],
    ) -> None:
        self.gamma, self.beta = check_number("gamma", gamma), check_number("beta", beta)
        self.side_by_side = check_flag("side_by_side", side_by_side)
        super().__init__(base, model, rho, **options)

    def direction(self, L: Objective) -> Vector:
        g = L.grad()
        e = self.epsilon(g, "rho")
        g_up = L.grad(at=e)
        known = (1 + self.gamma + self.beta) * g_up - 2 * self.gamma * g
        g_down = L.grad(at=-e, keep=known)
        return known + (self.gamma - self.beta) * g_down
