"""Ranks every mesh that divides a config, or every split of the chips of an RL run.

python -m glm5_jax.plan --config=configs/glm5_pretrain.py --topology=v5p:8x8x8 \
    --sequence_length=4096 --batch_size=512 --out=reports/plan_v5p_512
python -m glm5_jax.plan --config=configs/glm5_rl_agentic.py --topology=v5p:8x8x16 \
    --tasks=coding --out=reports/plan_rl_coding

Computes from shapes: memory by a model of the step, time by rooflines; for stages rl
and async_rl a simulated run says how many chips should sample, and how many train.
--verify=N compiles the best N meshes, which takes minutes each and needs libtpu. The
exit code is 2 if nothing divides, or nothing fits. docs/planning.md says what the
models know.
"""

import os
import sys

from absl import flags

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.scale import command
from glm5_jax.scale.rl import flags as rl_flags

_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "Chips as they lie: v5p:8x8x8; nodes of GPUs: h200:64x8."
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
flags.adopt_module_key_flags(rl_flags)


def main(arguments: command_line.Arguments) -> int:
    """Ranks, prints and writes the table."""
    topology = command.require_topology(_TOPOLOGY.value)
    rows = {"sequence_length": _LENGTH.value, "batch_size": _BATCH.value}
    config = command.planned(arguments, rows)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the chips are those of --topology
    of_what = config, str(arguments.config), topology
    how = {"num_slices": _SLICES.value, "num_shown": _TOP.value}
    typed = command.typed()
    # Each imports jax, after the input is checked.
    if config.stage_record.plays_episodes:
        asked = rl_flags.asked(config, _BATCH.value, _VERIFY.value)
        from glm5_jax.scale.rl import planner as splits
        from glm5_jax.scale.rl import table as splits_table

        ranking = splits.make(*of_what, asked, **how)
        text, page = splits_table.text(ranking), splits_table.page(ranking, typed)
    else:
        rl_flags.require_no_flags(config)
        from glm5_jax.scale.plan import planner, table

        ranking = planner.make(*of_what, num_verified=_VERIFY.value, **how)
        text, page = table.text(ranking), table.page(ranking, typed)
    print(text)
    if _OUT.value:
        ranking.write(_OUT.value, page, typed)
    if ranking.refusal:
        raise config_lib.InputError(ranking.refusal)
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run(main))
