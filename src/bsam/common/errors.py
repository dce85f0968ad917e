"""The exceptions of the library: standard ones with a common base class."""


class BsamError(Exception):
    """Base class of all errors that the library raises on purpose.

    The message says what is wrong, with which value, and what to do. Every instance is also a ``ValueError``, a
    ``TypeError`` or a ``RuntimeError``. Other exceptions are bugs, or come from torch or user code.
    """


class BsamValueError(BsamError, ValueError):
    """An argument, a setting or a combination of them is invalid."""


class BsamTypeError(BsamError, TypeError):
    """An argument, or the return value of a user's function, has an invalid type."""


class BsamRuntimeError(BsamError, RuntimeError):
    """The operation is not possible in the current state of the optimizer, a file or the machine."""
