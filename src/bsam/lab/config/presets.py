"""Presets: defaults that follow from other settings. Given values win, even if they equal the plain defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, Self

SET: Final = object()  # in ``when``: any value except None


class Preset:
    """Defaults that follow from other settings.

    Args:
        when: the values of other settings with which it applies, by name; ``SET`` stands for any value except
            None. Without them, it always applies.
        words: when it applies, for help texts, such as "with quantization"; by default the values of ``when``.
        values: the defaults, by name.

    Example:
        >>> preset = Preset(when={"base": "adamw"}, lr=3e-3)
        >>> preset.applies({"base": "adamw"}), preset.applies({"base": "sgd"})
        (True, False)
    """

    def __init__(self, *, when: Mapping[str, Any] | None = None, words: str = "", **values: Any) -> None:
        self.when = dict(when or {})
        self.words = words or " and ".join(f"with {value}" for value in self.when.values())
        self.values = values

    def applies(self, settings: Mapping[str, Any]) -> bool:
        """Return whether all its conditions hold."""
        for name, value in self.when.items():
            actual = settings[name]
            if (actual is None) if value is SET else (actual != value):
                return False
        return True


# usual for transformers trained from scratch
ADAMW = Preset(when={"base": "adamw"}, lr=1e-3, weight_decay=0.05, decay="weights")
SHARED = (ADAMW,)  # for all tasks, after their own


class RecordsGiven:
    """A base class of dataclasses that remember which of their fields the caller gave."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Note the names of the arguments."""
        self = super().__new__(cls)
        positional = [item.name for item in fields(cls) if not item.kw_only]  # type: ignore[arg-type]
        object.__setattr__(self, "_given", (*positional[: len(args)], *kwargs))
        return self


def given_values(settings: RecordsGiven) -> dict[str, Any]:
    """Return the values that the caller gave, by name."""
    return {name: getattr(settings, name) for name in vars(settings)["_given"]}
