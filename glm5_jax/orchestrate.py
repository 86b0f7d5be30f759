"""Plays the episodes of an asynchronous run, as a process without jax.

A run of stage async_rl with rl.num_engines starts it; people need not.
Needs the extra serve: pip install "glm5_jax[serve]".
"""

import json
import pathlib

from absl import flags, logging

from glm5_jax import command_line

_SETTINGS = flags.DEFINE_string(
    "settings", None, "JSON file with the config of the run.", required=True
)
_SERVERS = flags.DEFINE_string(
    "servers", None, "URL of the router before the servers.", required=True
)
_PORT = flags.DEFINE_integer("port", None, "Port to listen at.", required=True)


def main(arguments: command_line.Arguments) -> None:
    """Plays until SIGTERM."""
    from aiohttp import web

    from glm5_jax.rl.actors import process

    logging.set_verbosity(logging.INFO)  # on stderr
    config = command_line.resolve(json.loads(pathlib.Path(_SETTINGS.value).read_text()))
    app = process.Process(config, _SERVERS.value).app()
    web.run_app(
        app, host="127.0.0.1", port=_PORT.value, print=None, shutdown_timeout=1.0
    )


if __name__ == "__main__":
    command_line.run(main, takes_config=False)
