"""How evenly routers use their experts, and how sure they are.

max_load is the load of the busiest expert over the mean load: 1 is even. load_entropy
is the entropy of the loads and token_entropy that of a token's scores s / sum(s), both
over log(experts): 1 is even. Loads need many tokens, so a task is a group of rows.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from glm5_jax.evals import held_out, record
from glm5_jax.evals.probes import walk
from glm5_jax.model import block as block_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import layers, moe

GROUP = 8  # rows of a task


def _tasks(
    setting: record.Setting, subject: record.Subject
) -> list[list[held_out.Row]]:
    """Returns whole groups of rows, or all rows as one."""
    rows = held_out.rows(setting, subject)
    groups = [rows[i : i + GROUP] for i in range(0, len(rows), GROUP)]
    return [group for group in groups if len(group) == GROUP] or [rows]


def _answer(
    subject: record.Subject, setting: record.Setting, tasks: record.Tasks
) -> Iterator[tuple[int, record.Answer]]:
    """Yields the figures of each group: means over layers, and of each layer."""
    del setting

    def measure(visit: walk.Visit, _: None) -> tuple[walk.Figures, None]:
        if not visit.block.has_experts:
            return {}, None
        values = evenness(
            visit.params, visit.x, visit.context, visit.shared, visit.block
        )
        one = jnp.ones(1)
        return {name: (value[None], one) for name, value in values.items()}, None

    for number, rows in tasks:
        for _, _, batch in held_out.batches([*enumerate(rows)], len(rows)):
            yield from walk.answers([number], batch, subject, measure)


@functools.partial(jax.jit, static_argnames="block")
def evenness(
    params: dict,
    x: Float[Array, "B T D"],
    context: context_lib.Context,
    shared: Any,
    block: block_lib.Block,
) -> dict[str, Float[Array, ""]]:
    """Returns the three figures of a layer with experts, over all tokens."""
    config = block.config
    eps, is_token = config.rms_norm_eps, context.is_token
    h = layers.rms_norm(x, params["input_layernorm"], eps)
    x = x + block.attention.forward(params, h, context, shared).x
    h = layers.rms_norm(x, params["post_attention_layernorm"], eps)
    load = moe.route(params["mlp"], config, h, is_token).load
    exact = lax.Precision.HIGHEST
    logits = layers.linear(
        h.astype(jnp.float32), params["mlp"]["gate"], precision=exact
    )
    of_tokens = jnp.where(is_token, _entropy(jax.nn.sigmoid(logits)), 0)
    return {
        "max_load": jnp.max(load) / jnp.mean(load),
        "load_entropy": _entropy(load),
        "token_entropy": jnp.sum(of_tokens) / jnp.sum(is_token),
    }


def _entropy(weights: Float[Array, "*n E"]) -> Float[Array, "*n"]:
    """Returns the entropy of normalised weights over its largest value, log(E)."""
    p = weights / jnp.sum(weights, axis=-1, keepdims=True)
    most = jnp.log(float(weights.shape[-1]))
    return -jnp.sum(jax.scipy.special.xlogy(p, p), axis=-1) / most


SUITE = record.Suite(
    name="router",
    asks="How evenly the experts of a layer are used, and how sure its router is.",
    tasks=_tasks,
    rows_per_task=GROUP,
    answer=_answer,
    needs=frozenset({"tokenizer", "experts"}),
)
