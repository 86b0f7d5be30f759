"""Compares stored shapes with expected ones, leaf by leaf."""

from collections.abc import Mapping
from typing import Any

from glm5_jax import config as config_lib

_MAX_NAMED = 5  # differing leaves that a message names


def require(theirs: Mapping[str, Any], ours: Mapping[str, Any], what: str) -> None:
    """Checks shapes by name, since Orbax returns missing leaves without an error.

    Args:
      theirs: stored shapes by dotted name; any word for a shape that is unknown.
      ours: expected shapes by dotted name.
      what: subject of the message, such as "the model in FOLDER".

    Raises:
      InputError: lists missing and unexpected names, and shapes that differ.
    """
    there, here = ({k: str(v) for k, v in shapes.items()} for shapes in (theirs, ours))
    differing = [
        f"{name}: {there.get(name, 'absent')} there, {here.get(name, 'absent')} here"
        for name in sorted(there | here, key=lambda name: (name[:6] != "params", name))
        if there.get(name) != here.get(name)
    ]
    if differing:
        more = len(differing) - _MAX_NAMED
        shown = differing[:_MAX_NAMED] + [f"and {more} more"] * (more > 0)
        raise config_lib.InputError(
            f"{what} has shapes (there) that differ from the config's (here):\n  "
            + "\n  ".join(shown)
            + "\nUse the config of the run that wrote it (config.json in its folder); "
            "a run of another model needs another --workdir."
        )
