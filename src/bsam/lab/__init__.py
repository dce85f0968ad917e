"""The laboratory: train networks, compare methods, repeat the paper's tables, quantize, and report.

The library (:mod:`bsam`: optimizers, :mod:`bsam.flatness`, integrations) never imports this package.
"""

from typing import TYPE_CHECKING

from ..common.lazy_names import import_on_use

if TYPE_CHECKING:
    from .analysis.runs_table import read_epochs as read_epochs
    from .analysis.runs_table import read_runs as read_runs
    from .analysis.significance import compare_rows as compare_rows
    from .config import ClassificationSettings as ClassificationSettings
    from .config import PoseSettings as PoseSettings
    from .config import Preset as Preset
    from .config import Run as Run
    from .config import TaskSettings as TaskSettings
    from .config import setting as setting
    from .python_api import compare as compare
    from .python_api import write_report as write_report
    from .quantization import quantize as quantize
    from .tasks import Score as Score
    from .tasks import Splits as Splits
    from .tasks import Task as Task
    from .training import Machine as Machine
    from .training import RunCallbacks as RunCallbacks
    from .training import fit as fit

# Imported on first use: `import bsam.lab.models` needs none of the rest.
_MODULES = {
    "ClassificationSettings": "config",
    "PoseSettings": "config",
    "Machine": "training.machine",
    "Preset": "config",
    "Run": "config",
    "RunCallbacks": "training",
    "Score": "tasks",
    "Splits": "tasks",
    "Task": "tasks",
    "TaskSettings": "config",
    "compare": "python_api",
    "compare_rows": "analysis.significance",
    "fit": "training",
    "quantize": "quantization",
    "read_epochs": "analysis.runs_table",
    "read_runs": "analysis.runs_table",
    "setting": "config",
    "write_report": "python_api",
}
__all__ = [*_MODULES]

if not TYPE_CHECKING:  # type checkers know the names above, and report others
    __getattr__, __dir__ = import_on_use(__name__, _MODULES)
