"""Families of front-end tasks, by name."""

from collections.abc import Mapping

from glm5_jax.environments.worlds.frontend import draft
from glm5_jax.environments.worlds.frontend.families import dialogs, forms, lists, panels

ALL: Mapping[str, draft.Make] = {
    **dialogs.FAMILIES,
    **forms.FAMILIES,
    **lists.FAMILIES,
    **panels.FAMILIES,
}
