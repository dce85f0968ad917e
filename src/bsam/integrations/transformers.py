"""Sharpness-aware training with the Trainer of Transformers.

On import, this module makes Transformers importable if torchvision does not fit a CPU build of torch: import it before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..common.errors import BsamRuntimeError, BsamValueError
from ..common.extras import require_package
from ..common.method_info import Need
from ..common.timm_import import import_torchvision
from ..core.optimizer import SharpnessAware
from ..methods import METHODS
from .accelerate import check_accelerator, unwrap_optimizer
from .batch import check_unchanged, tensor_versions

require_package("transformers", "integrations")
require_package("accelerate", "integrations")
import_torchvision()

from transformers import Trainer  # noqa: E402


class SharpnessAwareTrainer(Trainer):
    """A ``transformers.Trainer`` that trains with a sharpness-aware method.

    The method wraps the optimizer that the Trainer creates or gets as ``optimizers``. The Trainer itself does clipping,
    gradient accumulation, mixed precision, label smoothing, gradient checkpointing, checkpoints and DDP: every pass of
    a step is one call of its ``training_step``, so ``compute_loss`` can be overridden as usual.

    The logged loss is that of the first pass. In later passes :attr:`extra_pass` is True and :meth:`log` does nothing;
    check it in a ``compute_loss`` that counts or stores something. To combine this class with a subclass of Trainer,
    put it first: ``class MyTrainer(SharpnessAwareTrainer, Seq2SeqTrainer)``.

    Args:
        method: the name of a method, such as ``"bsam"`` (the default) or ``"sam"``, or a subclass of
            :class:`bsam.SharpnessAware`. Leave it out if ``optimizers`` contains a sharpness-aware optimizer.
        method_kwargs: the arguments of the method, such as ``{"rho": 0.05}``. The Trainer sets AE-SAM's
            ``total_steps``.
        args, kwargs: passed to ``Trainer``.

    Example::

        trainer = SharpnessAwareTrainer(
            model,
            TrainingArguments("out", max_grad_norm=1.0),
            train_dataset=data,
            method="sam",
            method_kwargs={"rho": 0.05},
        )
        trainer.train()
    """

    extra_pass: bool = False

    def __init__(
        self,
        *args: Any,
        method: str | type[SharpnessAware] | None = None,
        method_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.method_kwargs = dict(method_kwargs or {})
        self.method = _method_class("bsam" if method is None else method, self.method_kwargs)
        super().__init__(*args, **kwargs)
        check_accelerator(self.accelerator)
        optim = str(getattr(self.args.optim, "value", self.args.optim))
        if "lomo" in optim or "layerwise" in optim:
            raise BsamValueError(f"optim={optim!r} steps during backward, which runs several times: use another one")
        if self.is_distributed_loading_by_transformers:
            raise BsamRuntimeError(
                "a model that was sharded at loading (DistributedConfig) cannot be trained with a sharpness-aware "
                "method: use DDP"
            )
        if isinstance(self.optimizer, SharpnessAware):
            if method is not None or method_kwargs:
                raise BsamValueError(
                    "optimizers already contains a sharpness-aware optimizer: leave out method and method_kwargs, or "
                    "pass its base optimizer"
                )
            _check_needs(self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the Trainer's optimizer and wrap it in the method."""
        optimizer = super().create_optimizer(model)
        kwargs, inner = self.method_kwargs, getattr(optimizer, "optimizer", optimizer)
        if Need.TOTAL_STEPS in self.method.needs:
            kwargs = {"total_steps": max(1, self.state.max_steps), **kwargs}  # 0 until train(), which calls this again
        if not isinstance(inner, SharpnessAware):
            optimizer = self.optimizer = self.method(optimizer, self.model if model is None else model, **kwargs)
            _check_needs(optimizer)
        elif "total_steps" in kwargs:  # wrapped in an earlier train(), or before a smaller batch size was tried
            inner.total_steps = kwargs["total_steps"]  # type: ignore[attr-defined]
        return optimizer

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run the passes of the method on one micro-batch; return the loss of the first."""
        one_pass = super().training_step
        versions = tensor_versions(dict(inputs))

        def closure() -> Tensor:
            loss = one_pass(model, inputs, num_items_in_batch)  # copies the containers of its inputs
            check_unchanged(versions, "compute_loss")
            self.extra_pass = True
            return loss

        try:
            return unwrap_optimizer(self.optimizer).backward(closure, scaler=self.accelerator.scaler)
        finally:
            self.extra_pass = False

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log as usual in the first pass, and nothing in later ones."""
        if not self.extra_pass:
            super().log(*args, **kwargs)


def _method_class(method: str | type[SharpnessAware], kwargs: Mapping[str, Any]) -> type[SharpnessAware]:
    cls: Any = METHODS[method] if isinstance(method, str) and method in METHODS else method
    optimizers = [name for name, listed in METHODS.items() if not listed.is_loss]
    if not (isinstance(cls, type) and issubclass(cls, SharpnessAware)):
        raise BsamValueError(
            f"method must be a subclass of bsam.SharpnessAware or one of {', '.join(optimizers)}, got {method!r}"
        )
    _check_needs(cls)
    if kwargs.get("m_sharpness"):
        raise BsamValueError(
            "m_sharpness=True needs the DistributedDataParallel wrapper, which the Trainer builds after the optimizer: "
            "leave it out, or write the loop with Accelerate"
        )
    return cls


def _check_needs(method: type[SharpnessAware] | SharpnessAware) -> None:
    for need, words in {Need.PER_SAMPLE_LOSSES: "per-sample losses", Need.OUTPUTS: "the outputs, too"}.items():
        if need in method.needs:
            raise BsamValueError(
                f"{method.title} needs {words}, but the Trainer computes the mean loss alone: use another method"
            )
