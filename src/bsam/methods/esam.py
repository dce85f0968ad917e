"""ESAM."""

from __future__ import annotations

import math
from typing import Unpack

from torch.optim import Optimizer

from ..common.checks import check_count, check_number, exact
from ..common.method_info import Need
from ..core import Modules, Objective, SharpnessAware, StepOptions, Vector
from .ksam import hardest
from .rst import bernoulli


class ESAM(SharpnessAware):
    r"""Efficient SAM: perturb some of the weights, and take the gradient on the samples whose losses rise most.

    .. math::
        d = \nabla L_B(w + \epsilon), \qquad \epsilon = \frac{\rho}{\beta}\, g_S / |g_S|

    :math:`g_S` is the gradient with respect to the parameter tensors in S; each tensor is in S with probability
    ``beta``. B is the fraction ``gamma`` of the samples whose losses rise most from :math:`w` to
    :math:`w + \epsilon`. With DDP, each rank selects among its own samples. Sharded (FSDP) and compiled models compute
    all gradients in the first pass and discard those of tensors outside S.

    Args:
        rho: the radius.
        beta: the probability that a parameter tensor is in S; the first pass computes no gradients for the others.
        gamma: the fraction of the batch used in the second pass (rounded down, at least one sample).
        seed: the seed of the random choice, which depends only on the seed and the step.
        base, model, m_sharpness, same_draws, warmup, start: see :class:`SharpnessAware`.

    Example:
        >>> import torch, bsam
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bsam.ESAM(base, model)
        >>> x, y = torch.randn(8, 3), torch.randn(8)
        >>> def closure(indices=slice(None)):
        ...     return (model(x[indices]).squeeze(1) - y[indices]) ** 2
        >>> loss = optimizer.step(closure)

    Reference:
        Du, Yan, Feng, Zhou, Zhen, Goh, Tan, "Efficient Sharpness-aware Minimization for Improved Training of Neural
        Networks", ICLR 2022.

    Differences from the paper:
        None known.
    """

    title = "ESAM"
    reference = "Du et al., ICLR 2022"
    arxiv = "2110.03141"
    purpose = "SAM on random parts of the weights, with fewer samples."
    needs = (Need.PER_SAMPLE_LOSSES,)

    def __init__(
        self,
        base: Optimizer,
        model: Modules,
        *,
        rho: float = 0.05,
        beta: float = 0.6,
        gamma: float = 0.5,
        seed: int = 0,
        **options: Unpack[StepOptions],
    ) -> None:
        self.beta = check_number("beta", beta, low=1e-3, high=1)
        self.gamma = check_number("gamma", gamma, low=0, high=1)
        self.seed = check_count("seed", seed, low=0)
        super().__init__(base, model, {"rho": rho}, **options)

    def direction(self, L: Objective) -> Vector:
        g_S = L.grad(wrt=bernoulli(self.seed, self.t, len(self.params), self.beta))
        losses = L.sample_losses
        e = self.epsilon(g_S, "rho") / self.beta
        rise = L.losses(at=e) - losses
        return L.grad(at=e, subset=hardest(rise, math.floor(exact(self.gamma) * len(rise))), keep=())
