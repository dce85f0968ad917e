"""Functional SAM."""

from __future__ import annotations

from typing import Unpack

from torch.optim import Optimizer

from ..common.method_info import Need
from ..core import Modules, Objective, Vector
from ..core.scheduled_radius import RadiusOptions, ScheduledRadius


class FunctionalSAM(ScheduledRadius):
    r"""Functional SAM: SAM's gradient without the part that comes from the change of the outputs.

    .. math::
        d = J_F(w + \rho\, g / |g|)^\top s, \qquad s = \partial L / \partial F(w), \qquad g = \nabla L(w)

    :math:`F` are the outputs of the network, such as logits, and :math:`J_F` is their Jacobian. SAM's gradient is the
    same product with the :math:`s` of the perturbed outputs. According to the paper, that difference dominates in
    language models, where SAM then changes the statistics of the logits instead of the network.

    The closure returns a pair, the loss and the outputs that it was computed from; with micro-batches it yields one
    pair for each. The outputs are one tensor, which all of the loss depends on: a penalty on the weights or a loss of
    other outputs has no effect on :math:`d`. The second pass back-propagates :math:`s` from the outputs.

    Args:
        rho: the radius, or its maximum if it follows the learning rate.
        rho_floor, lr_max, lr_min: the schedule of the radius, as in :class:`SAM`; without ``rho_floor``, it is fixed.
        base, model, m_sharpness, same_draws, warmup, start: see :class:`SharpnessAware`.

    Example:
        >>> import torch, bsam
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bsam.FunctionalSAM(base, model, rho=0.05)
        >>> def closure():
        ...     outputs = model(torch.ones(8, 3))
        ...     return outputs.square().mean(), outputs
        >>> loss = optimizer.step(closure)

    Reference:
        Singh, Mobahi, Agarwala, Dauphin, "Avoiding spurious sharpness minimization broadens applicability of SAM",
        ICML 2025. J-SAM (Baek, Kolter, Raghunathan, "Why is SAM Robust to Label Noise?", ICLR 2024) is similar.

    Differences from the paper:
        The paper's variant that also preconditions the perturbation, with Adam's second moment, is left out.
    """

    title = "Functional SAM"
    reference = "Singh et al., ICML 2025"
    arxiv = "2502.02407"
    purpose = "SAM without its effect on logits, for language models."
    capturable = True
    needs = (Need.OUTPUTS,)

    def __init__(
        self,
        base: Optimizer,
        model: Modules,
        *,
        rho: float = 0.05,
        **options: Unpack[RadiusOptions],
    ) -> None:
        super().__init__(base, model, rho, **options)

    def direction(self, L: Objective) -> Vector:
        g, signals = L.grad_and_signals()
        return L.pull_back(signals, at=self.epsilon(g, "rho"), keep=())
