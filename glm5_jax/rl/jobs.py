"""The episodes of a run, as functions of its config."""

from glm5_jax import config as config_lib
from glm5_jax.environments import protocol
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import held_out

# Within it a call of an environment ends, and an engine answers.
_STALLED = 4  # times rl.step_timeout_seconds


def of_group(
    config: config_lib.TrainConfig, taskset: protocol.Taskset, index: int, group: int
) -> list[episodes_lib.Job]:
    """Returns the episodes of a task, as a function of the seed and the index.

    Args:
      config: of the run.
      taskset: makes the task.
      index: of the task in the whole run.
      group: number that the episodes get.
    """
    rl = config.rl
    task = taskset.task("train", config.seed, index)
    first = index * rl.group_size
    return [
        episodes_lib.Job(task, group, episode * rl.max_turns % held_out.FIRST_ID)
        for episode in range(first, first + rl.group_size)
    ]


def settings(rl: config_lib.RLConfig) -> episodes_lib.Settings:
    """Returns the limits of episodes."""
    return episodes_lib.Settings(
        max_new_tokens=rl.max_new_tokens,
        max_turns=rl.max_turns,
        num_concurrent=2 * rl.slots,
        temperature=rl.temperature,
        call_timeout=rl.step_timeout_seconds,
    )


def stall_seconds(rl: config_lib.RLConfig) -> float:
    """Returns after how long without an answer nothing will come any more."""
    return _STALLED * rl.step_timeout_seconds


def most_dropped(rl: config_lib.RLConfig) -> int:
    """Returns how many groups may be dropped for a step, which then takes fewer."""
    return rl.max_rounds * rl.prompts_per_step
