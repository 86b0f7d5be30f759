"""Compares the data of a run's processes, and those of its starts, by fingerprints.

A fingerprint is pairs of key=value.
"""

import pathlib

from glm5_jax import config as config_lib
from glm5_jax.processes import together


def require_same_everywhere(ours: str) -> None:
    """Checks that all processes read the same data."""
    theirs = together.from_first("data", lambda: ours)
    if theirs != ours:
        raise config_lib.InputError(
            f"this process reads other data than process 0: {_changes(theirs, ours)}. "
            f"Give all hosts the same files and the same Python."
        )


def _changes(theirs: str, ours: str) -> str:
    """Returns the pairs key=value in which two fingerprints differ."""
    there, here = _pairs(theirs), _pairs(ours)
    differing = [
        f"{key}={there.get(key, 'absent')} there, {key}={here.get(key, 'absent')} here"
        for key in there | here
        if there.get(key) != here.get(key)
    ]
    return ", ".join(differing) or f"{theirs} there, {ours} here"


def _pairs(fingerprint: str) -> dict[str, str]:
    parts = (part.partition("=") for part in fingerprint.split())
    return {key: value for key, _, value in parts}


def require_same(theirs: str, ours: str, workdir: pathlib.Path) -> None:
    """Checks that the stream of batches can resume at its position.

    Args:
      theirs: fingerprint of the data that the run in `workdir` has read.
      ours: fingerprint of the data that the config names.
      workdir: folder of the run, for the message.

    Raises:
      InputError: the fingerprints differ.
    """
    if theirs == ours:
        return
    raise config_lib.InputError(
        f"the data of the run in {workdir} has changed: {_changes(theirs, ours)}. "
        f"Resume on a machine with that corpus (the same Python, the same files), or "
        f"give another --workdir."
    )
