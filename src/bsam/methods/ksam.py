"""K-SAM."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor
from torch.optim import Optimizer

from ..common.checks import check_count
from ..common.method_info import Need
from ..core import Modules, Objective, SharpnessAware, StepOptions, Vector


class KSAM(SharpnessAware):
    r"""K-SAM: SAM with both gradients computed on the k samples with the largest losses.

    .. math::  d = \nabla L_K(w + \rho\, g / |g|), \qquad g = \nabla L_K(w)

    K is the set of these samples. With DDP, each rank chooses among its own samples. Batch norm statistics are updated
    in the forward pass that finds the samples, the only one over the whole batch.

    Args:
        rho: the radius.
        k: the number of samples; smaller batches are used whole.
        base, model, m_sharpness, same_draws, warmup, start: see :class:`SharpnessAware`.

    Example:
        >>> import torch, bsam
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bsam.KSAM(base, model, k=4)
        >>> x, y = torch.randn(8, 3), torch.randn(8)
        >>> def closure(indices=slice(None)):
        ...     return (model(x[indices]).squeeze(1) - y[indices]) ** 2
        >>> loss = optimizer.step(closure)

    Reference:
        Ni, Chiang, Geiping, Goldblum, Wilson, Goldstein, "K-SAM: Sharpness-Aware Minimization at the Speed of SGD",
        2022.

    Differences from the paper:
        None known in the formula. The default of ``k`` is ours; we have not compared it with the paper's.
    """

    title = "K-SAM"
    reference = "Ni et al., 2022"
    arxiv = "2210.12864"
    purpose = "SAM on the k hardest samples of a large batch."
    capturable = True
    needs = (Need.PER_SAMPLE_LOSSES,)
    counts_of_batch = ("k",)

    def __init__(
        self,
        base: Optimizer,
        model: Modules,
        *,
        rho: float = 0.05,
        k: int = 64,
        **options: Unpack[StepOptions],
    ) -> None:
        self.k = check_count("k", k)
        super().__init__(base, model, {"rho": rho}, **options)

    def direction(self, L: Objective) -> Vector:
        K = hardest(L.losses(), self.k)
        g = L.grad(subset=K)
        return L.grad(at=self.epsilon(g, "rho"), subset=K, keep=())


def hardest(losses: Tensor, n: int) -> Tensor:
    """Return the indices of the ``n`` largest losses (at least one), sorted; of equal losses, the first ones."""
    order = losses.sort(descending=True, stable=True).indices
    return order[: max(1, n)].sort().values
