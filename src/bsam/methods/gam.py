"""GAM."""

from __future__ import annotations

from typing import Unpack

from torch.optim import Optimizer

from ..common.checks import check_number
from ..common.errors import BsamValueError
from ..core import TINY, Modules, Objective, SharpnessAware, StepOptions, Vector


class GAM(SharpnessAware):
    r"""Gradient norm Aware Minimization: first-order flatness, that is, small gradients in a whole neighbourhood.

    The released form needs no second derivatives. With :math:`g = \nabla L(w)`, :math:`h = g_1 - g` and
    :math:`\epsilon = \rho_n h / |h|`:

    .. math::
        g_1 = \nabla L(w + \rho\, g / |g|), \quad g_2 = \nabla L(w + \epsilon),
        \quad g_3 = \nabla L(w + \epsilon + \rho\, g_2 / |g_2|)

        d = n - \gamma\, (p - \mathrm{proj}_n p), \qquad n = \beta_1 g_1 + \beta_3 g_3, \qquad p = g + \beta_2 g_2

    The paper's form uses Hessian-vector products: :math:`d = g + \gamma \rho_n H(w')\, g(w') / |g(w')|` at
    :math:`w' = w + \rho_n f / |f|`, :math:`f = H g / |g|`.

    Args:
        rho: the radius of the ascent steps for :math:`g_1` and :math:`g_3` (released form only).
        rho_norm: :math:`\rho_n`, the radius within which the gradient should stay small.
        beta: the weights of ``g1``, ``g2`` and ``g3`` (released form only).
        gamma: the weight of the orthogonal part; in the paper's form, the weight of the flatness term (alpha in the
            paper).
        form: ``"released"`` or ``"paper"``; neither is a special case of the other.
        base, model, m_sharpness, same_draws, warmup, start: see :class:`SharpnessAware`.

    Example:
        >>> import torch, bsam
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bsam.GAM(base, model, rho_norm=0.05)
        >>> loss = optimizer.step(lambda: model(torch.ones(8, 3)).square().mean())

    Reference:
        Zhang, Xu, Yu, Zou, Cui, "Gradient Norm Aware Minimization Seeks First-Order Flatness and Improves
        Generalization", CVPR 2023.

    Differences from the paper:
        The default is the released code's form, which is a different method. ``form="paper"`` is the method in the
        paper.
    """

    title = "GAM"
    reference = "Zhang et al., CVPR 2023"
    arxiv = "2303.03108"
    purpose = "Seeks small gradients in the whole neighbourhood, if you can afford four passes."
    passes: float = 4
    memory = 3
    capturable = True

    def __init__(
        self,
        base: Optimizer,
        model: Modules,
        *,
        rho: float = 0.02,
        rho_norm: float = 0.2,
        beta: tuple[float, float, float] = (1, 1, 1),
        gamma: float = 0.03,
        form: str = "released",
        **options: Unpack[StepOptions],
    ) -> None:
        if form not in ("released", "paper"):
            raise BsamValueError(f'form must be "released" or "paper", got {form!r}')
        if not isinstance(beta, (tuple, list)) or len(beta) != 3:
            raise BsamValueError(f"beta must be three numbers, the weights of g1, g2 and g3; got {beta!r}")
        self.beta = tuple(check_number("beta", b) for b in beta)
        self.gamma, self.form = check_number("gamma", gamma), form
        super().__init__(base, model, {"rho": rho, "rho_norm": rho_norm}, **options)

    def direction(self, L: Objective) -> Vector:
        return self.released(L) if self.form == "released" else self.paper(L)

    def released(self, L: Objective) -> Vector:
        b1, b2, b3 = self.beta
        g = L.grad()
        g1 = L.grad(at=self.epsilon(g, "rho"))
        e = self.epsilon(g1 - g, "rho_norm")
        g2 = L.grad(at=e)
        p = g + b2 * g2
        g3 = L.grad(at=e + self.epsilon(g2, "rho"), keep=[g1, p])
        n = b1 * g1 + b3 * g3
        return n - self.gamma * p.reject(n)

    def paper(self, L: Objective) -> Vector:
        g = L.grad()
        e = self.epsilon(L.hvp(g / (g.norm() + TINY)), "rho_norm")
        g_e = L.grad(at=e)
        return g + L.hvp(g_e / (g_e.norm() + TINY), at=e) * self.radii("rho_norm") * self.gamma
