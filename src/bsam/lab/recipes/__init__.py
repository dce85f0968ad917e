"""The experiments, by name in ``RECIPES``.

Example:
    >>> len(RECIPES["label-noise"].study("paper", seeds=3).plans)
    168
"""

# importing a module adds its recipes, in this order
from . import cifar_recipes as cifar_recipes  # isort: skip
from . import more_recipes as more_recipes  # isort: skip
from . import transformer_recipe as transformer_recipe  # isort: skip
from . import demo_recipe as demo_recipe  # isort: skip
from .experiments import RECIPES as RECIPES
from .experiments import Recipe as Recipe
from .experiments import recipe as recipe
from .experiments import recipe_of as recipe_of
from .planning import Plan as Plan
from .planning import describe as describe
from .scales import Scale as Scale
from .variants import variants as variants
