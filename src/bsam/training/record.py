"""A folder that remembers finished runs, so that work that was interrupted goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

from ..core.errors import BsamRuntimeError
from ..flatness.sharpness import Sharpness
from .config import Run, check_settings
from .files import fits, parse_json, usable, write, writing
from .lock import LOCK
from .result import Epoch, LossSurface, Result

_NUMBERS = {name: kind for name, kind in get_type_hints(Result).items() if name not in ("run", "measure")}


class Record:
    """Finished runs as JSON lines in ``folder/runs.jsonl``, one per run, below a first line with the settings that they
    share.

    Args:
        folder: made if need be. One that holds runs under other settings is refused, and nothing in it is touched.
        settings: what makes numbers comparable, as plain values.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     record = Record(folder, {"epochs": 1})
        ...     record.add(Result(Run("sgd"), (Epoch({"test_accuracy": 0.5}),), 0.001))
        ...     again = Record(folder, {"epochs": 1})
        >>> again[Run("sgd")].score, Run("sgd", seed=1) in again
        (0.5, False)
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self._file = self.folder / "runs.jsonl"
        self._results: dict[str, Result] = {}
        with usable(self.folder, "results"):
            self.folder.mkdir(parents=True, exist_ok=True)
            lines = self._file.read_bytes().splitlines(keepends=True) if self._file.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]  # a process that was killed may have left half a line
        if not whole:
            self._start(settings)
            return
        mend = "choose another folder, or remove that one"
        check_settings(self.folder, parse_json(whole[0], dict, f"line 1 of {self._file}", mend), settings)
        mend = "choose another folder, or remove that line, and the run is run again"
        for number, line in enumerate(whole[1:], 2):
            name = f"line {number} of {self._file}"
            row = parse_json(line, dict, name, mend)
            try:
                self._remember(_result(row))
            except (KeyError, TypeError, ValueError) as error:
                raise BsamRuntimeError(f"{name} is damaged, or of another version ({_said(error)}): {mend}") from error
        if len(whole) < len(lines):
            write(self._file, b"".join(whole))

    def _start(self, settings: Mapping[str, Any]) -> None:
        strangers = sorted(path.name for path in self.folder.iterdir() if path.name not in (self._file.name, LOCK))
        if strangers:
            raise BsamRuntimeError(
                f"{self.folder} holds files of something else ({', '.join(strangers[:3])}): choose another folder"
            )
        write(self._file, (json.dumps(dict(settings)) + "\n").encode())

    def __contains__(self, run: Run) -> bool:
        return _key(run) in self._results

    def __getitem__(self, run: Run) -> Result:
        """The result of a run with exactly these settings."""
        return self._results[_key(run)]

    def add(self, result: Result) -> None:
        """Remember a finished run, on disk before this returns."""
        with writing(self._file), self._file.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        self._remember(result)

    def _remember(self, result: Result) -> None:
        self._results[_key(result.run)] = result


def _key(run: Run) -> str:
    return json.dumps(run.settings(), sort_keys=True)


def _said(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _result(line: dict[str, Any]) -> Result:
    """What :meth:`Record.add` wrote. A value that is no number, and should be, is refused as the rest of it is."""
    run = Run(**line["run"])
    numbers = {name: value for name, value in line.items() if name not in ("run", "measure")}
    if not fits(numbers, _NUMBERS) or numbers["seconds_per_step"] is None or not numbers["epochs"]:
        raise ValueError("it lacks numbers, or holds something else than numbers")
    found = ((epoch["metrics"], epoch.get("sharpness")) for epoch in line["epochs"])
    epochs = (Epoch(metrics, None if near is None else Sharpness(**near)) for metrics, near in found)
    relief = line["relief"]
    result = Result(
        run,
        tuple(epochs),
        line["seconds_per_step"],
        line["top_eigenvalue"],
        None if relief is None else LossSurface(tuple(relief["axis"]), tuple(map(tuple, relief["loss"]))),
        line.get("measure", "accuracy"),
    )
    if result.score is None:
        raise ValueError("it lacks the score of the run")
    near, land = result.last.sharpness, result.relief
    if (run.radius is not None and near is None) or (run.relief is not None and not _is_square(land)):
        raise ValueError("it lacks what the run measured")
    return result


def _is_square(relief: LossSurface | None) -> bool:
    return relief is not None and {len(relief.loss), *map(len, relief.loss)} == {len(relief.axis)}
