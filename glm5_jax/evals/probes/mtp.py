"""How many tokens multi-token prediction drafts that the main model accepts.

After token i + 1, step k of the module drafts token i + k + 1 from the states at i and
the tokens up to i + k; the main model has its own distribution at i + k. Rows are read
whole, so each draft follows the row's tokens, not earlier drafts.

greedy: a draft counts if the two likeliest tokens agree. sampled: it counts with the
probability sum_v min(p, q), by which speculative sampling accepts (arXiv 2211.17192).
depth_k is the share accepted among drafts whose predecessors were; length is 1 + the
expected number of accepted drafts (Table 2 of GLM-5 has it for 4 drafts).
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glm5_jax import config as config_lib
from glm5_jax.evals import held_out, record
from glm5_jax.model import context as context_lib
from glm5_jax.model import mtp, transformer

DRAFTS = 4  # Table 2 of GLM-5 drafts four tokens
MAX_PROBABILITIES = 2**28  # float32 numbers that are in memory at once


def _answer(
    subject: record.Subject, setting: record.Setting, tasks: record.Tasks
) -> Iterator[tuple[int, record.Answer]]:
    """Yields sums over the positions of each row."""
    numbers = setting.length * subject.config.vocab_size * (DRAFTS + 1)
    size = max(1, min(16, MAX_PROBABILITIES // numbers, len(tasks)))
    for kept, _, batch in held_out.batches(tasks, size):
        found = jax.device_get(accepted(subject.params, subject.config, batch))
        for i, number in enumerate(kept):
            figures = {
                name: (float(sums[i]), float(weights[i]))
                for name, (sums, weights) in found.items()
            }
            yield number, record.Answer(figures)


@functools.partial(jax.jit, static_argnames="config")
def accepted(
    params: dict, config: config_lib.ModelConfig, batch: dict[str, Any]
) -> dict[str, tuple[Float[Array, " B"], Float[Array, " B"]]]:
    """Returns sums and weights of each row; see the file."""
    tokens, segments = (jnp.asarray(batch[k]) for k in ("tokens", "segment_ids"))
    context = context_lib.make_context(
        config, segments, jnp.asarray(batch["positions"])
    )
    hidden = transformer.forward(params, config, tokens, context=context).hidden
    states, _ = mtp.steps(
        params["mtp"],
        config,
        params["embed_tokens"],
        hidden,
        mtp.ahead(tokens, DRAFTS),
        context,
    )
    main = transformer.logits(params, config, hidden)
    # The main model's state after the last draft's predecessor is in the document.
    is_inside = _shifted(segments, DRAFTS) == segments
    is_drafted = (is_inside & (segments > 0)).astype(jnp.float32)
    greedy, sampled = [], []
    for k in range(1, DRAFTS + 1):
        judge = _shifted(main, k)
        draft = transformer.logits(params, config, states[k - 1])
        greedy.append(jnp.argmax(judge, -1) == jnp.argmax(draft, -1))
        p, q = jax.nn.softmax(judge), jax.nn.softmax(draft)
        sampled.append(jnp.sum(jnp.minimum(p, q), axis=-1))
    figures = {}
    for name, shares in (("greedy", greedy), ("sampled", sampled)):
        chain, length = is_drafted, is_drafted
        for k, share in enumerate(shares, start=1):
            before, chain = chain, chain * share
            length = length + chain
            figures[f"{name}/depth_{k}"] = _total(chain), _total(before)
        figures[f"{name}/length"] = _total(length), _total(is_drafted)
    return figures


def _shifted(x: Array, k: int) -> Array:
    """Returns x [B, T, ...] of k positions later; zeros after the end."""
    later = jnp.roll(x, -k, axis=1)
    return later.at[:, -k:].set(0)


def _total(x: Float[Array, "B T"]) -> Float[Array, " B"]:
    return jnp.sum(x, axis=1)


SUITE = record.Suite(
    name="mtp",
    asks="How many drafted tokens the main model accepts, by depth.",
    tasks=held_out.rows,
    rows_per_task=1,
    answer=_answer,
    needs=frozenset({"tokenizer", "mtp"}),
)
