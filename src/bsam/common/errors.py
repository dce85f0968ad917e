"""The exceptions that the library raises on purpose: the standard ones, with one base class of ours."""


class BsamError(Exception):
    """Base class of all errors that the library raises on purpose.

    The message says what is wrong, with which value, and what to do. Errors that do not derive from it are bugs, or
    come from torch or from user code. Every instance is also a ``ValueError``, a ``TypeError`` or a ``RuntimeError``.
    """


class BsamValueError(BsamError, ValueError):
    """An argument, a setting or a combination of them has an invalid value.

    Example:
        >>> import bsam, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> bsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model, rho=-1.0)
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamValueError: rho must be a finite number ...
    """


class BsamTypeError(BsamError, TypeError):
    """An argument, or what a user's function returned, has an invalid type."""


class BsamRuntimeError(BsamError, RuntimeError):
    """The operation is not possible in this state: of the optimizer, of a file, of the machine."""
