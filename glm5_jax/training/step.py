"""The training step: loss, gradient, update, router bias; and the evaluation step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from glm5_jax import collectives, losses
from glm5_jax import config as config_lib
from glm5_jax.model import block as block_lib
from glm5_jax.model import moe, mtp, transformer
from glm5_jax.optim import optimizer as optimizer_lib
from glm5_jax.training import inputs as inputs_lib

Batch = inputs_lib.Batch
Metrics = dict[str, Array]


def has_indexer_loss(config: config_lib.TrainConfig) -> bool:
    """Whether the indexers are trained by their divergence from the attention."""
    is_rl = config.stage == "rl"  # there the indexers are frozen
    has_indexer = config.model.attention != "dense"
    return has_indexer and config.loss.indexer_weight > 0 and not is_rl


def is_trained(config: config_lib.TrainConfig) -> Callable[[tuple[str, ...]], bool]:
    """Which parameters a stage trains, by path.

    The DSA warm-up only the indexers; reinforcement learning all but the indexers
    (arXiv 2602.15763, section 3.2) and MTP, which has no term in its loss.
    """
    if config.stage == "dsa_warmup":
        return lambda path: "indexer" in path
    if config.stage == "rl":
        return lambda path: "indexer" not in path and "mtp" not in path
    return lambda path: True


def make_optimizer(config: config_lib.TrainConfig) -> optimizer_lib.Optimizer:
    """The optimizer of a stage."""
    dims = transformer.param_dims(config.model)
    trained = is_trained(config)
    per_step = config.rl.updates_per_rollout if config.stage == "rl" else 1
    num_updates = config.num_steps * per_step
    return optimizer_lib.make_optimizer(
        config.optim, config.model, dims, num_updates, trained
    )


def total_loss(
    params: dict, config: config_lib.TrainConfig, batch: Batch
) -> tuple[Float[Array, ""], tuple[Metrics, dict]]:
    """Weighted sum of the terms; the terms; and the load of every router's experts."""
    inputs = inputs_lib.make_inputs(config.model, batch, _num_mtp_steps(config))
    local = functools.partial(_local_loss, config)
    return inputs_lib.on_shards(local, config.model)(params, inputs)


def _num_mtp_steps(config: config_lib.TrainConfig) -> int:
    has_loss = config.model.has_mtp and config.loss.mtp_weight
    return config.model.mtp_num_steps if has_loss else 0


def _local_loss(
    config: config_lib.TrainConfig, params: dict, inputs: inputs_lib.Inputs
) -> tuple[Float[Array, ""], tuple[Metrics, dict]]:
    """`total_loss` of what a device has; sums go over all of them."""
    model, weights = config.model, config.loss
    chunk = {"chunk_tokens": weights.chunk_tokens}
    batch, context, ahead = inputs
    has_kl = has_indexer_loss(config)
    out = transformer.forward(
        params, model, batch["tokens"], context=context, with_indexer_loss=has_kl
    )
    aux: dict[str, Any] = dict(out.aux)
    head = params["lm_head"]
    with jax.named_scope("head"):
        lm_loss = losses.next_token_loss(
            *(out.hidden, head, batch["targets"], batch["loss_mask"]),
            z_weight=weights.z_weight,
            **chunk,
        )
    terms = {"train/lm_loss": (lm_loss, 1.0)}
    if ahead is not None:
        with jax.named_scope("mtp"):
            states, aux["mtp"] = mtp.steps(
                params["mtp"],
                model,
                params["embed_tokens"],
                out.hidden,
                ahead.tokens,
                context,
                jnp.ones(()) if has_kl else None,
            )
            loss = losses.mtp_loss(states, head, ahead.targets, ahead.mask, **chunk)
        terms["train/mtp_loss"] = (loss, weights.mtp_weight)
    blocks = list(_blocks(aux))
    routings = [b.routing for b in blocks if b.routing is not None]
    if routings:
        balance = jnp.mean(jnp.concatenate([r.balance.reshape(-1) for r in routings]))
        terms["train/balance_loss"] = (balance, weights.balance_weight)
    if has_kl:
        divergences = [b.indexer_kl for b in blocks if b.indexer_kl is not None]
        kl = jnp.sum(jnp.concatenate([x.reshape(-1) for x in divergences]))
        terms["train/indexer_kl"] = (kl, weights.indexer_weight)
    if config.stage == "dsa_warmup":  # the base is frozen: only the indexer's term
        only = terms["train/indexer_kl"]
        terms = {k: (lax.stop_gradient(v), 0.0) for k, (v, _) in terms.items()}
        terms["train/indexer_kl"] = only
    loss = functools.reduce(jnp.add, [value * w for value, w in terms.values()])
    return loss, ({k: value for k, (value, _) in terms.items()}, loads(aux))


