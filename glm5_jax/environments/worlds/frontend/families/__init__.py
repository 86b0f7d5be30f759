"""Families of front-end tasks, by name: pages, and projects of a framework."""

from collections.abc import Mapping

from glm5_jax.environments.worlds.frontend import draft, projects
from glm5_jax.environments.worlds.frontend.families import dialogs, forms, lists, panels

PROJECTS: Mapping[str, draft.Make] = projects.ALL
ALL: Mapping[str, draft.Make] = {
    **dialogs.FAMILIES,
    **forms.FAMILIES,
    **lists.FAMILIES,
    **panels.FAMILIES,
}
