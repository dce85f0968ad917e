"""Import timm, even with a CPU build of torch."""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from typing import Any

import torch

from .extras import require_package

_library: list[torch.library.Library] = []  # an operator exists as long as the library that defines it


def import_timm() -> Any:
    """Return the timm package; if it is missing, raise an error that says which extra to install.

    Example:
        >>> import_timm().is_model("resnet50")
        True
    """
    require_package("timm", "timm")
    import_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about imports inside timm
        import timm
    return timm


def import_torchvision() -> None:
    """Import torchvision if it is installed, even if its extension cannot be loaded.

    Its wheels link libtorch_cuda, which a CPU build of torch does not have. The import then fails at the operator
    ``nms``. Since timm, Lightning and Transformers do not use it, declaring the operator is enough.
    """
    if find_spec("torchvision") is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the extension
            _import_torchvision()


def _import_torchvision() -> None:
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]  # partially imported
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _library.append(library)
        import torchvision  # noqa: F401
