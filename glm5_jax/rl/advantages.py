"""Advantages and weights of trained tokens from rewards, computed on the host.

A group is the episodes of one task. `select` drops episodes that the environment failed
and groups that teach nothing. `group_advantages` compares the episodes of a group, and
`token_weights` gives the denominators; `weigh` does both for whole groups.
"""

import collections
import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from glm5_jax import config
from glm5_jax.environments import protocol

_EPSILON = 1e-6  # added to a standard deviation, as slime and verl do
_EQUAL = 1e-6  # rewards with a smaller standard deviation teach nothing (DAPO)


@runtime_checkable
class Sample(Protocol):
    """The token ids of one conversation; an episode that forked has several."""

    @property
    def mask(self) -> Sequence[bool]:
        """Returns which tokens were sampled and are trained."""
        ...


@runtime_checkable
class Episode(Protocol):
    """The parts of an episode that advantages need."""

    @property
    def reward(self) -> protocol.Reward | None:
        """Returns the reward."""
        ...

    @property
    def label(self) -> protocol.Label:
        """Returns how it ended."""
        ...

    @property
    def samples(self) -> Sequence[Sample]:
        """Returns its conversations; each sampled token is trained in one of them."""
        ...


E = TypeVar("E", bound=Episode)


@dataclasses.dataclass(frozen=True)
class Weighted:
    """A sample with the advantage and weight of its trained tokens."""

    sample: Sample
    episode: Episode  # of the sample
    reward: float  # of its episode
    advantage: float  # 0 where a critic or teachers give the advantages
    weight: float


def select(
    groups: Sequence[Sequence[E]], *, group_size: int, drop_equal: bool
) -> tuple[list[list[E]], Mapping[str, int]]:
    """Returns the groups to train on, each of `group_size` episodes, and counts.

    GLM-5 (arXiv 2602.15763) 4.1: an episode that the environment failed is dropped and
    never counts as reward 0. If more than half of `group_size` episodes are valid, they
    are repeated in turn until the group is full, and the copies count like the others.
    Otherwise the group is dropped. Dynamic sampling (DAPO, arXiv 2503.14476) then drops
    groups of equal rewards, whose advantages are all zero.

    Args:
        groups: the episodes of each task.
        group_size: the intended number of episodes of each task.
        drop_equal: whether to drop groups of equal rewards.
    """
    counts = collections.Counter(
        dict.fromkeys(
            ["groups", "episodes", "kept_groups", "repeated_episodes", "padded_groups"]
            + ["dropped_invalid_groups", "dropped_equal_groups"]
            + [
                f"excluded_{label.value}"
                for label in protocol.Label
                if not label.is_scored
            ],
            0,
        )
    )
    kept = []
    for group in groups:
        valid = [episode for episode in group if is_valid(episode)]
        counts.update(groups=1, episodes=len(group))
        counts.update(_excluded(episode) for episode in group if not is_valid(episode))
        if 2 * len(valid) <= group_size:
            counts["dropped_invalid_groups"] += 1
        elif drop_equal and not teaches(valid):
            counts["dropped_equal_groups"] += 1
        else:
            missing = max(group_size - len(valid), 0)
            counts.update(repeated_episodes=missing, padded_groups=int(missing > 0))
            counts["kept_groups"] += 1
            kept.append(valid + [valid[i % len(valid)] for i in range(missing)])
    return kept, dict(counts)


def teaches(group: Sequence[Episode]) -> bool:
    """Tells whether the rewards of a group of valid episodes differ."""
    return bool(np.std([_total(episode) for episode in group]) >= _EQUAL)


def is_valid(episode: Episode) -> bool:
    """Tells whether the episode was scored, by its label, and its reward is finite."""
    if not episode.label.is_scored or episode.reward is None:
        return False
    total = episode.reward.total
    return isinstance(total, numbers.Real) and math.isfinite(total)


def group_advantages(rewards: Sequence[float], std: config.AdvantageStd) -> np.ndarray:
    """Returns (R_i - mean R) / (std R + 1e-6) over one group, in float64.

    GLM-5 (arXiv 2602.15763), Eq. 1, does not define std: "sample" divides by
    G - 1 (slime), "population" by G, "none" does not divide (Dr. GRPO, arXiv
    2503.20783).

    Raises:
        config.InputError: a group of one has no standard deviation.
    """
    values = np.asarray(rewards, np.float64)
    if std != "none" and values.size < 2:
        raise config.InputError(
            f"group_size must be at least 2 where advantages are divided by a "
            f"standard deviation ({std!r}), got {values.size}; raise it or take "
            f"std='none'."
        )
    if np.ptp(values) == 0:  # the mean of equal numbers may be off by a rounding
        return np.zeros_like(values)
    centred = values - values.mean()
    if std == "none":
        return centred
    return centred / (values.std(ddof=int(std == "sample")) + _EPSILON)


def token_weights(
    num_tokens: Sequence[Sequence[int]], aggregation: config.LossMean
) -> list[list[float]]:
    """Returns the weight of a trained token of each episode; all tokens sum to 1.

    "sequence": 1 / (groups * G * |y_i|), the mean over an episode's tokens, then over
    its group, then over groups (GLM-5, Eq. 1). "token": 1 / (tokens of all groups)
    (GLM-5.2, DAPO). |y_i| counts the tokens of all samples of an episode that forked,
    so they share its weight by their trained tokens. An episode without any still
    counts in G.

    Args:
        num_tokens: trained tokens of each episode of each group, by the original mask:
            a token that a trust region drops later stays in the denominator.
        aggregation: the kind of mean.
    """
    if aggregation == "token":
        count = max(sum(map(sum, num_tokens)), 1)
        return [[1 / count] * len(group) for group in num_tokens]
    return [
        [1 / (len(num_tokens) * len(group) * max(n, 1)) for n in group]
        for group in num_tokens
    ]


def weigh(
    groups: Sequence[Sequence[Episode]],
    *,
    std: config.AdvantageStd | None,
    aggregation: config.LossMean,
) -> list[Weighted]:
    """Returns every sample of the groups, in order, with advantage and weight.

    Args:
        groups: the episodes of each task.
        std: see `group_advantages`; None: a critic (gae.py) or teachers give the
            advantages.
        aggregation: see `token_weights`.
    """
    counts = [[_num_trained(episode) for episode in group] for group in groups]
    weights = token_weights(counts, aggregation)
    weighted = []
    for group, group_weights in zip(groups, weights, strict=True):
        rewards = [_total(episode) for episode in group]
        values = np.zeros(len(group)) if std is None else group_advantages(rewards, std)
        of_group = zip(group, rewards, values, group_weights, strict=True)
        for episode, reward, value, weight in of_group:
            for sample in episode.samples:
                weighted.append(Weighted(sample, episode, reward, float(value), weight))
    return weighted


def _total(episode: Episode) -> float:
    assert episode.reward is not None, "only valid episodes are scored"
    return float(episode.reward.total)


def _num_trained(episode: Episode) -> int:
    return sum(int(np.sum(sample.mask)) for sample in episode.samples)


def _excluded(episode: Episode) -> str:
    """Returns the name of the count of an episode without a usable reward."""
    label = episode.label
    if label.is_scored:
        label = protocol.Label.REWARD_ERROR
    return f"excluded_{label.value}"
