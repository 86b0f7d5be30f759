"""The critic of a run: a model of the value of every token, and its updates.

SAO, GLM-5.2's algorithm for agents (arXiv 2607.07508), plays one episode a task: a
critic takes the place of the group. It has the policy's layers, which begin with the
policy's weights, and instead of the output matrix a vector, which begins with zeros.
Its attention keeps its first weights; experts, norms and embedding learn with it.

A step computes values, then the advantages of the policy from them (rl/gae.py), then
updates the critic. So no value has seen the rewards that it is compared with.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from glm5_jax import collectives, sharding
from glm5_jax import config as config_lib
from glm5_jax.model import invariance, layers, transformer
from glm5_jax.optim import optimizer as optimizer_lib
from glm5_jax.rl import gae
from glm5_jax.training import accumulation, policy
from glm5_jax.training import inputs as inputs_lib
from glm5_jax.training import program as program_lib

Metrics = dict[str, Array]
NAME = "critic"  # of its state among the arrays of a checkpoint
HEAD = "value_head"
RETURNS = "returns"  # in the critic's batch: what the values shall be
_READ = ("tokens", "segment_ids", "positions")  # by the layers, of a batch


@dataclasses.dataclass(frozen=True)
class Critic:
    """What a run does with its critic, whose state is {NAME: params and opt_state}."""

    state: dict  # shapes with their shardings
    init: Callable[[dict], dict]  # the policy's first parameters -> state
    # (state, batch) -> (state, batch with advantages, metrics); state is donated.
    step: Callable[[dict, Any], tuple[dict, Any, Metrics]]


# Of a run whose advantages come from groups.
ABSENT = Critic({}, lambda params: {}, lambda state, batch: (state, batch, {}))


def make(config: config_lib.TrainConfig, program: program_lib.Program) -> Critic:
    """Returns the programs of a run's critic; without rl.critic they do nothing."""
    if not config.stage_record.has_critic(config):
        return ABSENT
    optimizer, mesh = make_optimizer(config), program.mesh
    params = jax.eval_shape(first_params, program.params)
    opt_state = jax.eval_shape(optimizer.init, params)
    opt_places = sharding.shardings(optimizer.state_dims(opt_state, params), mesh)
    shapes = {"params": params, "opt_state": opt_state}
    places = {
        "params": sharding.shardings(param_dims(config.model), mesh),
        "opt_state": optimizer.kept(opt_state, opt_places),
    }

    @functools.partial(jax.jit, out_shardings=places)
    def init(params: dict) -> dict:
        params = first_params(params)
        return {"params": params, "opt_state": optimizer.init(params)}

    compiled = jax.jit(
        functools.partial(critic_step, config, optimizer),
        donate_argnums=0,
        out_shardings=(places, program_lib.batch_place(mesh), None),
        compiler_options=invariance.compiler_options(config.model),
    )

    def step(state: dict, batch: Any) -> tuple[dict, Any, Metrics]:
        # The critic's routers choose their own experts.
        read = {name: x for name, x in batch.items() if name != "experts"}
        own, advantages, metrics = compiled(state[NAME], read)
        return {NAME: own}, {**batch, "advantages": advantages}, metrics

    state = {NAME: program_lib.placed(shapes, places)}
    return Critic(state, lambda params: {NAME: init(params)}, step)


def table(model: config_lib.ModelConfig) -> dict:
    """Declares the parameters: the policy's without its heads, and the value's head."""
    declared = _trunk(transformer.table(model))
    return {**declared, HEAD: layers.bias(model.hidden_size, "D")}


def param_dims(model: config_lib.ModelConfig) -> dict:
    """Returns the logical dims of every parameter, as a tree."""
    return transformer.map_table(lambda param: param.dims, table(model))


def first_params(params: dict) -> dict:
    """Returns copies of the policy's parameters, and a value head of zeros."""
    size, dtype = params["norm"].shape, params["norm"].dtype
    return {**jax.tree.map(jnp.copy, _trunk(params)), HEAD: jnp.zeros(size, dtype)}


def is_trained(path: tuple[str, ...]) -> bool:
    """Tells whether the critic's parameter with this path learns: not in attention."""
    return not {"self_attn", "indexer"} & {*path}


def make_optimizer(config: config_lib.TrainConfig) -> optimizer_lib.Optimizer:
    """Returns the run's optimizer for the critic, with its constant learning rate."""
    rate = config.rl.critic_learning_rate
    optim = dataclasses.replace(
        config.optim,
        learning_rate=rate,
        end_learning_rate=rate,
        schedule="constant",
        warmup_steps=0,
        warmup_tokens=0.0,
    )
    num_updates = config.num_steps * config.rl.critic_updates
    slow_axes = config.mesh.slow_axes
    return optimizer_lib.make_optimizer(
        optim,
        config.model,
        param_dims(config.model),
        num_updates,
        is_trained,
        slow_axes,
    )


