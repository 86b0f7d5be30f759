"""The packages that HTTP needs: the extra serve."""

import importlib.util

from glm5_jax import config

_PACKAGES = ("aiohttp", "fastapi", "uvicorn")


def require(what: str) -> None:
    """Checks that the packages of the extra serve are installed.

    Args:
        what: needs them, for the message.

    Raises:
        config.InputError: one is missing.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise config.InputError(
            f"{what} needs packages that are not installed ({', '.join(missing)}): "
            f'pip install "glm5_jax[serve]".'
        )
