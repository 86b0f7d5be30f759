"""Triton kernels that split the lists of a few queries among programs.

Each program attends to every SPLITS-th block of a query's list. A second kernel weights
the parts by their log-sum-exps. Rows of bytes are restored in registers.
"""

import math
import typing

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels import (
    block_sizes,
    capabilities,
    dispatch,
    latent_rows,
    triton_call,
)

HEADS_FLOAT32, KEYS_FLOAT32 = 16, 32  # without tensor cores; more would spill
VALUES = 128  # of a head, written by a combining program
LOG2_E = math.log2(math.e)


def unsupported_decode_sparse_mla(
    q: Array,
    kv: Array,
    indices: Array,
    page_table: Array | None,
    scale: float,
    value_dim: int,
    form: latent_rows.Form | None = None,
) -> str | None:
    """Returns why the kernels cannot take these arguments, or None."""
    del page_table, scale
    latent, rope = value_dim, q.shape[-1] - value_dim
    if latent < 16 or rope < 16 or latent & (latent - 1) or rope & (rope - 1):
        return (
            "value_dim and the rest of q's last axis must be powers of two of 16 or "
            f"more, got {latent} and {rope}."
        )
    dtype = kv.dtype if form is None else q.dtype
    if q.dtype != dtype or q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"q and kv must share a float dtype, got {q.dtype} and {dtype}."
    if indices.dtype != jnp.int32:
        return f"indices must be int32, got {indices.dtype}."
    if form is None:
        return None
    if kv.shape[-1] % 4:
        return f"rows of bytes must be multiples of 4 wide, got {kv.shape[-1]}."
    capability = dispatch.capability() or capabilities.HOPPER
    if form.codes == "float8_e4m3fn" and capability < capabilities.FLOAT8:
        return "codes of float8_e4m3fn need compute capability 8.9; int8 ones do not."
    return None


