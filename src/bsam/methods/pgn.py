"""PGN."""

from __future__ import annotations

from typing import Unpack

from torch.optim import Optimizer

from ..common.checks import check_number
from ..core import Modules, Objective, SharpnessAware, StepOptions, Vector


class PGN(SharpnessAware):
    r"""Penalizing the gradient norm: a weighted mean of the gradient and SAM's gradient.

    .. math::  d = (1 - \alpha)\, g + \alpha\, \nabla L(w + \rho\, g / |g|), \qquad g = \nabla L(w)

    Args:
        rho: the radius.
        alpha: the weight of SAM's gradient; 1 gives SAM.
        base, model, m_sharpness, same_draws, warmup, start: see :class:`SharpnessAware`.

    Example:
        >>> import torch, bsam
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bsam.PGN(base, model, rho=0.05)
        >>> loss = optimizer.step(lambda: model(torch.ones(8, 3)).square().mean())

    Reference:
        Zhao, Zhang, Hu, "Penalizing Gradient Norm for Efficiently Improving Generalization in Deep Learning", ICML
        2022.

    Differences from the paper:
        None known. The released code differs from both the paper and this class: it uses ``g / |g|`` in place of the
        first ``g``.
    """

    title = "PGN"
    reference = "Zhao et al., ICML 2022"
    arxiv = "2202.03599"
    purpose = "Penalizes the gradient norm, by mixing SAM's gradient with the plain one."
    memory = 2
    capturable = True

    def __init__(
        self,
        base: Optimizer,
        model: Modules,
        *,
        rho: float = 0.1,
        alpha: float = 0.8,
        **options: Unpack[StepOptions],
    ) -> None:
        self.alpha = check_number("alpha", alpha)
        super().__init__(base, model, {"rho": rho}, **options)

    def direction(self, L: Objective) -> Vector:
        g = L.grad()
        return (1 - self.alpha) * g + self.alpha * L.grad(at=self.epsilon(g, "rho"))
