"""ASAM."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor
from torch.optim import Optimizer

from ..common.checks import check_number
from ..core import Modules, Objective, SharpnessAware, Vector
from ..core.scheduled_radius import RadiusOptions, ScheduledRadius
from ..core.tensors import local


class ASAM(ScheduledRadius):
    r"""Adaptive SAM: a neighbourhood that scales with the weights, so rescaling a layer has no effect.

    .. math::  d = \nabla L(w + \rho\, T^2 g / |T g|), \qquad T = |w| + \eta, \qquad g = \nabla L(w)

    ``T`` acts elementwise. The formula applies to weights and to the scales of norm layers; for biases, ``T`` is 1.

    Args:
        rho: the radius, or its maximum if it follows the learning rate. The paper uses 0.5 for CIFAR-10 and 1.0 for
            CIFAR-100.
        rho_floor, lr_max, lr_min: the schedule of the radius, as in :class:`SAM`; without ``rho_floor``, it is fixed.
        eta: added to the absolute values of the weights.
        base, model, m_sharpness, same_draws, warmup, start: see :class:`SharpnessAware`.

    Example:
        >>> import torch, bsam
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bsam.ASAM(base, model, rho=0.1)
        >>> loss = optimizer.step(lambda: model(torch.ones(8, 3)).square().mean())

    Reference:
        Kwon, Kim, Park, Choi, "ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of Deep Neural
        Networks", ICML 2021.

    Differences from the paper:
        The radius is fixed, as in the paper, unless ``rho_floor`` is given. The released code scales the parameters
        whose name contains "weight". Here all parameters with two or more dimensions are scaled, and one-dimensional
        ones named "weight"; without a model, every one-dimensional parameter counts as a bias. The real and imaginary
        parts of complex weights are scaled separately.
    """

    title = "ASAM"
    reference = "Kwon et al., ICML 2021"
    arxiv = "2102.11600"
    purpose = "SAM with radii that do not change when a layer is rescaled."
    capturable = True

    def __init__(
        self,
        base: Optimizer,
        model: Modules,
        *,
        rho: float = 0.5,
        eta: float = 0.01,
        **options: Unpack[RadiusOptions],
    ) -> None:
        self.eta = check_number("eta", eta, low=0)
        super().__init__(base, model, rho, **options)

    def direction(self, L: Objective) -> Vector:
        g = L.grad()
        v, length = rescaled(self, g, self.eta)
        return L.grad(at=self.epsilon(v, "rho", length), keep=())


def rescaled(optimizer: SharpnessAware, v: Vector, eta: float) -> tuple[Vector, Tensor]:
    """Return ``T^2 v``, in the memory of ``v``, and the length of ``T v``; T depends on the sizes of the weights."""
    modules = () if optimizer.model is None else (optimizer.model, *optimizer.others)
    scales = {p for module in modules for name, p in module.named_parameters() if name.rpartition(".")[-1] == "weight"}
    scaled = [p.dim() >= 2 or p in scales for p in optimizer.params]
    weights = [local(p.detach()) for p in optimizer.params]

    def multiplied(i: int, entries: Tensor) -> Tensor:
        return weights[i].abs().add_(eta).mul_(entries) if scaled[i] else entries

    length = optimizer.counted(v.map_(multiplied)).norm()  # |T v|
    return v.map_(multiplied), length
