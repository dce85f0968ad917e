"""The experiments, by name in ``RECIPES``.

Example:
    >>> len(RECIPES["label-noise"].runs("paper", seeds=3))
    168
"""

from ...common.errors import BsamValueError
from ..common.names import find_object
from .columns import ExtraColumn as ExtraColumn
from .columns import TableCell as TableCell
from .digits_demo import demo_recipe
from .experiments import Axis as Axis
from .experiments import Recipe as Recipe
from .image_recipes import IMAGE_RECIPES, QUANTIZATION_RECIPE
from .paper import Published as Published
from .paper import PublishedTable as PublishedTable
from .pose_recipe import POSE_RECIPE
from .radius_study import RADIUS_RECIPE
from .scales import Scale as Scale
from .variants import variants as variants

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for recipe in (*IMAGE_RECIPES, POSE_RECIPE, QUANTIZATION_RECIPE, RADIUS_RECIPE, demo_recipe())
}


def recipe_of(name: str) -> Recipe:
    """Return a recipe by its name in ``RECIPES``, or the one that ``module:variable`` names."""
    if ":" in name:
        recipe = find_object(name, "recipe")
        if not isinstance(recipe, Recipe):
            raise BsamValueError(f"{name} must be a bsam.lab.recipes.Recipe, got {type(recipe).__name__}")
        return recipe
    if name not in RECIPES:
        raise BsamValueError(f"recipe must be one of {', '.join(RECIPES)}, or MODULE:RECIPE; got {name!r}")
    return RECIPES[name]
