"""MSAM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.errors import BsamValueError
from ..core.objective import Objective
from ..core.optimizer import SharpnessAware
from ..core.vector import Vector


class MSAM(SharpnessAware):
    r"""Momentum SAM: perturb against the base optimizer's momentum, which is there already: no pass more than the base.

    .. math::  d = \nabla L(w - \rho\, v / |v|)

    with SGD's momentum buffer or Adam's first moment as ``v``. The first step has none and is unperturbed.

    Args:
        base: the optimizer that takes the step; one with momentum.
        model: the network that the closure calls (its DDP, FSDP or compiled wrapper will do); None if it has no batch
            norm. If the closure runs other modules, too, a list of all of them, this one first.
        rho: the radius.
        m_sharpness: each rank of DDP runs its pass alone, and the direction is averaged.
        same_draws: all passes of a step see the same random draws (dropout, noise).

    Example:
        >>> import torch, bsam
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = bsam.MSAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, rho=0.1)
        >>> x, y = torch.ones(8, 3), torch.ones(8, 1)
        >>> losses = [optimizer.step(lambda: torch.nn.functional.mse_loss(model(x), y)) for _ in range(50)]
        >>> bool(losses[-1] < losses[0] / 10)
        True

    Reference: Becker, Altrock, Risse, "Momentum-SAM: Sharpness Aware Minimization without Computational Overhead",
        2024. The released code leaves the
    weights perturbed between steps and decays them there; here they are back at ``w`` after each step, and decay acts
    there. The loss that ``step`` returns is the one at the perturbed point: there is no other pass.
    """

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module | Sequence[nn.Module] | None,
        *,
        rho: float = 3.0,
        m_sharpness: bool = False,
        same_draws: bool = True,
    ) -> None:
        super().__init__(base, model, {"rho": rho}, m_sharpness=m_sharpness, same_draws=same_draws)

    def completed(self, group: dict[str, Any]) -> dict[str, Any]:
        if not group.get("momentum") and not group.get("betas", (0,))[0]:
            raise BsamValueError(
                "MSAM perturbs along the momentum of base, and base has none: use SGD with momentum=0.9, or Adam(W)"
            )
        return super().completed(group)

    def direction(self, L: Objective) -> Vector:
        v = self.momentum()
        return L.grad(at=None if v is None else -self.epsilon(v, "rho"))

    def momentum(self) -> Vector | None:
        """What the base optimizer has gathered; None before its first step."""
        state = [self.base.state.get(p, {}) for p in self.params]
        found = [own.get("momentum_buffer", own.get("exp_avg")) for own in state]
        if all(v is None for v in found):
            if any(state):
                raise BsamValueError(
                    f"MSAM finds neither momentum_buffer nor exp_avg in the state of {type(self.base).__name__}: use "
                    "SGD with momentum, or Adam(W)"
                )
            return None
        return self.vector(
            torch.zeros_like(p, requires_grad=False) if v is None else v
            for v, p in zip(found, self.params, strict=True)
        )
