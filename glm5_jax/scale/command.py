"""The flag --topology and the typed command, for the commands aot and plan.

This file does not import jax, which the commands import after checking the input.
"""

import pathlib
import shlex
import sys

from glm5_jax import config as config_lib


def require_topology(given: str | None) -> str:
    """Returns the value of --topology.

    Raises:
      InputError: there is none.
    """
    if given is None:
        raise config_lib.InputError(
            "--topology is missing; give the chips of a slice as they lie, e.g. "
            "--topology=v5p:8x8x8."
        )
    return given


def typed() -> str:
    """Returns the command that is running, as it can be typed again."""
    name = pathlib.Path(sys.argv[0]).stem
    return f"python -m glm5_jax.{name} {shlex.join(sys.argv[1:])}"
