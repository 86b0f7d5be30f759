"""Runs many episodes concurrently, as clients of an engine's service.

A failure ends only its own episode (episodes.py lists how each one ends). An error of
the engine ends all of them.
"""

import collections
import itertools
from collections.abc import Callable, Sequence

from absl import logging

from glm5_jax import config
from glm5_jax.data.chat import templates
from glm5_jax.environments import protocol
from glm5_jax.inference import service as service_lib
from glm5_jax.rl import at_once, calls, entrance
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import pump as pump_lib


def collect(
    service: service_lib.Service,
    taskset: protocol.Taskset,
    template: templates.Template,
    jobs: Sequence[episodes_lib.Job],
    settings: episodes_lib.Settings,
    on_episode: Callable[[int, episodes_lib.Episode], object] | None = None,
) -> list[episodes_lib.Episode]:
    """Runs all jobs; returns their episodes in the order of the jobs.

    The samples of an episode depend on its request ids, its messages and the engine's
    seed and weights, not on concurrent episodes.

    Args:
        service: of the engine that samples; it may have other clients.
        taskset: makes an environment for each job.
        template: renders the conversations.
        jobs: the episodes to run, admitted in this order.
        settings: how to run them.
        on_episode: called with the index of a job when its episode ends.

    Raises:
        InputError: request ids overlap, or the engine refuses a request.
        EngineError: the engine fails for a request.
        Exception: `on_episode` raised it.
    """
    _check_ids(jobs, settings.max_turns)
    pump = pump_lib.Pump(service)
    context = episodes_lib.Context(pump, taskset, template, settings)
    episodes = calls.run(_played(context, jobs, on_episode, pump))
    failures = collections.Counter(e.reason for e in episodes if not e.label.is_scored)
    for reason, count in failures.most_common(3):
        logging.warning("%d episodes of %s: %s", count, taskset.name, reason)
    return episodes


def metrics(episodes: Sequence[episodes_lib.Episode]) -> dict[str, float]:
    """Returns counts and means; rollout/label/* counts every episode once."""
    labels = collections.Counter(episode.label for episode in episodes)
    rewards = [e.reward.total for e in episodes if e.reward is not None]
    num_turns = sum(episode.num_turns for episode in episodes)
    num_sampled = sum(sum(s.mask) for e in episodes for s in e.samples)
    counts = {
        "rollout/episodes": len(episodes),
        **{f"rollout/label/{label.value}": labels[label] for label in protocol.Label},
        "rollout/close_errors": sum(bool(e.close_error) for e in episodes),
        "rollout/forks": sum(episode.num_forks for episode in episodes),
        "rollout/sampled_tokens": num_sampled,
        "rollout/tokens": sum(len(s.tokens) for e in episodes for s in e.samples),
    }
    means = {
        "rollout/reward": _ratio(sum(rewards), len(rewards)),
        "rollout/turns": _ratio(num_turns, len(episodes)),
        "rollout/response_length": _ratio(num_sampled, num_turns),
        "rollout/truncated_fraction": _ratio(
            sum(episode.num_truncated for episode in episodes), num_turns
        ),
        "rollout/drift_fraction": _ratio(
            sum(episode.num_drift_tokens for episode in episodes), num_sampled
        ),
    }
    means |= _reward_by_tag(episodes)
    return {name: float(value) for name, value in (counts | means).items()}


async def _played(
    context: episodes_lib.Context,
    jobs: Sequence[episodes_lib.Job],
    on_episode: Callable[[int, episodes_lib.Episode], object] | None,
    pump: pump_lib.Pump,
) -> list[episodes_lib.Episode]:
    """Runs all jobs, and lets the engine go on alone at the end."""
    try:
        async with entrance.of(context) as opened:
            return await at_once.run_all(opened, jobs, on_episode)
    finally:
        pump.close()


def _check_ids(jobs: Sequence[episodes_lib.Job], max_turns: int) -> None:
    """Raises InputError if two turns would have the same request id."""
    ids = sorted(job.request_id for job in jobs)
    for one, other in itertools.pairwise(ids):
        if other - one < max_turns:
            raise config.InputError(
                f"request_id of jobs must be max_turns={max_turns} apart, as each turn "
                f"takes one; got {one} and {other}."
            )


def _reward_by_tag(
    episodes: Sequence[episodes_lib.Episode],
) -> dict[str, float | int]:
    """Returns the mean reward for every tag; one tag alone says nothing."""
    by_tag: dict[str, list[float]] = {}
    for episode in episodes:
        if episode.reward is not None:
            by_tag.setdefault(episode.task.tag, []).append(episode.reward.total)
    if len(by_tag) < 2:
        return {}
    return {
        f"rollout/reward/{tag or 'untagged'}": _ratio(sum(paid), len(paid))
        for tag, paid in sorted(by_tag.items())
    }


def shares(groups: Sequence[Sequence[episodes_lib.Episode]]) -> dict[str, float]:
    """Returns the share of groups of every tag; one tag alone says nothing.

    Args:
        groups: that a step learns from, each of one task.
    """
    tags = collections.Counter(group[0].task.tag for group in groups)
    if len(tags) < 2:
        return {}
    return {
        f"rollout/share/{tag or 'untagged'}": count / len(groups)
        for tag, count in sorted(tags.items())
    }


def _ratio(value: float | int, count: int) -> float:
    return value / count if count else 0.0
