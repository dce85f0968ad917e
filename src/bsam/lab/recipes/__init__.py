"""The experiments, by name in ``RECIPES``.

Example:
    >>> len(RECIPES["label-noise"]("paper", seeds=3).plans)
    168
"""

from ...common.errors import BsamValueError
from ..common.names import find_object
from . import demo_recipe, paper_recipes, transformer_recipe
from .plan import Plan as Plan
from .plan import describe as describe
from .recipe import Recipe as Recipe
from .recipe import recipe as recipe
from .variants import variants as variants

RECIPES: dict[str, Recipe] = {
    made.name: made
    for made in (
        paper_recipes.classification,
        paper_recipes.rho_min_study,
        paper_recipes.label_noise,
        paper_recipes.training_curves,
        paper_recipes.sharpness_curves,
        paper_recipes.gradient_conflict,
        paper_recipes.transfer,
        paper_recipes.pose,
        paper_recipes.quantization,
        paper_recipes.radius,
        transformer_recipe.transformers,
        demo_recipe.demo,
    )
}


def recipe_of(name: str) -> Recipe:
    """Return a recipe by its name in ``RECIPES``, or the one that ``MODULE:RECIPE`` names, which is imported."""
    if ":" in name:
        loaded = find_object(name, "recipe")
        if not isinstance(loaded, Recipe):
            raise BsamValueError(
                f"{name} must be a function with @bsam.lab.recipes.recipe, got {type(loaded).__name__}"
            )
        return loaded
    if name not in RECIPES:
        raise BsamValueError(f"recipe must be one of {', '.join(RECIPES)}, or MODULE:RECIPE; got {name!r}")
    return RECIPES[name]
