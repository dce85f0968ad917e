"""The import of timm, which works beside a torch without CUDA too."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

from ..common.extras import require_package

_library: list[torch.library.Library] = []  # an operator lives as long as the library that defined it


def import_timm() -> Any:
    """Return the package timm; an error names the extra to install if it is missing.

    Example:
        >>> import_timm().is_model("resnet50")
        True
    """
    require_package("timm", "timm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what timm and torchvision import is no concern of the caller's
        _import_torchvision()
        import timm
    return timm


def _import_torchvision() -> None:
    """Import torchvision, also where its extension cannot load.

    Its wheels link libtorch_cuda, which a torch for CPUs does not have. The import then fails at the operator ``nms``,
    which timm does not use: it is enough that the operator is declared.
    """
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]  # half imported
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _library.append(library)
        import torchvision  # noqa: F401
