"""Train into flat minima: BSAM (*Bilateral* Sharpness-Aware Minimization) and its family, for PyTorch."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:
    from .api import *  # noqa: F403
else:  # on first use: importing torch takes seconds, in which the command line must already be there to catch Ctrl-C

    def __getattr__(name: str) -> Any:
        found = vars(_import_module(".api", __name__)) if name == "__all__" or not name.startswith("__") else {}
        public = {own: value for own, value in found.items() if not own.startswith("_")}
        globals().update(public)
        if name == "__all__":
            return list(public)
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        return [*__getattr__("__all__"), "__version__"]
