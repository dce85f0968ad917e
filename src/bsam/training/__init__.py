"""One run: its settings, its loop, its record; and many runs side by side."""

from .config import Run as Run
from .loop import fit as fit
from .task import Task as Task
