"""Episodes of a run: the engine that plays them, and success on held-out tasks."""

import contextlib
import sys
from collections.abc import Sequence

import tqdm
from absl import logging

from glm5_jax import config as config_lib
from glm5_jax.data.chat import templates
from glm5_jax.environments import protocol
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference import limits as limits_lib
from glm5_jax.inference import service as service_lib
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import held_out, publisher, rollouts
from glm5_jax.rl import jobs as jobs_lib
from glm5_jax.training import computed

NUM_SHOWN = 4  # episodes of a sample


class Player:
    """Plays tasks with an engine, by the settings of config.rl."""

    def __init__(
        self,
        config: config_lib.TrainConfig,
        taskset: protocol.Taskset,
        template: templates.Template,
    ) -> None:
        """Draws the held-out tasks; the first weights start the engine.

        Raises:
          InputError: the model or its longest sequence cannot have rl.num_pages, or the
            model cannot draft tokens.
        """
        self._config, self._taskset, self._template = config, taskset, template
        self._engine: engine_lib.Engine | None = None
        self._service: service_lib.Service | None = None  # that stays open
        self._limits = limits_lib.Limits(
            num_pages=config.rl.num_pages, num_drafts=config.rl.num_drafts
        )
        self._limits.table(config.model, config.data.sequence_length, 1)  # checks
        self._limits.drafter(config.model)  # checks
        self.settings = jobs_lib.settings(config.rl)
        self.num_read = 0  # tokens of prompts that the last episodes made it read
        self.held_out = held_out.jobs(taskset, config.rl)
        self.shown: Sequence[episodes_lib.Episode] = ()

    def publish(
        self, params: dict, version: int, weights: config_lib.RolloutWeights
    ) -> None:
        """Plays the next episodes with these parameters."""
        config, rl = self._config, self._config.rl
        if self._service is not None:
            self._service.call(
                lambda engine: _publish_again(
                    engine, params, version, weights, rl.clears_cache
                )
            ).result()
            return
        if self._engine is None:
            logging.info("Compiling the engine, then playing the first episodes ...")
            self._engine = engine_lib.Engine(
                params,
                config.model,
                num_slots=rl.slots,
                capacity=config.data.sequence_length,
                seed=config.seed,
                chunk=rl.prefill_chunk,
                with_experts=config.replays_routing,
                limits=self._limits,
            )
        publisher.publish(self._engine, params, version, weights)

    def play(
        self, jobs: Sequence[episodes_lib.Job], what: str
    ) -> list[episodes_lib.Episode]:
        """Returns the episodes of the jobs; `what` is the label of the progress bar."""
        assert self._engine is not None, "publish comes first"
        service = self._service or service_lib.Service(self._engine)
        own = contextlib.nullcontext() if self._service else contextlib.closing(service)
        bar = tqdm.tqdm(
            desc=what,
            total=len(jobs),
            unit=" episodes",
            leave=False,
            disable=not sys.stderr.isatty(),
        )
        with own, bar:
            played = rollouts.collect(
                service,
                self._taskset,
                self._template,
                jobs,
                self.settings,
                on_episode=lambda *_: bar.update(),
            )
        self.num_read = service.stats().prompt_tokens
        self.shown = played[:NUM_SHOWN]
        return played

    def serve(self) -> service_lib.Service:
        """Returns a service that stays open for episodes beside those of `play`."""
        assert self._engine is not None, "publish comes first"
        if self._service is None:
            self._service = service_lib.Service(self._engine)
        return self._service

    def close(self) -> None:
        """Ends the service that stayed open."""
        if self._service is not None:
            self._service.close()

    def evaluate(self, params: dict, version: int) -> dict[str, float]:
        """Returns the share of held-out tasks solved, each tried once, and more.

        The interval is one of 95%. The engine samples with the parameters that are
        trained and saved, even if rollouts use rounded ones; quantization-aware
        training measures the rounded ones.
        """
        self.publish(computed.measured(params, self._config), version, "same")
        return held_out.figures(self.play_held_out())

    def play_held_out(self) -> list[episodes_lib.Episode]:
        """Returns an episode of each held-out task, with the engine's weights."""
        return self.play(self.held_out, "evaluate")


def _publish_again(
    engine: engine_lib.Engine,
    params: dict,
    version: int,
    weights: config_lib.RolloutWeights,
    clears_cache: bool,
) -> None:
    """Publishes weights, unless requests are running with this very version.

    If none is, the slots are emptied, so that rollouts do not depend on an evaluation
    before them.
    """
    is_new = version != engine.version
    if is_new or not engine.num_pending:
        publisher.publish(engine, params, version, weights)
    if clears_cache and is_new and engine.num_pending:
        engine.clear_cache()
