"""What all servers need: their extra, and flags of who reaches them. Imports no jax."""

import importlib.util

from absl import flags

from glm5_jax import api_key as keys
from glm5_jax import config

HOST = flags.DEFINE_string(
    "host", "127.0.0.1", "Address to listen at; any but this machine's needs a key."
)
PORT = flags.DEFINE_integer("port", 8000, "Port to listen at; 0 takes a free one.")
DRAIN_SECONDS = flags.DEFINE_integer(
    "drain_seconds", 60, "Time for answers under way after SIGTERM.", lower_bound=0
)
_API_KEY = flags.DEFINE_string(
    "api_key", None, f"Key that clients must send; default: ${keys.VARIABLE}, or none."
)


def api_key() -> str | None:
    """Returns the key that clients must send; None if they need none."""
    return _API_KEY.value or keys.given()


def require_extra() -> None:
    """Checks that the packages of the extra serve are installed.

    Raises:
      InputError: one is missing.
    """
    needed = ("aiohttp", "fastapi", "uvicorn")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise config.InputError(
            f"Servers need packages that are not installed ({', '.join(missing)}): "
            f'pip install "glm5_jax[serve]".'
        )
