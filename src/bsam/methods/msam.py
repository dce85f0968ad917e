"""MSAM."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any, Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.errors import BsamValueError
from ..common.method_info import Need
from ..core import Modules, Objective, SharpnessAware, StepOptions, Vector


class MSAM(SharpnessAware):
    r"""Momentum SAM: perturb against the base optimizer's momentum, which costs no extra pass.

    .. math::  d = \nabla L(w - \rho\, v / |v|)

    with SGD's momentum buffer or Adam's first moment as ``v``. The first step has no momentum yet and is unperturbed.
    The only pass is at the perturbed point, and ``step`` returns the loss there.

    As in every method, ``|v|`` counts only parameters that get a gradient in the step, and only these are perturbed.
    Which ones do is known after the pass: those of the last step are assumed, and if the pass reached others, it is
    discarded and repeated, once, with the right perturbation. A step then takes two passes. This happens if an
    auxiliary head is used in some steps only, and in nearly every step of a network that drops random layers.
    If the ranks of DDP use different parameters (``find_unused_parameters=True``), they repeat the pass together. With
    ``same_draws=False``, or if the layers are drawn with other generators than torch's (a warning says so), passes are
    not repeated, and perturbations are then too short.

    Args:
        base: the optimizer that takes the step; it must have momentum.
        rho: the radius.
        m_sharpness: each DDP rank computes its own gradient, and only the direction is averaged.
        model, same_draws, warmup, start: see :class:`SharpnessAware`.

    Example:
        >>> import torch, bsam
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bsam.MSAM(base, model, rho=0.1)
        >>> loss = optimizer.step(lambda: model(torch.ones(8, 3)).square().mean())

    Reference:
        Becker, Altrock, Risse, "Momentum-SAM: Sharpness Aware Minimization without Computational Overhead", 2024.

    Differences from the paper:
        None known in the formula. The released code leaves the weights perturbed between steps and applies weight decay
        there; here they return to ``w`` after each step, and weight decay acts at ``w``. Without weight decay the
        trajectories are the same.
    """

    title = "MSAM"
    reference = "Becker et al., 2024"
    arxiv = "2401.12033"
    purpose = "Perturbs against the momentum, without an extra pass; tune its radius."
    passes: float = 1
    capturable = True
    needs = (Need.MOMENTUM,)

    unreached: Collection[int] = ()  # parameters without a gradient in the last step, a guess for this one
    repeatable = True  # whether a repeated pass reaches the same parameters

    def __init__(self, base: Optimizer, model: Modules, *, rho: float = 3.0, **options: Unpack[StepOptions]) -> None:
        super().__init__(base, model, {"rho": rho}, **options)
        modules = (m for root in self.called_modules for m in root.modules())
        if any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.max_norm is not None for m in modules):
            raise BsamValueError(
                "an embedding in model has max_norm, which would change its weights while MSAM has them perturbed: "
                "leave max_norm out, or use another method"
            )

    def completed(self, group: dict[str, Any]) -> dict[str, Any]:
        if not group.get("momentum") and not group.get("betas", (0,))[0]:
            raise BsamValueError(
                "MSAM perturbs against the momentum of base, but base has none: use SGD with momentum=0.9, or Adam(W)"
            )
        return super().completed(group)

    def direction(self, L: Objective) -> Vector:
        momenta = self.momenta()
        assumed = [i not in self.unreached for i in range(len(momenta))]
        g = L.grad(at=self.perturbation(momenta, assumed))
        reached = L.reached
        differs = any(a != b for v, a, b in zip(momenta, assumed, reached, strict=True) if v is not None)
        if self.on_any_rank(differs and self.same_draws and self.repeatable):
            L.restart()
            g = L.grad(at=self.perturbation(momenta, reached))
            if L.reached != reached:
                self.repeatable = False
                warnings.warn(
                    "MSAM repeated a pass, which then reached other parameters: the closure draws random numbers that "
                    "are not torch's. From now on, passes are not repeated, and perturbations may be too short",
                    stacklevel=2,
                )
        self.unreached = {i for i, is_reached in enumerate(L.reached) if not is_reached}
        return g

    def perturbation(self, momenta: list[Tensor | None], reached: list[bool]) -> Vector | None:
        """Return the perturbation against the momentum of these parameters; None without momentum."""
        if all(v is None for v in momenta):
            return None
        return self.epsilon(-self.restricted(momenta, reached), "rho")

    def momenta(self) -> list[Tensor | None]:
        """Return the momentum of each parameter; None for those that the base optimizer has not moved yet."""
        states = [self.base.state.get(p, {}) for p in self.params]
        momenta = [state.get("momentum_buffer", state.get("exp_avg")) for state in states]
        if all(v is None for v in momenta) and any(states):
            raise BsamValueError(
                f"MSAM finds neither momentum_buffer nor exp_avg in the state of {type(self.base).__name__}: use "
                "SGD with momentum, or Adam(W)"
            )
        return momenta
