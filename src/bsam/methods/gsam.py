"""GSAM."""

from __future__ import annotations

from typing import Unpack

from torch.optim import Optimizer

from ..common.checks import check_number
from ..core import Modules, Objective, Vector
from ..core.scheduled_radius import RadiusOptions, ScheduledRadius


class GSAM(ScheduledRadius):
    r"""Surrogate-Gap Guided SAM: SAM's gradient minus the part of the plain gradient orthogonal to it.

    .. math::
        d = g_p - \alpha\, (g - \mathrm{proj}_{g_p} g), \qquad g_p = \nabla L(w + \rho_t\, g / |g|), \qquad
        g = \nabla L(w)

    Args:
        rho: the radius, or its maximum if it follows the learning rate.
        rho_floor, lr_max, lr_min: the schedule of the radius, as in :class:`SAM`; without ``rho_floor``, it is fixed.
        alpha: the weight of the orthogonal part.
        base, model, m_sharpness, same_draws, warmup, start: see :class:`SharpnessAware`.

    Example:
        >>> import torch, bsam
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bsam.GSAM(base, model, rho=0.05)
        >>> loss = optimizer.step(lambda: model(torch.ones(8, 3)).square().mean())

    Reference:
        Zhuang, Gong, Yuan, Cui, Adam, Dvornek, Tatikonda, Duncan, Liu, "Surrogate Gap Minimization Improves
        Sharpness-Aware Training", ICLR 2022.

    Differences from the paper:
        The radius is constant unless ``rho_floor`` is given; in the paper, it follows the learning rate. The projection
        treats all parameters as one vector.
    """

    title = "GSAM"
    reference = "Zhuang et al., ICLR 2022"
    arxiv = "2203.08065"
    purpose = "SAM that also reduces the gap between the loss and the worst loss nearby."
    memory = 2
    capturable = True

    def __init__(
        self,
        base: Optimizer,
        model: Modules,
        *,
        rho: float = 0.05,
        alpha: float = 0.4,
        **options: Unpack[RadiusOptions],
    ) -> None:
        self.alpha = check_number("alpha", alpha)
        super().__init__(base, model, rho, **options)

    def direction(self, L: Objective) -> Vector:
        g = L.grad()
        g_p = L.grad(at=self.epsilon(g, "rho"))
        return g_p - self.alpha * (g - g_p).reject(g_p)  # same as g.reject(g_p), but rounding errors are smaller
