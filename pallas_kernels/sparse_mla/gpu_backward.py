"""The gradient of `sparse_mla` on GPUs: one kernel for dq and one for dkv.

A single one of Triton's would spill (accumulators of dq fill half of the registers) and
spilled bytes go through L2, so both kernels compute the scores; on Hopper gpu_hopper.py
has one for both. Every query adds to the rows of
dkv that it lists, with atomics in float32. If deterministic, each program adds to its
own array, and these arrays are summed in order.
"""

import typing

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import block_sizes, capabilities, triton_call
from pallas_kernels.sparse_mla import gpu_hopper

KEYS_FLOAT32 = 16
CHUNK = 128  # columns of dkv at a time
ARRAY_BYTES = 2.5e9  # of all arrays, which hold a range of keys at a time


def gradients(
    residuals: tuple[Array, Array, Array, Array, Array],
    cotangents: tuple[Array, Array],
    scale: float,
    deterministic: bool,
    interpret: bool,
) -> tuple[Float[Array, "B T N row"], Float[Array, "B S row"]]:
    """Gradients of q and kv.

    d_scores = scale P (d_out kv - shift) with shift = out . d_out - d_lse.

    Args:
      residuals: q [B, T, N, row], kv [B, S, row], indices [B, T, K], out [B, T, N, C]
        and lse [B, N, T].
      cotangents: cotangents of out and lse.
      scale: see `sparse_mla`.
      deterministic: see `sparse_mla`.
      interpret: see `triton_call.call`.
    """
    q, kv, indices, out, lse = residuals
    d_out, d_lse = cotangents
    dtype, kv = kv.dtype, kv.astype(q.dtype)
    products = out.astype(jnp.float32) * d_out.astype(jnp.float32)
    shift_BTN = jnp.sum(products, axis=-1) - d_lse.swapaxes(1, 2)
    inputs = (q, kv, indices, lse.swapaxes(1, 2), shift_BTN, d_out.astype(q.dtype))
    sizes = {
        "SCALE": scale,
        "T": q.shape[1],
        "S": kv.shape[1],
        "K": indices.shape[2],
        "N": q.shape[2],
        "C": out.shape[3],
        "R": kv.shape[2] - out.shape[3],
        "D": min(CHUNK, out.shape[3]),
    }
    count = jnp.sum(indices >= 0, axis=-1, dtype=jnp.int32)
    if not deterministic and gpu_hopper.suits(q, out.shape[3], interpret):
        dq, dkv = gpu_hopper.backward(inputs, count, scale)
        return dq, dkv.astype(dtype)
    dq = _dq(inputs, count, sizes, interpret)
    if deterministic:
        return dq, _dkv_in_order(inputs, dtype, sizes, interpret)
    units = q.shape[0] * q.shape[1] * _blocks(q.shape[2])
    first = jnp.zeros(2, jnp.int32)
    bounds = (jnp.zeros_like(count), count)
    dkv = _dkv(inputs, first, bounds, kv.shape, units, sizes, interpret)
    return dq, dkv.astype(dtype)


def block_heads(num_heads: int, tile: capabilities.Tile) -> int:
    """Returns the heads per program: those of a tile, or fewer."""
    return min(max(triton.next_power_of_2(num_heads), 16), tile.sizes[0])


def _blocks(num_heads: int) -> int:
    """Returns the blocks of heads of `_dkv_kernel`."""
    tile = block_sizes.gpu().sparse_mla_dkv
    return triton.cdiv(num_heads, block_heads(num_heads, tile))


def _dq(inputs: tuple, count: Array, sizes: dict, interpret: bool) -> Array:
    q, tile = inputs[0], block_sizes.gpu().sparse_mla_dq
    heads = block_heads(sizes["N"], tile)
    return triton_call.call(
        _dq_kernel,
        *inputs,
        count,
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        grid=(q.shape[0] * q.shape[1] * triton.cdiv(sizes["N"], heads),),
        num_warps=tile.warps,
        num_stages=tile.stages,
        interpret=interpret,
        HEADS=heads,
        KEYS=KEYS_FLOAT32 if q.dtype == jnp.float32 else tile.sizes[1],
        **sizes,
    )[0]


def _dkv(
    inputs: tuple,
    first: Int[Array, "2"],
    bounds: tuple[Array, Array],
    shape: tuple[int, ...],
    units: int,
    sizes: dict,
    interpret: bool,
) -> Float[Array, "sequences rows row"]:
    """Sums the rows' gradients into zeros of `shape`.

    Args:
      inputs: of the kernel.
      first: query of the inputs that is number 0 here, and key that is row 0 of the
        output.
      bounds: part of each query's list, from and to.
      shape: [B, S, row]; or [programs, range, row], and a program adds to its own.
      units: queries times blocks of heads.
      sizes: of the kernel.
      interpret: of `triton_call.call`.
    """
    is_own, tile = shape != inputs[1].shape, block_sizes.gpu().sparse_mla_dkv
    return triton_call.call(
        _dkv_kernel,
        *inputs,
        first,
        *bounds,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32)],
        grid=(shape[0] if is_own else units,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        zeroed_outputs=(0,),
        interpret=interpret,
        HEADS=block_heads(sizes["N"], tile),
        KEYS=KEYS_FLOAT32 if inputs[0].dtype == jnp.float32 else tile.sizes[1],
        UNITS=units,
        PROGRAMS=shape[0] if is_own else units,
        RANGE=shape[1] if is_own else 0,
        **sizes,
    )[0]


