"""The flags of the command `serve`, which plays episodes for clients of HTTP."""

from absl import flags

from glm5_jax.http_server import extra, reach

_MAX_EPISODES = flags.DEFINE_integer("max_episodes", 256, "Episodes at a time.")
_IDLE_SECONDS = flags.DEFINE_float(
    "idle_seconds", 900.0, "Time without a request after which an episode ends."
)
_CALL_SECONDS = flags.DEFINE_float(
    "call_seconds", 300.0, "Time for one call of an environment."
)
_MAX_BODY_BYTES = flags.DEFINE_integer(
    "max_body_bytes", 2**22, "Bytes of a request's body."
)


def serve(name: str) -> None:
    """Serves a taskset until SIGTERM or ctrl-C.

    Args:
        name: of the taskset.

    Raises:
        config.InputError: a flag is wrong, the extra serve is missing, or the taskset
            cannot be served.
    """
    extra.require("A service of environments")
    from glm5_jax.environments.service import command, live

    limits = live.Limits(
        max_episodes=_MAX_EPISODES.value,
        call_seconds=_CALL_SECONDS.value,
        idle_seconds=_IDLE_SECONDS.value,
    )
    settings = command.Settings(
        host=reach.HOST.value,
        port=reach.PORT.value,
        api_key=reach.api_key(),
        limits=limits,
        max_body_bytes=_MAX_BODY_BYTES.value,
        drain_seconds=reach.DRAIN_SECONDS.value,
    )
    command.serve(name, settings)
