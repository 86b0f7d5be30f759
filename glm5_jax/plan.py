"""Ranks every mesh that divides a config, to find the one worth renting.

python -m glm5_jax.plan --config=configs/glm5_pretrain.py --topology=v5p:8x8x8 \
    --sequence_length=4096 --batch_size=512 --out=reports/plan_v5p_512

Computes from shapes: memory by a model of the step, time by rooflines. --verify=N
compiles the best N, which takes minutes each and needs libtpu. The exit code is 2 if
nothing divides, or nothing fits. docs/planning.md says what the model knows.
"""

import os
import sys

from absl import flags

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.scale import command

_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "Chips of a slice and their arrangement, e.g. v5p:8x8x8."
)
_SLICES = flags.DEFINE_integer("slices", 1, "Slices of that topology.", lower_bound=1)
_LENGTH = flags.DEFINE_string(
    "sequence_length", None, "Tokens of a row; default: the config's."
)
_BATCH = flags.DEFINE_string(
    "batch_size", None, "Rows of a step, over all devices; default: the config's."
)
_VERIFY = flags.DEFINE_integer("verify", 0, "Best plans to compile.", lower_bound=0)
_TOP = flags.DEFINE_integer(
    "top", 10, "Plans to show; at least --verify.", lower_bound=1
)
_OUT = flags.DEFINE_string("out", None, "Path of the table, without suffix.")
_AXES = ("fsdp", "expert", "tensor", "context")


def main(arguments: command_line.Arguments) -> int:
    """Ranks the meshes, prints and writes the table."""
    topology = command.require_topology(_TOPOLOGY.value)
    data = {"sequence_length": _LENGTH.value, "batch_size": _BATCH.value}
    # The varied fields return to 1 first: they need not divide the asked sizes.
    varied = dict.fromkeys((f"mesh.{axis}" for axis in _AXES), "1")
    varied |= {"mesh.data": "-1", "mesh.slices": "1", "model.expert_chunks": "1"}
    varied["optim.accumulation_steps"] = "1"
    if asked := [path for path, _ in arguments.overrides if path in varied]:
        raise config_lib.InputError(
            f"the plan varies {', '.join(asked)}: leave out "
            f"{', '.join(f'--config.{path}' for path in asked)} (slices are --slices); "
            f"for the needs of one mesh use python -m glm5_jax.aot."
        )
    rows = {f"data.{name}": text for name, text in data.items() if text}
    overrides = (*arguments.overrides, *varied.items(), *rows.items())
    arguments = command_line.Arguments(config=arguments.config, overrides=overrides)
    config = arguments.train_config()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the chips are those of --topology
    from glm5_jax.scale.plan import planner, table  # jax: after the input is checked

    ranking = planner.make(
        config,
        str(arguments.config),
        topology,
        num_slices=_SLICES.value,
        num_shown=_TOP.value,
        num_verified=_VERIFY.value,
    )
    print(table.text(ranking))
    if _OUT.value:
        typed = command.typed()
        ranking.write(_OUT.value, table.page(ranking, typed), typed)
    if ranking.refusal:
        raise config_lib.InputError(ranking.refusal)
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run(main))
