"""SAM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Unpack

from torch.optim import Optimizer

from ..common.checks import check_share, exact
from ..common.method_info import Need
from ..core import Modules, Objective, Vector
from ..core.ranks import several_ranks
from ..core.scheduled_radius import RadiusOptions, ScheduledRadius


class SAM(ScheduledRadius):
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
        ascent: the share of the batch that determines the perturbation. Below 1, the first pass uses only the first
            samples of the batch (their number is rounded up), and a step takes ``1 + ascent`` passes. The closure must
            take a slice or indices of samples and return one loss for each. ``step`` returns the loss of the share,
            which also updates batch norm's statistics. The first step begins with a forward pass over the whole batch,
            to find its size, and returns that loss; a later step whose batch has another size is started over, and
            takes twice the passes. With several processes, every step begins with this forward pass.
        base, model, m_sharpness, same_draws, warmup, start: see :class:`SharpnessAware`.

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
        None, unless ``rho_floor`` or ``ascent`` is given: the paper's radius is fixed, and its perturbation is computed
        from the whole batch. ``ascent`` is from Bahri, Mobahi, Tay, "Sharpness-Aware Minimization Improves Language
        Model Generalization", ACL 2022.
    """

    title = "SAM"
    reference = "Foret et al., ICLR 2021"
    arxiv = "2010.01412"
    purpose = "Flat minima at twice the cost of the base optimizer: the method to start with."
    capturable = True

    def __init__(
        self,
        base: Optimizer,
        model: Modules,
        *,
        rho: float = 0.05,
        ascent: float = 1.0,
        **options: Unpack[RadiusOptions],
    ) -> None:
        self.ascent = check_share("ascent", ascent)
        if ascent < 1:
            self.numbers = ("batch_size",)
            self.needs = (Need.PER_SAMPLE_LOSSES,)
            self.passes = self.passes_with({"ascent": ascent})
        super().__init__(base, model, rho, **options)

    @classmethod
    def passes_with(cls, arguments: Mapping[str, Any]) -> float:
        return 1 + arguments.get("ascent", 1)

    def direction(self, L: Objective) -> Vector:
        if self.ascent < 1:
            return self._from_share(L)
        g = L.grad()
        return L.grad(at=self.epsilon(g, "rho"), keep=())

    def _from_share(self, L: Objective) -> Vector:
        """Return the gradient of the batch, perturbed along that of its first samples.

        The size of a batch is known after a pass over it. It is assumed to be that of the last step; if it is not, the
        step is started over.
        """
        remembered = None if several_ranks() else self.recall("batch_size")  # ranks must take the same passes
        n = remembered or len(L.losses())
        while True:
            g = L.grad(subset=slice(max(1, math.ceil(exact(self.ascent) * n))))
            d = L.grad(at=self.epsilon(g, "rho"), keep=())
            size = len(L.sample_losses)
            if size == n:
                self.remember("batch_size", n)
                return d
            L.restart()
            n = size
