"""SAM."""

from __future__ import annotations

from typing import ClassVar, Unpack

from torch.optim import Optimizer

from ..core import Modules, Objective, SharpnessAware, StepOptions, Vector
from ..core.wrapper import radius_settings


class SAM(SharpnessAware):
    r"""Sharpness-Aware Minimization: the gradient at the worst point nearby.

    .. math::  d = \nabla L(w + \rho\, g / |g|), \qquad g = \nabla L(w)

    Args:
        rho: the radius, or its maximum if it follows the learning rate. The paper uses 0.05 for CIFAR-10 and 0.1 for
            CIFAR-100.
        rho_floor: the minimum of a radius that follows the learning rate, from ``rho`` at ``lr_max`` down to
            ``rho_floor`` at ``lr_min``, with the same schedule as ``rho_min`` in :class:`BSAM`. None keeps the radius
            at ``rho``. With ``rho=a + b, rho_floor=a``, the radius at every step is the sum of BSAM's two radii with
            ``rho_max=a, rho_min=b``.
        lr_max: the learning rate at which the radius is largest; None means the same as in :class:`BSAM`.
        lr_min: the learning rate at which the radius is smallest.
        base, model, m_sharpness, same_draws: see :class:`SharpnessAware`.

    Example:
        >>> import torch, bsam
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bsam.SAM(base, model, rho=0.05)
        >>> loss = optimizer.step(lambda: model(torch.ones(8, 3)).square().mean())

    Reference:
        Foret, Kleiner, Mobahi, Neyshabur, "Sharpness-Aware Minimization for Efficiently Improving Generalization",
        ICLR 2021.

    Differences from the paper:
        None, unless ``rho_floor`` is given: the paper's radius is fixed.
    """

    title = "SAM"
    reference = "Foret et al., ICLR 2021"
    arxiv = "2010.01412"
    purpose = "Flat minima at twice the cost of the base optimizer: the method to start with."
    capturable = True

    scheduled_radii: ClassVar[dict[str, str]] = {"rho": "rho_floor"}

    def __init__(
        self,
        base: Optimizer,
        model: Modules,
        *,
        rho: float = 0.05,
        rho_floor: float | None = None,
        lr_max: float | None = None,
        lr_min: float = 0.0,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(base, model, radius_settings(rho, rho_floor, lr_max, lr_min), **options)

    def direction(self, L: Objective) -> Vector:
        g = L.grad()
        return L.grad(at=self.epsilon(g, "rho"))
