"""Sends the weights of a run to servers that share no folder with it.

python -m glm5_jax.serve_weights --weights_store=FOLDER --host=0.0.0.0 --port=9000

It runs where the folder of rl.weights_store is, and servers of other machines read from
it, in ranges of bytes: python -m glm5_jax.serve --weights_url=http://HOST:9000
(docs/async_rl.md). Needs the extra serve: pip install "glm5_jax[serve]".
The key may also be in the variable GLM5_JAX_API_KEY, which other users cannot see.
"""

import contextlib

from absl import flags, logging

from glm5_jax import command_line
from glm5_jax.http_server import extra, reach

_STORE = flags.DEFINE_string(
    "weights_store", None, "Folder that the run writes its versions to.", required=True
)
flags.adopt_module_key_flags(reach)  # --help shows them


def main(arguments: command_line.Arguments) -> None:
    """Serves until SIGTERM or ctrl-C."""
    extra.require("Weights over HTTP")
    from glm5_jax.http_server import guard, listening
    from glm5_jax.rl.weight_store import files

    logging.set_verbosity(logging.INFO)  # on stderr
    host, key = reach.HOST.value, reach.api_key()
    listening.require_key(host, key)
    limits = guard.Limits(api_key=key, is_loopback=host in guard.LOOPBACK)
    door = guard.Guard(files.app(_STORE.value), limits)
    with contextlib.closing(listening.bind(host, reach.PORT.value)) as listener:
        port = listener.getsockname()[1]
        logging.info("Sending the weights in %s at port %d", _STORE.value, port)
        server = listening.make_server(door, reach.DRAIN_SECONDS.value)
        server.run(sockets=[listener])


if __name__ == "__main__":
    command_line.run(main, takes_config=False)