def make_train_step(
    config: config_lib.TrainConfig, optimizer: optimizer_lib.Optimizer
) -> Callable[[dict, Any, Batch], tuple[dict, Any, Metrics]]:
    """Builds (params, optimizer state, batch) -> (params, optimizer state, metrics).

    Donate the first two: the update then works in place.
    """
    rate = 0.0 if config.stage == "dsa_warmup" else config.loss.router_bias_rate

    def train_step(params: Any, state: Any, batch: Batch) -> tuple[Any, Any, Metrics]:
        gradient = jax.value_and_grad(total_loss, has_aux=True)
        computed = transformer.cast(params, config.model)
        (loss, (terms, load)), grads = gradient(computed, config, batch)
        with jax.named_scope("optimizer"):
            params, state, metrics = optimizer_lib.update_if_finite(
                optimizer, grads, state, params
            )
        is_finite = metrics["optim/skipped_in_a_row"] == 0
        params = _with_moved_biases(params, load, rate * is_finite)
        metrics |= {"train/loss": loss, **terms, **load_metrics(load)}
        return params, state, metrics

    return train_step


def make_eval_step(
    config: config_lib.TrainConfig,
) -> Callable[[dict, Batch], tuple[Float[Array, ""], Float[Array, ""]]]:
    """Builds (params, batch) -> summed nats and summed bytes of the scored tokens."""

    def local(params: dict, inputs: inputs_lib.Inputs) -> tuple[Array, Array]:
        batch = inputs.batch
        out = transformer.forward(
            params, config.model, batch["tokens"], context=inputs.context
        )
        nll = losses.token_nll(
            out.hidden, params["lm_head"], batch["targets"], config.loss.chunk_tokens
        )
        mask = batch["loss_mask"]
        sums = jnp.sum(nll * mask), jnp.sum(batch["num_bytes"] * mask)
        return collectives.total(sums, collectives.TOKENS)

    def eval_step(params: dict, batch: Batch) -> tuple[Array, Array]:
        inputs = inputs_lib.make_inputs(config.model, batch)
        return inputs_lib.on_shards(local, config.model)(params, inputs)

    return eval_step


def loads(aux: dict) -> dict:
    """Tokens that every router gave each expert, as the tree of its layers."""

    def load(block: block_lib.BlockAux) -> Array | None:
        return None if block.routing is None else block.routing.load

    return jax.tree.map(load, aux, is_leaf=_is_block)


def _blocks(aux: dict) -> list[block_lib.BlockAux]:
    """Auxiliary values of every block, the MTP's last."""
    return jax.tree.leaves(aux, is_leaf=_is_block)


def _is_block(node: Any) -> bool:
    return isinstance(node, block_lib.BlockAux)


def _with_moved_biases(params: Any, load: dict, rate: Float[Array, ""]) -> dict:
    """Moves e_score_correction_bias of every router against its load."""

    def moved(layer: dict, load: Array | None) -> dict:
        if load is None:
            return layer
        bias = layer["mlp"]["e_score_correction_bias"]
        load = load.reshape(-1, *bias.shape).sum(0)  # MTP: over its steps
        bias = moe.updated_bias(bias, load, rate).astype(bias.dtype)
        return layer | {"mlp": layer["mlp"] | {"e_score_correction_bias": bias}}

    new = dict(params)
    for group, blocks in load.items():
        if group == "mtp":
            block = moved(params["mtp"]["block"], blocks)
            new["mtp"] = params["mtp"] | {"block": block}
            continue
        changed = {name: moved(params[group][name], b) for name, b in blocks.items()}
        new[group] = params[group] | changed
    return new


def load_metrics(load: dict) -> Metrics:
    """How uneven the experts' load is: largest over mean, worst layer."""
    worst = [
        jnp.max(x / jnp.maximum(x.mean(-1, keepdims=True), 1))
        for x in jax.tree.leaves(load)
    ]
    return {"moe/max_load": jnp.max(jnp.stack(worst))} if worst else {}
