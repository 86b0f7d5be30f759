"""Lists the keys that bits mark, on TPU, in one pass over the bits without a sort.

A TensorCore cannot scatter, but it can shift lanes. A vector of 128 keys closes its
gaps in 7 steps. A marked key is d lanes behind its place, where d is the number of
unmarked keys before it, counted by a product with a triangle of ones. Step p moves the
key by 2^p if bit p of d is set; in this order of bits no two keys ever collide. The
sublanes of a vector are eight queries. XLA would gather 2048 words per query, or sort.
Neither was timed, nor was this kernel (55 bundles per vector on v5p).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, UInt32

from pallas_kernels import mapped, selection

QUERIES = 8  # sublanes of a vector
LANES = selection.LANES
VECTORS = selection.RUN // LANES  # for the keys of 128 words
GROUP = 8  # vectors whose steps overlap


def list_from_bits(
    bits: UInt32[Array, "B T W"], topk: int, *, interpret: bool
) -> Int[Array, "B T K"]:
    """Lists at most `topk` marked keys, ascending, padded with -1."""
    batch, num_queries, words = bits.shape
    bits = jnp.pad(bits, ((0, 0), (0, -num_queries % QUERIES), (0, 0)))
    width = -(-topk // LANES) * LANES
    tile = lambda size: pl.BlockSpec((None, QUERIES, size), lambda b, t: (b, t, 0))
    lists = mapped.pallas_call(
        _kernel,
        grid=(batch, bits.shape[1] // QUERIES),
        in_specs=[tile(words)],
        out_specs=tile(width),
        out_shape=jax.ShapeDtypeStruct((*bits.shape[:2], width), jnp.int32),
        scratch_shapes=[
            pltpu.VMEM((QUERIES, LANES), jnp.int32),
            pltpu.VMEM((VECTORS * QUERIES, LANES), jnp.int32),
            pltpu.VMEM((VECTORS * QUERIES, LANES), jnp.int32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel")
        ),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="list_from_bits",
    )(bits)
    return lists[:, :num_queries, :topk]


def _kernel(bits, lists, listed, keys, slots):
    """Processes QUERIES queries; `listed` counts their listed keys, in every lane."""
    lists[...] = jnp.full(lists.shape, -1, jnp.int32)
    listed[...] = jnp.zeros_like(listed)
    row = lax.broadcasted_iota(jnp.int32, (LANES, 2 * LANES), 0)
    column = lax.broadcasted_iota(jnp.int32, (LANES, 2 * LANES), 1)
    counter = ((row < column) | (column >= LANES)).astype(jnp.bfloat16)

    def run(i, _):
        words = bits[:, pl.ds(pl.multiple_of(i * LANES, LANES), LANES)]
        words = lax.bitcast_convert_type(words, jnp.int32)

        @pl.when(jnp.max((words != 0).astype(jnp.int32)) > 0)
        def _():
            start = jnp.min(listed[...])

            def group(j, _):
                count, part = listed[...], pl.ds(j * GROUP * QUERIES, GROUP * QUERIES)
                marks = _marks(words, j * GROUP)
                first = i * selection.RUN + j * GROUP * LANES
                keys[part], slots[part], listed[...] = _close_gaps(
                    marks, first, counter, count
                )

            lax.fori_loop(0, VECTORS // GROUP, group, None)
            end = jnp.minimum(jnp.max(listed[...]), lists.shape[1])

            def store(slot, _):
                place = pl.ds(pl.multiple_of(slot * LANES, LANES), LANES)
                coming = jnp.where(slots[...] == slot, keys[...], -1)
                coming = jnp.max(coming.reshape(VECTORS, QUERIES, LANES), axis=0)
                lists[:, place] = jnp.maximum(lists[:, place], coming)

            lax.fori_loop(start // LANES, (end + LANES - 1) // LANES, store, None)

    lax.fori_loop(0, bits.shape[1] // LANES, run, None)


def _marks(words, first):
    """Returns 0 or 1 for the keys of GROUP vectors, [GROUP * QUERIES, LANES]."""
    return jnp.concatenate([(words >> (first + j)) & 1 for j in range(GROUP)], axis=0)


def _close_gaps(marks, first, counter, count):
    """Moves the marked keys of GROUP vectors to their lanes of the list.

    Args:
      marks: [GROUP * QUERIES, LANES].
      first: key of the first lane.
      counter: [LANES, 2 LANES]; counts the marks before each lane, and all marks.
      count: [QUERIES, LANES], keys already listed, the same in every lane.

    Returns:
      The keys; the vector of the list where each goes, or -1; and the new count.
    """
    exact = marks.astype(jnp.float32).astype(jnp.bfloat16)
    sums = jnp.dot(exact, counter, preferred_element_type=jnp.float32)
    before, total = jnp.split(sums.astype(jnp.int32), 2, axis=1)
    counts = [count]
    for j in range(GROUP):
        counts.append(counts[-1] + total[j * QUERIES : (j + 1) * QUERIES])
    count = jnp.concatenate(counts[:-1], axis=0)
    lane = lax.broadcasted_iota(jnp.int32, marks.shape, 1)
    distance = jnp.where(marks > 0, lane - before, 0)
    for p in range(LANES.bit_length() - 1):
        step = 1 << p
        coming = pltpu.roll(distance, LANES - step, 1)
        staying = jnp.where((distance & step) > 0, 0, distance)
        distance = jnp.where((coming & step) > 0, coming, staying)
    vector = lax.broadcasted_iota(jnp.int32, marks.shape, 0) // QUERIES
    key = first + vector * LANES + lane + distance
    rank = (lane - count) & (LANES - 1)  # among the keys of a vector
    key = jnp.take_along_axis(key, rank, axis=1, mode="promise_in_bounds")
    slot = jnp.where(rank < total, (count + rank) // LANES, -1)
    return key, slot, counts[-1]
