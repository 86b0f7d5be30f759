"""Attention from inside: the mass that a selection keeps, and the largest logits.

The selection's recall is the share of a query's attention, softmax over all visible
keys in the mean over heads, that falls on the keys which the indexer selects. Only
queries that see more than model.index_topk keys count: the others keep everything. A
dense model is measured with its own attention and the keys that its indexer would
select, so that warm-up can be compared before and after.

The largest logit of a head is the largest scale * q . k in a row. It grows without
bound where Muon treats all heads as one matrix (Muon Split, GLM-5 2.1.1).

    for view in attention.views(model.params, model.config, batch):
        plt.imshow(view.mass[0])  # of the first row: queries by keys
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from glm5_jax import config as config_lib
from glm5_jax.evals import held_out, record
from glm5_jax.evals.probes import walk
from glm5_jax.model import block as block_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import indexer
from glm5_jax.model import selection as selection_lib
from glm5_jax.model.attention import grouped, latent_sliding, mla, window
from pallas_kernels import selection as forms

Keep = Bool[Array, "B T S"]
LAYER_TYPES = ("latent", "latent_sliding", "grouped", "grouped_sliding")  # with logits


class View(NamedTuple):
    """A layer's attention over all keys, beside the keys that its index selects."""

    label: str  # e.g. "layer_00"
    mass: Float[Array, "B T S"]  # in the mean over heads; sums to 1 over a query's keys
    selected: Bool[Array, "B T S"]
    visible: Bool[Array, "B T S"]


def views(
    params: dict, config: config_lib.ModelConfig, batch: held_out.Batch
) -> Iterator[View]:
    """Yields a view of every layer that has an index, in order.

    Args:
      params: of `transformer.table`.
      config: of the model. If its attention is dense, the selected keys are those that
        its indexers would select.
      batch: rows with their tokens, segment_ids and positions. The views of a layer
        take 4 bytes for each head, query and key.
    """
    keep = None
    for visit in walk.visits(params, config, batch):
        if visit.kind.index == "none":
            continue
        keep = _kept(visit, keep)
        context = visit.context
        mass = _mass(visit.params, visit.block.config, walk.normed(visit), context)
        visible = forms.visible(context.lo, context.hi, keep.shape[-1])
        yield View(visit.label, mass, keep, visible)


def _recall(
    subject: record.Subject, setting: record.Setting, tasks: record.Tasks
) -> Iterator[tuple[int, record.Answer]]:
    """Yields the recall of each row: over the layers with an index, and of each."""

    def measure(visit: walk.Visit, keep: Array | None) -> tuple[walk.Figures, Any]:
        if visit.kind.index == "none":
            return {}, keep
        config, x = visit.block.config, walk.normed(visit)
        keep = _kept(visit, keep)
        mass = kept_mass(visit.params, config, x, visit.context, keep)
        has_choice = visit.context.hi - visit.context.lo > config.index_topk
        sums = jnp.sum(jnp.where(has_choice, mass, 0), axis=1)
        return {"recall": (sums, jnp.sum(has_choice, axis=1))}, keep

    for numbers, batch in walk.batches(subject, setting, tasks):
        yield from walk.answers(numbers, batch, subject, measure)


def _logits(
    subject: record.Subject, setting: record.Setting, tasks: record.Tasks
) -> Iterator[tuple[int, record.Answer]]:
    """Yields the largest logit of each row: of all heads, and of each."""
    for numbers, batch in walk.batches(subject, setting, tasks):
        found: dict[str, np.ndarray] = {}
        for visit in walk.visits(subject.params, subject.config, batch):
            if visit.kind.attention not in LAYER_TYPES:
                continue
            x = walk.normed(visit)
            values = largest(visit.params, x, visit.context, visit.block)
            for head, of_rows in enumerate(np.asarray(values)):
                found[f"largest/{visit.label}/head_{head:02d}"] = of_rows
        found = {"largest": np.max([*found.values()], axis=0), **found}
        for i, number in enumerate(numbers):
            figures = {name: (float(x[i]), 1.0) for name, x in found.items()}
            yield number, record.Answer(figures)


def _kept(visit: walk.Visit, before: Array | None) -> Bool[Array, "B T S"]:
    """Marks the keys of the layer's own index, or those of the index before it."""
    if visit.kind.owns_indexer:
        x, config = walk.normed(visit), visit.block.config
        return selected(visit.params, config, x, visit.context)
    assert before is not None, "the first layer with an index owns it"
    return before


