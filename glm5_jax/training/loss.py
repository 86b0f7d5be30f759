"""The loss of every stage but reinforcement learning, and its gradient.

| stage         | minimises                             | trains                      |
|---------------|---------------------------------------|-----------------------------|
| pretrain, sft | next_token, mtp, balance, indexer_kl  | everything, any attention   |
| dsa_warmup    | indexer_kl, over all visible keys     | the indexers                |
| dsa_sparse    | next_token, mtp, balance, indexer_kl  | everything, sparse          |
| rl            | policy (training/policy.py)           | all but indexers and MTP    |

glm5_jax/config/stages/ has this table as code. The loss is the sum of the terms, each
times its coefficient in config.loss; a term is a mean over the batch. Balance of the
experts and divergence of the indexers exist in each layer: the loss has their sum over
layers, with the coefficient of one layer. MTP counts as one layer, by the mean over its
steps.
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
    """Returns (loss, (its terms, the load of the experts)), and the gradient.

    Means are over the whole batch, whatever optim.accumulation_steps is.
    """
    inputs, local = _make_inputs(config, batch), functools.partial(_local_loss, config)
    return accumulation.value_and_grad(local, config, params, inputs)


def _make_inputs(config: config_lib.TrainConfig, batch: Batch) -> inputs_lib.Inputs:
    """Adds to a batch the weight of every position in the means over it."""
    is_token = (batch["segment_ids"] > 0).astype(jnp.float32)
    weights = {
        "weights": losses.mean_weights(batch["loss_mask"]),  # of targets
        "token_weights": losses.mean_weights(is_token),
    }
    batch = {**batch, **weights}
    return inputs_lib.make_inputs(config.model, batch, config.num_mtp_steps)


def _local_loss(
    config: config_lib.TrainConfig, params: dict, inputs: inputs_lib.Inputs
) -> tuple[Float[Array, ""], tuple[Metrics, dict]]:
    """Computes on one device's shard; returns (loss, (terms, loads)), equal on all.

    Terms add up over devices and accumulation parts: weights are shares of the batch.
    """
    model = config.model
    coefficients = config.loss
    batch, context, ahead = inputs
    has_kl = config.has_indexer_loss
    params = _with_frozen(config, params)
    out = transformer.forward(
        params, model, batch["tokens"], context=context, with_indexer_loss=has_kl
    )
    aux: dict[str, Any] = dict(out.aux)
    with jax.named_scope("head"):
        lm_loss = losses.next_token_loss(
            out.hidden,
            params["lm_head"],
            batch["targets"],
            batch["weights"],
            z_weight=coefficients.z_weight,
            chunk_tokens=coefficients.chunk_tokens,
        )
    terms: dict[str, tuple[Array, float]] = {}  # name -> (value, coefficient)
    terms["next_token"] = (lm_loss, 1.0)
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
            mtp_loss = losses.mtp_loss(
                states,
                params["lm_head"],
                ahead.targets,
                ahead.weights,
                chunk_tokens=coefficients.chunk_tokens,
            )
        terms["mtp"] = (mtp_loss, coefficients.mtp_weight)
    balances = _balances(aux)
    if balances.size:
        # A value a layer: logs have the mean, the loss the sum. Parts have equal rows.
        balance = jnp.mean(balances) / config.optim.accumulation_steps
        terms["balance"] = (balance, balances.size * coefficients.balance_weight)
    if has_kl:
        kl = _sum_of_divergences(aux, batch["token_weights"])
        terms["indexer_kl"] = (kl, coefficients.indexer_weight)
    weighted = [
        value * (coefficient if name in config.stage_record.losses else 0.0)
        for name, (value, coefficient) in terms.items()
    ]
    metrics = {METRIC_NAMES[name]: value for name, (value, _) in terms.items()}
    return functools.reduce(jnp.add, weighted), (metrics, loads(aux))


def _with_frozen(config: config_lib.TrainConfig, params: dict) -> dict:
    """Returns the parameters; those that the stage does not train are constants."""
    is_trained = config.stage_record.trains

    def hold(path: tuple, x: Array) -> Array:
        return x if is_trained(tuple(k.key for k in path)) else lax.stop_gradient(x)

    return jax.tree_util.tree_map_with_path(hold, params)


def loads(aux: dict) -> dict:
    """Returns the tokens that every router gave each expert, as a tree of layers."""

    def load(block: block_lib.BlockAux) -> Array | None:
        return None if block.routing is None else block.routing.load

    return jax.tree.map(load, aux, is_leaf=_is_block)


def _balances(aux: dict) -> Float[Array, " expert_layers"]:
    """Returns the balance loss of each layer with experts; MTP's by its mean."""
    means = [
        jnp.mean(block.routing.balance, keepdims=True)
        if name == "mtp"
        else jnp.ravel(block.routing.balance)
        for name, part in aux.items()
        for block in _blocks(part)
        if block.routing is not None
    ]
    return jnp.concatenate([jnp.zeros(0), *means])


def _sum_of_divergences(
    aux: dict, token_weights: Float[Array, "B T"]
) -> Float[Array, ""]:
    """Returns the divergence of the indexers, summed over layers.

    Each layer has the mean over this part's tokens. The part's share of the batch's
    tokens makes it a summand of the mean over the batch.
    """
    divergences = [x.indexer_kl for x in _blocks(aux) if x.indexer_kl is not None]
    kl = jnp.sum(jnp.concatenate([x.reshape(-1) for x in divergences]))
    token_share = collectives.total(jnp.sum(token_weights), collectives.TOKENS)
    return kl * token_share


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
