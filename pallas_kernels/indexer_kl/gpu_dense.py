"""Triton kernels: the loss over all visible keys, or those that bits select.

Kernels process a chunk of queries at a time. The head-averaged probabilities of the
attention are four fifths of the work. They are computed once and written to HBM
([chunk, S]; -1 for a key that does not count). Then the loss and its gradient follow,
with a row of q per query and indexer head. k's gradient is summed by tiles of keys, in
order, without atomics.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import triton
from jax import lax
from jaxtyping import Array

from pallas_kernels import block_sizes, capabilities, dispatch, selection, triton_call
from pallas_kernels.indexer_kl import gpu_dense_tiles as tiles
from pallas_kernels.indexer_kl import gradient as gradient_lib

MAX_HEADS = 128  # of the indexer
MAX_HEAD_DIM = 256  # of the attention: wider tiles do not fit in shared memory
QUERIES = 128  # a chunk is a multiple of them, as they are of every tile's
KEYS = 64  # rows of HBM are a multiple of them
# Queries per pass: with 32 heads 384 tiles, which an H200 runs at once.
CHUNK = 1536


def unsupported_indexer_kl_loss(
    main: tuple, index: tuple, *_: typing.Any
) -> str | None:
    """Returns why the kernels cannot take these arguments, or None."""
    (q, k, _), (q_index, k_index, _) = main, index
    heads, dim = q_index.shape[2:]
    sizes = (q.shape[3], dim)
    is_taken = triton_call.is_split(sizes[0]) and sizes[0] <= MAX_HEAD_DIM
    if not is_taken or dim < 16 or dim & (dim - 1):
        return (
            f"q's last axis must be up to {MAX_HEAD_DIM}, a power of two or the sum of "
            f"two, q_index's a power of two, each of 16 or more, got {sizes}."
        )
    if heads > MAX_HEADS or heads & (heads - 1):
        return (
            "the indexer's heads must be a power of two up to "
            f"{MAX_HEADS}, got {heads}."
        )
    dtypes = {x.dtype.name for x in (q, k, q_index, k_index)}
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16", "float32"}:
        return (
            "q and k, also the indexer's, must all be bfloat16, float16 or float32, "
            f"got {sorted(dtypes)}."
        )
    if k_index.shape[1] * CHUNK >= 2**31:
        return f"there may be up to {2**31 // CHUNK} keys, got {k_index.shape[1]}."
    if q.dtype == jnp.float32 and q.shape[3] > 128:
        return f"float32 fits for heads of up to 128, got {q.shape[3]}."
    return None


def indexer_kl_loss(
    main: tuple,
    index: tuple,
    lo: Array,
    hi: Array,
    selected: Array | None,
    weight: Array,
    scale: float,
    *,
    interpret: bool = False,
) -> Array:
    """See `pallas_kernels.indexer_kl_loss`."""
    if selected is not None and selected.dtype == bool:
        selected = selection.pack(selected)
    hi = jnp.where(weight == 0, 0, hi)
    return _loss(index, main, (lo, hi, selected, weight), scale, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _loss(index, main, rows, scale, interpret):
    return _over_chunks(index, main, rows, scale, interpret, with_gradient=False)[0]


def _forward(index, main, rows, scale, interpret):
    result = _over_chunks(index, main, rows, scale, interpret, with_gradient=True)
    return dispatch.saved(result)


def _backward(scale, interpret, gradient, factor):
    del scale, interpret
    return gradient_lib.times(factor, gradient), None, None


_loss.defvjp(_forward, _backward)


def _over_chunks(
    index: tuple,
    main: tuple,
    rows: tuple,
    scale: float,
    interpret: bool,
    with_gradient: bool,
) -> tuple[Array, tuple]:
    """Computes the loss and, on request, its gradient for q, k and w."""
    q_index, k_index, w = index
    batch, num_queries = q_index.shape[:2]
    chunk = min(CHUNK, triton.cdiv(num_queries, QUERIES) * QUERIES)
    num_chunks = triton.cdiv(num_queries, chunk)

    def add(dk: Array | None, start: Array) -> tuple[Array | None, tuple]:
        loss, sums = _compared(index, main, rows, start, scale, chunk, interpret)
        if dk is None:
            return None, (loss,)
        dq, dw, new = _gradient(index, rows, start, sums, interpret)
        return dk + new, (loss, dq, dw)

    def sequence(b: Array) -> tuple[Array | None, tuple]:
        firsts = jnp.arange(num_chunks, dtype=jnp.int32) * chunk
        starts = jnp.stack([jnp.broadcast_to(b, firsts.shape), firsts], axis=-1)
        shape = k_index.shape[1:]
        dk = jnp.zeros(shape, jnp.float32) if with_gradient else None
        dk, outs = lax.scan(add, dk, starts)
        join = lambda x: x.reshape(-1, *x.shape[2:])[:num_queries]
        return dk, jax.tree.map(join, outs)

    dk, outs = lax.map(sequence, jnp.arange(batch, dtype=jnp.int32))
    loss = jnp.sum(outs[0])
    if dk is None:
        return loss, ()
    gradient = (outs[1], dk.astype(k_index.dtype), outs[2].astype(w.dtype))
    return loss, gradient


def _compared(
    index: tuple,
    main: tuple,
    rows: tuple,
    start: Array,
    scale: float,
    chunk: int,
    interpret: bool,
) -> tuple[Array, tuple]:
    """Computes the loss of a chunk's queries, and the gradient's inputs."""
    (q, k, lse), (lo, hi, bits, weight) = main, rows
    rest = triton_call.split(q.shape[3])[1]
    tile = block_sizes.gpu().for_heads(rest).kl_target
    rows_of_tile, keys = tile.sizes
    sizes = _options(index, block_sizes.gpu().kl_loss)
    _, num_queries, num_heads, head_dim = q.shape
    given = jnp.zeros((1, 1, 1), jnp.uint32) if bits is None else bits
    target = triton_call.call(
        tiles.target_kernel,
        q,
        k,
        lse,
        lo,
        hi,
        given,
        start,
        out_shape=[jax.ShapeDtypeStruct((chunk, sizes["STRIDE"]), jnp.float32)],
        grid=(chunk // rows_of_tile, sizes["STRIDE"] // keys),
        num_warps=tile.warps,
        num_stages=tile.stages,
        interpret=interpret,
        SCALE=scale,
        T=num_queries,
        S=k.shape[1],
        N=num_heads,
        H=head_dim,
        R=rest,
        WORDS=0 if bits is None else bits.shape[2],
        STRIDE=sizes["STRIDE"],
        QUERIES=rows_of_tile,
        KEYS=keys,
    )[0]
    loss, norm, total = triton_call.call(
        tiles.loss_kernel,
        *index,
        lo,
        hi,
        weight,
        start,
        target,
        out_shape=[jax.ShapeDtypeStruct((chunk,), jnp.float32)] * 3,
        grid=(chunk // sizes["QUERIES"],),
        interpret=interpret,
        **sizes,
    )
    return loss, (target, norm, total)


def _gradient(
    index: tuple, rows: tuple, start: Array, sums: tuple, interpret: bool
) -> tuple[Array, Array, Array]:
    """Computes a chunk's gradients for its q and w, and for all k."""
    (q_index, k_index, _), (lo, hi, _, weight) = index, rows
    tiled, chunk = block_sizes.gpu(), sums[0].shape[0]
    heads, dim = q_index.shape[2:]
    sizes = _options(index, tiled.kl_gradient)
    dq, dw, d_scores = triton_call.call(
        tiles.gradient_kernel,
        *index,
        lo,
        hi,
        weight,
        start,
        *sums,
        out_shape=[
            jax.ShapeDtypeStruct((chunk, heads, dim), q_index.dtype),
            jax.ShapeDtypeStruct((chunk, heads), jnp.float32),
            jax.ShapeDtypeStruct(sums[0].shape, jnp.float32),
        ],
        grid=(chunk // sizes["QUERIES"],),
        interpret=interpret,
        **sizes,
    )
    sizes = _options(index, tiled.kl_dk)
    (dk,) = triton_call.call(
        tiles.dk_kernel,
        *index,
        lo,
        hi,
        start,
        d_scores,
        *_groups(lo, hi, start, chunk, sizes),
        out_shape=[jax.ShapeDtypeStruct(k_index.shape[1:], jnp.float32)],
        grid=(sizes["STRIDE"] // sizes["KEYS"],),
        interpret=interpret,
        **sizes,
    )
    return dq, dw, dk


def _groups(
    lo: Array, hi: Array, start: Array, chunk: int, sizes: dict
) -> tuple[Array, Array]:
    """Returns the range of a chunk's query tiles that see each tile of keys."""
    sequence, first = start
    t = first + jnp.arange(chunk)
    is_row = t < lo.shape[1]
    t = jnp.minimum(t, lo.shape[1] - 1)
    lo, hi = lo[sequence, t], hi[sequence, t]
    is_row &= lo < hi
    low = jnp.where(is_row, lo, sizes["STRIDE"]).reshape(-1, sizes["QUERIES"])
    high = jnp.where(is_row, hi, 0).reshape(-1, sizes["QUERIES"])
    keys = sizes["KEYS"]
    key = jnp.arange(0, sizes["STRIDE"], keys)[:, None]
    sees = (jnp.min(low, 1)[None] < key + keys) & (jnp.max(high, 1)[None] > key)
    group = jnp.arange(low.shape[0], dtype=jnp.int32)[None]
    end = jnp.max(jnp.where(sees, group + 1, 0), axis=1)
    return jnp.min(jnp.where(sees, group, end[:, None]), axis=1), end


def _options(index: tuple, tile: capabilities.Tile) -> dict[str, typing.Any]:
    """Returns a kernel's options.

    It reads the probabilities of whole tiles, which `target_kernel` wrote: so a tile
    has no more queries and no more keys than one of that kernel.
    """
    q_index, k_index, _ = index
    _, num_queries, heads, dim = q_index.shape
    rows, keys = tile.sizes
    most, _ = block_sizes.gpu().kl_target.sizes
    return {
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "T": num_queries,
        "S": k_index.shape[1],
        "I": heads,
        "J": dim,
        "STRIDE": triton.cdiv(k_index.shape[1], KEYS) * KEYS,
        "QUERIES": min(max(rows // heads, 1), most),
        "KEYS": keys,
    }
