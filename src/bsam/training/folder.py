"""The folder of one run: its settings, its numbers, and where it goes on after an interruption."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import BsamError, BsamRuntimeError
from ..core.extras import need
from ..flatness.sharpness import Sharpness
from .config import Run, check_settings
from .environment import environment_info
from .events import Events
from .files import (
    fits,
    lines,
    read_bytes,
    read_checkpoint,
    read_json,
    read_json_lines,
    usable,
    write,
    write_checkpoint,
    write_json,
    writing,
)
from .lock import LOCK, locked
from .training import Training

CHECKPOINT, BEFORE, NETWORK = "checkpoint.bsam", "checkpoint-before.bsam", "model.safetensors"
MOST_HEADER = 100_000_000  # bytes, as in safetensors
ANEW = "the command that trained it writes it anew, from the checkpoint"
_METRICS: dict[str, Any] = {"epoch": int, "sharpness": Sharpness | None}  # in metrics.jsonl; the others are floats
_BLANK = "0" * 64  # in place of a digest


@dataclass(frozen=True)
class _Tensor:
    """An entry in the header of ``model.safetensors``."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


class RunDir:
    """A folder for one run, held by one process at a time.

    ``config.json`` has the settings, ``identity.json`` the task and a digest of the data, ``environment.json`` each
    machine that worked on it, ``metrics.jsonl`` a line per epoch, ``tensorboard/`` the same for TensorBoard,
    ``probe.jsonl`` the probe's readings, ``checkpoint.bsam`` the state after the last epoch (and, until the run is
    finished, ``checkpoint-before.bsam`` that before), ``curvature.json`` the eigenvalue and the landscape after the
    last epoch, ``model.safetensors`` the trained network. All of them are written whole or not at all.

    Args:
        path: made if need be. A folder that holds another configuration, or something else, is refused and not touched.
        run: the settings.
        tell: called with a sentence that a user should know.
    """

    def __init__(self, path: str | Path, run: Run, tell: Callable[[str], None] = print) -> None:
        self.path, self.run, self._tell = Path(path), run, tell
        self._held = contextlib.ExitStack()
        self._whole = (
            False  # whether the newest checkpoint is: a damaged one must not take the place of the one before it
        )

    def __enter__(self) -> RunDir:
        need("safetensors", "train")  # now, not after the last epoch
        config = self.path / "config.json"
        with usable(self.path, "a run"), contextlib.ExitStack() as stack:
            self.path.mkdir(parents=True, exist_ok=True)
            self._check(config)
            stack.enter_context(locked(self.path, "training"))
            self._check(config)  # again: somebody may have come and gone meanwhile
            self._held = stack.pop_all()
        return self

    def _check(self, config: Path) -> None:
        names = sorted(file.name for file in self.path.iterdir())
        strangers = [name for name in names if name != LOCK and not name.endswith(".draft")]
        if config.exists():
            theirs = read_json(config, dict, "it is not the configuration of a run: choose another folder")
            check_settings(self.path, theirs, json.loads(json.dumps(self.run.settings())))
        elif strangers:
            raise BsamRuntimeError(
                f"{self.path} holds files of something else ({', '.join(strangers[:3])}): choose another folder"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def begin(self, training: Training, epochs: list[dict[str, Any]], readings: list[dict[str, Any]]) -> None:
        """Note the settings, which have proved possible by now; the data; the machine that goes to work, and how; what
        the task wants written down; and the
        epochs so far: a process may have been killed before it did. Other data than that of the epochs so far is
            refused.
        """
        task, team = training.task, training.team
        identity = {"task": f"{type(task).__module__}.{type(task).__qualname__}", "data": task.fingerprint()}
        if epochs:
            check_settings(self.path, {**identity, **_read(self.path / "identity.json", dict)}, identity)
        write_json(self.path / "config.json", self.run.settings())
        write_json(self.path / "identity.json", identity)
        file = self.path / "environment.json"
        how = {"processes": team.size, "compiled": training.compiled, "captured": training.captured}
        write_json(file, [*_read(file, list), {**environment_info(team.device), **how}])
        for name, value in task.notes().items():
            write_json(self.path / f"{name}.json", value)
        self._events = Events(self.path / "tensorboard", epochs)
        self._publish(epochs, readings)

    def last(self, device: torch.device) -> dict[str, Any] | None:
        """The newest checkpoint that is whole; None where no epoch was finished yet."""
        found = [self.path / name for name in (CHECKPOINT, BEFORE) if (self.path / name).exists()]
        for file in found:
            try:
                state = read_checkpoint(file, device)
                self._whole = file.name == CHECKPOINT
                return state
            except BsamError as error:
                self._tell(
                    f"{error}. {'Going on from the one before it' if file != found[-1] else 'There is none before it'}."
                )
        if found:
            raise BsamRuntimeError(
                f"{self.path} has no checkpoint that is whole: remove {' and '.join(file.name for file in found)} "
                "there to start anew"
            )
        if (self.path / NETWORK).exists():
            raise BsamRuntimeError(
                f"{self.path} holds {NETWORK}, and no checkpoint from which damaged files could be written anew: "
                f"remove {NETWORK} there to train the whole run again, or choose another folder. "
                "If only curvature.json is damaged, remove that file"
            )
        return None

    def keep(self, state: dict[str, Any], epochs: list[dict[str, Any]], readings: list[dict[str, Any]]) -> None:
        """The state after an epoch, with the metrics and the readings so far."""
        checkpoint = self.path / CHECKPOINT
        if self._whole:
            with writing(checkpoint):
                checkpoint.replace(self.path / BEFORE)
            self._whole = False
        write_checkpoint(checkpoint, {**state, "epochs": epochs, "readings": readings})
        self._whole = True
        self._events.add(epochs[-1])
        self._publish(epochs, readings)

    def _publish(self, epochs: list[dict[str, Any]], readings: list[dict[str, Any]]) -> None:
        write(self.path / "metrics.jsonl", lines(epochs))
        if readings:
            write(self.path / "probe.jsonl", lines(readings))

    def finish(self, network: nn.Module, found: Mapping[str, Any] | None = None) -> None:
        """Write what was found after the last epoch, if anything, and the trained network: where that is, the run is
        finished.
        """
        from safetensors.torch import save

        if found is not None:
            write_json(self.path / "curvature.json", found)
        tensors = {name: t.detach().cpu().contiguous() for name, t in network.state_dict().items()}
        content = save(tensors)
        with writing(self.path / BEFORE):
            (self.path / BEFORE).unlink(missing_ok=True)  # a sweep has hundreds of these
        write(self.path / NETWORK, _described(content, {"run": json.dumps(self.run.settings())}))


def _read(file: Path, kind: type[Any]) -> Any:
    """What a JSON file holds, if it is there, whole, and of this kind; else an empty one."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return kind()
    return found if isinstance(found, kind) else kind()


def read_run(path: Path) -> Run:
    """The settings of a run folder."""
    try:
        return Run(**read_json(path / "config.json", dict, "choose another folder"))
    except (BsamError, TypeError) as error:
        raise BsamRuntimeError(f"{path} is no folder of a run: {error}") from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """What ``metrics.jsonl`` holds: one entry per finished epoch; none where there is no such file.

    A damaged one is refused: :func:`bsam.training.loop.fit` writes it anew, from the checkpoint.
    """
    file = path / "metrics.jsonl"
    try:
        rows = read_json_lines(file, ANEW)
    except BsamError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise
    kinds = {name: _METRICS.get(name, float) for name in {"epoch", "seconds", *rows[0]}} if rows else {}
    whole = all(fits(row, kinds) and row["seconds"] is not None for row in rows)
    if not whole or [row["epoch"] for row in rows] != [*range(1, len(rows) + 1)]:
        raise BsamRuntimeError(f"{file} is damaged: it does not hold the same numbers of each epoch; {ANEW}")
    return rows


def last_metrics(path: Path) -> dict[str, Any]:
    """The last entry of a finished run's metrics; a file that has not all of them is refused."""
    found, epochs = read_metrics(path), read_run(path).epochs
    if len(found) != epochs:
        file = path / "metrics.jsonl"
        raise BsamRuntimeError(f"{file} does not hold the run's {epochs} epochs; {ANEW}")
    return found[-1]


def read_network(path: Path, network: nn.Module) -> nn.Module:
    """The network of a finished run, read into one of its architecture."""
    if not (path / NETWORK).exists():
        raise BsamRuntimeError(
            f"{path} has no model.safetensors: the run is not finished. `bsam train --out {path}` with the same "
            "settings goes on with it"
        )
    network.load_state_dict(read_weights(path))
    return network


def has_network(path: Path) -> bool:
    """Whether a run folder holds a trained network, as far as the header and the length of the file tell; a file that
    cannot be read is refused.
    """
    try:
        with (path / NETWORK).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, MOST_HEADER)))
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return False
    except OSError as error:
        raise BsamRuntimeError(f"{path / NETWORK} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError):
        return False
    if not isinstance(header, dict):
        return False
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    if not fits(tensors, list[_Tensor]) or any(len(entry["data_offsets"]) != 2 for entry in tensors):
        return False
    return size == 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a finished run, by name; a file that is damaged is refused."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    file = path / NETWORK
    content = read_bytes(file)
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise BsamRuntimeError(f"{file} is damaged ({error}); {ANEW}") from error
    header, _ = _parts(content)
    about = json.loads(header).get("__metadata__") or {}
    digest = about.get("sha256")
    is_old = about.keys() <= {"run"}  # files of earlier versions have no digest
    if not is_old and (digest is None or _digest(content, digest) != digest):
        raise BsamRuntimeError(f"{file} is damaged: its content is not what was written; {ANEW}")
    return tensors


def _described(content: bytes, about: dict[str, str]) -> bytes:
    """A safetensors file with metadata and a digest, in a fixed order: that of safetensors' own function varies."""
    header, tensors = _parts(content)
    header = json.dumps({"__metadata__": {"sha256": _BLANK, **about}, **json.loads(header)}).encode()
    header += b" " * (-len(header) % 8)
    content = len(header).to_bytes(8, "little") + header + tensors
    return content.replace(_BLANK.encode(), _digest(content, _BLANK).encode(), 1)


def _digest(content: bytes, noted: str) -> str:
    """The SHA-256 of a whole file, header included, with zeros in place of the digest noted in it."""
    return hashlib.sha256(content.replace(noted.encode(), _BLANK.encode(), 1)).hexdigest()


def _parts(content: bytes) -> tuple[bytes, bytes]:
    """The header of a safetensors file, whose length is in the first 8 bytes, and the tensors behind it."""
    end = 8 + int.from_bytes(content[:8], "little")
    return content[8:end], content[end:]
