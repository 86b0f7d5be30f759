"""The recipes by name."""

from glm5_jax import config as config_lib
from glm5_jax.config import fields
from glm5_jax.recipes import glm5, record

RECIPES = {recipe.name: recipe for recipe in (glm5.SMALL, glm5.TINY)}


def find(name: str) -> record.Recipe:
    """Returns the recipe of a name.

    Raises:
      InputError: there is none; names the nearest one.
    """
    if name not in RECIPES:
        guess = fields.did_you_mean(name, RECIPES)
        raise config_lib.InputError(
            f"there is no recipe {name!r}.{guess} Recipes: {', '.join(RECIPES)}."
        )
    return RECIPES[name]
