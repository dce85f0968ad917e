"""VaSSO."""

from __future__ import annotations

from typing import Unpack

from torch.optim import Optimizer

from ..common.checks import check_share
from ..core import Modules, Objective, Vector
from ..core.scheduled_radius import RadiusOptions, ScheduledRadius


class VaSSO(ScheduledRadius):
    r"""Variance-Suppressed Sharpness-aware Optimization: perturb along a running mean of the batch gradients.

    .. math::
        d = \nabla L(w + \rho\, v / |v|), \qquad v \leftarrow (1 - \theta)\, v + \theta\, g, \qquad g = \nabla L(w)

    The mean of a parameter starts with its first gradient. It is kept in float32 if the parameter is in bfloat16 or
    float16, which takes twice the memory of the parameter: in half precision, small updates of a mean are rounded away.
    A parameter without a gradient in a step keeps its mean, which then does not count in :math:`|v|`.

    Args:
        rho: the radius, or its maximum if it follows the learning rate.
        rho_floor, lr_max, lr_min: the schedule of the radius, as in :class:`SAM`; without ``rho_floor``, it is fixed.
        theta: the weight of the new gradient in the mean, above 0 and at most 1, which gives SAM.
        base, model, m_sharpness, same_draws, warmup, start: see :class:`SharpnessAware`.

    Example:
        >>> import torch, bsam
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bsam.VaSSO(base, model, rho=0.05)
        >>> loss = optimizer.step(lambda: model(torch.ones(8, 3)).square().mean())

    Reference:
        Li, Giannakis, "Enhancing Sharpness-Aware Optimization Through Variance Suppression", NeurIPS 2023.

    Differences from the paper:
        None known.
    """

    title = "VaSSO"
    reference = "Li and Giannakis, NeurIPS 2023"
    arxiv = "2309.15639"
    purpose = "SAM with a steadier perturbation, along a running mean of the gradients."
    memory = 3
    memory_kept = 1
    capturable = True

    vectors: tuple[str, ...] = ("gradient_mean",)
    running_means: tuple[str, ...] = vectors

    def __init__(
        self,
        base: Optimizer,
        model: Modules,
        *,
        rho: float = 0.05,
        theta: float = 0.9,
        **options: Unpack[RadiusOptions],
    ) -> None:
        self.theta = check_share("theta", theta)
        super().__init__(base, model, rho, **options)

    def direction(self, L: Objective) -> Vector:
        g = L.grad()
        v = (1 - self.theta) * self.recall("gradient_mean", missing=g) + self.theta * g
        self.remember("gradient_mean", v)
        return L.grad(at=self.epsilon(v, "rho"), keep=())
