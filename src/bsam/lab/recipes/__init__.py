"""The experiments, by name in ``RECIPES``.

Example:
    >>> len(RECIPES["label-noise"].runs("paper", seeds=3))
    168
"""

from ...common.errors import BsamValueError
from ..common.user_modules import find_object
from .columns import ExtraColumn, TableCell
from .digits_demo import demo_recipe
from .experiments import Axis, Recipe
from .image_recipes import (
    IMAGE_RECIPES,
    QUANTIZATION_RECIPE,
    classification,
    gradient_conflict,
    label_noise,
    quantization,
    rho_min_study,
    sharpness_curves,
    training_curves,
    transfer,
)
from .paper import Published, PublishedTable
from .pose_recipe import POSE_RECIPE, pose
from .radius_study import RADIUS_RECIPE, radius_study
from .scales import Scale
from .variants import variants

__all__ = (
    "RECIPES",
    "Axis",
    "ExtraColumn",
    "Published",
    "PublishedTable",
    "Recipe",
    "Scale",
    "TableCell",
    "classification",
    "demo_recipe",
    "gradient_conflict",
    "label_noise",
    "pose",
    "quantization",
    "radius_study",
    "recipe_of",
    "rho_min_study",
    "sharpness_curves",
    "training_curves",
    "transfer",
    "variants",
)

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
