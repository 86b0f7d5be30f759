"""Routes requests to several servers of one model.

python -m glm5_jax.route --replicas=http://10.0.0.1:8000,http://10.0.0.2:8000

Conversations stay on one replica, requests of one that fails go to another, and
replicas join and leave while it runs (docs/routing.md). It runs without jax.
Needs the extra serve: pip install "glm5_jax[serve]".
The keys may also be in the variables GLM5_JAX_API_KEY and GLM5_JAX_REPLICA_KEY, which
other users cannot see.
"""

import os

from absl import flags, logging

from glm5_jax import command_line
from glm5_jax.http_server import extra, reach

_REPLICAS = flags.DEFINE_list(
    "replicas", [], "Addresses of servers, http://HOST:PORT; more may join later."
)
_PREFILL_REPLICAS = flags.DEFINE_list(
    "prefill_replicas",
    [],
    "Servers that read prompts for those of --replicas, which name them, too, in "
    "--prefill_servers.",
)
_REPLICA_KEY = flags.DEFINE_string(
    "replica_key", None, "Key of the replicas; default: $GLM5_JAX_REPLICA_KEY, or ours."
)
_MAX_CONCURRENCY = flags.DEFINE_integer(
    "max_concurrency", 1024, "Requests answered at the same time.", lower_bound=1
)
_LOAD_FACTOR = flags.DEFINE_float(
    "load_factor",
    1.25,
    "Most requests of a replica, as a multiple of the mean.",
    lower_bound=1,
)
_SPARE = flags.DEFINE_integer(
    "spare", 4, "Requests that a replica takes beside that bound.", lower_bound=1
)
_MAX_WAIT = flags.DEFINE_float(
    "max_wait", 10, "Seconds to wait while no replica is in service.", lower_bound=0
)

flags.adopt_module_key_flags(reach)  # --help shows them


def main(arguments: command_line.Arguments) -> None:
    """Routes until SIGTERM or ctrl-C."""
    extra.require("A router")
    from glm5_jax.serving.router import app, balance, command

    logging.set_verbosity(logging.INFO)  # on stderr
    key = reach.api_key()
    options = app.Options(
        replica_key=_REPLICA_KEY.value or os.environ.get("GLM5_JAX_REPLICA_KEY", key),
        bound=balance.Bound(factor=_LOAD_FACTOR.value, spare=_SPARE.value),
        max_wait=_MAX_WAIT.value,
        drain_seconds=reach.DRAIN_SECONDS.value,
    )
    settings = command.Settings(
        host=reach.HOST.value,
        port=reach.PORT.value,
        api_key=key,
        max_concurrency=_MAX_CONCURRENCY.value,
        options=options,
        prefill_urls=_PREFILL_REPLICAS.value,
    )
    command.route(_REPLICAS.value, settings)


if __name__ == "__main__":
    command_line.run(main, takes_config=False)
