"""The paper's tables and figures: functions that return runs, by name in ``RECIPES``.

Example:
    >>> len(label_noise("paper")), len(RECIPES["label-noise"].runs("paper", seeds=3))
    (40, 120)
"""

from .catalogue import RECIPES as RECIPES
from .catalogue import classification as classification
from .catalogue import gradient_conflict as gradient_conflict
from .catalogue import label_noise as label_noise
from .catalogue import rho_min_study as rho_min_study
from .catalogue import sharpness_curves as sharpness_curves
from .catalogue import training_curves as training_curves
