"""The flags of `plan` that describe a run of reinforcement learning."""

import dataclasses
import math

from absl import flags

from glm5_jax import config as config_lib
from glm5_jax.scale.rl import request, tasks

TASKS = flags.DEFINE_string(
    "tasks",
    None,
    f"Kinds of tasks, of {', '.join(tasks.KINDS)}, with their shares of the groups, "
    "e.g. coding:2,search:1; default: reasoning where rl.max_turns is 1, else coding.",
)
SIZES = {
    "prompt": flags.DEFINE_string(
        "prompt", None, "Tokens of a prompt, MEDIAN:SPREAD; default: the task's."
    ),
    "turns": flags.DEFINE_string(
        "turns", None, "Turns of an episode, MEDIAN:SPREAD; default: the task's."
    ),
    "drawn": flags.DEFINE_string(
        "drawn", None, "Tokens drawn in a turn, MEDIAN:SPREAD; default: the task's."
    ),
    "observed": flags.DEFINE_string(
        "observed", None, "Tokens of an answer of a tool, MEDIAN:SPREAD."
    ),
    "tool_seconds": flags.DEFINE_string(
        "tool_seconds", None, "Seconds of an answer of a tool, MEDIAN:SPREAD."
    ),
}
REREAD = flags.DEFINE_float(
    "reread",
    0.0,
    "Share of an episode's cache that is lost between two turns and read again.",
    lower_bound=0.0,
    upper_bound=1.0,
)
ENGINE = flags.DEFINE_string(
    "engine",
    None,
    "Slice of an engine, e.g. v5p:4x4x4; default: the smallest whose memory the "
    "weights take a quarter of.",
)
ENGINE_TENSOR = flags.DEFINE_integer(
    "engine_tensor",
    None,
    "Chips of an engine that share slots; default: 2, or 1 of an odd number.",
    lower_bound=1,
)
ENGINE_WEIGHTS = flags.DEFINE_enum(
    "engine_weights", "bfloat16", ["bfloat16", "FP8"], "Weights that engines get."
)
ENGINE_REPORT = flags.DEFINE_string(
    "engine_report",
    None,
    "STEM.json of aot --program=decode --out=STEM, in place of an estimate by shapes; "
    "gives the engine's slice and mesh.",
)
PUSH = flags.DEFINE_enum(
    "push", "full", ["full", "delta"], "Whole versions of the weights, or differences."
)
NUM_STEPS = flags.DEFINE_integer(
    "simulated_steps", 12, "Steps that are simulated, after the first.", lower_bound=1
)
SEED = flags.DEFINE_integer("episode_seed", 0, "Seed of the drawn episodes.")
_ALL = (
    *(TASKS, *SIZES.values(), REREAD, ENGINE, ENGINE_TENSOR, ENGINE_WEIGHTS),
    *(ENGINE_REPORT, PUSH, NUM_STEPS, SEED),
)


def require_no_flags(config: config_lib.TrainConfig) -> None:
    """Checks that a plan without episodes was asked for without these flags.

    Raises:
      InputError: one is given.
    """
    given = [f"--{flag.name}" for flag in _ALL if flag.present]
    if given:
        raise config_lib.InputError(
            f"{', '.join(given)}: a run of stage {config.stage!r} plays no episodes; "
            f"leave them out, or plan a config of stage rl or async_rl, e.g. "
            f"--config=configs/glm5_rl_agentic.py."
        )


def asked(
    config: config_lib.TrainConfig, batch_size: str | None, num_verified: int
) -> request.Request:
    """Returns what the flags ask for.

    Args:
      config: of a stage that plays episodes.
      batch_size: value of --batch_size, which is of other stages.
      num_verified: value of --verify, which is of other stages.

    Raises:
      InputError: a kind, a share or a size is not possible, or a flag is of other
        stages.
    """
    if batch_size:
        rows = " and ".join(
            f"--config.{f}" for f in config.stage_record.rows_of(config)
        )
        raise config_lib.InputError(
            f"--batch_size is not for stage {config.stage!r}, whose rows are episodes: "
            f"leave it out, and set {rows}."
        )
    if num_verified:
        raise config_lib.InputError(
            f"--verify is not for stage {config.stage!r}, whose splits are simulated: "
            f"leave it out; python -m glm5_jax.aot compiles a trainer's step."
        )
    if ENGINE.value and ENGINE_REPORT.value:
        raise config_lib.InputError(
            "--engine and --engine_report both give an engine: leave one out."
        )
    return request.Request(
        mixture=_mixture(config),
        engine=ENGINE.value,
        engine_tensor=ENGINE_TENSOR.value,
        engine_weights=ENGINE_WEIGHTS.value,
        engine_report=ENGINE_REPORT.value,
        push=PUSH.value,
        num_steps=NUM_STEPS.value,
    )


def _mixture(config: config_lib.TrainConfig) -> tasks.Mixture:
    """Returns the tasks that the flags describe."""
    default = "reasoning" if config.rl.max_turns == 1 else "coding"
    shares = tasks.parse_shares(TASKS.value or default)
    sizes = {
        name: tasks.parse_size(flag.name, flag.value)
        for name, flag in SIZES.items()
        if flag.value is not None
    }
    bounds = len(config.rl.concurrency)
    if bounds > 1 and bounds != len(shares):
        raise config_lib.InputError(
            f"rl.concurrency={config.rl.concurrency} bounds {bounds} parts, and "
            f"--tasks={TASKS.value or default} names {len(shares)} kinds: name one for "
            f"each part of rl.environment, in their order, e.g. "
            f"--tasks=coding:2,search:1."
        )
    if math.isnan(REREAD.value):
        raise config_lib.InputError("--reread must lie in 0..1, got nan.")
    return tasks.Mixture(
        kinds={n: dataclasses.replace(tasks.KINDS[n], **sizes) for n, _ in shares},
        shares=shares,
        limits=tasks.Limits.of(config),
        seed=SEED.value,
        reread=REREAD.value,
    )