@functools.partial(jax.jit, static_argnames="config")
def selected(
    params: dict,
    config: config_lib.ModelConfig,
    x: Float[Array, "B T D"],
    context: context_lib.Context,
) -> Bool[Array, "B T S"]:
    """Marks the keys that a layer's indexer selects, whatever its attention reads."""
    sparse = dataclasses.replace(config, attention="sparse")
    c_q = mla.query_latent(params["self_attn"], config, x)
    index = indexer.select(params["indexer"], sparse, x, c_q, context)
    chosen = None
    if not isinstance(index.selection, selection_lib.AllVisible):
        [chosen] = index.selection
    return forms.as_rows(context.lo, context.hi, chosen, x.shape[1])


@functools.partial(jax.jit, static_argnames="config")
def kept_mass(
    params: dict,
    config: config_lib.ModelConfig,
    x: Float[Array, "B T D"],
    context: context_lib.Context,
    keep: Bool[Array, "B T S"],
) -> Float[Array, "B T"]:
    """Returns the attention on marked keys, in the mean over heads."""

    def of_head(logits: Array) -> Array:
        return jnp.sum(jnp.where(keep, jax.nn.softmax(logits, axis=-1), 0), axis=-1)

    q, k = _latent_heads(params, config, x, context)
    return jnp.mean(_by_head(of_head, q, k, context), axis=0)


@functools.partial(jax.jit, static_argnames="config")
def _mass(
    params: dict,
    config: config_lib.ModelConfig,
    x: Float[Array, "B T D"],
    context: context_lib.Context,
) -> Float[Array, "B T S"]:
    """Returns the attention on every key, in the mean over heads; 0 on hidden keys."""
    q, k = _latent_heads(params, config, x, context)
    softmax = functools.partial(jax.nn.softmax, axis=-1)
    mass = jnp.mean(_by_head(softmax, q, k, context), axis=0)
    return jnp.where(forms.visible(context.lo, context.hi, k.shape[1]), mass, 0)


@functools.partial(jax.jit, static_argnames="block")
def largest(
    params: dict,
    x: Float[Array, "B T D"],
    context: context_lib.Context,
    block: block_lib.Block,
) -> Float[Array, "N B"]:
    """Returns the largest logit of each head in each row."""
    attention, config = block.attention, block.config
    if isinstance(attention, grouped.GroupedAttention):
        q, k, context = attention.queries_and_keys(params, x, context)
    else:
        if isinstance(attention, latent_sliding.SlidingLatentAttention):
            context = window.narrowed(context, config.variants.sliding_window)
        q, k = _latent_heads(params, config, x, context)
    return _by_head(lambda logits: jnp.max(logits, axis=(1, 2)), q, k, context)


def _latent_heads(
    params: dict,
    config: config_lib.ModelConfig,
    x: Float[Array, "B T D"],
    context: context_lib.Context,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S N H"]]:
    """Returns the scaled queries and the keys of every head of MLA."""
    attn = params["self_attn"]
    c_q = mla.query_latent(attn, config, x)
    kv = mla.latent(attn, config, x, context)
    every = selection_lib.AllVisible()
    _, softmax = mla.expanded(attn, config, c_q, kv, context, every)
    q = softmax.q.astype(jnp.float32) * config.softmax_scale
    return q, softmax.k


def _by_head(
    function: Callable[[Array], Array],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    context: context_lib.Context,
) -> Array:
    """Maps over the logits [B, T, S] of one head after another; hidden ones are low."""
    visible = forms.visible(context.lo, context.hi, k.shape[1])

    def of_head(pair: tuple[Array, Array]) -> Array:
        q, k = (y.astype(jnp.float32) for y in pair)
        logits = jnp.einsum("bth,bsh->bts", q, k)
        return function(jnp.where(visible, logits, jnp.finfo(jnp.float32).min))

    return lax.map(of_head, (jnp.moveaxis(q, 2, 0), jnp.moveaxis(k, 2, 0)))


def _recall_rules(config: config_lib.ModelConfig, length: int) -> list[record.Rule]:
    return [
        (
            config.index_topk < length,
            f"Suite recall needs rows longer than model.index_topk={config.index_topk} "
            f"tokens, got {length}: shorter ones leave nothing to select.",
        )
    ]


RECALL = record.Suite(
    name="recall",
    asks="The share of the attention's mass that falls on the indexer's selection.",
    tasks=held_out.rows,
    rows_per_task=1,
    answer=_recall,
    needs=frozenset({"tokenizer", "latent"}),
    rules=_recall_rules,
)
LOGITS = record.Suite(
    name="attention_logits",
    asks="The largest attention logit of each head in a row.",
    tasks=held_out.rows,
    rows_per_task=1,
    answer=_logits,
    needs=frozenset({"tokenizer", "softmax"}),
)
