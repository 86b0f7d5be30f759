"""Episodes of a run: the engine that plays them, and success on held-out tasks."""

import contextlib
import json
import sys
from collections.abc import Sequence

import tqdm
from absl import logging

from glm5_jax import config as config_lib
from glm5_jax import intervals
from glm5_jax.data.chat import templates
from glm5_jax.environments import protocol
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference import limits as limits_lib
from glm5_jax.inference import service as service_lib
from glm5_jax.rl import advantages, publisher, rollouts
from glm5_jax.rl import episodes as episodes_lib

NUM_SHOWN = 4  # episodes of a sample
EVAL_IDS = 2**30  # request ids from here on are those of evaluations
_MAX_DRAWS = 16  # draws per held-out task, to find one unlike the others


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
        self._limits = limits_lib.Limits(
            num_pages=config.rl.num_pages, num_drafts=config.rl.num_drafts
        )
        self._limits.table(config.model, config.data.sequence_length, 1)  # checks
        self._limits.drafter(config.model)  # checks
        self.num_read = 0  # tokens of prompts that the last episodes made it read
        self._held_out = held_out_tasks(taskset, config.rl.num_eval_tasks)
        self.shown: Sequence[episodes_lib.Episode] = ()

    def publish(
        self, params: dict, version: int, weights: config_lib.RolloutWeights
    ) -> None:
        """Plays the next episodes with these parameters."""
        config, rl = self._config, self._config.rl
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
        rl = self._config.rl
        settings = episodes_lib.Settings(
            max_new_tokens=rl.max_new_tokens,
            max_turns=rl.max_turns,
            num_concurrent=2 * rl.slots,
            temperature=rl.temperature,
            call_timeout=rl.step_timeout_seconds,
        )
        service = service_lib.Service(self._engine)
        bar = tqdm.tqdm(
            desc=what,
            total=len(jobs),
            unit=" episodes",
            leave=False,
            disable=not sys.stderr.isatty(),
        )
        with contextlib.closing(service), bar:
            played = rollouts.collect(
                service,
                self._taskset,
                self._template,
                jobs,
                settings,
                on_episode=lambda *_: bar.update(),
            )
        self.num_read = service.stats().prompt_tokens
        self.shown = played[:NUM_SHOWN]
        return played

    def evaluate(self, params: dict, version: int) -> dict[str, float]:
        """Returns the share of held-out tasks solved, each tried once, and more.

        The interval is one of 95%. The engine samples with the parameters that are
        trained and saved, even if rollouts use rounded ones.
        """
        self.publish(params, version, "same")
        turns = self._config.rl.max_turns
        jobs = [
            episodes_lib.Job(task, i, EVAL_IDS + i * turns)
            for i, task in enumerate(self._held_out)
        ]
        done = self.play(jobs, "evaluate")
        valid = [
            (e.task.tag, e.reward.total)
            for e in done
            if advantages.is_valid(e) and e.reward
        ]
        is_solved = [reward >= 1 for _, reward in valid]
        solved = intervals.proportion_interval(sum(is_solved), len(valid))
        return {
            "eval/success": sum(is_solved) / max(len(valid), 1),
            "eval/success_low": solved.low,
            "eval/success_high": solved.high,
            **_success_by_tag([tag for tag, _ in valid], is_solved),
            "eval/reward": sum(reward for _, reward in valid) / max(len(valid), 1),
            "eval/tasks": len(valid),
            "eval/invalid": len(done) - len(valid),
        }


def held_out_tasks(taskset: protocol.Taskset, count: int) -> list[protocol.Task]:
    """Returns the first `count` held-out tasks of which no two ask the same.

    An interval over equal tasks would be too narrow. Logs a warning and returns fewer
    tasks if the taskset has no more.
    """
    found: dict[str, protocol.Task] = {}
    for index in range(_MAX_DRAWS * count):
        task = taskset.task("held_out", 0, index)
        words = [*task.messages], task.answer
        said = json.dumps(words, sort_keys=True, default=repr)
        found.setdefault(task.problem or said, task)
        if len(found) == count:
            break
    else:
        logging.warning(
            "%s has %d held-out tasks that differ, fewer than rl.num_eval_tasks=%d; "
            "evaluations use those.",
            taskset.name,
            len(found),
            count,
        )
    return [*found.values()]


def _success_by_tag(tags: Sequence[str], is_solved: Sequence[bool]) -> dict[str, float]:
    """Returns the share of tasks solved for every tag; one tag alone says nothing."""
    by_tag: dict[str, list[bool]] = {}
    for tag, solved in zip(tags, is_solved, strict=True):
        by_tag.setdefault(tag, []).append(solved)
    if len(by_tag) < 2:
        return {}
    return {
        f"eval/success/{tag or 'untagged'}": sum(by_tag[tag]) / len(by_tag[tag])
        for tag in sorted(by_tag)
    }
