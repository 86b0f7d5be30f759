"""The key of servers: where it comes from, and how a client sends it."""

import os

VARIABLE = "GLM5_JAX_API_KEY"  # other users cannot see it, as they can flags


def given() -> str | None:
    """Returns the key that the environment has, if any."""
    return os.environ.get(VARIABLE) or None


def header(key: str | None) -> dict[str, str]:
    """Returns the header that sends a key; none without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}