def decode_sparse_mla(
    q: Float[Array, "B T N row"],
    kv: Float[Array, "pages s row"] | UInt8[Array, "pages s width"],
    indices: Int[Array, "B T K"],
    page_table: Int[Array, "B n"] | None,
    scale: float,
    value_dim: int,
    form: latent_rows.Form | None = None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B N T"]]:
    """See `pallas_kernels.decode_sparse_mla`; `form` is that of rows of bytes."""
    splits = num_splits(q, indices.shape[2], form)
    args = (q, kv, indices, page_table, scale, value_dim)
    return attend(*args, splits, interpret, form)


def num_splits(q: Array, topk: int, form: latent_rows.Form | None = None) -> int:
    """Returns the programs per list, a power of two, to use all multiprocessors."""
    heads, keys = _tile(form).sizes
    rows = q.shape[0] * q.shape[1] * triton.cdiv(q.shape[2], heads)
    most = min(block_sizes.gpu().cores // rows, triton.cdiv(topk, keys))
    return 2 ** (max(most, 1).bit_length() - 1)


def _tile(form: latent_rows.Form | None) -> capabilities.Tile:
    """Returns the tile for rows of floats, or of bytes if they have a form."""
    sizes = block_sizes.gpu()
    return sizes.decode_sparse_mla if form is None else sizes.decode_sparse_mla_codes


def attend(q, kv, indices, page_table, scale, value_dim, splits, interpret, form=None):
    """See `decode_sparse_mla`; `splits`, a power of two, does not change the result."""
    batch, num_queries, num_heads, width = q.shape
    rows = batch * num_queries
    is_float32, tile = q.dtype == jnp.float32, _tile(form)
    most_heads = HEADS_FLOAT32 if is_float32 else tile.sizes[0]
    heads = min(max(triton.next_power_of_2(num_heads), 16), most_heads)
    is_whole = splits == 1
    out, lse = triton_call.call(
        _part_kernel,
        q,
        kv,
        indices,
        indices if page_table is None else page_table,
        out_shape=[
            jax.ShapeDtypeStruct(
                (rows, splits, num_heads, value_dim), q.dtype if is_whole else "float32"
            ),
            jax.ShapeDtypeStruct((rows, splits, num_heads), jnp.float32),
        ],
        grid=(rows * triton.cdiv(num_heads, heads), splits),
        num_warps=tile.warps,
        num_stages=tile.stages,
        interpret=interpret,
        SCALE=scale * LOG2_E,
        T=num_queries,
        K=indices.shape[2],
        N=num_heads,
        C=value_dim,
        R=width - value_dim,
        PAGE=kv.shape[1],
        PAGES=0 if page_table is None else page_table.shape[1],
        SPLITS=splits,
        SLOTS=triton.next_power_of_2(indices.shape[2]),
        HEADS=heads,
        KEYS=KEYS_FLOAT32 if is_float32 else tile.sizes[1],
        BYTES=0 if form is None else kv.shape[2],
        TILE=min(latent_rows.TILE, value_dim),
        IS_FLOAT8=form is not None and form.codes == "float8_e4m3fn",
    )
    if not is_whole:
        out, lse = _combined(out, lse, q.dtype, interpret)
    lse = lse.reshape(batch, num_queries, num_heads).swapaxes(1, 2)
    return out.reshape(*q.shape[:3], value_dim), lse


def _combined(out, lse, dtype, interpret):
    """Weights the parts of each list by their log-sum-exps."""
    rows, splits, num_heads, value_dim = out.shape
    values = min(VALUES, value_dim)
    return triton_call.call(
        _combine_kernel,
        out,
        lse,
        out_shape=[
            jax.ShapeDtypeStruct((rows, num_heads, value_dim), dtype),
            jax.ShapeDtypeStruct((rows, num_heads), jnp.float32),
        ],
        grid=(rows * num_heads, value_dim // values),
        interpret=interpret,
        N=num_heads,
        C=value_dim,
        SPLITS=splits,
        VALUES=values,
    )


@triton.jit
@typing.no_type_check
def _part_kernel(
    q_ptr, kv_ptr, indices_ptr, table_ptr, out_ptr, lse_ptr,
    SCALE: tl.constexpr, T: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    C: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr,
    SPLITS: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    BYTES: tl.constexpr, TILE: tl.constexpr, IS_FLOAT8: tl.constexpr,
):  # fmt: skip
    # One split of a query's list. Softmax in base 2: SCALE holds log2(e).
    blocks: tl.constexpr = (N + HEADS - 1) // HEADS
    row = tl.program_id(0).to(tl.int64) // blocks
    split = tl.program_id(1)
    head = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)
    is_head = (head < N)[:, None]
    c, r = tl.arange(0, C)[None], C + tl.arange(0, R)[None]
    q_ptr += row * (N * (C + R)) + head[:, None] * (C + R)
    q_c = tl.load(q_ptr + c, is_head, 0.0)
    q_r = tl.load(q_ptr + r, is_head, 0.0)
    indices_ptr += row * K
    slot = tl.arange(0, SLOTS)
    row_listed = tl.load(indices_ptr + slot, slot < K, -1)
    end = tl.max(tl.where(row_listed >= 0, slot + 1, 0))

    top = tl.full([HEADS], -1e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    out = tl.zeros([HEADS, C], tl.float32)
    for first in range(split * KEYS, end, SPLITS * KEYS):
        k = first + tl.arange(0, KEYS)
        s = tl.load(indices_ptr + k, k < end, -1)
        is_key = (s >= 0) & (s < (PAGE * PAGES if PAGES > 0 else PAGE))
        s = tl.where(is_key, s, 0)
        if PAGES > 0:
            page = tl.load(table_ptr + row // T * PAGES + s // PAGE, is_key, 0)
            key = page.to(tl.int64) * PAGE + s % PAGE
        else:
            key = row // T * PAGE + s
        dtype: tl.constexpr = q_ptr.dtype.element_ty
        kv_c, kv_r = _rows(
            kv_ptr, key, is_key, dtype, C, R, BYTES, TILE, IS_FLOAT8
        )  # fmt: skip
        scores = tl.dot(q_c, kv_c.T, input_precision="ieee")
        scores = tl.dot(q_r, kv_r.T, scores, input_precision="ieee")
        scores = tl.where(is_key[None], scores * SCALE, -1e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.where(is_key[None], tl.exp2(scores - new_top[:, None]), 0.0)
        total = total * shrink + tl.sum(weights, 1)
        out = out * shrink[:, None]
        out = tl.dot(weights.to(kv_c.dtype), kv_c, out, input_precision="ieee")
        top = new_top

    empty = 0.0 if SPLITS == 1 else -1e30
    safe = tl.where(total > 0, total, 1.0)
    lse = tl.where(total > 0, (top + tl.log2(safe)) * 0.6931471805599453, empty)
    place = (row * SPLITS + split) * N + head
    tl.store(lse_ptr + place, lse, head < N)
    out = (out / safe[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place[:, None] * C + c, out, is_head)


@triton.jit
@typing.no_type_check
def _rows(
    kv_ptr, key, is_key, dtype: tl.constexpr,
    C: tl.constexpr, R: tl.constexpr, BYTES: tl.constexpr, TILE: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
):  # fmt: skip
    # Latent and rotated key of rows: floats, or as `latent_rows.Form` has them.
    is_row = is_key[:, None]
    if BYTES == 0:
        at = kv_ptr + key[:, None] * (C + R)
        latent = tl.load(at + tl.arange(0, C)[None], is_row, 0.0)
        kept = tl.load(at + (C + tl.arange(0, R)[None]), is_row, 0.0)
    else:
        TILES: tl.constexpr = C // TILE
        tile = tl.arange(0, TILES)[None, :, None]
        code = tile * TILE + tl.arange(0, TILE)[None, None]
        row, is_tile = key[:, None, None], is_key[:, None, None]
        kind: tl.constexpr = tl.float8e4nv if IS_FLOAT8 else tl.int8
        # Exact; by way of bfloat16 integers take fewer registers.
        wide: tl.constexpr = tl.float32 if IS_FLOAT8 else tl.bfloat16
        codes = tl.load(kv_ptr + row * BYTES + code, is_tile, 0).to(kind, bitcast=True)
        scales_ptr = kv_ptr.to(tl.pointer_type(tl.float32)) + C // 4
        scales = tl.load(scales_ptr + row * (BYTES // 4) + tile, is_tile, 0.0)
        latent = (codes.to(wide).to(tl.float32) * scales).to(dtype)
        latent = tl.reshape(latent, [key.shape[0], C])
        SIZE: tl.constexpr = dtype.primitive_bitwidth // 8
        kept_ptr = kv_ptr.to(tl.pointer_type(dtype)) + (C + 4 * TILES) // SIZE
        at = kept_ptr + key[:, None] * (BYTES // SIZE)
        kept = tl.load(at + tl.arange(0, R)[None], is_row, 0.0)
    return latent, kept


@triton.jit
@typing.no_type_check
def _combine_kernel(
    parts_ptr, lses_ptr, out_ptr, lse_ptr,
    N: tl.constexpr, C: tl.constexpr, SPLITS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    # out = sum_i exp(lse_i) out_i / sum_i exp(lse_i), of one head.
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    c = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    place = (head // N * SPLITS + split) * N + head % N
    lses = tl.load(lses_ptr + place)
    parts = tl.load(parts_ptr + place[:, None] * C + c[None])
    top = tl.max(lses)
    is_empty = top < -1e29
    weights = tl.where(is_empty, 0.0, tl.exp(lses - top))
    total = tl.where(is_empty, 1.0, tl.sum(weights))
    out = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out_ptr + head * C + c, out.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + head, tl.where(is_empty, 0.0, top + tl.log(total)))
