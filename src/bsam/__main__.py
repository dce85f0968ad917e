"""``python -m bsam`` is ``bsam``: both start here."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

INTERRUPTED = 130


def main() -> int:
    """Import the command line, which takes seconds, and run it; the exit status."""
    before = signal.getsignal(signal.SIGINT)  # ignored, for instance, as under nohup
    # Only the main thread may replace it.
    ours = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, _leave)
    from .cli import main as run

    if ours:
        signal.signal(signal.SIGINT, before)
    return run()


def _leave(number: int, frame: FrameType | None) -> None:
    """Ctrl-C during the imports: nothing was begun. An exception might be lost or changed in the code that imports."""
    if os.environ.get("LOCAL_RANK", "0") == "0":  # of the processes of torchrun one speaks
        os.write(2, b"bsam: interrupted.\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    raise SystemExit(main())
