"""The experiments: functions that return runs, by name in ``RECIPES``.

Example:
    >>> len(label_noise("paper")), len(RECIPES["label-noise"].runs("paper", seeds=3))
    (56, 168)
"""

from ..common.errors import BsamValueError
from .digits_demo import demo_recipe
from .experiments import (
    Recipe,
    by_noise,
    by_rho_min,
    by_schedule,
    classification,
    gradient_conflict,
    label_noise,
    rho_min_study,
    sharpness_curves,
    training_curves,
)
from .pose import MEASURES, by_method, pose, pose_notes
from .quantization import by_precision, quantization, quantization_notes
from .radius import NOTES as RADIUS_NOTES
from .radius import by_radius, radius_study
from .transfer import transfer

__all__ = (
    "RECIPES",
    "Recipe",
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
)

_TABLE = "classification"
_CONFLICT = "Cosine of g and g_min under three schedules of rho_min"
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("classification", "Test accuracy of every method", classification, table=_TABLE, tunable=True),
        Recipe(
            "rho-min-study",
            "BSAM with different rho_min",
            rho_min_study,
            by_rho_min,
            rows="rho_min",
            table="rho_min_study",
            figures=("accuracy_lines",),
        ),
        Recipe(
            "label-noise",
            "A part of the training labels flipped",
            label_noise,
            by_noise,
            table="label_noise",
            figures=("accuracy_lines",),
            tunable=True,
        ),
        Recipe(
            "training-curves",
            "Loss and accuracy during training",
            training_curves,
            table=_TABLE,
            figures=("training_curves",),
        ),
        Recipe(
            "sharpness-curves",
            "MaxS, MinS and BilS during training",
            sharpness_curves,
            table=_TABLE,
            figures=("sharpness_curves",),
        ),
        Recipe(
            "gradient-conflict",
            _CONFLICT,
            gradient_conflict,
            by_schedule,
            rows="rho_min",
            figures=("gradient_conflict",),
        ),
        Recipe("transfer", "Pretrained networks, fine-tuned", transfer, table="transfer", tunable=True),
        Recipe(
            "pose",
            "Human pose estimation by SimCC",
            pose,
            by_method,
            table="pose",
            figures=("skeletons", "training_curves"),
            notes=pose_notes,
            measures=MEASURES,
            tunable=True,
        ),
        Recipe(
            "quantization",
            "Quantization-aware training with 4 bits",
            quantization,
            by_precision,
            table="quantization",
            details=("top_eigenvalue",),
            notes=quantization_notes,
            tunable=True,
        ),
        Recipe(
            "radius",
            "Methods at equal total radii, 40 % of the training labels flipped",
            radius_study,
            by_radius,
            figures=("radius",),
            details=("memorised", "top_eigenvalue"),
            notes=lambda run: RADIUS_NOTES,
            findings="radius",
            smoke="demo",
        ),
        demo_recipe(),
    )
}


def recipe_of(name: str) -> Recipe:
    """Return a recipe by its name."""
    if name not in RECIPES:
        raise BsamValueError(f"recipe must be one of {', '.join(RECIPES)}; got {name!r}")
    return RECIPES[name]
