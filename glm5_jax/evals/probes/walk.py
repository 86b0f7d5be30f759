"""Walks a model layer by layer, so that a probe can look into each."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glm5_jax import config as config_lib
from glm5_jax import depth
from glm5_jax.evals import held_out, record
from glm5_jax.model import attention as attention_lib
from glm5_jax.model import block as block_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import embedding, layers

MAX_SCORES = 2**27  # float32 numbers of a query and key each that are in memory at once
MAX_ROWS = 16


class Visit(NamedTuple):
    """A layer with its input, before it is run."""

    number: int
    block: block_lib.Block
    kind: depth.Kind
    params: dict  # the layer's, fetched
    x: Float[Array, "B T D"]
    context: context_lib.Context
    shared: Any  # what the layer before hands to its attention

    @property
    def label(self) -> str:
        """Returns the layer's name in figures, which sorts by number."""
        return f"layer_{self.number:02d}"


Pair = tuple[Array, Array]  # a sum and a weight of each row [B]
Figures = dict[str, Pair]
Measure = Callable[[Visit, Any], tuple[Figures, Any]]


def batches(
    subject: record.Subject, setting: record.Setting, tasks: record.Tasks
) -> Iterator[tuple[list[int], held_out.Batch]]:
    """Yields the rows that a probe reads at once, with their numbers."""
    fitting = max(1, MAX_SCORES // setting.length**2)  # one head after another
    size = min(MAX_ROWS, fitting, len(tasks) or 1)
    for numbers, _, batch in held_out.batches(tasks, size):
        yield numbers, batch


def answers(
    numbers: Sequence[int],
    batch: held_out.Batch,
    subject: record.Subject,
    measure: Measure,
) -> Iterator[tuple[int, record.Answer]]:
    """Yields the figures of each row: over all layers, then of each layer.

    Args:
      numbers: of the rows that are no padding.
      batch: of rows.
      subject: the model.
      measure: of a visit, and of what it kept at the layer before (None at first);
        returns figures, and what it keeps.
    """
    kept: Any = None
    found: dict[int, record.Figures] = {number: {} for number in numbers}
    for visit in visits(subject.params, subject.config, batch):
        figures, kept = measure(visit, kept)
        for name, (sums, weights) in jax.device_get(figures).items():
            for row, own, weight in zip(found.values(), sums, weights, strict=False):
                total = row.get(name, (0.0, 0.0))
                row[name] = total[0] + float(own), total[1] + float(weight)
                row[f"{name}/{visit.label}"] = float(own), float(weight)
    yield from ((number, record.Answer(row)) for number, row in found.items())


def visits(
    params: dict, config: config_lib.ModelConfig, batch: held_out.Batch
) -> Iterator[Visit]:
    """Yields every layer in order; each is run after its visit."""
    tokens = jnp.asarray(batch["tokens"])
    places = jnp.asarray(batch["segment_ids"]), jnp.asarray(batch["positions"])
    x, context = _start(params["embed_tokens"], config, tokens, *places)
    shared = attention_lib.first_shared(config, *tokens.shape, with_indexer_loss=False)
    numbered: dict[int, tuple[depth.Kind, str, str, int]] = {
        group.layer(repeat, p): (kind, f"layers_{g}", f"block_{p}", repeat)
        for g, group in enumerate(depth.layer_groups(config))
        for p, kind in enumerate(group.unit)
        for repeat in range(group.repeats)
    }
    for number in sorted(numbered):
        kind, group, name, repeat = numbered[number]
        block = block_lib.make(config, kind)
        own = _fetched(params[group][name], repeat, block)
        yield Visit(number, block, kind, own, x, context, shared)
        x, shared = _run(own, x, context, shared, block)


@functools.partial(jax.jit, static_argnames="config")
def _start(
    table: Array,
    config: config_lib.ModelConfig,
    tokens: Array,
    segment_ids: Array,
    positions: Array,
) -> tuple[Array, context_lib.Context]:
    context = context_lib.make_context(config, segment_ids, positions)
    return embedding.embed(table, config, tokens), context


@functools.partial(jax.jit, static_argnames="block")
def _fetched(stacked: dict, repeat: Any, block: block_lib.Block) -> dict:
    return block.fetched(jax.tree.map(lambda p: p[repeat], stacked))


@functools.partial(jax.jit, static_argnames="block")
def _run(
    params: dict, x: Array, context: context_lib.Context, shared: Any, block: Any
) -> tuple[Array, Any]:
    out = block.forward(params, x, context, shared)
    return out.x, out.shared


def normed(visit: Visit) -> Float[Array, "B T D"]:
    """Returns the input of the layer's attention."""
    eps = visit.block.config.rms_norm_eps
    return layers.rms_norm(visit.x, visit.params["input_layernorm"], eps)
