"""The batch that a step of reinforcement learning makes of its groups of episodes.

It is a function of the groups, the config and the position: a run's kept episodes give
its batches again.
"""

import math
from collections.abc import Sequence

import numpy as np

from glm5_jax import config as config_lib
from glm5_jax.data.rows import packing
from glm5_jax.environments import mixture
from glm5_jax.rl import advantages, gae, gateway
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.training import policy, program
from glm5_jax.training.feeds import feed
from glm5_jax.training.feeds import groups as groups_lib


def make(
    config: config_lib.TrainConfig, groups: Sequence[groups_lib.Group], position: int
) -> feed.Batch:
    """Returns a row for each sample, or with rl.rows_per_step for several.

    The rows are padded to a multiple of num_rows. All are padding if too few groups
    have a gradient.
    """
    rl, size, placed = config.rl, config.num_rows, _placed(config, groups)
    num_used = 1 + max((row for (row, _), _, _ in placed), default=-1)
    num_rows = max(-(-num_used // size), 1) * size
    batch: feed.Batch = {
        name: np.zeros((num_rows, *x.shape[1:]), x.dtype)
        for name, x in program.batch_shapes(config).items()
    }
    for here, number, item in placed:
        batch["segment_ids"][here] = number
        _fill(batch, here, item, position)
        if policy.TAUGHT_BY in batch:
            batch[policy.TAUGHT_BY][here] = _part_of(item)
        if rl.critic:
            _fill_for_critic(batch, here, item, rl.gae_alpha)
    return batch


def by_sample(
    config: config_lib.TrainConfig,
    groups: Sequence[groups_lib.Group],
    values: np.ndarray,
) -> dict[int, np.ndarray]:
    """Returns what a batch has for each token of a sample, by the sample's id().

    The first token is no target and has 0.

    Args:
      config: of the run.
      groups: that the batch was made of.
      values: of its targets, [B, T].
    """
    return {
        id(item.sample): np.pad(values[here], (1, 0))
        for here, _, item in _placed(config, groups)
    }


def num_teaching(rl: config_lib.RLConfig, groups: Sequence[groups_lib.Group]) -> int:
    """Returns the number of groups whose rewards differ; of all, if none need to."""
    if not rl.compares_groups:
        return len(groups)
    return sum(map(advantages.teaches, groups))


def least_teaching(rl: config_lib.RLConfig) -> int:
    """Returns how many groups of `num_teaching` an update needs."""
    return max(math.ceil(rl.min_used_groups * rl.prompts_per_step), 1)


def staleness(groups: Sequence[groups_lib.Group], version: int) -> int:
    """Returns how many versions the oldest weights of a token are behind `version`."""
    found = (
        sample.oldest_version
        for group in groups
        for episode in group
        for sample in episode.samples
    )
    return max((version - oldest for oldest in found if oldest is not None), default=0)


def _placed(
    config: config_lib.TrainConfig, groups: Sequence[groups_lib.Group]
) -> list[tuple[tuple[int, slice], int, advantages.Weighted]]:
    """Returns each sample with the place of its targets and its number in its row."""
    rl = config.rl
    used = groups if num_teaching(rl, groups) >= least_teaching(rl) else []
    std = rl.advantage_std if rl.compares_groups else None
    weighted = advantages.weigh(used, std=std, aggregation=rl.loss_mean)
    rows = [[place] for place in range(len(weighted))]
    if rl.rows_per_step:
        lengths = [len(item.sample.mask) - 1 for item in weighted]
        rows = packing.best_fit(lengths, config.data.sequence_length)
    found = []
    for row, places in enumerate(rows):
        start = 0
        for number, place in enumerate(places, 1):
            end = start + len(weighted[place].sample.mask) - 1
            found.append(((row, slice(start, end)), number, weighted[place]))
            start = end
    return found


def _fill(
    batch: feed.Batch,
    here: tuple[int, slice],
    item: advantages.Weighted,
    position: int,
) -> None:
    """Writes a sample into a part of a row."""
    sample = item.sample
    assert isinstance(sample, gateway.Sample)
    mask = np.asarray(sample.mask[1:], np.float32)
    batch["tokens"][here] = sample.tokens[:-1]  # the last token is only a target
    batch["targets"][here] = sample.tokens[1:]
    batch["positions"][here] = np.arange(len(mask))
    batch["loss_mask"][here] = mask
    batch["rollout_logprobs"][here] = sample.logprobs[1:]
    batch["advantages"][here] = item.advantage * mask
    batch["weights"][here] = item.weight * mask
    if "staleness" in batch:
        versions = np.asarray(sample.cache_versions[1:], np.int32)
        batch["staleness"][here] = np.where(mask, position - versions, 0)
    if "experts" in batch:
        batch["experts"][here] = sample.experts


def _part_of(item: advantages.Weighted) -> int:
    """Returns the number of the part of a mixture from which a sample's task is."""
    episode = item.episode
    assert isinstance(episode, episodes_lib.Episode)
    return mixture.part_of(episode.task)


def _fill_for_critic(
    batch: feed.Batch,
    here: tuple[int, slice],
    item: advantages.Weighted,
    alpha: float,
) -> None:
    """Writes the reward of a sample, at its last sampled token, and its lambda."""
    mask = batch["loss_mask"][here] > 0
    if not mask.any():
        return
    row, place = here
    last = place.start + np.flatnonzero(mask)[-1]
    batch[policy.REWARDS][row, last] = item.reward
    batch[policy.LAMBDAS][here] = mask * gae.adaptive_lambda(int(mask.sum()), alpha)
