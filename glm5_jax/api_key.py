"""The key of servers: where it comes from, and how a client sends it."""

import os

from glm5_jax import config

VARIABLE = "GLM5_JAX_API_KEY"  # other users cannot see it, as they can flags


def given(variable: str = VARIABLE) -> str | None:
    """Returns the key that the environment has, if any.

    Raises:
        config.InputError: no header can hold it.
    """
    key = os.environ.get(variable) or None
    return key if key is None else checked(key, f"${variable}")


def checked(key: str, where: str) -> str:
    """Returns a key that reaches a server as it is.

    Args:
        key: that is sent, or that a server asks for.
        where: it was given, for the message, which does not show the key.

    Raises:
        config.InputError: clients send it in different ways, or not at all.
    """
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise config.InputError(
            f"{where} must hold printable ASCII without spaces or line feeds at its "
            f"ends, as headers carry nothing else; give such a key."
        )
    return key


def header(key: str | None) -> dict[str, str]:
    """Returns the header that sends a key; none without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}
