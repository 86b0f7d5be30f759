"""The episodes of a run, as functions of its config."""

from glm5_jax import config as config_lib
from glm5_jax.environments import protocol
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import held_out


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
        num_concurrent=2 * rl.slots * max(rl.num_engines, 1),
        concurrency=rl.concurrency,
        temperature=rl.temperature,
        call_timeout=rl.step_timeout_seconds,
        episode_timeout=rl.episode_timeout_seconds,
    )


def stall_seconds(rl: config_lib.RLConfig, taskset: protocol.Taskset) -> float:
    """Returns after how long no answer or episode that has not ended will end any more.

    After an answer an environment has a call, and then an answer comes or `close` is
    called. A program may play all of its episode without asking for a turn.
    """
    longest = [
        rl.episode_timeout_seconds
        if protocol.has_agents(part)
        else rl.answer_timeout_seconds
        for part in protocol.parts(taskset)
    ]
    return rl.step_timeout_seconds + max(*longest, rl.step_timeout_seconds)


def most_dropped(rl: config_lib.RLConfig) -> int:
    """Returns how many groups may be dropped for a step, which then takes fewer."""
    return rl.max_rounds * rl.prompts_per_step
