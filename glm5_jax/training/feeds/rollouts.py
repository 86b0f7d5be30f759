"""The feed of reinforcement learning: rollouts of the policy itself, step by step.

A source plays groups of episodes, one task each (SOURCES). Their rewards become
advantages, and every sample becomes a row.
"""

import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from glm5_jax import config as config_lib
from glm5_jax import environments
from glm5_jax.config import stages
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.processes import together
from glm5_jax.rl import episode_files, rollouts
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.training import policy
from glm5_jax.training.feeds import feed, policy_batch, rounds, stream
from glm5_jax.training.feeds import groups as groups_lib

# What plays the groups of each kind of feed.
SOURCES: dict[stages.Feed, Callable[..., groups_lib.Source]] = {
    "rollouts": rounds.Rounds,
    "stream": stream.Stream,
}
_WARN_EVERY = 25  # steps in a row that teach nothing
_GRAD_NORMS = "train/grad_norm", "critic/grad_norm"  # metrics of a step


class GapError(RuntimeError):
    """The rollouts came from another policy than the one that is trained."""


class Rollouts:
    """Rollouts of an engine and their weights in the objective, as a `feed.Feed`."""

    is_on_policy = True

    def __init__(self, config: config_lib.TrainConfig) -> None:
        """Opens the environment; the first batch starts the engine.

        Raises:
          InputError: the environment or the tokenizer is unusable.
        """
        self._config = config
        self.tells_of_stalls = config.rl.has_servers
        taskset = environments.make(config.rl.environment)
        self.tokenizer = _tokenizer(config)
        template = templates.make_template(config.data, self.tokenizer)
        self._source = SOURCES[config.stage_record.feed](config, taskset, template)
        self._idle_steps = 0  # in a row
        self._drawn: tuple[int, groups_lib.Played]  # the last batch
        self._workdir: pathlib.Path | None = None
        self._files: episode_files.Writer | None = None
        settings = {
            "environment": config.rl.environment,
            "tokenizer": self.tokenizer.digest[:16],
            "prompts_per_step": config.rl.prompts_per_step,
            "group_size": config.rl.group_size,
            "seed": config.seed,
        }
        self.fingerprint = " ".join(f"{key}={value}" for key, value in settings.items())

    def begin(self, workdir: pathlib.Path, step: int) -> None:
        """Uses the folder of a run, in which steps of before a kill may be kept."""
        self._workdir, limit = workdir, self._config.rl.episodes_gib * 2**30
        if limit and together.is_first():
            self._files = episode_files.Writer(workdir, limit)
        self._source.begin(workdir, step)

    def restrict_to(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Does nothing: every process makes all rows, whose number may vary."""

    def prepare(self, params: dict, to_devices: feed.ToDevices) -> None:
        """Does nothing: the engine compiles its programs for the first batch."""

    def next(self, params: dict, position: int) -> tuple[feed.Batch, feed.Metrics]:
        """Returns rows of the groups of a step, and what to log about them."""
        jax.block_until_ready(params)  # do not bill pending updates to the rollouts
        began = time.perf_counter()
        start = self._require_start(params) if position == 0 else {}
        played = self._source.play(params, position)
        self._drawn = position, played
        num_teaching = policy_batch.num_teaching(self._config.rl, played.groups)
        self._count_idle(num_teaching)
        seen, seconds = rollouts.metrics(played.episodes), time.perf_counter() - began
        batch = policy_batch.make(self._config, played.groups, position)
        metrics = {
            **start,
            **seen,
            **rollouts.shares(played.groups),
            **played.metrics,
            "rollout/staleness_max": policy_batch.staleness(played.groups, position),
            "rollout/filled_share": float(np.mean(batch["segment_ids"] > 0)),
            "rollout/used_groups": 0 if self._idle_steps else num_teaching,
            "perf/rollout_seconds": round(seconds, 3),
        }
        if not played.is_kept:
            speed = seen["rollout/sampled_tokens"] / seconds
            metrics["perf/sampled_tokens_per_second"] = round(speed, 1)
        return batch, metrics

    def keep(self, step: int, advantages: jax.Array | None) -> None:
        """Writes the episodes of the last batch into the run's folder."""
        position, played = self._drawn
        if not self._config.rl.episodes_gib or played.is_kept:
            return
        values = None if advantages is None else together.whole(advantages)
        if self._files is None:
            return
        told = {}
        if values is not None:
            told = policy_batch.by_sample(self._config, played.groups, values)
        self._files.write(
            episode_files.Step(
                step,
                position,
                played.groups,
                played.unused,
                num_steps=self._config.num_steps,
                memory=played.memory,
                advantages=told,
                metrics=played.metrics,
            )
        )

    def check(self, metrics: feed.Metrics, step: int) -> None:
        """Ends the run if trainer and engine disagree.

        Before, it keeps a batch whose gradient is not finite, of policy or critic.

        Raises:
          GapError: rl/logprob_gap is above rl.max_logprob_gap, or not a number.
        """
        norms = [float(metrics[name]) for name in _GRAD_NORMS if name in metrics]
        if self._files is not None and not all(map(math.isfinite, norms)):
            position = self._drawn[0]
            logging.warning(
                "The gradient of step %d is not finite. Its batch is kept in %s; "
                "python -m glm5_jax.episodes --run=%s --skipped --steps=%d --replay "
                "computes the step again.",
                step,
                self._files.set_apart(step, position),
                self._workdir,
                position,
            )
        gap, limit = float(metrics[policy.GAP]), self._config.rl.max_logprob_gap
        if not gap <= limit:
            self._disown(step)
            raise GapError(
                f"{policy.GAP} of step {step} is {gap:.3g}, more than "
                f"rl.max_logprob_gap={limit:g}: the engine that played the rollouts "
                f"and the trainer disagree about what was sampled. The update of this "
                f"step was neither applied nor saved. If nothing is broken, reduce the "
                f"gap with rl.rollout_weights=same, rl.router_replay=true or "
                f"model.dtype=float32, in a new run with init_from; or raise "
                f"rl.max_logprob_gap, with which the same command resumes from the "
                f"last checkpoint."
            )

    def evaluate(
        self, params: dict, position: int, to_devices: feed.ToDevices
    ) -> dict[str, float]:
        """Returns success on held-out tasks: see `player.Player.evaluate`."""
        return self._source.evaluate(params, position)

    def evaluate_beside(self, params: dict, position: int) -> bool:
        """Begins an evaluation that the trainer does not wait for, if it can."""
        return self._source.evaluate_beside(params, position)

    def memory(self, position: int) -> Mapping[str, Any]:
        """Returns what a checkpoint must keep of the groups that are being played.

        The episodes that it learnt from are on the disk before it.
        """
        if self._files is not None:
            self._files.wait()
        return self._source.memory(position)

    def resume(self, memory: Mapping[str, Any]) -> None:
        """Continues from what `memory` returned."""
        self._source.resume(memory)

    def close(self) -> None:
        """Ends the episodes that are being played."""
        try:
            self._source.close()
        finally:
            if self._files is not None:
                self._files.close()

    def sample(self, params: dict) -> str:
        """Returns the transcripts of a few episodes."""
        return "\n".join(_shown(episode) for episode in self._source.shown)

    def _disown(self, step: int) -> None:
        """Lets a later start play anew what was played for a step and under way."""
        self._source.disown()
        if self._files is not None:
            self._files.wait()
        if self._workdir is not None and together.is_first():
            episode_files.forget_memory(self._workdir, step)

    def _require_start(self, params: dict) -> dict[str, float]:
        """Measures held-out success before the first step; returns what to log.

        Raises:
          InputError: it is outside of rl.min_start_success..rl.max_start_success.
        """
        rl, init_from = self._config.rl, self._config.init_from
        low, high = rl.min_start_success, rl.max_start_success
        if (low, high) == (0, 1) or rl.teachers:
            return {}
        found = self._source.evaluate(params, 0)
        share = found["eval/success"]
        what = (
            f"the start ({f'init_from={init_from}' if init_from else 'no init_from'}) "
            f"solves {share:.1%} of {found['eval/tasks']} held-out tasks of "
            f"{rl.environment!r}"
        )
        if share < low:
            raise config_lib.InputError(
                f"{what}, less than rl.min_start_success={low:g}: most groups would "
                f"earn nothing and teach nothing. Train stage 'sft' on such tasks "
                f"until it solves some (stop_metric=eval/success), take easier tasks, "
                f"or, where rewards are partial, set rl.min_start_success=0."
            )
        if share > high:
            raise config_lib.InputError(
                f"{what}, more than rl.max_start_success={high:g}: most groups would "
                f"earn everything and teach nothing. Take harder tasks, an earlier "
                f"checkpoint, or set rl.max_start_success=1."
            )
        return {"rollout/start_success": share}

    def _count_idle(self, num_teaching: int) -> None:
        """Counts steps without an update, and warns of many in a row."""
        rl = self._config.rl
        least = policy_batch.least_teaching(rl)
        self._idle_steps = 0 if num_teaching >= least else self._idle_steps + 1
        if self._idle_steps % _WARN_EVERY != 1:
            return
        if not rl.compares_groups:
            logging.warning(
                "%d steps in a row are skipped: in the last one %d groups are left, "
                "and an update needs %d (rl.min_used_groups). rollout/excluded_* tell "
                "what the environment did to the others.",
                self._idle_steps,
                num_teaching,
                least,
            )
        else:
            logging.warning(
                "%d steps in a row are skipped: in the last one the rewards of %d "
                "groups differ, and an update needs %d (rl.min_used_groups). Take "
                "tasks of which some are solved and some are not, a larger "
                "rl.group_size, or rl.dynamic_sampling=true.",
                self._idle_steps,
                num_teaching,
                least,
            )


def _tokenizer(config: config_lib.TrainConfig) -> tokenizer_lib.Tokenizer:
    """Returns the tokenizer that config.data names, which must exist already."""
    if config.data.tokenizer in ("bpe", "bpe_chat"):
        raise config_lib.InputError(
            f"data.tokenizer must be 'byte_chat' or the path of a tokenizer.json in "
            f"stage 'rl', where there is no corpus to train one on, got "
            f"{config.data.tokenizer!r}; that of init_from is in its folder."
        )
    return tokenizer_lib.for_corpus(config.data, [])


def _shown(episode: episodes_lib.Episode) -> str:
    """Returns the transcript of an episode."""
    lines = [f"--- {episode.task.id}: {episode.label.value} {episode.reason}".rstrip()]
    for message in episode.transcript:
        rest = {k: v for k, v in message.items() if k not in ("role", "content") and v}
        more = f" {json.dumps(rest, ensure_ascii=False, default=str)}" if rest else ""
        lines.append(f"{message['role']}: {message.get('content')}{more}")
    if episode.reward is not None:
        lines.append(f"reward: {episode.reward.total:g}")
    return "\n".join(lines) + "\n"
