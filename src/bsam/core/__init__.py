"""The engine: vectors in weight space, the loss around ``w``, and the optimizer built on both."""

from .objective import Objective as Objective
from .optimizer import Modules as Modules
from .optimizer import SharpnessAware as SharpnessAware
from .optimizer import StepOptions as StepOptions
from .vector import TINY as TINY
from .vector import Vector as Vector
from .vector import ratio as ratio
