"""BSAM, Algorithm 1."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, Unpack

from torch import Tensor
from torch.optim import Optimizer

from ..common.checks import check_count, check_flag, check_number, check_radius
from ..common.errors import BsamValueError
from ..core import TINY, Modules, Objective, SharpnessAware, StepOptions, Vector, ratio
from ..core.schedule import LR_MAX, LR_MIN
from ..core.tensors import Scalar
from .asam import rescaled


class BSAM(SharpnessAware):
    r"""Bilateral Sharpness-Aware Minimization: flat on both sides, up the gradient and down.

    Not to be confused with Bayesian SAM, which is also abbreviated bSAM.

    .. math::
        g_{\max} = \nabla L(w + \rho_{\max}\, g / |g|), \qquad g_{\min} = \nabla L(w - \rho_{\min}\, g / |g|)

        d = g + g_{\max} - \frac{|g_{\max}|}{|g_{\min}|}\, g_{\min}, \qquad g = \nabla L(w)

    :math:`\rho_{\min}` follows the learning rate from ``rho_min`` at ``lr_max`` down to ``rho_min_floor`` at
    ``lr_min``: close to a minimum, a fixed radius overshoots it, and :math:`g_{\min}` turns against :math:`g`.

    Args:
        base: the optimizer that takes the step.
        model: the network that the closure calls, or its DDP, FSDP or compiled wrapper; None if it has no buffers.
            If the closure runs several modules, a list of them, the trained one first.
        rho_max: the radius uphill.
        rho_min: the maximum of the radius downhill.
        rho_min_floor: the minimum of the radius downhill; if equal to ``rho_min``, the radius is fixed.
        lr_max: the learning rate at which the radius downhill is largest. None means the group's largest learning
            rate so far, but at least its known peak. The peak is ``max_lr`` or else ``initial_lr``, which torch's
            schedulers store in the group; without them, it is the learning rate when the optimizer was built. During a
            warm-up to the peak, the radius rises, too. Set ``lr_max`` if the rate can exceed the peak, as with
            ``LambdaLR`` and ``CyclicLR``. ``lr_scale``, timm's layer-wise decay, does not lower the radius. The
            parameter groups store ``lr_max`` as ``sharpness_lr_max`` and ``lr_min`` as ``sharpness_lr_min``, since some
            base optimizers have a setting called ``lr_max``, too.
        lr_min: the learning rate at which the radius downhill is smallest.
        passes: 3 is Algorithm 1; 2 extrapolates ``g_min`` from the other two gradients, which agrees to first order in
            the radii (our extension, not in the paper). This needs the same ratio ``rho_min / rho_max`` in all groups.
            Other steps take three passes, with a warning: for example, if groups with different learning rates have
            schedules that end at the same rate, so that their ``rho_min`` fall differently. Extrapolation multiplies
            the rounding errors of the gradients by that ratio, so in bfloat16 and float16 keep ``rho_min`` below about
            twice ``rho_max``.
        every: 1 is Algorithm 1; with k, only every k-th step computes BSAM's direction ``d``. The steps in between take
            one pass: to the new gradient, they add the component of the last ``d`` orthogonal to its ``g``, scaled by
            the ratio of the two gradients' norms (our extension, not in the paper). ``passes=2, every=5`` takes 1.2
            passes per step on average.
        start_from_min: step from ``w - rho_min g/|g|`` instead of ``w``, as the authors' released code does.
        side_by_side: in a step that is captured in a CUDA graph on one GPU, compute ``g_max`` and ``g_min`` at the same
            time, on two streams. This needs memory for a second copy of the parameters and for the second pass. It has
            no effect with a ``GradScaler``. Views of parameters or buffers made outside the closure do not see the
            perturbed values.
        adaptive: measure both radii in ASAM's metric, which scales with the weights: ``T^2 g / |T g|`` instead of
            ``g / |g|`` (our extension, not in the paper).
        eta: the constant of that metric, 0.01 if not given; only with ``adaptive``.
        m_sharpness: each DDP rank perturbs along its own gradient.
        same_draws: all passes of a step see the same random draws (dropout, noise).
        warmup, start: see :class:`SharpnessAware`.

    Example:
        >>> import torch, bsam
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bsam.BSAM(base, model, rho_max=0.05, rho_min=0.05)
        >>> x, y = torch.ones(8, 3), torch.ones(8, 1)
        >>> losses = [
        ...     optimizer.step(lambda: torch.nn.functional.mse_loss(model(x), y))
        ...     for _ in range(50)
        ... ]
        >>> bool(losses[-1] < losses[0] / 10)
        True

    Reference:
        Deng, Pang, Zhang, Huang, "Bilateral Sharpness-Aware Minimization for Flatter Minima",
        arXiv:2409.13173, Algorithm 1.

    Differences from the paper:
        With the default arguments, none except two special cases: the ratio is 0 if :math:`|g_{\min}| = 0`, and the
        radius downhill stays at its minimum or maximum if the learning rate is below ``lr_min`` or above ``lr_max``.
        ``passes=2``, ``every`` and ``adaptive=True`` are our extensions. The authors' released code steps from
        :math:`w - \rho_{\min}\, g / |g|`, as ``start_from_min=True`` does, and has :math:`\rho_{\min} = 0` in its
        first step.
    """

    title = "BSAM"
    reference = "Deng et al., arXiv 2024"
    arxiv = "2409.13173"
    purpose = "Flat in both directions, up and down the gradient; passes=2 costs the same as SAM."
    passes: float = 3
    memory = 2
    capturable = True

    scheduled_radii: ClassVar[dict[str, str]] = {"rho_min": "rho_min_floor"}
    warned = False  # whether the user knows that two passes do not suffice

    def __init__(
        self,
        base: Optimizer,
        model: Modules,
        *,
        rho_max: float = 0.05,
        rho_min: float = 0.05,
        rho_min_floor: float = 0.0,
        lr_max: float | None = None,
        lr_min: float = 0.0,
        passes: int = 3,
        every: int = 1,
        start_from_min: bool = False,
        side_by_side: bool = False,
        adaptive: bool = False,
        eta: float | None = None,
        **options: Unpack[StepOptions],
    ) -> None:
        if not isinstance(passes, int) or passes not in (2, 3):
            raise BsamValueError(f"passes must be 3 (Algorithm 1) or 2 (g_min extrapolated), got {passes!r}")
        radii = {"rho_max": rho_max, "rho_min": rho_min, "rho_min_floor": rho_min_floor}
        settings = {**radii, LR_MAX: lr_max, LR_MIN: lr_min}
        check_radius("rho_min_floor", rho_min_floor)
        if every != 1:
            self.vectors = ("orthogonal",)  # the component of d orthogonal to g, divided by |g|
        self.every = check_count("every", every)
        self.start_from_min = check_flag("start_from_min", start_from_min)
        if every > 1 and start_from_min:
            raise BsamValueError(
                f"every={every} needs start_from_min=False: most steps have no point downhill to start from"
            )
        self.full_passes, self.passes = passes, self.passes_with({"passes": passes, "every": every})
        self.side_by_side = check_flag("side_by_side", side_by_side) and passes == 3
        self.adaptive = check_flag("adaptive", adaptive)
        self.eta = check_number("eta", 0.01 if eta is None else eta, low=0)
        if eta is not None and not adaptive:
            raise BsamValueError("eta belongs to the adaptive metric: also set adaptive=True, or leave eta out")
        super().__init__(base, model, settings, **options)

    @classmethod
    def passes_with(cls, arguments: Mapping[str, Any]) -> float:
        return 1 + (arguments.get("passes", cls.passes) - 1) / arguments.get("every", 1)

    def step_kind(self) -> Hashable:
        return super().step_kind() or self.steps_since_start % self.every == 0

    def direction(self, L: Objective) -> Vector:
        g = L.grad()  # Algorithm 1, line 3
        orthogonal = None if self.step_kind() else self.recall("orthogonal")
        if orthogonal is not None:
            return g + g.norm() * orthogonal
        d = self.algorithm_1(L, g)
        if self.every > 1:
            self.remember("orthogonal", d.reject(g) / (g.norm() + TINY))
        return d

    def algorithm_1(self, L: Objective, g: Vector) -> Vector:
        """Return the direction of Algorithm 1, from the gradient ``g``."""
        v, length = rescaled(self, g.copy(), self.eta) if self.adaptive else (g, self.counted(g).norm())
        e_max = self.epsilon(v, "rho_max", length)  # line 4
        e_min = self.epsilon(v, "rho_min", length)  # line 6
        if self.start_from_min:
            self.start_from(-e_min)
        k = self.ratio_of_radii() if self.full_passes == 2 else None
        if self.side_by_side:
            g_max, g_min = L.grads(e_max, -e_min)  # lines 5 and 7
            return g + g_max - ratio(g_max.norm(), g_min.norm()) * g_min  # line 8
        g_max = L.grad(at=e_max)  # line 5
        n_max = g_max.norm()
        if k is not None:
            # line 7, to first order: g - k (g_max - g), up to a factor, which cancels in line 8
            share = k / (1 + k)
            g_min = g - share * g_max
            if self.every > 1 or self.start_from_min:  # g is needed afterwards
                g_min = Vector(g_min.tensors(), g.layout, stable=True)
            else:
                L.store(g_min, g_max)
            return g_min + share * g_max + g_max - ratio(n_max, g_min.norm()) * g_min
        rise = g + g_max
        g_min = L.grad(at=-e_min, keep=None if self.every > 1 else rise)  # line 7
        return rise - ratio(n_max, g_min.norm()) * g_min  # line 8

    def ratio_of_radii(self) -> Scalar | None:
        """Return ``rho_min / rho_max``; None, with a warning, if perturbed groups differ in it, or if ``rho_max`` is 0.

        Learning rates on a GPU are not read, which would wait for it: groups with equal settings are assumed to follow
        one schedule.
        """
        k = self._common_ratio()
        if k is None and not self.warned:
            self.warned = True
            warnings.warn(
                "passes=2 needs the same rho_min / rho_max in all parameter groups: steps in which they differ take "
                "three passes. Set rho_min_floor=rho_min to keep both radii fixed, or passes=3",
                stacklevel=6,
            )
        return k

    def _common_ratio(self) -> Scalar | None:
        groups = self.param_groups  # a warm-up scales both radii, and so does not change their ratio
        radii = [(self.full_radius(group, "rho_min"), self.full_radius(group, "rho_max"), group) for group in groups]
        moved = [(a, b, group) for a, b, group in radii if b != 0.0 or isinstance(a, Tensor) or a != 0.0]
        if any(b == 0.0 for _, b, _ in moved):
            return None
        k, *others = [a / b for a, b, _ in moved] or [0.0]
        if any(isinstance(ratio, Tensor) and ratio.is_cuda for ratio in (k, *others)):
            k_top, *others = [group["rho_min"] / b for _, b, group in moved]
            floor, *other_floors = [group["rho_min_floor"] / b for _, b, group in moved]
            return k if _all_close(k_top, others) and _all_close(floor, other_floors) else None
        return k if _all_close(k, others) else None


def _all_close(value: Scalar, others: Sequence[Scalar]) -> bool:
    return all(math.isclose(other, value, rel_tol=1e-6) for other in others)
