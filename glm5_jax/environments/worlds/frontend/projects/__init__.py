"""Front-end tasks whose instance is a Vite project, of React or of Vue.

frameworks.py has what a project begins with, kit.py fetches its packages by npm, once,
build.py builds it in the sandbox. A family is a file: its brief, its checklist, and a
project of each framework that passes it.
"""

import functools
from collections.abc import Mapping

from glm5_jax.environments.worlds.frontend import draft
from glm5_jax.environments.worlds.frontend.projects import (
    board,
    frameworks,
    order,
    stock,
)

ALL: Mapping[str, draft.Make] = {
    f"{framework}_{module.__name__.rpartition('.')[2]}": functools.partial(
        module.make, framework=framework
    )
    for framework in frameworks.ALL
    for module in (board, order, stock)
}
