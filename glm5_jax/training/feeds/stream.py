"""Asynchronous rollouts: episodes are played while the trainer learns.

Episodes that are under way continue with new weights, and each token records the
version that drew it. A group may be at most rl.max_staleness versions older than the
step that learns from it, which its admission ensures (rl/actors/groups.py). With
max_staleness=0 and an engine of this process, rollouts are those of rounds.py.
"""

import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from glm5_jax import config as config_lib
from glm5_jax.data.chat import templates
from glm5_jax.environments import protocol
from glm5_jax.processes import together
from glm5_jax.rl import episode_files, held_out
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl.actors import journal
from glm5_jax.training.feeds import actors as actors_lib
from glm5_jax.training.feeds import (
    engine_processes,
    kept_steps,
    own_engine,
    shared_actors,
)
from glm5_jax.training.feeds import groups as groups_lib
from glm5_jax.training.feeds import player as player_lib


class Stream:
    """Takes groups from actors, as a `groups.Source`."""

    def __init__(
        self,
        config: config_lib.TrainConfig,
        taskset: protocol.Taskset,
        template: templates.Template,
    ) -> None:
        """Prepares the actors; the first step starts them.

        Raises:
          InputError: see `player.Player`, or the extra serve is missing.
        """
        self._config = config
        self._actors: actors_lib.Actors = (
            engine_processes.EngineProcesses(config)
            if config.rl.has_servers
            else own_engine.OwnEngine(config, taskset, template)
        )
        if config.rl.weights_store and jax.distributed.is_initialized():
            folder = pathlib.Path(config.rl.weights_store)
            self._actors = shared_actors.SharedActors(self._actors, folder)
        self._is_playing = self._is_disowned = False
        self._folder: pathlib.Path | None = None  # of what is under way
        self._kept: kept_steps.KeptSteps | None = None
        self._saved: Mapping[str, Any] = {}
        self.shown: Sequence[episodes_lib.Episode] = ()

    def begin(self, workdir: pathlib.Path, step: int) -> None:
        """Uses the folder of a run from now on, and what a killed one left there."""
        num_steps = self._config.num_steps
        self._kept = kept_steps.KeptSteps(workdir, step, num_steps)
        folder = workdir / episode_files.FOLDER / journal.FOLDER
        self._folder = folder if self._config.rl.episodes_gib else None
        # What is there had another start, or will be older than the run.
        is_useless = step == 0 or self._folder is None
        if is_useless and together.is_first():
            shutil.rmtree(folder, ignore_errors=True)

    def play(self, params: dict, position: int) -> groups_lib.Played:
        """Publishes the weights and waits for the oldest groups.

        After a kill it returns those of the steps that were done already.

        Raises:
          StalledError: no episode advances.
          EngineError: the engines failed again and again.
        """
        if not self._is_playing and self._kept and (kept := self._kept.take(position)):
            return self._played_before(kept)
        self._actors.publish(params, position)
        if not self._is_playing:
            first = position * self._config.rl.prompts_per_step
            begun = {"next": first, "again": [], "counts": {}}
            skipped = self._kept.after_skipped(position) if self._kept else None
            state = {**begun, **(skipped or self._saved), "version": position}
            self._actors.start(state, self._folder)
            self._is_playing = True
        taken = self._actors.take(position)
        own = [episode for group in taken.groups for episode in group]
        episodes = taken.episodes or own  # all may have ended before the last step
        self.shown = episodes[: player_lib.NUM_SHOWN]
        metrics = taken.metrics
        if taken.evaluated is not None:
            metrics = {**metrics, **held_out.mixed_figures(taken.evaluated)}
        return groups_lib.Played(
            taken.groups, episodes, taken.unused, metrics, taken.memory
        )

    def evaluate(self, params: dict, position: int) -> dict[str, float]:
        """Returns success on held-out tasks, while other episodes continue.

        Without staleness no group is under way between two steps, so the engine plays
        nothing else, as in rounds.py. With it groups begin meanwhile, too.

        The engines sample with the weights of rollouts, also where these are rounded
        (rl.rollout_weights).
        """
        self._actors.publish(params, position)
        played = self._actors.evaluate()
        self.shown = played[: player_lib.NUM_SHOWN]
        return held_out.figures(played)

    def evaluate_beside(self, params: dict, position: int) -> bool:
        """Begins an evaluation, with rl.evaluates_beside, for a later `play`."""
        if not (self._config.rl.evaluates_beside and self._is_playing):
            return False
        self._actors.publish(params, position)
        self._actors.evaluate_beside(position)
        return True

    def memory(self, position: int) -> Mapping[str, Any]:
        """Returns which groups are done, and which must begin again."""
        return self._actors.memory(position) if self._is_playing else self._saved

    def resume(self, memory: Mapping[str, Any]) -> None:
        """Continues from what `memory` returned.

        After a rollback of a running process no group changes: they are newer.
        """
        if self._kept is None:
            self._saved = memory
        else:
            self._kept.end()

    def disown(self) -> None:
        """Lets nothing go on after this process, as its engines drew wrong tokens."""
        self._is_disowned = True

    def close(self) -> None:
        """Cancels all episodes and ends the engines."""
        self._actors.close()
        if self._is_disowned and self._folder is not None and together.is_first():
            shutil.rmtree(self._folder, ignore_errors=True)

    def _played_before(self, kept: episode_files.Step) -> groups_lib.Played:
        """Returns what a step took before a kill; actors go on after it."""
        self._saved = kept.memory or {}
        groups = [[*group] for group in kept.groups]
        every = [*(episode for group in groups for episode in group), *kept.unused]
        episodes = [*{id(episode): episode for episode in every}.values()]
        self.shown = episodes[: player_lib.NUM_SHOWN]
        return groups_lib.Played(
            groups, episodes, kept.unused, kept.metrics, is_kept=True
        )
