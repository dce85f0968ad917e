"""FriendlySAM."""

from __future__ import annotations

from typing import Unpack

from torch.optim import Optimizer

from ..common.checks import check_number
from ..core import Modules, Objective, Vector
from ..core.scheduled_radius import RadiusOptions, ScheduledRadius


class FriendlySAM(ScheduledRadius):
    r"""Friendly SAM (F-SAM): perturb along the noise of the batch gradient, its difference from a running mean.

    .. math::
        d = \nabla L(w + \rho\, v / |v|), \qquad v = g - \sigma m, \qquad g = \nabla L(w)

        m \leftarrow \lambda m + (1 - \lambda) g

    Where a parameter has no mean yet, as in the first step, it is perturbed along ``g``, which becomes the mean. The
    mean is kept in float32 if the parameter is in bfloat16 or float16, which takes twice the memory of the parameter:
    in half precision, small updates of a mean are rounded away. A parameter without a gradient in a step keeps its
    mean, which then does not count in :math:`|v|`.

    Args:
        rho: the radius, or its maximum if it follows the learning rate. The paper uses 0.2 for CIFAR-100.
        rho_floor, lr_max, lr_min: the schedule of the radius, as in :class:`SAM`; without ``rho_floor``, it is fixed.
        sigma: the weight of the mean that is subtracted.
        decay: :math:`\lambda`, the decay of the mean. The paper uses 0.6 for CIFAR-100.
        base, model, m_sharpness, same_draws, warmup, start: see :class:`SharpnessAware`.

    Example:
        >>> import torch, bsam
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bsam.FriendlySAM(base, model, rho=0.05)
        >>> loss = optimizer.step(lambda: model(torch.ones(8, 3)).square().mean())

    Reference:
        Li, Zhou, He, Cheng, Huang, "Friendly Sharpness-Aware Minimization", CVPR 2024.

    Differences from the paper:
        The paper updates the mean before subtracting it. With ``sigma=1``, the direction is the same; with other
        values, it is not.
    """

    title = "F-SAM"
    reference = "Li et al., CVPR 2024"
    arxiv = "2403.12350"
    purpose = "SAM that perturbs along the noise of the batch, not along the full gradient."
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
        sigma: float = 1.0,
        decay: float = 0.9,
        **options: Unpack[RadiusOptions],
    ) -> None:
        self.sigma, self.decay = check_number("sigma", sigma), check_number("decay", decay, low=0, high=1)
        super().__init__(base, model, rho, **options)

    def direction(self, L: Objective) -> Vector:
        g = L.grad()
        m = self.recall("gradient_mean")
        before = self.recall("gradient_mean", missing=g)  # the mean of a parameter starts with its first gradient
        self.remember("gradient_mean", self.decay * before + (1 - self.decay) * g)
        return L.grad(at=self.epsilon(g if m is None else g - self.sigma * m, "rho"), keep=())
