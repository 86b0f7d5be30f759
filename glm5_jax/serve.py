"""Serves a model over HTTP, as OpenAI's clients and trainers ask for it.

python -m glm5_jax.serve --checkpoint=FOLDER --port=8000
python -m glm5_jax.serve --checkpoint=FOLDER --host=0.0.0.0 --api_key=KEY

Needs the extra serve: pip install "glm5_jax[serve]". docs/serving.md lists the routes.
The key may also be in the variable GLM5_JAX_API_KEY, which other users cannot see.
"""

import os
from typing import cast

from absl import flags, logging

from glm5_jax import command_line, compile_cache
from glm5_jax import config as config_lib

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Run, step or Hugging Face folder.", required=True
)
_HOST = flags.DEFINE_string(
    "host", "127.0.0.1", "Address to listen at; any but this machine's needs a key."
)
_PORT = flags.DEFINE_integer("port", 8000, "Port to listen at; 0 takes a free one.")
_API_KEY = flags.DEFINE_string(
    "api_key", None, "Key that clients must send; default: $GLM5_JAX_API_KEY, or none."
)
_MODEL_NAME = flags.DEFINE_string(
    "model_name", None, "Name of the model for clients; default: its folder's."
)
_TEMPLATE = flags.DEFINE_enum(
    "template",
    None,
    ["glm5", "glm5.1", "glm5.2"],
    "Version of the chat template; default: the run's, or glm5.",
)
_NUM_SLOTS = flags.DEFINE_integer(
    "num_slots", 8, "Sequences that are decoded at the same time.", lower_bound=1
)
_NUM_PAGES = flags.DEFINE_integer("num_pages", 0, "Pages of 64 tokens to share.")
_CAPACITY = flags.DEFINE_integer(
    "capacity", 0, "Most tokens of prompt and answer; 0: as in training, or 4,096."
)
_WARM_UP = flags.DEFINE_bool(
    "warm_up", False, "Compiles for every length of prompts before the port opens."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the random numbers.", lower_bound=0)
_MAX_CONCURRENCY = flags.DEFINE_integer(
    "max_concurrency", 256, "Requests answered at the same time.", lower_bound=1
)
_DRAIN_SECONDS = flags.DEFINE_integer(
    "drain_seconds", 60, "Time for answers under way after SIGTERM.", lower_bound=0
)
flags.adopt_module_key_flags(compile_cache)  # --help shows them


def main(arguments: command_line.Arguments) -> None:
    """Serves until SIGTERM or ctrl-C."""
    from glm5_jax.data.chat import templates
    from glm5_jax.weights import loading

    try:
        from glm5_jax.serving import command
    except ImportError as error:
        raise config_lib.InputError(
            f"The server needs packages that are not installed ({error}): "
            f'pip install "glm5_jax[serve]".'
        ) from error
    logging.set_verbosity(logging.INFO)  # on stderr
    compile_cache.enable()
    options = command.Options(
        host=_HOST.value,
        port=_PORT.value,
        api_key=_API_KEY.value or os.environ.get("GLM5_JAX_API_KEY"),
        name=_MODEL_NAME.value,
        template=cast(templates.Version | None, _TEMPLATE.value),
        num_slots=_NUM_SLOTS.value,
        num_pages=_NUM_PAGES.value,
        capacity=_CAPACITY.value,
        warm_up=_WARM_UP.value,
        seed=_SEED.value,
        max_concurrency=_MAX_CONCURRENCY.value,
        drain_seconds=_DRAIN_SECONDS.value,
    )
    command.serve(_CHECKPOINT.value, loading.overrides_of(arguments), options)


if __name__ == "__main__":
    command_line.run(main, only_model=True)
