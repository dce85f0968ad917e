"""The laboratory: train networks, compare methods, repeat the paper's tables, quantize, and report.

The library (:mod:`bsam`: optimizers, :mod:`bsam.flatness`, integrations) never imports this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .analysis.runs_table import read_epochs as read_epochs
    from .analysis.runs_table import read_runs as read_runs
    from .analysis.significance import compare_rows as compare_rows
    from .config import ClassificationSettings as ClassificationSettings
    from .config import PoseSettings as PoseSettings
    from .python_api import compare as compare
    from .python_api import write_report as write_report
    from .quantization import quantize as quantize
    from .training import Run as Run
    from .training import fit as fit

# Imported on first use: `import bsam.lab.models` needs none of the rest.
_MODULES = {"Run": "training", "fit": "training", "quantize": "quantization"}
_MODULES |= dict.fromkeys(("ClassificationSettings", "PoseSettings"), "config")
_MODULES |= dict.fromkeys(("compare", "write_report"), "python_api")
_MODULES |= dict.fromkeys(("read_runs", "read_epochs"), "analysis.runs_table") | {
    "compare_rows": "analysis.significance"
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
