"""The laboratory: train networks, compare methods, repeat the paper's tables, quantize, and report.

The library (:mod:`bsam`: optimizers, :mod:`bsam.flatness`, integrations) never imports this package.
"""

from .python_api import compare as compare
from .quantization import quantize as quantize
from .training import Run as Run
from .training import fit as fit
