"""Imported once by the process from which workers are forked, and with it what each of them would import: torch.

:mod:`bsam.core.workers` starts that process with signals blocked. It may serve other parts of the user's program, too,
whose processes must end by SIGTERM as usual.
"""

from __future__ import annotations

import os
import signal

from .workers import SIGNALS

os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS))
