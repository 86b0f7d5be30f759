"""Synchronous rollouts: a step plays its groups with its own weights, then learns.

Tasks, requests and random numbers are functions of the seed and the position, so a run
that was killed plays the same rollouts again.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax import config as config_lib
from glm5_jax.data.chat import templates
from glm5_jax.environments import protocol
from glm5_jax.rl import advantages, jobs
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.training.feeds import groups as groups_lib
from glm5_jax.training.feeds import player as player_lib


class Rounds:
    """Plays rounds of rl.prompts_per_step groups, as a `groups.Source`."""

    def __init__(
        self,
        config: config_lib.TrainConfig,
        taskset: protocol.Taskset,
        template: templates.Template,
    ) -> None:
        """Prepares the engine, which the first weights start.

        Raises:
          InputError: see `player.Player`.
        """
        self._config, self._taskset = config, taskset
        self._player = player_lib.Player(config, taskset, template)

    @property
    def shown(self) -> Sequence[episodes_lib.Episode]:
        """Returns a few of the episodes that were played last."""
        return self._player.shown

    def begin(self, workdir: pathlib.Path, step: int) -> None:
        """Does nothing."""

    def play(self, params: dict, position: int) -> groups_lib.Played:
        """Returns groups; with rl.dynamic_sampling of up to rl.max_rounds rounds."""
        rl = self._config.rl
        self._player.publish(params, position, rl.rollout_weights)
        episodes: groups_lib.Group = []
        kept: list[groups_lib.Group] = []
        counts: dict[str, int] = {"prompt_tokens_read": 0}
        num_rounds = rl.max_rounds if rl.dynamic_sampling else 1
        for number in range(position * num_rounds, (position + 1) * num_rounds):
            groups = self._round(number)
            counts["prompt_tokens_read"] += self._player.num_read
            episodes += [episode for group in groups for episode in group]
            selected, more = advantages.select(
                groups, group_size=rl.group_size, drop_equal=rl.dynamic_sampling
            )
            kept += selected
            counts |= {name: n + counts.get(name, 0) for name, n in more.items()}
            if len(kept) >= rl.prompts_per_step:
                break
        metrics = {f"rollout/{name}": n for name, n in counts.items()}
        used = kept[: rl.prompts_per_step]
        learnt = {id(episode) for group in used for episode in group}
        unused = [episode for episode in episodes if id(episode) not in learnt]
        return groups_lib.Played(used, episodes, unused, metrics)

    def evaluate(self, params: dict, position: int) -> dict[str, float]:
        """Returns success on held-out tasks: see `player.Player.evaluate`."""
        return self._player.evaluate(params, position)

    def evaluate_beside(self, params: dict, position: int) -> bool:
        """Begins none: no episode is played while the model learns."""
        return False

    def memory(self, position: int) -> Mapping[str, Any]:
        """Returns nothing: the rollouts of a position are functions of it."""
        return {}

    def resume(self, memory: Mapping[str, Any]) -> None:
        """Does nothing."""

    def disown(self) -> None:
        """Does nothing: no episode goes on after this process."""

    def close(self) -> None:
        """Does nothing: no episode runs between steps."""

    def _round(self, number: int) -> list[groups_lib.Group]:
        """Plays all groups of a round; a run counts its rounds from 0."""
        rl = self._config.rl
        first = number * rl.prompts_per_step
        todo: list[episodes_lib.Job] = []
        for group in range(rl.prompts_per_step):
            todo += jobs.of_group(self._config, self._taskset, first + group, group)
        done = iter(self._player.play(todo, "rollouts"))
        return [
            [next(done) for _ in range(rl.group_size)]
            for _ in range(rl.prompts_per_step)
        ]
