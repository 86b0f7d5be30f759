"""The training step of reinforcement learning: objective, gradient, update.

The objectives are in glm5_jax/rl/objectives.py. A batch has the arrays of a batch of
text, and for every target: rollout_logprobs, advantages, weights; reference_logprobs
where the loss has a KL to a reference; teacher_logprobs where teachers give the
advantages, and the number of each token's teacher if there are several; rewards and
lambdas where a critic (critic.py) fills the advantages; and if the trainer replays the
engine's routing, experts [B, T, expert_layers, K].
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from glm5_jax import collectives, losses, sharding
from glm5_jax import config as config_lib
from glm5_jax.model import transformer
from glm5_jax.optim import optimizer as optimizer_lib
from glm5_jax.rl import objectives
from glm5_jax.training import accumulation, computed
from glm5_jax.training import inputs as inputs_lib
from glm5_jax.training import loss as loss_lib

REFERENCE = "reference_logprobs"
TEACHER = "teacher_logprobs"
TAUGHT_BY = "teacher"  # number of the teacher of each token, where there are several
REWARDS = "rewards"  # for a critic: of the last sampled token of each sample
LAMBDAS = "lambdas"  # for a critic: of generalized advantage estimation, by token
GAP = "rl/logprob_gap"  # mean |log pi_train - log pi_infer| of the sampled tokens


def token_logprobs(
    params: dict,
    config: config_lib.TrainConfig,
    batch: inputs_lib.Batch,
    num_parts: int = 1,
) -> Float[Array, "B T"]:
    """Returns the log-probability of every target at the engine's temperature.

    Args:
      params: of the policy.
      config: of the run.
      batch: whole rows.
      num_parts: parts that go through the model in turn; a divisor of the rows.
    """
    if num_parts > 1:
        one = functools.partial(token_logprobs, params, config)
        return in_parts(one, batch, num_parts)

    def local(params: dict, inputs: inputs_lib.Inputs) -> Array:
        return _local_logprobs(config, params, inputs)[0]

    inputs = inputs_lib.make_inputs(config.model, batch)
    rows = sharding.spec(("B", "T"))
    logprobs = inputs_lib.on_shards(local, config.model, rows)(params, inputs)
    return collectives.in_order(logprobs, 1)


def in_parts(
    function: Callable[[inputs_lib.Batch], Array],
    batch: inputs_lib.Batch,
    num_parts: int,
) -> Float[Array, "B T"]:
    """Returns a number for each token of whole rows, of one part after the other.

    Args:
      function: of a part of the rows.
      batch: whole rows.
      num_parts: a divisor of the rows.
    """
    found = lax.map(function, _cut(batch, num_parts))
    return found.swapaxes(0, 1).reshape(batch["tokens"].shape)


def _local_logprobs(
    config: config_lib.TrainConfig, params: dict, inputs: inputs_lib.Inputs
) -> tuple[Float[Array, "B T"], transformer.Output]:
    """Returns `token_logprobs` of a device's shard, and the model's outputs."""
    batch, context, _ = inputs
    experts = batch.get("experts")
    out = transformer.forward(
        params,
        config.model,
        batch["tokens"],
        context=context,
        experts=None if experts is None else jnp.moveaxis(experts, 2, 0),
    )
    with jax.named_scope("head"):
        logprobs = losses.token_logprobs(
            out.hidden,
            params["lm_head"],
            batch["targets"],
            temperature=config.rl.temperature,
            chunk_tokens=config.loss.chunk_tokens,
        )
    return logprobs, out


def make_policy_step(
    config: config_lib.TrainConfig, optimizer: optimizer_lib.Optimizer
) -> Callable[[dict, Any, inputs_lib.Batch], tuple[dict, Any, loss_lib.Metrics]]:
    """Builds (params, optimizer state, batch) -> (params, optimizer state, metrics).

    One call makes all updates of a batch of rollouts. All are skipped if the log-probs
    of trainer and engine are too far apart (rl.max_logprob_gap); one is skipped if its
    rows have no sampled token, or while a critic learns alone.
    """
    num_updates, num_kept = config.rl.updates_per_rollout, 0
    if config.stage_record.has_critic(config):
        num_kept = config.rl.critic_warmup_steps * num_updates

    def update(
        carry: tuple, batch: inputs_lib.Batch, gap: Float[Array, ""] | None = None
    ) -> tuple[tuple, loss_lib.Metrics]:
        params, state = carry
        weights = computed.weights(params, config)
        (loss, metrics), grads = value_and_grad(weights, config, batch)
        if gap is not None:  # of all rollouts: either every part is applied or none
            metrics[GAP] = gap
        is_allowed = metrics["rl/trained_tokens"] > 0
        is_allowed &= metrics[GAP] <= config.rl.max_logprob_gap
        if num_kept:
            is_allowed &= state.num_calls >= num_kept
        with jax.named_scope("optimizer"):
            params, state, more = optimizer_lib.update_if_finite(
                optimizer, grads, state, params, is_allowed
            )
        return (params, state), {"train/loss": loss, **metrics, **more}

    def policy_step(
        params: Any, state: Any, batch: inputs_lib.Batch
    ) -> tuple[Any, Any, loss_lib.Metrics]:
        if config.rl.forgets_moments:
            state = optimizer.forgetting(state, params)
        if num_updates == 1:
            (params, state), metrics = update((params, state), batch)
            return params, state, metrics
        num_parts = num_updates * config.optim.accumulation_steps  # as in the updates
        weights = computed.rounded(params, config)
        old_logprobs = token_logprobs(weights, config, batch, num_parts)
        parts = _cut(
            {**batch, "old_logprobs": lax.stop_gradient(old_logprobs)}, num_updates
        )
        parts["weights"] *= num_updates  # the weights of each part sum to 1
        own = _by_staleness(config, batch)[0]
        gap, _ = objectives.gap(old_logprobs, batch["rollout_logprobs"], own)
        gap = gap / jnp.maximum(jnp.sum(own), 1)
        (params, state), metrics = lax.scan(
            functools.partial(update, gap=gap), (params, state), parts
        )
        return params, state, _summary(metrics)

    return policy_step


def _cut(batch: inputs_lib.Batch, num_parts: int) -> dict[str, Array]:
    """Returns parts of the rows, stacked first; devices have equal rows of each."""
    return jax.tree.map(
        lambda x: x.reshape(-1, num_parts, *x.shape[1:]).swapaxes(0, 1), dict(batch)
    )


def _by_staleness(
    config: config_lib.TrainConfig, batch: inputs_lib.Batch
) -> list[Bool[Array, "B T"]]:
    """Returns masks of the sampled tokens, by versions behind the trained weights.

    Only the first are judged by rl.max_logprob_gap: others were drawn by another
    policy. Without staleness in the batch, they are all tokens.
    """
    mask = batch["loss_mask"] > 0
    if "staleness" not in batch:
        return [mask]
    staleness, most = batch["staleness"], config.rl.max_staleness
    return [mask & (staleness == s) for s in range(most)] + [mask & (staleness >= most)]


class Measured(NamedTuple):
    """Sums over the sampled tokens of a part of a batch, and its largest gap."""

    sums: objectives.Metrics
    gaps: Float[Array, " n"]  # by staleness
    num_tokens: Float[Array, " n"]  # by staleness
    surprise: Float[Array, ""]
    load: dict
    largest_gap: Float[Array, ""]
    terms: dict  # further terms of the loss, by name of their metric
    mtp: Float[Array, ""] | None  # loss of multi-token prediction, if it learns along

    def plus(self, other: "Measured") -> "Measured":
        """Returns the measurements of both parts together."""
        largest = jnp.maximum(self.largest_gap, other.largest_gap)
        added = jax.tree.map(jnp.add, self, other)
        return added._replace(largest_gap=largest)


def value_and_grad(
    params: dict, config: config_lib.TrainConfig, batch: inputs_lib.Batch
) -> tuple[tuple[Float[Array, ""], loss_lib.Metrics], dict]:
    """Returns sum(weights * objective) and what to log; and the gradient."""
    (loss, measured), grads = accumulation.value_and_grad(
        functools.partial(_local_loss, config),
        config,
        params,
        inputs_lib.make_inputs(config.model, batch, config.num_mtp_steps),
        config.optim.accumulation_steps,
        lambda a, b: (a[0] + b[0], a[1].plus(b[1])),
    )
    return (loss, _metrics(measured)), grads


def _local_loss(
    config: config_lib.TrainConfig, params: dict, inputs: inputs_lib.Inputs
) -> tuple[Float[Array, ""], Measured]:
    """Returns the loss and the measurements, summed over the shards of all devices."""
    batch, objective = inputs.batch, objectives.of(config.rl)
    logprobs, out = _local_logprobs(config, params, inputs)
    mask, advantages = batch["loss_mask"] > 0, batch["advantages"]
    if config.teachers:
        advantages = objectives.distillation_advantages(batch[TEACHER], logprobs, mask)
    tokens = objective(
        logprobs,
        batch.get("old_logprobs"),
        batch["rollout_logprobs"],
        advantages,
        mask,
    )
    # Not the objective's own ratio: in dis it also holds the change by the updates.
    old_logprobs = batch.get("old_logprobs", logprobs)
    masks = _by_staleness(config, batch)
    measured = [
        objectives.gap(old_logprobs, batch["rollout_logprobs"], m) for m in masks
    ]
    gaps, largest_gap = jnp.stack([gap for gap, _ in measured]), measured[0][1]
    num_tokens = jnp.stack([jnp.sum(m, dtype=jnp.float32) for m in masks])
    surprise = jnp.sum(jnp.where(mask, -lax.stop_gradient(logprobs), 0))
    added, terms = _terms(config, params, inputs, logprobs, out.hidden)
    if config.teachers:
        terms["rl/teacher_kl"] = -jnp.sum(advantages)
    loss = jnp.sum(batch["weights"] * (tokens.loss + added))
    loss, sums, gaps, num_tokens, surprise, terms = collectives.total(
        (loss, tokens.metrics, gaps, num_tokens, surprise, terms), collectives.TOKENS
    )
    largest_gap = collectives.largest(largest_gap, collectives.TOKENS)
    mtp = None
    if inputs.ahead is not None:
        mtp = _mtp_loss(config, params, out.hidden, inputs)
        loss += config.loss.mtp_weight * mtp
    load = loss_lib.loads(out.aux)
    measured = Measured(sums, gaps, num_tokens, surprise, load, largest_gap, terms, mtp)
    return loss, measured


def _terms(
    config: config_lib.TrainConfig,
    params: dict,
    inputs: inputs_lib.Inputs,
    logprobs: Float[Array, "B T"],
    hidden: Float[Array, "B T D"],
) -> tuple[Float[Array, "B T"], dict[str, Float[Array, ""]]]:
    """Returns what KL and entropy add to the loss of every token, and their sums."""
    batch, rl = inputs.batch, config.rl
    mask, old = batch["loss_mask"] > 0, batch.get("old_logprobs")
    added, sums = jnp.zeros_like(logprobs), {}
    if config.reference:
        kl = objectives.kl_to_reference(logprobs, old, batch[REFERENCE], mask)
        added += rl.kl_weight * kl
        sums["rl/reference_kl"] = jnp.sum(lax.stop_gradient(kl))
    if rl.entropy_weight:
        with jax.named_scope("head"):
            entropies = losses.token_entropies(
                hidden,
                params["lm_head"],
                temperature=rl.temperature,
                chunk_tokens=config.loss.chunk_tokens,
            )
        entropies = jnp.where(mask, entropies, 0)
        added -= rl.entropy_weight * entropies
        sums["rl/exact_entropy"] = jnp.sum(lax.stop_gradient(entropies))
    return added, sums


def _mtp_loss(
    config: config_lib.TrainConfig,
    params: dict,
    hidden: Float[Array, "B T D"],
    inputs: inputs_lib.Inputs,
) -> Float[Array, ""]:
    """Returns the loss of multi-token prediction, without gradients for the policy."""
    own = {"mtp": params["mtp"]}
    fixed = lax.stop_gradient({**params, "mtp": None})
    return loss_lib.mtp_loss(config, fixed | own, lax.stop_gradient(hidden), inputs)[0]


def _metrics(measured: Measured) -> loss_lib.Metrics:
    values = objectives.means(measured.sums)
    num_tokens = jnp.maximum(values["tokens"], 1)
    gaps = measured.gaps / jnp.maximum(measured.num_tokens, 1)
    metrics = {
        "rl/trained_tokens": values["tokens"],
        "rl/masked_fraction": values["masked_fraction"],
        "rl/clip_fraction": values["clip_fraction"],
        GAP: gaps[0],
        f"{GAP}_max": measured.largest_gap,
        "rl/ratio": values["ratio_mean"],
        "rl/kl": values["kl_k3"],
        # The mean of -log pi over sampled tokens estimates the policy's entropy.
        "rl/entropy": measured.surprise / num_tokens,
    }
    for staleness in range(1, gaps.size):
        metrics[f"{GAP}/stale_{staleness}"] = gaps[staleness]
        metrics[f"rl/tokens/stale_{staleness}"] = measured.num_tokens[staleness]
    metrics |= {name: total / num_tokens for name, total in measured.terms.items()}
    if measured.mtp is not None:
        metrics[loss_lib.METRIC_NAMES["mtp"]] = measured.mtp
    return metrics | loss_lib.load_metrics(measured.load)


def _summary(metrics: loss_lib.Metrics) -> loss_lib.Metrics:
    """Returns the metrics of several updates: means, sums of counts, last totals."""
    out = {}
    for name, values in metrics.items():
        if name.startswith("optim/"):
            out[name] = values[-1]
        elif name.endswith("_max"):
            out[name] = jnp.max(values)
        elif name == "rl/trained_tokens" or name.startswith("rl/tokens/"):
            out[name] = jnp.sum(values)
        else:
            out[name] = jnp.mean(values)
    return out
