"""The objectives of reinforcement learning: one function each, one loss a token.

All have the signature objective(logprobs, old_logprobs, rollout_logprobs, advantages,
mask), with arrays of one shape [*n], and return the loss of every token. The learner
minimises sum(weights * loss). The host makes the weights from the original mask
(glm5_jax/rl/advantages.py), so a loss does not depend on padding, microbatches, shards
or the number of tokens outside a band.

  logprobs: log pi_train(theta), which is differentiated.
  old_logprobs: log pi_train(theta_old), before the first update on these rollouts. None
    if there is only one update: then theta_old = theta, and they are sg(logprobs).
  rollout_logprobs: log pi_infer(theta_old), as the engine recorded them.
  advantages: the advantage of the token, or of its episode.
  mask: which tokens were sampled. Other tokens change no value and no gradient.

sg is stop-gradient. r = exp(logprobs - old_logprobs) measures how far the policy has
moved. rho = sg(exp(old_logprobs - rollout_logprobs)) measures the mismatch between
trainer and engine.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from glm5_jax import config

_MAX_LOG_RATIO = 20.0  # its exp is finite and far outside every band


class Metrics(NamedTuple):
    """Sums over the sampled tokens, which microbatches add; `means` divides them."""

    num_tokens: Float[Array, ""]
    num_masked: Float[Array, ""]  # outside the band of rho (dis: of r), or capped
    num_clipped: Float[Array, ""]  # no gradient because r moved too far
    sum_ratio: Float[Array, ""]  # rho; dis: r
    sum_kl: Float[Array, ""]  # rho - 1 - log rho: k3 estimate of KL(engine || trainer)


class TokenLoss(NamedTuple):
    """The loss of every token, zero outside the mask, and the metrics."""

    loss: Float[Array, "*n"]
    metrics: Metrics


Objective = Callable[[Array, Array | None, Array, Array, Array], TokenLoss]


def of(settings: config.RLConfig) -> Objective:
    """Returns the objective that the config names, with its settings bound."""
    clip = {"clip_low": settings.clip_low, "clip_high": settings.clip_high}
    band = {"dis_low": settings.dis_low, "dis_high": settings.dis_high}
    objectives: dict[str, Objective] = {
        "grpo": functools.partial(grpo, **clip),
        "icepop": functools.partial(icepop, beta=settings.pop_beta, **clip),
        "tis": functools.partial(tis, tis_cap=settings.tis_cap, **clip),
        "dis": functools.partial(dis, **band),
        "cispo": functools.partial(cispo, **band),
        "gspo": functools.partial(gspo, **clip),
    }
    return objectives[settings.objective]


def grpo(
    logprobs: Float[Array, "*n"],
    old_logprobs: Float[Array, "*n"] | None,
    rollout_logprobs: Float[Array, "*n"],
    advantages: Float[Array, "*n"],
    mask: Bool[Array, "*n"],
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Returns -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); ignores rho.

    Group-relative policy optimisation (arXiv 2402.03300) without its KL term and with
    the two clips of DAPO (arXiv 2503.14476).
    """
    x = _masked(logprobs, old_logprobs, rollout_logprobs, advantages, mask)
    surrogate, is_clipped = _clipped_surrogate(x, clip_low, clip_high)
    is_off = jnp.zeros_like(mask)
    return TokenLoss(-surrogate, _metrics(x, x.mismatch, is_off, is_clipped))


