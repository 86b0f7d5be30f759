"""Flash attention on GPUs, in Triton, over selected keys.

cuDNN's attention takes a causal or sliding mask, or a bias [T, S], but neither bits nor
a range of keys per query, and a bias is too large to allocate. Mosaic's attention would
need a separate kernel for each mask, written for the tensor memory accelerator, whose
gain could not be timed here. Triton's compiled code was inspected at 256 dims, not
timed: wgmma throughout and never serialised, copies of 16 bytes, no spills except 7
words of dv without a selection.

128 queries share a block of 64 keys, because a tile of fewer queries would exceed the
bandwidth of the L2 cache (64 KB of keys and values for 8.4 MFLOP of each head's tile).
"""

import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from pallas_kernels import block_sizes, capabilities, dispatch, triton_call
from pallas_kernels.dense_attention import gpu_backward, gpu_words

LOG2E = gpu_backward.LOG2E
HIDDEN = tl.constexpr(-1e30)  # score of a key that does not count
FLOAT32_TILE = capabilities.Tile((32, 32), 4, 2)


def dense_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N O"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    selected: Array | None,
    scale: float,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N O"], Float[Array, "B N T"]]:
    """See `pallas_kernels.dense_attention`."""
    return _attend(q, k, v, lo, hi, selected, scale, interpret)


def unsupported_dense_attention(q: Array, k: Array, v: Array, *_: Any) -> str | None:
    """Returns why these arguments cannot be taken, or None."""
    dims = (q.shape[-1], v.shape[-1])
    is_taken = triton_call.is_split(dims[0]) and dims[0] <= 256
    if not is_taken or dims[1] not in (16, 32, 64, 128, 256):
        return (
            "head dims must be up to 256, q's and k's a power of two or the sum of "
            f"two, v's a power of two, each of 16 or more, got {dims}."
        )
    is_known = q.dtype in (jnp.bfloat16, jnp.float32)
    if not is_known or k.dtype != v.dtype or k.dtype not in (q.dtype, jnp.float32):
        dtypes = f"{q.dtype}, {k.dtype} and {v.dtype}"
        return f"q must be bfloat16 or float32, k and v the same or float32: {dtypes}."
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attend(
    q: Array,
    k: Array,
    v: Array,
    lo: Array,
    hi: Array,
    selected: Array | None,
    scale: float,
    interpret: bool,
) -> tuple[Array, Array]:
    batch, num_queries, heads, dim = q.shape
    num_keys, value_dim = v.shape[1], v.shape[-1]
    words = gpu_words.row_words(selected, num_keys, interpret)
    rest, is_half = triton_call.split(dim)[1], q.dtype.itemsize == 2
    tiles = block_sizes.gpu().for_heads(rest)
    tile = tiles.dense_attention if is_half else FLOAT32_TILE
    rows, cols = tile.sizes
    sizes: dict[str, Any] = {
        "T": num_queries, "S": num_keys, "N": heads, "H": dim, "R": rest,
        "O": value_dim, "WORDS": 0 if words is None else words.shape[1],
        "P": 0 if words is None else words.shape[2],
        "SCALE": scale, "BM": rows, "BN": cols,
    }  # fmt: skip
    out, lse = triton_call.call(
        _forward_kernel,
        q,
        k.astype(q.dtype),
        v.astype(q.dtype),
        lo,
        hi,
        lo if words is None else words,
        out_shape=[
            jax.ShapeDtypeStruct((batch, num_queries, heads, value_dim), q.dtype),
            jax.ShapeDtypeStruct((batch, heads, num_queries), jnp.float32),
        ],
        grid=(triton.cdiv(num_queries, rows), heads, batch),
        num_warps=tile.warps,
        num_stages=tile.stages,
        interpret=interpret,
        **sizes,
    )
    return out, lse


def _forward(q, k, v, lo, hi, selected, scale, interpret):
    args = (q, k, v, lo, hi, selected)
    out, lse = dispatch.saved(_attend(*args, scale, interpret))
    return (out, lse), (*args, out, lse)


def _backward(scale, interpret, residuals, cotangents):
    q, k, v, lo, hi, selected, out, lse = residuals
    d_out, d_lse = cotangents
    shift = jnp.einsum("btno,btno->bnt", out, d_out, preferred_element_type=jnp.float32)
    words = gpu_words.row_words(selected, k.shape[1], interpret)
    # In float32 bounds are exact up to 2^24.
    bounds = [
        jnp.broadcast_to(x[:, None].astype(jnp.float32), lse.shape) for x in (lo, hi)
    ]
    stats = (lse * gpu_backward.LOG2E.value, shift - d_lse, *bounds)
    stats = jnp.stack([gpu_words.padded(x) for x in stats], -1)
    grads = gpu_backward.gradients((q, d_out, stats), k, v, words, scale, interpret)
    return *grads, None, None, None


_attend.defvjp(_forward, _backward)


