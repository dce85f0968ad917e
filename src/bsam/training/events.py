"""Numbers for TensorBoard, written without it: a file of its events is a list of framed protocol buffers."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import writing

_CASTAGNOLI = 0x82F63B78


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_CASTAGNOLI if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _table()


def masked_crc(data: bytes) -> int:
    """The checksum that frames events: CRC-32C, rotated and shifted.

    Example:
        >>> masked_crc(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF
        True
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class Events:
    """One file of events in a folder, which is emptied first: what an interrupted run left there is written anew.

    Args:
        folder: made if need be.
        epochs: the metrics of the epochs so far.
    """

    def __init__(self, folder: Path, epochs: Sequence[Mapping[str, Any]]) -> None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
        self._file = folder / f"events.out.tfevents.{int(time.time())}.{os.getpid()}"
        self._append(
            [
                _double(1, time.time()) + _bytes(3, b"brain.Event:2"),
                *(event for epoch in epochs for event in _events(epoch)),
            ]
        )

    def add(self, epoch: Mapping[str, Any]) -> None:
        """The numbers of one more epoch."""
        self._append(_events(epoch))

    def _append(self, events: Sequence[bytes]) -> None:
        with writing(self._file), self._file.open("ab") as file:
            for event in events:
                length = struct.pack("<Q", len(event))
                file.write(
                    length + struct.pack("<I", masked_crc(length)) + event + struct.pack("<I", masked_crc(event))
                )


def _events(epoch: Mapping[str, Any]) -> list[bytes]:
    """An event for each number; the step is the epoch."""
    numbers = {name: value for name, value in epoch.items() if name != "epoch" and isinstance(value, (int, float))}
    return [_event(epoch["epoch"], name, float(value)) for name, value in numbers.items()]


def _event(step: int, tag: str, value: float) -> bytes:
    """The protocol buffer ``Event(wall_time, step, summary=Summary(value=[Value(tag, simple_value)]))``."""
    summary = _bytes(1, _bytes(1, tag.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", value))
    return _double(1, time.time()) + bytes([2 << 3]) + _varint(step) + _bytes(5, summary)


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _bytes(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
