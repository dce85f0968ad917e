"""Sharpness-aware training with skorch."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..common.errors import BsamTypeError
from ..common.extras import require_package
from ..core.optimizer import SharpnessAware

require_package("skorch", "integrations")

from skorch import NeuralNetClassifier, NeuralNetRegressor  # noqa: E402
from skorch.utils import TeeGenerator  # noqa: E402


class SharpnessAwareMixin:
    """Train a net of skorch with a sharpness-aware optimizer.

    Put it before ``NeuralNet``, or a class derived from it, among the base classes. ``optimizer`` is a method, such as
    :class:`bsam.SAM`. The arguments of the method and of its base have the prefix ``optimizer__``; ``optimizer__base``
    is the class of the base, SGD by default.

    The callbacks ``on_grad_computed``, such as ``GradientNormClipping``, run once per step, on the direction of the
    method. The training loss and the predictions in the history are those of the first pass.

    Example::

        class Net(SharpnessAwareMixin, skorch.NeuralNet):
            pass


        net = Net(Network, nn.MSELoss, optimizer=bsam.SAM, optimizer__rho=0.05)
    """

    def initialize_optimizer(self: Any) -> Any:
        """Build the base and the method from the arguments with the prefix ``optimizer__``."""
        if isinstance(self.optimizer, type) and not issubclass(self.optimizer, SharpnessAware):
            raise BsamTypeError(
                f"optimizer must be a method of bsam, such as bsam.SAM, got {self.optimizer.__name__}: pass the class "
                "of its base as optimizer__base"
            )
        (groups,), settings = self.get_params_for_optimizer("optimizer", self.get_all_learnable_params())
        names = inspect.signature(self.optimizer).parameters
        arguments = {name: settings.pop(name) for name in names if name in settings}
        base = arguments.pop("base", torch.optim.SGD)(groups, **settings)
        self.optimizer_ = self.optimizer(base, self.module_, **arguments)
        return self

    def train_step(self: Any, batch: Any, **fit_params: Any) -> dict[str, Any]:
        """Run the passes of a step, the callbacks on the gradient, and the step; return the first pass."""
        passes = self.get_train_step_accumulator()  # keeps the first pass

        def closure() -> torch.Tensor:
            passes.store_step(step := self.train_step_single(batch, **fit_params))
            return step["loss"]

        self.optimizer_.zero_grad()
        self.optimizer_.backward(closure)
        named_parameters = TeeGenerator(self.get_all_learnable_params())
        self.notify("on_grad_computed", named_parameters=named_parameters, batch=batch, training=True)
        self.optimizer_.step()
        return passes.get_step()


class SharpnessAwareClassifier(SharpnessAwareMixin, NeuralNetClassifier):  # type: ignore[misc]
    """A ``skorch.NeuralNetClassifier`` that trains with a sharpness-aware method (:class:`SharpnessAwareMixin`).

    Example::

        net = SharpnessAwareClassifier(
            Network, optimizer=bsam.BSAM, optimizer__rho_max=0.05, lr=0.1
        )
    """


class SharpnessAwareRegressor(SharpnessAwareMixin, NeuralNetRegressor):  # type: ignore[misc]
    """A ``skorch.NeuralNetRegressor`` with the same arguments as :class:`SharpnessAwareClassifier`."""
