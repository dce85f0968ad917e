"""MSAM."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from ..common.errors import BsamValueError
from ..common.method_info import Need
from ..core import Modules, Objective, SharpnessAware, StepOptions, Vector


class MSAM(SharpnessAware):
    r"""Momentum SAM: perturb against the base optimizer's momentum, which costs no extra pass.

    .. math::  d = \nabla L(w - \rho\, v / |v|)

    with SGD's momentum buffer or Adam's first moment as ``v``. The first step has no momentum yet and is unperturbed.
    The only pass is at the perturbed point, and ``step`` returns the loss there.

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
    memory = "1"
    capturable = True
    needs = (Need.MOMENTUM,)

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
        v = self.momentum()
        return L.grad(at=None if v is None else -self.epsilon(v, "rho"))

    def momentum(self) -> Vector | None:
        """Return the momentum of the base optimizer; None before its first step."""
        states = [self.base.state.get(p, {}) for p in self.params]
        momenta = [state.get("momentum_buffer", state.get("exp_avg")) for state in states]
        if all(v is None for v in momenta):
            if any(states):
                raise BsamValueError(
                    f"MSAM finds neither momentum_buffer nor exp_avg in the state of {type(self.base).__name__}: use "
                    "SGD with momentum, or Adam(W)"
                )
            return None
        return self.vector(
            torch.zeros_like(p, requires_grad=False) if v is None else v
            for v, p in zip(momenta, self.params, strict=True)
        )
