"""The trace of a Hessian, estimated from Hessian-vector products."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..common.checks import check_count
from ..common.errors import BsamValueError
from .hessian import HessianOperator
from .intervals import plus_minus, t_quantile
from .products import Progress, after_products, check_finite, no_progress, seeded

LEAST_SAMPLES = {"hutch++": 6, "hutchinson": 2}


@dataclass(frozen=True)
class Trace:
    """An estimate of the trace, with its standard error from the spread of the samples and from rounding.

    With few products the standard error itself is uncertain; ``interval`` accounts for that.
    """

    value: float
    standard_error: float
    interval: tuple[float, float]  #: 95 % confidence interval (Student's t)
    products: int
    note: str = ""  #: how many batches were computed without a recording, and why (see HessianOperator.linearized)

    def __repr__(self) -> str:
        half = (self.interval[1] - self.interval[0]) / 2
        return f"Trace({plus_minus(self.value, half)} (95 %), {after_products(self.products, self.note)})"


def trace(
    H: HessianOperator, samples: int = 30, seed: int = 0, *, method: str = "hutch++", progress: Progress | None = None
) -> Trace:
    r"""Estimate the trace from ``samples`` products with random vectors.

    Hutchinson averages :math:`z^T H z` over random signs ``z``. Hutch++ spends a third of the products on a sketch of
    the largest eigenvectors, a third on computing their share of the trace exactly, and a third on Hutchinson for the
    rest. The few large eigenvalues that are typical of Hessians then add no variance. It is the default because it is
    better from about 20 products on: with 30 products on trained MLPs its root mean square error was 2.4 to 3.6 % of
    the trace, and Hutchinson's 6.4 to 7.5 %. With 10 products Hutchinson is as good or slightly better, and its
    standard error is more reliable, because it comes from all products and not only from the last third.

    Args:
        H: the operator.
        samples: number of products.
        seed: seed of the random vectors.
        method: ``"hutch++"`` or ``"hutchinson"``.
        progress: called after each product with the number done and the number expected.

    Example:
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> data = [(torch.diag(torch.tensor([1.0, 2.0, 3.0])), torch.zeros(3, 1))]
        >>> H = HessianOperator(model, torch.nn.functional.mse_loss, data)
        >>> round(trace(H, samples=9).value * 3 / 2, 3)
        14.0

    Reference:
        Hutchinson, Commun. Stat. Simul. Comput. 19 (1990); Meyer, Musco, Musco, Woodruff, "Hutch++: Optimal Stochastic
        Trace Estimation", SOSA 2021.
    """
    if method not in LEAST_SAMPLES:
        raise BsamValueError(f'method must be "hutch++" or "hutchinson", got {method!r}')
    check_count("samples", samples, low=LEAST_SAMPLES[method])
    generator, before, report = seeded(seed), H.products, progress or no_progress
    wide = torch.promote_types(H.dtype, torch.float32)  # QR and sums need more digits than half precision has

    def times(v: Tensor) -> Tensor:
        out = H.times(v.to(H.dtype)).to(wide)
        check_finite(float(out.norm()))
        report(H.products - before, samples)
        return out

    sketched = min(samples // 3, H.size) if method == "hutch++" else 0
    Q = torch.zeros(H.size, 0, dtype=wide, device=H.device)
    with H.linearized() as recording:
        if sketched:
            Q = torch.linalg.qr(torch.stack([times(H.random(generator, "signs")) for _ in range(sketched)], dim=1)).Q
        exact = [float(torch.dot(q, times(q.contiguous()))) for q in Q.T]
        rest = []
        for _ in range(samples - 2 * sketched):
            z = H.random(generator, "signs").to(wide)
            z -= Q @ (Q.T @ z)
            rest.append(float(torch.dot(z, times(z))))
    spread = float(np.std(rest, ddof=1)) / math.sqrt(len(rest))
    # the only error if the sketch contains the whole range of H
    rounding = torch.finfo(H.dtype).eps * (np.abs(exact).sum() + np.abs(rest).mean())
    value, error = sum(exact) + float(np.mean(rest)), math.hypot(spread, rounding)
    half = t_quantile(0.975, len(rest) - 1) * error
    return Trace(value, error, (value - half, value + half), H.products - before, recording.note)
