"""What reinforcement learning learns from: the policy's own rollouts, step by step.

Synchronous and in one process: the engine gets the step's weights, plays a group of
episodes of every task, and their rewards become advantages. Tasks, requests and random
numbers follow from (seed, step) alone, so a run that was killed plays the same rollouts
again.
"""

import json
import math
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np
import tqdm

from glm5_jax import config as config_lib
from glm5_jax.data import chat
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference import loading
from glm5_jax.rl import advantages, environments, episodes, gateway, publisher, rollouts
from glm5_jax.training import feed, policy, program

NUM_SHOWN = 4  # episodes of a sample
_Z = 1.959964  # of a two-sided interval of 95%
_EVAL_IDS = 2**30  # request ids from here on are those of evaluations


class GapError(RuntimeError):
    """Rollouts came from another policy than the one that is trained."""


class Rollouts:
    """Tasks, an engine and an objective's weights as a `feed.Feed`."""

    is_on_policy = True

    def __init__(self, config: config_lib.TrainConfig) -> None:
        """Finds the environment; the engine starts with the first step.

        Raises:
          InputError: environment or tokenizer cannot be used.
        """
        self._config = config
        self._taskset = environments.make(config.rl.environment)
        self.tokenizer = _tokenizer(config)
        self._template = chat.make_template(config.data, self.tokenizer)
        self._engine: engine_lib.Engine | None = None
        self._shown: Sequence[episodes.Episode] = ()
        settings = {
            "environment": config.rl.environment,
            "tokenizer": self.tokenizer.digest[:16],
            "prompts_per_step": config.rl.prompts_per_step,
            "group_size": config.rl.group_size,
            "seed": config.seed,
        }
        self.fingerprint = " ".join(f"{key}={value}" for key, value in settings.items())

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a batch, padding included."""
        return self._config.rl.num_rows * self._config.data.sequence_length

    def take(self, rows: Sequence[int]) -> None:
        """Nothing to do: one process has all rows, and several are refused."""

    def next(self, params: dict, position: int) -> tuple[feed.Batch, feed.Metrics]:
        """Plays the groups of a batch; all that is counted of them is logged."""
        rl = self._config.rl
        jax.block_until_ready(params)  # what they still take is not the rollouts'
        began = time.perf_counter()
        engine = self._published(params, position, rl.rollout_weights)
        played: list[episodes.Episode] = []
        kept: list[list[episodes.Episode]] = []
        counts: dict[str, int] = {}
        num_rounds = rl.max_rounds if rl.dynamic_sampling else 1
        for number in range(position * num_rounds, (position + 1) * num_rounds):
            groups = self._play(engine, number)
            played += [episode for group in groups for episode in group]
            selected, more = advantages.select(
                groups, group_size=rl.group_size, drop_equal=rl.dynamic_sampling
            )
            kept += selected
            counts = {name: n + counts.get(name, 0) for name, n in more.items()}
            if len(kept) >= rl.prompts_per_step:
                break
        weighted = advantages.weigh(
            kept[: rl.prompts_per_step],
            std=rl.advantage_std,
            aggregation=rl.loss_mean,
        )
        self._shown = played[:NUM_SHOWN]
        seen, seconds = rollouts.metrics(played), time.perf_counter() - began
        metrics = {
            **seen,
            **{f"rollout/{name}": n for name, n in counts.items()},
            "rollout/used_groups": min(len(kept), rl.prompts_per_step),
            "perf/rollout_seconds": round(seconds, 3),
            "perf/sampled_tokens_per_second": round(
                seen["rollout/sampled_tokens"] / seconds, 1
            ),
        }
        return self._batch(weighted), metrics

    def check(self, metrics: feed.Metrics, step: int) -> None:
        """Ends the run where trainer and engine disagree.

        Raises:
          GapError: rl/logprob_gap is above rl.max_logprob_gap, or no number.
        """
        gap, limit = float(metrics[policy.GAP]), self._config.rl.max_logprob_gap
        if not gap <= limit:
            raise GapError(
                f"{policy.GAP} of step {step} is {gap:.3g}, more than "
                f"rl.max_logprob_gap={limit:g}: the engine that played the rollouts "
                f"and the trainer disagree about what was sampled. Its update was not "
                f"applied and not saved. Where nothing is broken, come closer with "
                f"rl.rollout_weights=same, rl.router_replay=true or "
                f"model.dtype=float32, or raise rl.max_logprob_gap; the same command "
                f"then goes on from the last checkpoint or, with other settings than "
                f"the limit, another run with init_from does."
            )

    def evaluate(self, params: dict, step: int, place: feed.Place) -> dict[str, float]:
        """Share of held-out tasks solved, each tried once, with its 95% interval.

        By the parameters that are trained and saved, however the rollouts are rounded.
        """
        rl = self._config.rl
        tasks = [
            self._taskset.task("held_out", 0, index)
            for index in range(rl.num_eval_tasks)
        ]
        jobs = [
            episodes.Job(task, i, _EVAL_IDS + i * rl.max_turns)
            for i, task in enumerate(tasks)
        ]
        done = self._collect(self._published(params, step, "same"), jobs, "evaluate")
        valid = [e.reward.total for e in done if advantages.is_valid(e) and e.reward]
        self._shown = done[:NUM_SHOWN]
        low, high = wilson_interval(sum(r >= 1 for r in valid), len(valid))
        return {
            "eval/success": sum(r >= 1 for r in valid) / max(len(valid), 1),
            "eval/success_low": low,
            "eval/success_high": high,
            "eval/reward": sum(valid) / max(len(valid), 1),
            "eval/invalid": len(done) - len(valid),
        }

    def sample(self, params: dict, step: int) -> str:
        """The transcripts of a few episodes."""
        return "\n".join(_shown(episode) for episode in self._shown)

    def _published(
        self, params: dict, step: int, weights: config_lib.RolloutWeights
    ) -> engine_lib.Engine:
        """The engine with these parameters, as version `step`."""
        config, rl = self._config, self._config.rl
        if self._engine is None:
            self._engine = engine_lib.Engine(
                params,
                config.model,
                num_slots=rl.slots,
                capacity=config.data.sequence_length,
                seed=config.seed,
                chunk=rl.prefill_chunk,
                with_experts=rl.router_replay,
            )
        publisher.publish(self._engine, params, step, weights)
        return self._engine

    def _play(
        self, engine: engine_lib.Engine, number: int
    ) -> list[list[episodes.Episode]]:
        """All groups of a round of rollouts; rounds are numbered through the run."""
        rl, jobs = self._config.rl, []
        for group in range(rl.prompts_per_step):
            index = number * rl.prompts_per_step + group
            task = self._taskset.task("train", self._config.seed, index)
            for member in range(rl.group_size):
                episode = index * rl.group_size + member
                request = episode * rl.max_turns % _EVAL_IDS
                jobs.append(episodes.Job(task, group, request))
        done = iter(self._collect(engine, jobs, "rollouts"))
        return [
            [next(done) for _ in range(rl.group_size)]
            for _ in range(rl.prompts_per_step)
        ]

    def _collect(
        self, engine: engine_lib.Engine, jobs: Sequence[episodes.Job], what: str
    ) -> list[episodes.Episode]:
        rl = self._config.rl
        settings = episodes.Settings(
            max_new_tokens=rl.max_new_tokens,
            max_turns=rl.max_turns,
            num_concurrent=2 * rl.slots,
            temperature=rl.temperature,
            call_timeout=rl.step_timeout_seconds,
        )
        with tqdm.tqdm(
            desc=what,
            total=len(jobs),
            unit=" episodes",
            leave=False,
            disable=not sys.stderr.isatty(),
        ) as bar:
            return rollouts.collect(
                *(engine, self._taskset, self._template, jobs, settings),
                on_episode=lambda *_: bar.update(),
            )

    def _batch(self, weighted: Sequence[advantages.Weighted]) -> feed.Batch:
        """A row for each sample, and rows of padding up to a multiple of num_rows."""
        config, size = self._config, self._config.rl.num_rows
        num_rows = max(-(-len(weighted) // size), 1) * size
        batch: feed.Batch = {
            name: np.zeros((num_rows, *x.shape[1:]), x.dtype)
            for name, x in program.batch_shapes(config).items()
        }
        for row, item in enumerate(weighted):
            sample = item.sample
            assert isinstance(sample, gateway.Sample)
            n = len(sample.tokens) - 1  # the last token is a target alone
            mask = np.asarray(sample.mask[1:], np.float32)
            batch["tokens"][row, :n] = sample.tokens[:-1]
            batch["targets"][row, :n] = sample.tokens[1:]
            batch["segment_ids"][row, :n] = 1
            batch["positions"][row, :n] = np.arange(n)
            batch["loss_mask"][row, :n] = mask
            batch["rollout_logprobs"][row, :n] = sample.logprobs[1:]
            batch["advantages"][row, :n] = item.advantage * mask
            batch["weights"][row, :n] = item.weight * mask
            if "experts" in batch:
                batch["experts"][row, :n] = sample.experts
        return batch


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """95% score interval of a share (Wilson 1927); (0, 1) without trials."""
    if not trials:
        return 0.0, 1.0
    share, z = successes / trials, _Z
    centre = share + z**2 / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    scale = 1 + z**2 / trials
    return max((centre - spread) / scale, 0.0), min((centre + spread) / scale, 1.0)


def _tokenizer(config: config_lib.TrainConfig) -> tokenizer_lib.Tokenizer:
    """The tokenizer that config.data names, which must exist already."""
    if config.data.tokenizer in ("bpe", "bpe_chat"):
        raise config_lib.InputError(
            f"data.tokenizer must be 'byte_chat' or the path of a tokenizer.json in "
            f"stage 'rl', where there is no corpus to train one on, got "
            f"{config.data.tokenizer!r}; that of init_from is in its folder."
        )
    tokenizer = tokenizer_lib.for_corpus(config.data, [])
    loading.require_tokenizer(config, tokenizer)
    return tokenizer


def _shown(episode: episodes.Episode) -> str:
    """An episode as a reader wants it."""
    lines = [f"--- {episode.task.id}: {episode.label.value} {episode.reason}".rstrip()]
    for message in episode.transcript:
        rest = {k: v for k, v in message.items() if k not in ("role", "content") and v}
        more = f" {json.dumps(rest, ensure_ascii=False, default=str)}" if rest else ""
        lines.append(f"{message['role']}: {message.get('content')}{more}")
    if episode.reward is not None:
        lines.append(f"reward: {episode.reward.total:g}")
    return "\n".join(lines) + "\n"
