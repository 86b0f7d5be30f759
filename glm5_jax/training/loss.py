"""The loss of every stage but reinforcement learning, and its gradient.

Its terms are next tokens, MTP, balance of the experts, and the divergence of the
indexers from the attention; each is a mean over the batch. Balance and divergence are
summed over layers, since the coefficient is that of one layer. The MTP module counts as
one layer, by the mean over its steps.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from glm5_jax import collectives, losses
from glm5_jax import config as config_lib
from glm5_jax.model import block as block_lib
from glm5_jax.model import mtp, transformer
from glm5_jax.training import accumulation
from glm5_jax.training import inputs as inputs_lib

Batch = inputs_lib.Batch
Metrics = dict[str, Array]
METRIC_NAMES = {
    "next_token": "train/lm_loss",
    "mtp": "train/mtp_loss",
    "balance": "train/balance_loss",
    "indexer_kl": "train/indexer_kl",
}


def value_and_grad(
    params: dict, config: config_lib.TrainConfig, batch: Batch
) -> tuple[tuple[Float[Array, ""], tuple[Metrics, dict]], dict]:
    """Returns the loss, its terms and the load of the experts; and the gradient.

    Means are over the whole batch, whatever optim.accumulation_steps is.
    """
    inputs, local = _make_inputs(config, batch), functools.partial(_local_loss, config)
    return accumulation.value_and_grad(local, config, params, inputs)


def _make_inputs(config: config_lib.TrainConfig, batch: Batch) -> inputs_lib.Inputs:
    """Adds to a batch the weight of every position in the means over it."""
    is_token = (batch["segment_ids"] > 0).astype(jnp.float32)
    weights = {
        "weights": losses.mean_weights(batch["loss_mask"]),
        "token_weights": losses.mean_weights(is_token),
    }
    batch = {**batch, **weights}
    return inputs_lib.make_inputs(config.model, batch, config.num_mtp_steps)


def _local_loss(
    config: config_lib.TrainConfig, params: dict, inputs: inputs_lib.Inputs
) -> tuple[Float[Array, ""], tuple[Metrics, dict]]:
    """Returns the weighted sum of the terms of a device's shard; terms; loads."""
    model, weights, params = config.model, config.loss, _with_constants(config, params)
    chunk = {"chunk_tokens": weights.chunk_tokens}
    batch, context, ahead = inputs
    has_kl = config.has_indexer_loss
    out = transformer.forward(
        params, model, batch["tokens"], context=context, with_indexer_loss=has_kl
    )
    aux: dict[str, Any] = dict(out.aux)
    head = params["lm_head"]
    with jax.named_scope("head"):
        lm_loss = losses.next_token_loss(
            out.hidden,
            head,
            batch["targets"],
            batch["weights"],
            z_weight=weights.z_weight,
            **chunk,
        )
    terms: dict[str, tuple[Array, float]] = {"next_token": (lm_loss, 1.0)}
    if ahead is not None:
        with jax.named_scope("mtp"):
            states, aux["mtp"] = mtp.steps(
                params["mtp"],
                model,
                params["embed_tokens"],
                out.hidden,
                ahead.tokens,
                context,
                jnp.ones(()) / model.mtp_num_steps if has_kl else None,
            )
            loss = losses.mtp_loss(states, head, ahead.targets, ahead.weights, **chunk)
        terms["mtp"] = (loss, weights.mtp_weight)
    balances = _balances(aux)
    if balances.size:
        balance = jnp.mean(balances)
        balance = balance / config.optim.accumulation_steps  # parts of equal rows
        weight = balances.size * weights.balance_weight  # the loss has their sum
        terms["balance"] = (balance, weight)
    if has_kl:
        divergences = [x.indexer_kl for x in _blocks(aux) if x.indexer_kl is not None]
        kl = jnp.sum(jnp.concatenate([x.reshape(-1) for x in divergences]))
        share = jnp.sum(batch["token_weights"])  # this part's share of all tokens
        kl = kl * collectives.total(share, collectives.TOKENS)
        terms["indexer_kl"] = (kl, weights.indexer_weight)
    minimised = config.stage_record.losses
    weighted = [
        value * (weight if name in minimised else 0.0)
        for name, (value, weight) in terms.items()
    ]
    metrics = {METRIC_NAMES[name]: value for name, (value, _) in terms.items()}
    return functools.reduce(jnp.add, weighted), (metrics, loads(aux))


def _with_constants(config: config_lib.TrainConfig, params: dict) -> dict:
    """Returns the parameters, frozen ones as constants without a backward pass."""
    is_trained = config.stage_record.trains

    def hold(path: tuple, x: Array) -> Array:
        return x if is_trained(tuple(k.key for k in path)) else lax.stop_gradient(x)

    return jax.tree_util.tree_map_with_path(hold, params)


def loads(aux: dict) -> dict:
    """Returns the tokens that every router gave each expert, as a tree of layers."""

    def load(block: block_lib.BlockAux) -> Array | None:
        return None if block.routing is None else block.routing.load

    return jax.tree.map(load, aux, is_leaf=_is_block)


def _balances(aux: dict) -> Float[Array, " mixtures"]:
    """Returns the balance loss of every mixture; MTP has the mean of its steps."""
    means = [
        jnp.mean(block.routing.balance, keepdims=True)
        if name == "mtp"
        else jnp.ravel(block.routing.balance)
        for name, part in aux.items()
        for block in _blocks(part)
        if block.routing is not None
    ]
    return jnp.concatenate([jnp.zeros(0), *means])


def _blocks(aux: Any) -> list[block_lib.BlockAux]:
    """Returns the auxiliary outputs of every block; the block of MTP is last."""
    return jax.tree.leaves(aux, is_leaf=_is_block)


def _is_block(node: Any) -> bool:
    return isinstance(node, block_lib.BlockAux)


def load_metrics(load: dict) -> Metrics:
    """Returns the largest load of an expert over the mean load, of the worst layer."""
    worst = [
        jnp.max(x / jnp.maximum(x.mean(-1, keepdims=True), 1))
        for x in jax.tree.leaves(load)
    ]
    return {"moe/max_load": jnp.max(jnp.stack(worst))} if worst else {}
