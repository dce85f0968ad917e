"""AE-SAM."""

from __future__ import annotations

import math
from typing import Unpack

from torch.optim import Optimizer

from ..common.checks import check_count, check_number
from ..common.method_info import Need
from ..core import Modules, Objective, SharpnessAware, StepOptions, Vector
from .looksam import add_orthogonal, sam_gradient


class AESAM(SharpnessAware):
    r"""AE-SAM: SAM if ``|g|^2`` is large compared with its running mean and variance, else the plain gradient.

    .. math::
        d = \begin{cases}
        \nabla L(w + \rho\, g / |g|) & \text{if } s \ge \mu + c_t \sqrt{v} \\
        g & \text{otherwise}
        \end{cases}

        g = \nabla L(w), \qquad s = |g|^2, \qquad c_t = \tfrac{t}{T} \lambda_1 + (1 - \tfrac{t}{T}) \lambda_2

        \mu \leftarrow \delta \mu + (1 - \delta) s, \qquad v \leftarrow \delta v + (1 - \delta)(s - \mu)^2

    The first step has :math:`\mu = s` and :math:`v = 0`. The host decides whether to run a second pass, so each step
    synchronizes with the device once and cannot be captured in a CUDA graph. With ``m_sharpness``, each rank decides
    for itself: forward passes must not wait for other ranks (as SyncBatchNorm does), and each rank needs its own
    ``state_dict``.

    Args:
        rho: the radius.
        decay: :math:`\delta`, the decay of the running mean and variance.
        lambda_1: the threshold :math:`c_t` at the end of training, in standard deviations.
        lambda_2: the threshold :math:`c_t` at the start of training, in standard deviations.
        total_steps: T, the total number of training steps.
        alpha: if positive, steps without SAM add the orthogonal part of SAM's last gradient, as LookSAM does (our
            extension, not in the paper).
        base, model, m_sharpness, same_draws, warmup, start: see :class:`SharpnessAware`.

    Example:
        >>> import torch, bsam
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bsam.AESAM(base, model, total_steps=50)
        >>> loss = optimizer.step(lambda: model(torch.ones(8, 3)).square().mean())

    Reference:
        Jiang, Yang, Zhang, Kwok, "An Adaptive Policy to Employ Sharpness-Aware Minimization", ICLR 2023.

    Differences from the paper:
        None known for ``alpha=0``; no official code was found to compare with. ``alpha`` is ours.
    """

    title = "AE-SAM"
    reference = "Jiang et al., ICLR 2023"
    arxiv = "2304.14647"
    purpose = "SAM only on steps with a large gradient, roughly half of all steps."
    passes: float = 1.5
    needs = (Need.TOTAL_STEPS,)

    vectors: tuple[str, ...] = ("g_v",)
    numbers: tuple[str, ...] = ("norm_mean", "norm_var")

    def __init__(
        self,
        base: Optimizer,
        model: Modules,
        *,
        total_steps: int,
        rho: float = 0.05,
        decay: float = 0.9,
        lambda_1: float = -1.0,
        lambda_2: float = 1.0,
        alpha: float = 0.0,
        **options: Unpack[StepOptions],
    ) -> None:
        self.decay, self.alpha = check_number("decay", decay, low=0, high=1), check_number("alpha", alpha)
        self.lambda_1, self.lambda_2 = check_number("lambda_1", lambda_1), check_number("lambda_2", lambda_2)
        self.total_steps = check_count("total_steps", total_steps)
        super().__init__(base, model, {"rho": rho}, **options)

    def direction(self, L: Objective) -> Vector:
        g, g_v = L.grad(), self.recall("g_v")
        if self.large(self.mean_over_ranks(float(g.norm()) ** 2)):
            return sam_gradient(self, L, g) if self.alpha else L.grad(at=self.epsilon(g, "rho"), keep=())
        return g if g_v is None else add_orthogonal(g, g_v, self.alpha)

    def large(self, s: float) -> bool:
        """Update the running statistics with ``s``, and return whether ``s`` is large compared with them."""
        mu, var = self.recall("norm_mean"), self.recall("norm_var")
        mu = s if mu is None else self.decay * mu + (1 - self.decay) * s
        var = 0.0 if var is None else self.decay * var + (1 - self.decay) * (s - mu) ** 2
        self.remember("norm_mean", mu)
        self.remember("norm_var", var)
        done = min(self.t / self.total_steps, 1.0)
        return s >= mu + (done * self.lambda_1 + (1 - done) * self.lambda_2) * math.sqrt(var)
