"""LookSAM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from ..core.checks import check_count, check_number
from ..core.objective import Objective
from ..core.optimizer import SharpnessAware
from ..core.vector import TINY, Vector


class LookSAM(SharpnessAware):
    r"""LookSAM: SAM every k-th step; in between, the gradient and the part of SAM's that lies across it, kept from the
    last time.

    .. math::
        t \bmod k = 0: \quad d = g_s = \nabla L(w + \rho\, g / |g|), \qquad g_v = g_s - \mathrm{proj}_g\, g_s

        \text{else}: \quad d = g + \alpha\, \frac{|g|}{|g_v|}\, g_v

    Args:
        base: the optimizer that takes the step.
        model: the network that the closure calls (its DDP, FSDP or compiled wrapper will do); None if it has no batch
            norm. If the closure runs other modules, too, a list of all of them, this one first.
        rho: the radius.
        k: how often SAM's gradient is looked up; a step in between costs one pass.
        alpha: the weight of what was kept.
        m_sharpness: each rank of DDP perturbs along its own gradient.
        same_draws: all passes of a step see the same random draws (dropout, noise).

    Example:
        >>> import torch, bsam
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = bsam.LookSAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, k=5)
        >>> x, y = torch.ones(8, 3), torch.ones(8, 1)
        >>> losses = [optimizer.step(lambda: torch.nn.functional.mse_loss(model(x), y)) for _ in range(50)]
        >>> bool(losses[-1] < losses[0] / 10)
        True

    Reference: Liu, Mai, Chen, Hsieh, You, "Towards Efficient and Scalable Sharpness-Aware Minimization", CVPR 2022.
        Norms are over all parameters.
    """

    vectors: ClassVar[tuple[str, ...]] = ("g_v",)

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module | Sequence[nn.Module] | None,
        *,
        rho: float = 0.05,
        k: int = 5,
        alpha: float = 0.2,
        m_sharpness: bool = False,
        same_draws: bool = True,
    ) -> None:
        self.k, self.alpha = check_count("k", k), check_number("alpha", alpha)
        super().__init__(base, model, {"rho": rho}, m_sharpness=m_sharpness, same_draws=same_draws)

    def direction(self, L: Objective) -> Vector:
        g, g_v = L.grad(), self.recall("g_v")
        return looked_up(self, L, g) if self.t % self.k == 0 or g_v is None else reused(g, g_v, self.alpha)


def looked_up(optimizer: SharpnessAware, L: Objective, g: Vector) -> Vector:
    """SAM's gradient; its part across ``g`` is kept."""
    g_s = L.grad(at=optimizer.epsilon(g, "rho"))
    optimizer.remember("g_v", (g_s - g).reject(g))  # the same as of g_s alone, with the digits of the difference
    return g_s


def reused(g: Vector, g_v: Vector, alpha: float) -> Vector:
    """The gradient, and across it what was kept, at the length that the gradient has now."""
    return g + alpha * g.norm() / (g_v.norm() + TINY) * g_v
