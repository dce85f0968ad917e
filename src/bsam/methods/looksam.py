"""LookSAM."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Unpack

from torch.optim import Optimizer

from ..common.checks import check_count, check_number
from ..core import TINY, Modules, Objective, SharpnessAware, StepOptions, Vector


class LookSAM(SharpnessAware):
    r"""LookSAM: SAM every k-th step; in between, the gradient plus the orthogonal part of SAM's last gradient.

    .. math::
        d = \begin{cases}
        g_s & \text{if } t \bmod k = 0 \\
        g + \alpha\, \frac{|g|}{|g_v|}\, g_v & \text{otherwise}
        \end{cases}

        g_s = \nabla L(w + \rho\, g / |g|), \qquad g_v = g_s - \mathrm{proj}_g\, g_s, \qquad g = \nabla L(w)

    Parameters without a gradient in a step do not count in its :math:`|g_v|`.

    Args:
        rho: the radius.
        k: the number of steps from one SAM gradient to the next; steps in between cost one pass.
        alpha: the weight of the orthogonal part.
        base, model, m_sharpness, same_draws, warmup, start: see :class:`SharpnessAware`.

    Example:
        >>> import torch, bsam
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bsam.LookSAM(base, model, k=5)
        >>> loss = optimizer.step(lambda: model(torch.ones(8, 3)).square().mean())

    Reference:
        Liu, Mai, Chen, Hsieh, You, "Towards Efficient and Scalable Sharpness-Aware Minimization", CVPR 2022.

    Differences from the paper:
        None known. Norms and projections treat all parameters as one vector; several other implementations compute them
        per tensor.
    """

    title = "LookSAM"
    reference = "Liu et al., CVPR 2022"
    arxiv = "2203.02714"
    purpose = "Approximates SAM in 1 + 1/k passes, by reusing part of its gradient for k - 1 steps."
    passes: float = 1.2
    memory = 3
    memory_kept = 1
    capturable = True

    vectors: tuple[str, ...] = ("g_v",)

    def __init__(
        self,
        base: Optimizer,
        model: Modules,
        *,
        rho: float = 0.05,
        k: int = 5,
        alpha: float = 0.2,
        **options: Unpack[StepOptions],
    ) -> None:
        self.k, self.alpha = check_count("k", k), check_number("alpha", alpha)
        super().__init__(base, model, {"rho": rho}, **options)

    @classmethod
    def passes_with(cls, arguments: Mapping[str, Any]) -> float:
        return 1 + 1 / arguments["k"] if "k" in arguments else cls.passes

    def step_kind(self) -> Hashable:
        return super().step_kind() or self.steps_since_start % self.k == 0

    def direction(self, L: Objective) -> Vector:
        g, g_v = L.grad(), self.recall("g_v")
        return sam_gradient(self, L, g) if self.step_kind() or g_v is None else add_orthogonal(g, g_v, self.alpha)


def sam_gradient(optimizer: SharpnessAware, L: Objective, g: Vector) -> Vector:
    """Return SAM's gradient, and remember its part orthogonal to ``g``."""
    g_s = L.grad(at=optimizer.epsilon(g, "rho"))
    optimizer.remember("g_v", (g_s - g).reject(g))  # = g_s.reject(g), with less rounding
    return g_s


def add_orthogonal(g: Vector, g_v: Vector, alpha: float) -> Vector:
    """Return the gradient plus the orthogonal part ``g_v``, scaled to ``alpha`` times the gradient's length."""
    return g + alpha * g.norm() / (g_v.norm() + TINY) * g_v
