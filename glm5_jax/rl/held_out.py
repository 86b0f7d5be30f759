"""Success on held-out tasks: which episodes to play, and what they say."""

import json
from collections.abc import Sequence
from typing import NamedTuple

from absl import logging

from glm5_jax import config, intervals
from glm5_jax.environments import protocol
from glm5_jax.rl import advantages
from glm5_jax.rl import episodes as episodes_lib

FIRST_ID = 2**30  # of requests; those of training are below
_MAX_DRAWS = 16  # draws per held-out task, to find one unlike the others


class Evaluation(NamedTuple):
    """Episodes of held-out tasks that were played while weights may have changed."""

    version: int  # of the weights as it began
    episodes: Sequence[episodes_lib.Episode]


def jobs(
    taskset: protocol.Taskset, settings: config.RLConfig
) -> list[episodes_lib.Job]:
    """Returns one episode of each of num_eval_tasks held-out tasks."""
    return [
        episodes_lib.Job(task, i, FIRST_ID + i * settings.max_turns)
        for i, task in enumerate(tasks(taskset, settings.num_eval_tasks))
    ]


def tasks(taskset: protocol.Taskset, count: int) -> list[protocol.Task]:
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


def figures(episodes: Sequence[episodes_lib.Episode]) -> dict[str, float]:
    """Returns the share of tasks solved, its 95% interval, and more."""
    valid = [
        (e.task.tag, e.reward.total)
        for e in episodes
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
        "eval/invalid": len(episodes) - len(valid),
    }


def mixed_figures(evaluation: Evaluation) -> dict[str, float]:
    """Returns the figures, and of which versions the sampled tokens are."""
    samples = [sample for e in evaluation.episodes for sample in e.samples]
    drawn = [v for s in samples for v, m in zip(s.versions, s.mask, strict=True) if m]
    is_first = [version == evaluation.version for version in drawn]
    return {
        **figures(evaluation.episodes),
        "eval/version": evaluation.version,
        "eval/version_last": max([evaluation.version, *drawn]),
        "eval/version_share": sum(is_first) / max(len(is_first), 1),
    }


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
