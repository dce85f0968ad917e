"""The one exception that the library raises on purpose."""


class Refusal(ValueError, TypeError, RuntimeError):
    """Input that cannot be right, said in a sentence that names the culprit and the mend.

    It is a ``ValueError``, a ``TypeError`` and a ``RuntimeError`` at once, so that handlers written for torch's own optimizers catch it.

    Example:
        >>> import bsam, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> bsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model, rho=-1.0)
        Traceback (most recent call last):
        ...
        bsam.core.refusal.Refusal: rho must be a finite number that is not negative, got -1.0
    """