def icepop(
    logprobs: Float[Array, "*n"],
    old_logprobs: Float[Array, "*n"] | None,
    rollout_logprobs: Float[Array, "*n"],
    advantages: Float[Array, "*n"],
    mask: Bool[Array, "*n"],
    *,
    beta: float,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Returns -pop(rho, 1/beta, beta) min(r A, clip(r, 1-clip_low, 1+clip_high) A).

    pop(rho, a, b) = rho if a <= rho <= b else 0: inside the band the mismatch is an
    importance weight, outside it the token is dropped. GLM-5 (arXiv 2602.15763), Eq. 1:
    beta 2, clips 0.2 and 0.28, no KL term; IcePop itself has the band [0.5, 5].
    """
    x = _masked(logprobs, old_logprobs, rollout_logprobs, advantages, mask)
    surrogate, is_clipped = _clipped_surrogate(x, clip_low, clip_high)
    rho = _ratio(x.mismatch)
    is_inside = (rho >= 1 / beta) & (rho <= beta)
    weight = jnp.where(is_inside, rho, 0)
    metrics = _metrics(x, x.mismatch, ~is_inside, is_clipped)
    return TokenLoss(-weight * surrogate, metrics)


def tis(
    logprobs: Float[Array, "*n"],
    old_logprobs: Float[Array, "*n"] | None,
    rollout_logprobs: Float[Array, "*n"],
    advantages: Float[Array, "*n"],
    mask: Bool[Array, "*n"],
    *,
    tis_cap: float,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Returns -min(rho, tis_cap) min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training"): no token is dropped; the cap is 2 in
    slime, verl and Tunix.
    """
    x = _masked(logprobs, old_logprobs, rollout_logprobs, advantages, mask)
    surrogate, is_clipped = _clipped_surrogate(x, clip_low, clip_high)
    rho = _ratio(x.mismatch)
    metrics = _metrics(x, x.mismatch, rho > tis_cap, is_clipped)
    return TokenLoss(-jnp.minimum(rho, tis_cap) * surrogate, metrics)


def dis(
    logprobs: Float[Array, "*n"],
    old_logprobs: Float[Array, "*n"] | None,
    rollout_logprobs: Float[Array, "*n"],
    advantages: Float[Array, "*n"],
    mask: Bool[Array, "*n"],
    *,
    dis_low: float,
    dis_high: float,
) -> TokenLoss:
    """Returns -sg(f(r)) A logprobs, f(r) = r if 1-dis_low < r < 1+dis_high else 0.

    Direct double-sided importance sampling, GLM-5 (arXiv 2602.15763) 4.1.2: here r is
    exp(logprobs - rollout_logprobs), so `old_logprobs` is not read, and
    one band limits both the mismatch and the staleness of rollouts. The interval is
    open; without sg the gradient would have another factor 1 + logprobs.
    """
    del old_logprobs
    x = _masked(logprobs, None, rollout_logprobs, advantages, mask)
    r = _ratio(x.mismatch)
    is_inside = (r > 1 - dis_low) & (r < 1 + dis_high)
    weight = jnp.where(is_inside, r, 0)
    metrics = _metrics(x, x.mismatch, ~is_inside, ~is_inside)
    return TokenLoss(-weight * x.advantages * x.logprobs, metrics)


def cispo(
    logprobs: Float[Array, "*n"],
    old_logprobs: Float[Array, "*n"] | None,
    rollout_logprobs: Float[Array, "*n"],
    advantages: Float[Array, "*n"],
    mask: Bool[Array, "*n"],
    *,
    dis_low: float,
    dis_high: float,
) -> TokenLoss:
    """Returns -sg(clip(r, 1 - dis_low, 1 + dis_high)) A logprobs.

    Clipped importance sampling, MiniMax-M1 (arXiv 2506.13585), Eq. 4 and 5: as in dis,
    r is exp(logprobs - rollout_logprobs) and `old_logprobs` is not read, but a token
    outside the band keeps its gradient, with the weight of the band's edge.
    """
    del old_logprobs
    x = _masked(logprobs, None, rollout_logprobs, advantages, mask)
    r = _ratio(x.mismatch)
    weight = jnp.clip(r, 1 - dis_low, 1 + dis_high)
    metrics = _metrics(x, x.mismatch, weight != r, jnp.zeros_like(mask))
    return TokenLoss(-weight * x.advantages * x.logprobs, metrics)


def gspo(
    logprobs: Float[Array, "*n T"],
    old_logprobs: Float[Array, "*n T"] | None,
    rollout_logprobs: Float[Array, "*n T"],
    advantages: Float[Array, "*n T"],
    mask: Bool[Array, "*n T"],
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Returns -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A); ignores rho.

    Group sequence policy optimisation (arXiv 2507.18071), its form by tokens (Eq. 13):
    s is the geometric mean of r over the sampled tokens of a row, so that a row is
    clipped as a whole, and each token's gradient has the factor s. Its bands are
    narrow: 3e-4 and 4e-4 in the paper. A row must be one sequence.
    """
    x = _masked(logprobs, old_logprobs, rollout_logprobs, advantages, mask)
    count = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)
    mean = jnp.sum(x.moved, axis=-1, keepdims=True) / count
    here = x.logprobs - lax.stop_gradient(x.logprobs)  # 0, with the token's gradient
    x = x._replace(moved=lax.stop_gradient(mean) + here)
    surrogate, is_clipped = _clipped_surrogate(x, clip_low, clip_high)
    loss = jnp.where(mask, -surrogate, 0)
    return TokenLoss(loss, _metrics(x, x.mismatch, jnp.zeros_like(mask), is_clipped))


def kl_to_reference(
    logprobs: Float[Array, "*n"],
    old_logprobs: Float[Array, "*n"] | None,
    reference_logprobs: Float[Array, "*n"],
    mask: Bool[Array, "*n"],
) -> Float[Array, "*n"]:
    """Returns r (exp(d) - 1 - d), d = reference_logprobs - logprobs; 0 off the mask.

    Over tokens that theta_old samples, its mean is KL(pi_train || reference), and its
    gradient is that of the KL; without the factor r, the gradient would be that of the
    reversed KL. DeepSeek-V3.2 (arXiv 2512.02556) 3.1. Where tokens are older than
    theta_old, it is an estimate for the tokens that are there.
    """
    logprobs, reference = _cut(logprobs, mask), _cut(reference_logprobs, mask)
    old = logprobs if old_logprobs is None else _cut(old_logprobs, mask)
    difference = lax.stop_gradient(reference) - logprobs
    apart = jnp.expm1(jnp.minimum(difference, _MAX_LOG_RATIO)) - difference
    return _ratio(logprobs - lax.stop_gradient(old)) * apart


def distillation_advantages(
    teacher_logprobs: Float[Array, "*n"],
    logprobs: Float[Array, "*n"],
    mask: Bool[Array, "*n"],
) -> Float[Array, "*n"]:
    """Returns sg(log pi_teacher - log pi_train(theta)), for on-policy distillation.

    GLM-5 (arXiv 2602.15763) 3.5: it replaces the group advantage, so groups have one
    rollout. The engine computes the teacher's log-probs, the trainer the student's.
    """
    return lax.stop_gradient(jnp.where(mask, teacher_logprobs - logprobs, 0))


def gap(
    logprobs: Float[Array, "*n"],
    rollout_logprobs: Float[Array, "*n"],
    mask: Bool[Array, "*n"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns sum and maximum of |log pi_train - log pi_infer| of sampled tokens.

    It is the same for every objective. logprobs must be those of theta_old.
    """
    difference = jnp.where(mask, logprobs, 0) - jnp.where(mask, rollout_logprobs, 0)
    gaps = lax.stop_gradient(jnp.abs(difference))
    return jnp.sum(gaps), jnp.max(gaps, initial=0)


def means(metrics: Metrics) -> Mapping[str, Float[Array, ""]]:
    """Returns fractions and means per sampled token, by metric name."""
    count = jnp.maximum(metrics.num_tokens, 1)
    return {
        "tokens": metrics.num_tokens,
        "masked_fraction": metrics.num_masked / count,
        "clip_fraction": metrics.num_clipped / count,
        "ratio_mean": metrics.sum_ratio / count,
        "kl_k3": metrics.sum_kl / count,
    }


class _Masked(NamedTuple):
    """Float32 arrays that are zero outside the mask, for every input."""

    logprobs: Array
    moved: Array  # log r
    mismatch: Array  # log rho, a constant
    advantages: Array
    mask: Array


def _masked(
    logprobs: Array,
    old_logprobs: Array | None,
    rollout_logprobs: Array,
    advantages: Array,
    mask: Array,
) -> _Masked:
    """Sets untrained tokens to zero before any computation."""
    logprobs = _cut(logprobs, mask)
    old = logprobs if old_logprobs is None else _cut(old_logprobs, mask)
    constants = old, _cut(rollout_logprobs, mask), _cut(advantages, mask)
    old, rollout, advantages = lax.stop_gradient(constants)
    return _Masked(logprobs, logprobs - old, old - rollout, advantages, mask)


def _cut(x: Array, mask: Array) -> Array:
    """Returns x in float32, zero outside the mask.

    A `where` after an exp or a product would still let a NaN into the gradient.
    """
    return jnp.where(mask, x.astype(jnp.float32), 0)


def _ratio(log_ratio: Array) -> Array:
    """Returns a finite exp of a log ratio."""
    return jnp.exp(jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def _clipped_surrogate(x: _Masked, low: float, high: float) -> tuple[Array, Array]:
    """Returns min(r A, clip(r) A), and where the clip is the minimum."""
    r = _ratio(x.moved)
    clipped = jnp.clip(r, 1 - low, 1 + high)
    is_clipped = r * x.advantages > clipped * x.advantages
    return jnp.minimum(r * x.advantages, clipped * x.advantages), is_clipped


def _metrics(
    x: _Masked, log_ratio: Array, is_masked: Array, is_clipped: Array
) -> Metrics:
    """Returns the sums over x.mask."""

    def total(values: Array) -> Array:
        return jnp.sum(jnp.where(x.mask, values.astype(jnp.float32), 0))

    rho = _ratio(log_ratio)
    return lax.stop_gradient(
        Metrics(
            num_tokens=total(x.mask),
            num_masked=total(is_masked),
            num_clipped=total(is_clipped),
            sum_ratio=total(rho),
            # expm1, because exp(gap) - 1 of a small gap would round to 0.
            sum_kl=total(jnp.expm1(jnp.minimum(log_ratio, _MAX_LOG_RATIO)) - log_ratio),
        )
    )
