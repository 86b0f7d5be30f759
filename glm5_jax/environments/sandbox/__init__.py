"""Shells that model-written commands run in, shut off from the machine.

    box = await sandbox.start(sandbox.Image({"a.txt": b"1"}))
    result = await box.run("cat a.txt")
    await box.close()

bubblewrap (`apt-get install bubblewrap`) gives each box namespaces of its own: no
network, no process, no file of the machine but a read-only /usr, no privileges. Where
it does not work, `start` takes plain shells with resource limits, which keep nothing
secret, and the log says so; a kind that is asked for is taken or refused, never
replaced. box.py speaks with the shell, bubblewrap.py and plain.py start it.
"""

import functools
from collections.abc import Sequence

from absl import logging

from glm5_jax import config
from glm5_jax.environments.sandbox import box, bubblewrap, plain
from glm5_jax.environments.sandbox.box import (
    NO_OUTPUT,
    Box,
    BrokenError,
    FileError,
    Result,
)
from glm5_jax.environments.sandbox.image import Image
from glm5_jax.environments.sandbox.limits import Limits

__all__ = [
    "KINDS",
    "NO_OUTPUT",
    "Box",
    "BrokenError",
    "FileError",
    "Image",
    "Limits",
    "Result",
    "confine",
    "describe",
    "require",
    "start",
]

KINDS = {"bubblewrap": bubblewrap, "rlimits": plain}  # the strongest first


async def start(
    image: Image | None = None,
    limits: Limits | None = None,
    kind: str | None = None,
) -> Box:
    """Starts a box.

    Args:
        image: its files; None: none.
        limits: of its commands; None: the defaults.
        kind: of KINDS; None takes the strongest that works.

    Raises:
        config.InputError: the kind does not exist or does not work here.
    """
    kind = kind or _strongest()
    require(kind)
    _log(kind)
    limits, image = limits or Limits(), image or Image()
    return await box.start(KINDS[kind], image, limits)


def require(kind: str) -> None:
    """Checks that a kind of KINDS works here.

    Raises:
        config.InputError: it does not exist or does not work.
    """
    if reason := _missing(kind):
        raise config.InputError(
            f"The sandbox {kind!r} does not work on this machine: {reason}"
        )


def confine(words: Sequence[str], binds: Sequence[str] = ()) -> list[str]:
    """Returns the command that runs one program in the strongest kind that works.

    It reads and writes through the descriptors that it inherits.

    Args:
        words: of the program's command.
        binds: folders of this machine that it sees, read-only, where they exist.
    """
    kind = _strongest()
    _log(kind)
    return KINDS[kind].confined(words, binds)


def describe() -> str:
    """Names the kind that `start` takes by itself, and why stronger ones are not."""
    kind = _strongest()
    weaker = [f"{name}: {_missing(name)}" for name in KINDS if _missing(name)]
    return "; ".join([kind, *weaker])


@functools.cache
def _strongest() -> str:
    return next(name for name in KINDS if not _missing(name))


@functools.cache
def _log(kind: str) -> None:
    """Says once what commands run in, louder where that keeps nothing apart."""
    if kind == "rlimits":
        logging.warning(
            "Commands run WITHOUT a sandbox, with resource limits alone: they can read "
            "and write what you can, and use the network. %s",
            _missing("bubblewrap"),
        )
    else:
        logging.info("Commands run in %s.", kind)


@functools.cache
def _missing(kind: str) -> str:
    """Returns why a kind does not work here, "" if it does."""
    if kind not in KINDS:
        return f"it is none of {', '.join(KINDS)}."
    return KINDS[kind].missing()
