"""Serves a model over HTTP, as OpenAI's clients and trainers ask for it.

python -m glm5_jax.serve --checkpoint=FOLDER --port=8000
python -m glm5_jax.serve --checkpoint=FOLDER --host=0.0.0.0 --api_key=KEY
python -m glm5_jax.serve --checkpoint=FOLDER --num_replicas=4
python -m glm5_jax.serve --checkpoint=FOLDER --config.mesh.fsdp=16  # on every host

Needs the extra serve: pip install "glm5_jax[serve]". docs/serving.md lists the routes.
The key may also be in the variable GLM5_JAX_API_KEY, which other users cannot see.
"""

from collections.abc import Sequence
from typing import Any, cast

from absl import flags, logging

from glm5_jax import command_line, compile_cache, quantize_flag
from glm5_jax.http_server import extra, reach
from glm5_jax.processes import flags as process_flags
from glm5_jax.serving import engine_flags, for_prefill, for_trainers, shared

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Run, step or Hugging Face folder.", required=True
)
_MODEL_NAME = flags.DEFINE_string(
    "model_name", None, "Name of the model for clients; default: its folder's."
)
_TEMPLATE = flags.DEFINE_enum(
    "template", None, ["glm5", "glm5.1", "glm5.2"], "Chat template; default: the run's."
)
_SEED = flags.DEFINE_integer("seed", None, "Seed; default: each request draws one.", 0)
_NUM_REPLICAS = flags.DEFINE_integer(
    "num_replicas", 0, "Servers on this machine behind a router; 0: one, without.", 0
)
_MAX_CONCURRENCY = flags.DEFINE_integer(
    "max_concurrency", 256, "Requests answered at the same time.", lower_bound=1
)
for module in (engine_flags, reach, for_trainers, for_prefill):  # --help shows them
    flags.adopt_module_key_flags(module)
for module in (compile_cache, quantize_flag, process_flags):
    flags.adopt_module_key_flags(module)


def main(arguments: command_line.Arguments) -> int | None:
    """Serves until SIGTERM or ctrl-C."""
    extra.require("A server")
    logging.set_verbosity(logging.INFO)  # on stderr
    if _NUM_REPLICAS.value or for_prefill.NUM_PREFILL_REPLICAS.value:
        from glm5_jax.serving.router import local

        numbers = _NUM_REPLICAS.value, _MAX_CONCURRENCY.value
        return process_flags.run(lambda: local.serve(*numbers), None, alone=True)
    from glm5_jax.weights import loading

    overrides = loading.overrides_of(arguments, alone=False)
    shared.require_flags()
    return process_flags.run(lambda: _run(overrides), loading.mesh_config_of(overrides))


def _run(overrides: Sequence[command_line.Override]) -> None:
    from glm5_jax.serving import command

    compile_cache.enable()
    options = command.Options(
        host=reach.HOST.value,
        port=reach.PORT.value,
        api_key=reach.api_key(),
        name=_MODEL_NAME.value,
        template=cast(Any, _TEMPLATE.value),
        num_slots=engine_flags.NUM_SLOTS.value,
        num_pages=engine_flags.NUM_PAGES.value,
        num_drafts=engine_flags.NUM_DRAFTS.value,
        acceptance=cast(Any, engine_flags.ACCEPTANCE.value),
        host_pages=engine_flags.HOST_PAGES.value,
        capacity=engine_flags.CAPACITY.value,
        warm_up=engine_flags.WARM_UP.value,
        seed=_SEED.value,
        **for_trainers.given(),
        max_concurrency=_MAX_CONCURRENCY.value,
        drain_seconds=reach.DRAIN_SECONDS.value,
        prefill_servers=for_prefill.PREFILL_SERVERS.value,
        min_prefill_tokens=for_prefill.MIN_PREFILL_TOKENS.value,
        quantize=quantize_flag.SCHEME.value,
    )
    command.serve(_CHECKPOINT.value, overrides, options)


if __name__ == "__main__":
    command_line.run(main, only_model=True)
