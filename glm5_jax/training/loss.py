"""The loss of every stage but reinforcement learning, and its gradient.

| stage                     | minimises                            | trains       |
|---------------------------|--------------------------------------|--------------|
| pretrain, sft, dsa_sparse | next_token, mtp, balance, indexer_kl | all          |
| dsa_warmup                | indexer_kl                           | the indexers |

glm5_jax/config/stages/ has this table as code. Each term is a mean over the tokens of
the batch; the loss is their sum, each times its coefficient in config.loss. A model
without experts has no balance loss, one without an indexer no KL divergence of indexer
and attention. Each layer has its own of these two, and the loss has their sums over
layers. Multi-token prediction (MTP) counts as one layer, by the mean over its steps.
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
    params: dict,
    config: config_lib.TrainConfig,
    batch: Batch,
    mtp_weight: Float[Array, ""] | float | None = None,
) -> tuple[tuple[Float[Array, ""], tuple[Metrics, dict]], dict]:
    """Returns (loss, (its terms, the load of the experts)), and the gradient.

    The batch goes through `_local_loss` in `config.num_parts` parts, whose values and
    gradients are added; the devices of a mesh share each part.

    Args:
      params: in the dtype of the computation.
      config: of the run.
      batch: whole rows.
      mtp_weight: of the step; None: that of the run's beginning.
    """
    if mtp_weight is None:
        mtp_weight = config.loss.mtp_weight
    num_parts = config.num_parts(batch["tokens"].shape[0])
    local = functools.partial(_local_loss, config, mtp_weight, num_parts)
    inputs = _make_inputs(config, batch)
    return accumulation.value_and_grad(local, config, params, inputs, num_parts)


def _make_inputs(config: config_lib.TrainConfig, batch: Batch) -> inputs_lib.Inputs:
    """Adds to a batch the weight of every position in the means over the batch.

    A mean is the sum of weight times value; the weights are mask / sum(mask).
    """
    is_token = (batch["segment_ids"] > 0).astype(jnp.float32)
    weights = {
        "weights": losses.mean_weights(batch["loss_mask"]),  # in means over targets
        "token_weights": losses.mean_weights(is_token),  # in means over all tokens
    }
    batch = {**batch, **weights}
    return inputs_lib.make_inputs(config.model, batch, config.num_mtp_steps)


def _local_loss(
    config: config_lib.TrainConfig,
    mtp_weight: Float[Array, ""] | float,
    num_parts: int,
    params: dict,
    inputs: inputs_lib.Inputs,
) -> tuple[Float[Array, ""], tuple[Metrics, dict]]:
    """Returns (loss, (terms, loads of the experts)) of one part of the batch.

    On a mesh each device runs this on its shard of the tokens. The functions that make
    a term sum it over devices, so every device returns the term of the whole part.
    A token's weight is 1 / (number of tokens in the batch), or 0 if it does not count,
    so the terms of all parts add up to the means over the batch.
    """
    batch, context, ahead = inputs  # ahead: the later tokens that MTP predicts
    has_kl = config.has_indexer_loss
    params = _with_frozen(config, params)  # no gradient; the optimizer skips them too
    out = transformer.forward(
        params, config.model, batch["tokens"], context=context, with_indexer_loss=has_kl
    )
    aux: dict[str, Any] = dict(out.aux)  # of each layer: indexer_kl, routing
    terms = {"next_token": _next_token_loss(config, params, out.hidden, batch)}
    if ahead is not None:
        terms["mtp"], aux["mtp"] = mtp_loss(config, params, out.hidden, inputs)
    balances = _balances(aux)  # of each layer with experts
    if balances.size:  # all parts have equally many rows
        terms["balance"] = jnp.mean(balances) / num_parts
    if has_kl:  # each layer's mean over the part, times the part's share of the batch
        terms["indexer_kl"] = _sum_of_divergences(aux, batch["token_weights"])
    coefficients: dict[str, Array | float] = {
        "next_token": 1.0,
        "mtp": mtp_weight,
        # The term, a metric too, is the mean over layers; the loss has the sum.
        "balance": balances.size * config.loss.balance_weight,
        "indexer_kl": config.loss.indexer_weight,
    }
    minimised = [  # the other terms are metrics only; their NaNs do not reach the loss
        value * coefficients[name]
        for name, value in terms.items()
        if name in config.stage_record.losses
    ]
    metrics = {METRIC_NAMES[name]: value for name, value in terms.items()}
    return functools.reduce(jnp.add, minimised), (metrics, loads(aux))


@jax.named_scope("head")
def _next_token_loss(
    config: config_lib.TrainConfig,
    params: dict,
    hidden: Float[Array, "B T D"],
    batch: Batch,
) -> Float[Array, ""]:
    """Returns the mean loss of the next token; the logits exist a chunk at a time."""
    return losses.next_token_loss(
        hidden,
        params["lm_head"],
        batch["targets"],
        batch["weights"],
        z_weight=config.loss.z_weight,
        chunk_tokens=config.loss.chunk_tokens,
    )


@jax.named_scope("mtp")
def mtp_loss(
    config: config_lib.TrainConfig,
    params: dict,
    hidden: Float[Array, "B T D"],
    inputs: inputs_lib.Inputs,
) -> tuple[Float[Array, ""], Any]:
    """Returns the loss of multi-token prediction, and its layer's auxiliary outputs."""
    model, ahead = config.model, inputs.ahead
    assert ahead is not None
    states, aux = mtp.steps(
        params["mtp"],
        model,
        params["embed_tokens"],
        hidden,
        ahead.tokens,
        inputs.context,
        jnp.ones(()) / model.mtp_num_steps if config.has_indexer_loss else None,
    )
    head, weights, size = params["lm_head"], ahead.weights, config.loss.chunk_tokens
    if config.loss.mtp_objective != "cross_entropy":
        is_end_to_end = config.loss.mtp_objective == "end_to_end"
        loss = losses.mtp_rejection(
            states,
            hidden,
            head,
            weights,
            is_end_to_end=is_end_to_end,
            chunk_tokens=size,
        )
        return loss, aux
    loss = losses.mtp_loss(states, head, ahead.targets, weights, chunk_tokens=size)
    return loss, aux


def _with_frozen(config: config_lib.TrainConfig, params: dict) -> dict:
    """Returns the parameters; those that the stage does not train are constants.

    The optimizer keeps no moments of them and applies no weight decay to them
    (`optimizer.make_optimizer`), so they stay as they are, bit for bit.
    """
    is_trained = config.is_trained

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
