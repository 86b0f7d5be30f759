"""The training step: gradient, update, router bias; and the evaluation step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm5_jax import collectives, losses
from glm5_jax import config as config_lib
from glm5_jax.model import moe, transformer
from glm5_jax.optim import optimizer as optimizer_lib
from glm5_jax.optim import schedule
from glm5_jax.training import computed
from glm5_jax.training import inputs as inputs_lib
from glm5_jax.training import loss as loss_lib

Batch = inputs_lib.Batch
Metrics = loss_lib.Metrics


def make_optimizer(config: config_lib.TrainConfig) -> optimizer_lib.Optimizer:
    """Returns the optimizer of a stage."""
    dims = transformer.param_dims(config.model)
    return optimizer_lib.make_optimizer(
        config.optim,
        config.model,
        dims,
        config.num_updates,
        config.is_trained,
        config.mesh.slow_axes,
        config.data.batches if config.stage_record.has_batch_size else None,
    )


def make_train_step(
    config: config_lib.TrainConfig, optimizer: optimizer_lib.Optimizer
) -> Callable[[dict, Any, Batch], tuple[dict, Any, Metrics]]:
    """Builds (params, optimizer state, batch) -> (params, optimizer state, metrics).

    training/program.py jits the step and donates the first two arguments, so that the
    update is in place. If the gradient is not finite, parameters, moments and router
    biases stay (`optimizer.update_if_finite`).
    """

    def train_step(params: Any, state: Any, batch: Batch) -> tuple[Any, Any, Metrics]:
        bias_rate, mtp_weight = _scheduled_weights(config, state.num_calls)
        # Matrices in model.dtype, norms and router in float32; gradients alike.
        (loss, (terms, load)), grads = loss_lib.value_and_grad(
            computed.weights(params, config), config, batch, mtp_weight
        )
        with jax.named_scope("optimizer"):
            params, state, metrics = optimizer_lib.update_if_finite(
                optimizer, grads, state, params
            )
        is_applied = metrics["optim/skipped_in_a_row"] == 0  # 0 after an applied update
        # bias_rate is 0 in stages that leave the router alone.
        params = _with_moved_biases(params, load, bias_rate * is_applied)
        metrics |= {"train/loss": loss, **terms, **loss_lib.load_metrics(load)}
        metrics["optim/router_bias_rate"] = jnp.float32(bias_rate)
        if config.num_mtp_steps:
            metrics["optim/mtp_weight"] = jnp.float32(mtp_weight)
        return params, state, metrics

    return train_step


def _scheduled_weights(
    config: config_lib.TrainConfig, step: Int[Array, ""]
) -> tuple[Float[Array, ""] | float, Float[Array, ""] | float]:
    """Returns the router bias's rate and the weight of MTP's loss at a step."""
    weights, batches = config.loss, config.data.batches
    bias_rate_at = schedule.changing(
        weights.router_bias_rate, weights.router_bias_rate_changes, batches
    )
    mtp_weight_at = schedule.changing(
        weights.mtp_weight, weights.mtp_weight_changes, batches
    )
    has_moving_bias = config.stage_record.moves_router_bias
    return bias_rate_at(step) if has_moving_bias else 0.0, mtp_weight_at(step)


def make_eval_step(
    config: config_lib.TrainConfig,
) -> Callable[[dict, Batch], tuple[Float[Array, ""], Float[Array, ""]]]:
    """Builds (params, batch) -> sums of nats and of bytes over the scored tokens."""

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
        params = computed.rounded(params, config)
        return inputs_lib.on_shards(local, config.model)(params, inputs)

    return eval_step


def _with_moved_biases(params: Any, load: dict, rate: Float[Array, ""]) -> dict:
    """Adds rate * sign(mean load - load) to every router's e_score_correction_bias.

    An expert with less than the mean load is then chosen more often. The bias only
    ranks experts and has no gradient; the optimizer leaves it alone.
    """

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
