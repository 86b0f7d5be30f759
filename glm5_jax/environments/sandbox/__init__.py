"""Shells that model-written commands run in, shut off from the machine.

    box = await sandbox.start(sandbox.Image({"a.txt": b"1"}))
    result = await box.run("cat a.txt")
    await box.close()

bubblewrap (`apt-get install bubblewrap`) gives each box namespaces of its own: no
network, no process, no file of the machine but a read-only /usr, no privileges. Where
it does not work, `start` takes containers of podman or Docker, which keep the same
apart; where no engine answers either, plain shells with resource limits, which keep
nothing secret, and the log says so. A kind that is asked for, here or by
$GLM5_JAX_SANDBOX, is taken or refused, never replaced. box.py speaks with the shell;
bubblewrap.py, container.py and plain.py start it.
"""

import functools
import os
import pathlib
from collections.abc import Mapping, Sequence

from absl import logging

from glm5_jax import config
from glm5_jax.environments.sandbox import box, bubblewrap, container, plain
from glm5_jax.environments.sandbox.box import Box, BrokenError, FileError
from glm5_jax.environments.sandbox.image import Image
from glm5_jax.environments.sandbox.limits import Limits
from glm5_jax.environments.sandbox.results import NO_OUTPUT, Result

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
    "require_work",
    "start",
]

KINDS: Mapping[str, box.Kind] = {  # the first that works is taken
    "bubblewrap": bubblewrap,
    "podman": container.Engine("podman", (("--runtime", "runc"),), is_mapped=True),
    "docker": container.Engine("docker"),
    "rlimits": plain,
}
_CONFINES = {"bubblewrap": bubblewrap, "rlimits": plain}  # programs alone
_DEMANDED = "GLM5_JAX_SANDBOX"
_WORK = "/work"


async def start(
    image: Image | None = None,
    limits: Limits | None = None,
    kind: str | None = None,
) -> Box:
    """Starts a box.

    Args:
        image: its files; None: none.
        limits: of its commands; None: the defaults.
        kind: of KINDS; None takes that of $GLM5_JAX_SANDBOX, or the first that works.

    Raises:
        config.InputError: the kind does not exist or does not work here.
    """
    kind = kind or _taken()
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


def require_work() -> None:
    """Checks that the kind that `start` takes by itself has its files in /work.

    Raises:
        config.InputError: it has them elsewhere, or does not work here.
    """
    kind = _taken()
    require(kind)
    if KINDS[kind].home(pathlib.Path("/room")) != _WORK:
        raise config.InputError(
            f"These tasks need a sandbox with a folder {_WORK} of its own, which "
            f"{kind!r} does not have: install bubblewrap, podman or Docker, or choose "
            f"one of them by ${_DEMANDED}."
        )


def confine(words: Sequence[str], binds: Sequence[str] = ()) -> list[str]:
    """Returns the command that runs one program in bubblewrap, else without a sandbox.

    It reads and writes through the descriptors that it inherits, which containers do
    not pass on.

    Args:
        words: of the program's command.
        binds: folders of this machine that it sees, read-only, where they exist.
    """
    kind = next(name for name in _CONFINES if not _missing(name))
    _log(kind)
    return _CONFINES[kind].confined(words, binds)


def describe() -> str:
    """Names the kind that `start` takes by itself, and why those before it are not.

    Raises:
        config.InputError: $GLM5_JAX_SANDBOX names one that does not work here.
    """
    kind = _taken()
    require(kind)
    if os.environ.get(_DEMANDED):
        return f"{kind}; by ${_DEMANDED}"
    before = [*KINDS][: [*KINDS].index(kind)]
    return "; ".join([kind, *(f"{name}: {_missing(name)}" for name in before)])


def _taken() -> str:
    """Returns the kind that nobody has to ask for."""
    return os.environ.get(_DEMANDED) or _first()


@functools.cache
def _first() -> str:
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