@triton.jit
@typing.no_type_check
def _forward_kernel(
    q, k, v, lo, hi, words, out, lse,
    T: tl.constexpr, P: tl.constexpr, S: tl.constexpr, N: tl.constexpr,
    H: tl.constexpr, R: tl.constexpr, O: tl.constexpr, SCALE: tl.constexpr,
    WORDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attends for a tile of a head's queries; if causal, long tiles start first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = tile * BM + tl.arange(0, BM)
    is_row = rows < T
    low = tl.load(lo + batch * T + rows, mask=is_row, other=0)
    high = tl.load(hi + batch * T + rows, mask=is_row, other=0)
    sees = low < high
    last = tl.max(tl.where(sees, high, 0))
    begin = tl.min(tl.where(sees, low, last)) // BN * BN
    end = tl.cdiv(last, BN) * BN
    q_at = q + (batch * T + tile * BM) * (N * H) + head * H
    q_tile = _queries(q_at, is_row, N * H, H - R, BM)
    q_rest = q_tile
    if R > 0:
        q_rest = _queries(q_at + (H - R), is_row, N * H, R, BM)
    k += batch * (S * N * H) + head * H
    v += batch * (S * N * O) + head * O
    words += batch * (WORDS * P) + rows[:, None]
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), HIDDEN, tl.float32)
    mean = tl.zeros((BM, O), tl.float32)
    if WORDS > 0:
        for start in range(begin, end, BN):
            total, top, mean = _block(
                start, total, top, mean, q_tile, q_rest, k, v, words, low, high,
                P, S, N, H, R, O, SCALE, WORDS, BN, False,
            )  # fmt: skip
    else:
        # Blocks from `inside` to `outside` need no mask: all queries see them.
        inside = tl.cdiv(tl.max(tl.where(sees, low, 0)), BN) * BN
        inside = tl.minimum(inside, end)
        outside = tl.min(tl.where(sees, high, last)) // BN * BN
        outside = tl.maximum(outside, inside)
        for start in range(inside, outside, BN):
            total, top, mean = _block(
                start, total, top, mean, q_tile, q_rest, k, v, words, low, high,
                P, S, N, H, R, O, SCALE, WORDS, BN, True,
            )  # fmt: skip
        for step in range(0, inside - begin + end - outside, BN):
            start = begin + step
            start = tl.where(start < inside, start, start - inside + outside)
            total, top, mean = _block(
                start, total, top, mean, q_tile, q_rest, k, v, words, low, high,
                P, S, N, H, R, O, SCALE, WORDS, BN, False,
            )  # fmt: skip
    found = sees & (top > 0.5 * HIDDEN)
    mean = tl.where(found[:, None], mean / total[:, None], 0)
    out_at = out + (batch * T + tile * BM) * (N * O) + head * O
    out_at += tl.arange(0, BM)[:, None] * (N * O) + tl.arange(0, O)[None, :]
    tl.store(out_at, mean.to(out.dtype.element_ty), mask=is_row[:, None])
    total = tl.where(found, (top + tl.log2(total)) / LOG2E, 0)
    tl.store(lse + (batch * N + head) * T + rows, total, mask=is_row)


@triton.jit
@typing.no_type_check
def _queries(
    q, is_row, STEP: tl.constexpr, DIM: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Loads DIM numbers of each query of a tile, zeros where there is none."""
    q += tl.arange(0, BM)[:, None] * STEP + tl.arange(0, DIM)[None, :]
    return tl.load(q, mask=is_row[:, None], other=0.0)


@triton.jit
@typing.no_type_check
def _block(
    start, total, top, mean, q_tile, q_rest, k, v, words, low, high,
    P: tl.constexpr, S: tl.constexpr, N: tl.constexpr, H: tl.constexpr,
    R: tl.constexpr, O: tl.constexpr, SCALE: tl.constexpr, WORDS: tl.constexpr,
    BN: tl.constexpr, IS_INSIDE: tl.constexpr,
):  # fmt: skip
    """Adds a block of keys: sum of weights, largest score, weighted sum of values."""
    k_tile, k_rest = gpu_backward.tiles_of(k, start, S, N, H, R, BN, IS_INSIDE)
    v_tile = gpu_backward.tile_of(v, start, S, N * O, O, BN, IS_INSIDE)
    scores = gpu_backward.scores_of(q_tile, q_rest, k_tile, k_rest, R)
    scores *= SCALE * LOG2E
    if not IS_INSIDE:
        cols = tl.arange(0, BN)[None, :]
        keep = gpu_backward.kept(
            words, low[:, None], high[:, None], cols, start, P, WORDS, BN
        )
        scores = tl.where(keep, scores, HIDDEN)
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weights, 1)
    mean = tl.dot(
        weights.to(v_tile.dtype), v_tile, mean * shrink[:, None], input_precision="ieee"
    )
    return total, higher, mean