def _dkv_in_order(
    inputs: tuple, dtype: jnp.dtype, sizes: dict, interpret: bool
) -> Array:
    """A range of keys of a sequence at a time: [programs, range, row] in float32.

    There is a program for each multiprocessor. Program p adds the terms of queries p,
    p + programs, ... in order; then the programs' arrays are summed. The schedule of
    programs does not change the result.
    """
    _, kv, indices, *_ = inputs
    batch, num_keys, width = kv.shape
    units = sizes["T"] * _blocks(sizes["N"])
    programs = min(block_sizes.gpu().cores, units)
    num_ranges = triton.cdiv(num_keys * programs * width * 4, int(ARRAY_BYTES))
    size = triton.cdiv(num_keys, num_ranges)

    def add(first: tuple[Array, Array]) -> Array:
        sequence, key = first
        listed = indices[sequence]
        before = lambda end: jnp.sum(
            (listed >= 0) & (listed < end), axis=-1, dtype=jnp.int32
        )
        place = jnp.stack([sequence * sizes["T"], key])
        bounds = (before(key), before(key + size))
        shape = (programs, size, width)
        parts = _dkv(inputs, place, bounds, shape, units, sizes, interpret)
        return jnp.sum(parts, axis=0).astype(dtype)

    sequences = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), num_ranges)
    keys = jnp.tile(jnp.arange(num_ranges, dtype=jnp.int32) * size, batch)
    dkv = lax.map(add, (sequences, keys))
    return dkv.reshape(batch, num_ranges * size, width)[:, :num_keys]