def values(
    params: dict,
    config: config_lib.TrainConfig,
    batch: inputs_lib.Batch,
    num_parts: int = 1,
) -> Float[Array, "B T"]:
    """Returns the value of the tokens up to each one, in units of the reward.

    Args:
      params: of the critic, in the dtypes of the computation.
      config: of the run.
      batch: whole rows.
      num_parts: parts that go through the model in turn; a divisor of the rows.
    """
    batch = {name: batch[name] for name in _READ}
    if num_parts > 1:
        one = functools.partial(values, params, config)
        return policy.in_parts(one, batch, num_parts)
    inputs = inputs_lib.make_inputs(config.model, batch)
    local = functools.partial(_local_values, config)
    rows, dims = sharding.spec(("B", "T")), param_dims(config.model)
    run = inputs_lib.on_shards(local, config.model, rows, dims)
    return collectives.in_order(run(params, inputs), 1)


def value_and_grad(
    params: dict, config: config_lib.TrainConfig, batch: inputs_lib.Batch
) -> tuple[Float[Array, ""], dict]:
    """Returns sum weights (V - returns)^2 / 2 over the sampled tokens; the gradient.

    Args:
      params: of the critic, in the dtypes of the computation.
      config: of the run.
      batch: of a policy's step, with the array `RETURNS`.
    """
    names = (*_READ, "loss_mask", "weights", RETURNS)
    inputs = inputs_lib.make_inputs(config.model, {name: batch[name] for name in names})
    (loss, _), grads = accumulation.value_and_grad(
        functools.partial(_local_loss, config),
        config,
        params,
        inputs,
        config.updates_per_step * config.optim.accumulation_steps,
        dims=param_dims(config.model),
    )
    return loss, grads


def critic_step(
    config: config_lib.TrainConfig,
    optimizer: optimizer_lib.Optimizer,
    state: dict,
    batch: inputs_lib.Batch,
) -> tuple[dict, Float[Array, "B T"], Metrics]:
    """Returns the state after all updates, the policy's advantages, and metrics.

    The updates are skipped where no token was sampled, and each where its gradient is
    not finite.
    """
    mask, segments = batch["loss_mask"] > 0, batch["segment_ids"]
    rewards, gamma = batch[policy.REWARDS], config.rl.gae_gamma
    num_parts = config.updates_per_step * config.optim.accumulation_steps
    found = values(_cast(state["params"], config), config, batch, num_parts)
    with jax.named_scope("gae"):
        lambdas = batch[policy.LAMBDAS]
        advantages = gae.advantages(
            found, rewards, lambdas, mask, segments, gamma=gamma
        )
        returns = gae.returns(rewards, mask, segments, gamma=gamma)
    goals, is_allowed = {**batch, RETURNS: returns}, jnp.any(mask)

    def update(carry: tuple, _: None) -> tuple[tuple, tuple[Array, Metrics]]:
        params, opt_state = carry
        loss, grads = value_and_grad(_cast(params, config), config, goals)
        params, opt_state, more = optimizer_lib.update_if_finite(
            optimizer, grads, opt_state, params, is_allowed
        )
        return (params, opt_state), (loss, more)

    carry, (losses, more) = lax.scan(
        update,
        (state["params"], state["opt_state"]),
        None,
        length=config.rl.critic_updates,
    )
    metrics = {
        "critic/loss": losses[0],  # before the first update
        "critic/grad_norm": more["train/grad_norm"][0],
        "critic/skipped_total": more["optim/skipped_total"][-1],
        **_fit(found, returns, mask),
    }
    return dict(zip(("params", "opt_state"), carry, strict=True)), advantages, metrics


def _trunk(tree: dict) -> dict:
    """Returns the entries of the policy that the critic has too."""
    return {name: x for name, x in tree.items() if name not in ("lm_head", "mtp")}


def _cast(params: dict, config: config_lib.TrainConfig) -> dict:
    return layers.cast(params, table(config.model), config.model.dtype)


def _local_values(
    config: config_lib.TrainConfig, params: dict, inputs: inputs_lib.Inputs
) -> Float[Array, "B T"]:
    """Returns `values` of a device's shard, in its order, in float32."""
    batch, context, _ = inputs
    out = transformer.forward(params, config.model, batch["tokens"], context=context)
    with jax.named_scope("value_head"):
        return jnp.einsum("btd,d->bt", out.hidden.astype(jnp.float32), params[HEAD])


def _local_loss(
    config: config_lib.TrainConfig, params: dict, inputs: inputs_lib.Inputs
) -> tuple[Float[Array, ""], None]:
    """Returns the loss, summed over the shards of all devices."""
    batch = inputs.batch
    error = _local_values(config, params, inputs) - batch[RETURNS]
    error = jnp.where(batch["loss_mask"] > 0, error, 0)
    loss = jnp.sum(batch["weights"] * jnp.square(error)) / 2
    return collectives.total(loss, collectives.TOKENS), None


def _fit(
    found: Float[Array, "B T"], returns: Float[Array, "B T"], mask: Array
) -> Metrics:
    """Returns how values and returns of the sampled tokens compare."""
    count = jnp.maximum(jnp.sum(mask), 1)

    def mean(x: Array) -> Array:
        return jnp.sum(jnp.where(mask, x, 0)) / count

    error, spread = returns - found, mean(jnp.square(returns - mean(returns)))
    unexplained = mean(jnp.square(error - mean(error)))
    return {
        "critic/value": mean(found),
        "critic/return": mean(returns),
        # 1: the values are the returns up to a constant; 0: they say nothing.
        "critic/explained_variance": jnp.where(
            spread > 0, 1 - unexplained / jnp.maximum(spread, 1e-12), 0
        ),
    }
