"""The flags of who reaches a server. Imports no jax."""

from absl import flags

from glm5_jax import api_key as keys

HOST = flags.DEFINE_string(
    "host", "127.0.0.1", "Address to listen at; any but this machine's needs a key."
)
PORT = flags.DEFINE_integer("port", 8000, "Port to listen at; 0 takes a free one.")
DRAIN_SECONDS = flags.DEFINE_integer(
    "drain_seconds", 60, "Time for answers under way after SIGTERM.", lower_bound=0
)
_API_KEY = flags.DEFINE_string(
    "api_key",
    None,
    f"Key that a server's clients must send; default: ${keys.VARIABLE}, or none.",
)


def api_key() -> str | None:
    """Returns the key that clients must send; None if there is none."""
    return _API_KEY.value or keys.given()