@triton.jit
@typing.no_type_check
def _dq_kernel(
    q_ptr, kv_ptr, indices_ptr, lse_ptr, shift_ptr, d_out_ptr, count_ptr, dq_ptr,
    SCALE: tl.constexpr, T: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (N + HEADS - 1) // HEADS
    row = tl.program_id(0).to(tl.int64) // blocks
    first_head = tl.program_id(0) % blocks * HEADS
    head = first_head + tl.arange(0, HEADS)
    is_head = (head < N)[:, None]
    d, r = tl.arange(0, D)[None], C + tl.arange(0, R)[None]
    both, q_r, lse, shift = _load_query(
        q_ptr, lse_ptr, shift_ptr, d_out_ptr, row, first_head, N, C, R, D, HEADS
    )
    kv_ptr += row // T * (S * (C + R))
    indices_ptr += row * K
    dq = ()
    for _i in tl.static_range(C // D):
        dq = dq + (tl.zeros([HEADS, D], tl.float32),)  # noqa: RUF005
    dq_r = tl.zeros([HEADS, R], tl.float32)

    count = tl.load(count_ptr + row)
    for first in range(0, count, KEYS):
        k = first + tl.arange(0, KEYS)
        key = triton_call.listed(indices_ptr + k, k < count)[:, None] * (C + R)
        kv = _load_chunks(kv_ptr + key, None, C, D)
        kv_r = tl.load(kv_ptr + key + r)
        _, d_scores = _d_scores(both, q_r, lse, shift, kv, kv_r, k < count, SCALE)
        d_scores = d_scores.to(kv_r.dtype)
        new = ()
        for i in tl.static_range(C // D):
            added = tl.dot(d_scores, kv[i], dq[i], input_precision="ieee")
            new = new + (added,)  # noqa: RUF005
        dq = new
        # Scaled here, this sum is no product's accumulator, and Triton waits for the
        # products of the step; else ptxas runs those of the next one by one.
        dq_r += tl.dot(d_scores, kv_r, input_precision="ieee") * SCALE

    dq_ptr += row * (N * (C + R)) + head[:, None] * (C + R)
    for i in tl.static_range(C // D):
        part = (dq[i] * SCALE).to(dq_ptr.dtype.element_ty)
        tl.store(dq_ptr + i * D + d, part, is_head)
    tl.store(dq_ptr + r, dq_r.to(dq_ptr.dtype.element_ty), is_head)


@triton.jit
@typing.no_type_check
def _dkv_kernel(
    q_ptr, kv_ptr, indices_ptr, lse_ptr, shift_ptr, d_out_ptr, first_ptr, start_ptr,
    end_ptr, dkv_ptr,
    SCALE: tl.constexpr, T: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr, D: tl.constexpr, UNITS: tl.constexpr, PROGRAMS: tl.constexpr,
    RANGE: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (N + HEADS - 1) // HEADS
    d, r = tl.arange(0, D)[None], C + tl.arange(0, R)[None]
    first_row = tl.load(first_ptr)
    first_key = tl.load(first_ptr + 1)
    for unit in range(tl.program_id(0), UNITS, PROGRAMS):
        start = tl.load(start_ptr + unit // blocks)
        end = tl.load(end_ptr + unit // blocks)
        if start < end:
            row = (first_row + unit // blocks).to(tl.int64)
            first_head = unit % blocks * HEADS
            both, q_r, lse, shift = _load_query(
                q_ptr, lse_ptr, shift_ptr, d_out_ptr, row, first_head, N, C, R, D, HEADS
            )
            kv_row_ptr = kv_ptr + row // T * (S * (C + R))
            if RANGE > 0:  # this program's own array
                array = tl.program_id(0).to(tl.int64) * (RANGE * (C + R))
            else:
                array = row // T * (S * (C + R))
            sum_ptr = dkv_ptr + (array - first_key * (C + R))
            for first in range(start, end, KEYS):
                k = first + tl.arange(0, KEYS)
                is_key = (k < end)[:, None]
                s = triton_call.listed(indices_ptr + row * K + k, k < end)[:, None]
                if RANGE > 0:  # a descending list would write out of bounds
                    is_key &= (s >= first_key) & (s < first_key + RANGE)
                key = s * (C + R)
                kv = _load_chunks(kv_row_ptr + key, None, C, D)
                kv_r = tl.load(kv_row_ptr + key + r)
                probs, d_scores = _d_scores(
                    both, q_r, lse, shift, kv, kv_r, k < end, SCALE
                )
                d_scores *= SCALE
                weights = tl.permute(tl.join(d_scores, probs), (2, 0, 1))
                weights = tl.reshape(weights, (2 * HEADS, KEYS)).to(kv_r.dtype)
                for i in tl.static_range(C // D):
                    part = tl.dot(weights.T, both[i], input_precision="ieee")
                    place = sum_ptr + key + i * D + d
                    tl.atomic_add(place, part, is_key, sem="relaxed")
                d_scores = d_scores.to(kv_r.dtype)
                part = tl.dot(d_scores.T, q_r, input_precision="ieee")
                tl.atomic_add(sum_ptr + key + r, part, is_key, sem="relaxed")
        if RANGE > 0:
            tl.debug_barrier()  # separates the additions of two queries


@triton.jit
@typing.no_type_check
def _load_query(
    q_ptr, lse_ptr, shift_ptr, d_out_ptr, row, first_head,
    N: tl.constexpr, C: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    # Rows 0 .. HEADS of each chunk of `both` are q, the others d_out: one product of so
    # many rows keeps all warps busy, where they would compute two smaller ones twice.
    i = tl.arange(0, 2 * HEADS)
    place = row * N + first_head + i % HEADS
    start = tl.where(i < HEADS, q_ptr + place * (C + R), d_out_ptr + place * C)
    is_row = (first_head + i % HEADS < N)[:, None]
    both = _load_chunks(start[:, None], is_row, C, D)
    head = first_head + tl.arange(0, HEADS)
    q_ptr += (row * N + head)[:, None] * (C + R) + C
    q_r = tl.load(q_ptr + tl.arange(0, R)[None], (head < N)[:, None], 0.0)
    lse = tl.load(lse_ptr + row * N + head, head < N, 0.0)
    shift = tl.load(shift_ptr + row * N + head, head < N, 0.0)
    return both, q_r, lse, shift


@triton.jit
@typing.no_type_check
def _load_chunks(ptr, is_row, C: tl.constexpr, D: tl.constexpr):
    # A tuple, because Triton cannot slice a tile.
    chunks = ()
    for i in tl.static_range(C // D):
        place = ptr + i * D + tl.arange(0, D)[None]
        chunk = tl.load(place, is_row, None if is_row is None else 0.0)
        chunks = chunks + (chunk,)  # noqa: RUF005
    return chunks


@triton.jit
@typing.no_type_check
def _d_scores(both, q_r, lse, shift, kv, kv_r, is_key, SCALE: tl.constexpr):
    # Probabilities [HEADS, KEYS], and the gradient of the scaled scores.
    HEADS: tl.constexpr = q_r.shape[0]
    KEYS: tl.constexpr = kv_r.shape[0]
    products = tl.zeros([2 * HEADS, KEYS], tl.float32)
    for i in tl.static_range(len(kv)):
        products = tl.dot(both[i], kv[i].T, products, input_precision="ieee")
    products = tl.reshape(products, (2, HEADS, KEYS))
    scores, d_probs = tl.split(tl.permute(products, (1, 2, 0)))
    scores += tl.dot(q_r, kv_r.T, input_precision="ieee")
    log2_e: tl.constexpr = 1.4426950408889634
    probs = tl.exp2(scores * (SCALE * log2_e) - lse[:, None] * log2_e)
    probs = tl.where(is_key[None], probs, 0.0)
    return probs, probs * (d_probs - shift[:, None])
