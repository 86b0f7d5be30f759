"""Actors in a thread of the trainer's process, with an engine on its devices."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax import config as config_lib
from glm5_jax.data.chat import templates
from glm5_jax.environments import protocol
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import jobs
from glm5_jax.rl.actors import groups as groups_lib
from glm5_jax.rl.actors import journal as journal_lib
from glm5_jax.rl.actors import local, monitor
from glm5_jax.rl.actors import orchestrator as orchestrator_lib
from glm5_jax.training.feeds import actors
from glm5_jax.training.feeds import player as player_lib


class OwnEngine:
    """One engine, which shares devices with the trainer, as `actors.Actors`."""

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
        self._config, self._taskset, self._template = config, taskset, template
        self._player = player_lib.Player(config, taskset, template)
        self._local: local.Local | None = None

    def publish(self, params: dict, version: int) -> None:
        """Gives the engine a copy of weights between two dispatches."""
        self._player.publish(params, version, self._config.rl.rollout_weights)

    def start(self, state: Mapping[str, Any], folder: pathlib.Path | None) -> None:
        """Begins to play in a thread."""
        config, rl = self._config, self._config.rl
        game = local.Game(
            self._taskset,
            self._template,
            jobs.settings(rl),
            jobs=lambda index: jobs.of_group(config, self._taskset, index, index),
            drop_equal=rl.dynamic_sampling,
            watch=monitor.Settings(
                quarantine=rl.quarantine, canary_every=rl.canary_every
            ),
        )
        groups = groups_lib.Groups[orchestrator_lib.Group](
            rl.prompts_per_step,
            rl.max_staleness,
            dict(state),
            max_dropped=jobs.most_dropped(rl),
        )
        journal = journal_lib.Journal(folder)
        self._local = local.Local(self._player.serve(), game, groups, journal)

    def take(self, version: int) -> actors.Taken:
        """Lets groups begin with a version; waits for those of the step after it.

        Raises:
          StalledError: no episode advances.
          EngineError: the engine failed again and again.
        """
        assert self._local is not None, "start comes first"
        self._local.call(lambda made: made.published(version))
        stall_seconds = jobs.stall_seconds(self._config.rl, self._taskset)
        taken = self._local.take(stall_seconds)
        played = self._local.call(orchestrator_lib.Orchestrator.played)
        ledger = self._local.call(lambda made: made.groups.ledger())
        metrics: dict[str, float | int] = {
            f"rollout/{name}": n for name, n in played.counts.items()
        }
        metrics |= {f"groups/{name}": n for name, n in ledger.items()}
        metrics |= self._local.call(orchestrator_lib.Orchestrator.figures)
        metrics["actors/loop_lag_seconds"] = round(self._local.lag.taken(), 3)
        evaluated = self._local.call(lambda made: made.evaluation.taken())
        memory = self._local.call(lambda made: made.groups.state(version + 1))
        groups = [group for _, group in taken]
        return actors.Taken(
            groups, played.episodes, played.unused, metrics, memory, evaluated
        )

    def evaluate(self) -> Sequence[episodes_lib.Episode]:
        """Plays the held-out tasks beside the other episodes."""
        return self._player.play_held_out()

    def evaluate_beside(self, version: int) -> None:
        """Begins to play the held-out tasks, for a later `take`."""
        assert self._local is not None, "start comes first"
        jobs = self._player.held_out
        self._local.call(lambda made: made.evaluation.begin(jobs, version))

    def memory(self, version: int) -> Mapping[str, Any]:
        """Returns which groups are done, and which must begin again."""
        assert self._local is not None, "start comes first"

        def state(made: orchestrator_lib.Orchestrator) -> Mapping[str, Any]:
            saved = made.groups.state(version)
            made.groups.commit(version)
            return saved

        return self._local.call(state)

    def close(self) -> None:
        """Cancels the episodes that are under way, and ends the engine's thread."""
        if self._local is not None:
            self._local.close()
        self._player.close()
