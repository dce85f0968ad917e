"""FisherSAM."""

from __future__ import annotations

from typing import Unpack

from torch.optim import Optimizer

from ..common.checks import check_number
from ..core import Modules, Objective, SharpnessAware, StepOptions, Vector


class FisherSAM(SharpnessAware):
    r"""Fisher SAM: SAM in the metric of the (diagonal) Fisher information; steep coordinates move less than in SAM.

    .. math::
        d = \nabla L(w + \rho\, F^{-1} g / \sqrt{\langle g, F^{-1} g \rangle}), \qquad g = \nabla L(w)

        F^{-1} = 1 / (1 + \eta\, g^2) \quad \text{elementwise}

    The result depends on the scale of the loss; gradients scaled by a ``GradScaler`` are unscaled first.

    Args:
        rho: the radius.
        eta: the weight of the Fisher information; 0 gives SAM.
        base, model, m_sharpness, same_draws, warmup, start: see :class:`SharpnessAware`.

    Example:
        >>> import torch, bsam
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bsam.FisherSAM(base, model, rho=0.05)
        >>> loss = optimizer.step(lambda: model(torch.ones(8, 3)).square().mean())

    Reference:
        Kim, Li, Hu, Hospedales, "Fisher SAM: Information Geometry and Sharpness Aware Minimisation", ICML 2022.

    Differences from the paper:
        None known; no official code was found to compare with.
    """

    title = "Fisher SAM"
    reference = "Kim et al., ICML 2022"
    arxiv = "2206.04920"
    purpose = "SAM with relatively smaller perturbations where gradients are large."
    capturable = True

    def __init__(
        self,
        base: Optimizer,
        model: Modules,
        *,
        rho: float = 0.1,
        eta: float = 0.2,
        **options: Unpack[StepOptions],
    ) -> None:
        self.eta = check_number("eta", eta, low=0)
        super().__init__(base, model, {"rho": rho}, **options)

    def direction(self, L: Objective) -> Vector:
        g = L.grad()
        natural = g.map(lambda _, g: g / (1 + self.eta * g * g))  # F^-1 g
        return L.grad(at=self.epsilon(natural, "rho", length=self.counted(g).dot(natural).sqrt()), keep=())
