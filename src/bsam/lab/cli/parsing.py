"""An argument parser whose errors are sentences: they name the wrong flag and offer the closest one."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

from ...common.errors import BsamValueError
from ..common.names import find_name

OF_TIMM = {  # flags of timm's train.py that are values of another flag here
    "opt_eps": "--base-set eps=",
    **{name: f"--augment timm:{name}=" for name in ("aa", "mixup", "cutmix")},
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises a BsamValueError of one line, without the usage of all flags.

    ``words`` are those of the command line, for flags that depend on them.

    Unknown flags are reported before missing ones: ``--metod sam`` says nothing about ``--method`` being required.
    """

    words: Sequence[str] = ()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse, after raising if the command or one of its flags does not exist."""
        words = list(sys.argv[1:] if args is None else args)
        commands = next((action.choices for action in self._actions if action.nargs == argparse.PARSER), None)
        for i, word in enumerate(words):
            if word == "--":
                break
            if not _is_flag(word):
                if commands is not None:
                    find_name("command", word, list(commands))
                    break  # the parser of the command checks the rest
                continue
            flag, _, value = word.partition("=")
            if flag not in self._option_string_actions:  # without abbreviations: --rho is not --rho-start
                following = words[i + 1] if i + 1 < len(words) and not _is_flag(words[i + 1]) else "VALUE"
                raise BsamValueError(f"`{self.prog}` has no flag {flag}{self._hint(flag, value or following)}")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise the error."""
        raise BsamValueError(f"{message}. `{self.prog} --help` describes the arguments")

    def _hint(self, flag: str, value: str) -> str:
        """Return the rest of the sentence about an unknown flag."""
        arguments = _method_arguments()
        flags = {_argument(known): known for known in self._option_string_actions if known.startswith("--")}
        name = _argument(flag)
        if name not in arguments:
            if name == "radius" and "sharpness_rho" in flags:
                of_method = f", and to set that of a method such as sam, --set rho={value}" if "set" in flags else ""
                return f". To measure the sharpness at a radius, write --sharpness-rho {value}{of_method}"
            if flag == "--list":
                return ". `bsam list` lists methods, networks, data sets and recipes"
            if name in OF_TIMM and OF_TIMM[name].split()[0] in flags.values():
                return f". Write {OF_TIMM[name]}{value}"
            if "epochs" in flags and (task := _task_with(name)):
                return f". It is a flag of the task {task}: leave it out, or choose another --task"
            closest = difflib.get_close_matches(name, {*arguments, *flags}, n=1)
            longer = [known for known in flags if known.startswith(name)]
            if not (closest or longer):
                return f". `{self.prog} --help` lists the flags"
            name = (longer or closest)[0]
            if name in flags:
                return f". Did you mean {' or '.join(flags[known] for known in longer or [name])}?"
        if "set" in flags:
            return f". Arguments of the method are given with --set: --set {name}={value}"
        return f". Only `bsam train` takes arguments of the method: --set {name}={value}"


def _method_arguments() -> set[str]:
    from ...methods import METHODS  # a correct command does not need torch for this
    from ..config import arguments_of

    return {name for method in METHODS for name in arguments_of(method)}


def _task_with(flag: str) -> str | None:
    """Return the task of ours that has this setting, also under its name in timm."""
    from ..config import TASK_SETTINGS

    for task in TASK_SETTINGS.values():
        for item in fields(task):
            if flag in (item.name, *map(_argument, item.metadata["timm"])):
                return task.name
    return None


def _is_flag(word: str) -> bool:
    """Return whether argparse takes a word for a flag: a number or a text with spaces is a value."""
    if not word.startswith("-") or word == "-" or " " in word:
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def _argument(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
