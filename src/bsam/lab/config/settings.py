"""Declare and check a setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np

from ...common.checks import check_count, check_flag, check_number, is_number
from ...common.errors import BsamValueError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Check: TypeAlias = Callable[[str, Any], object]
Split = Literal["validation", "holdout", "test"]
MAX_SEED = 2**63 - 1  # seeds are stored as 64-bit integers

NOT_NEGATIVE: Check = partial(check_number, low=0)
SHARE: Check = partial(check_number, low=0, high=1)


def setting(
    default: T,
    help: str,
    heading: str = "Task",
    check: Check | None = None,
    timm: Sequence[str] = (),
    digest: str | None = None,
) -> T:
    """Declare a dataclass field.

    Args:
        default: its default; None is not checked.
        help: the help text of its flag.
        heading: the heading of its flag.
        check: called with the name and the value; raises if the value is wrong. By default the value must be a name, a
            count, a number or a bool, as the default is.
        timm: its flags in timm's ``train.py``, which `bsam train` takes, too.
        digest: its name in the digest of a run, if the setting was renamed.

    Example:
        >>> from dataclasses import dataclass
        >>> from bsam.lab.config import TaskSettings
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Settings(TaskSettings):
        ...     name = "segmentation"
        ...     width: int = setting(8, "channels of the first stage")
        >>> Settings(width=0)
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamValueError: width must be a whole number of at least 1, got 0
    """
    checks: dict[type, Check] = {str: check_name, int: check_count, float: check_number, bool: check_flag}
    metadata = {
        "help": help,
        "heading": heading,
        "check": check or checks.get(type(default)),
        "timm": timm,
        "digest": digest,
    }
    return field(default=default, metadata=metadata)


def check_name(name: str, value: object) -> None:
    """Raise unless the value is a non-empty string."""
    if not (isinstance(value, str) and value):
        raise BsamValueError(f"{name} must be a name, got {value!r}")


def check_positive(name: str, value: object, high: float = math.inf) -> None:
    """Raise unless the value is a finite number above 0 and at most ``high``."""
    if not is_number(value) or not 0 < value <= high:  # type: ignore[operator]
        most = "" if high == math.inf else f" and at most {high:g}"
        raise BsamValueError(f"{name} must be a finite number above 0{most}, got {value!r}")


def one_of(kind: Any) -> Check:
    """Return a check for the values of a ``Literal``."""

    def check(name: str, value: object) -> None:
        if value not in get_args(kind):
            raise BsamValueError(f"{name} must be one of {', '.join(get_args(kind))}; got {value!r}")

    return check


def to_json_value(value: Any) -> Any:
    """Return the value as JSON stores it: numpy numbers as Python numbers, tuples and arrays as lists, even nested."""
    if value is None or type(value) in (str, bool, int, float):  # most values; this is called often
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: to_json_value(entry) for name, entry in value.items()}
    return [to_json_value(entry) for entry in value] if type(value) in (list, tuple) else value


def check_values(settings: DataclassInstance) -> None:
    """Check the value of each field, and replace it by a copy in plain Python values."""
    for item in fields(settings):
        value = to_json_value(getattr(settings, item.name))  # a copy: the caller's values may change later
        object.__setattr__(settings, item.name, value)
        check = item.metadata.get("check")
        if check is not None and (value is not None or item.default is not None):
            check(item.name, value)
