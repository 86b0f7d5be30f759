"""Gluon kernels for Hopper: the same sums as gpu.py's, with layouts chosen by hand.

Triton lets all eight warps compute the same scores, because another product follows.
Here two groups of four warps take half of a step's keys each, and give each other the
weights through shared memory. The next step's rows arrive meanwhile. The backward
kernel gathers a row once for both gradients, where Triton's kernels do it twice: five
products a step instead of seven. On an H200 half of its time goes to the additions to
the rows' gradients (docs/kernels.md).

Shared memory holds 64 heads of a query and 64 gathered rows, twice in the forward
kernel. Rows are 512 + 64 wide, as in GLM-5 and DeepSeek-V3.2.
"""

import math
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from pallas_kernels import capabilities, dispatch, triton_call

LATENT, ROPE = 512, 64
HEADS, KEYS = 64, 64  # of a program, and of a step
COLUMNS = 64  # of the rows' gradients, multiplied and added at a time; as many as ROPE
WARPS = 8
LOG2_E = math.log2(math.e)
_LOG2_E, _LN_2 = gl.constexpr(LOG2_E), gl.constexpr(math.log(2))

# Copies of 16 bytes: a warp takes 256 columns of a row, or four rows of 64 columns.
_WIDE = gl.constexpr(gl.BlockedLayout([8, 8], [1, 32], [8, 1], [1, 0]))
_NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
# Two groups of four warps share the columns of a product of 64 rows.
_OF_64 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
_OF_512 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
# The same after neighbouring threads exchanged two columns for two rows: each has four
# columns of a row, which one instruction adds.
_BY_FOUR = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 8], [0, 16]],
        lane_bases=[[8, 0], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, 32]],
        block_bases=[],
        shape=[64, 64],
    )
)
_ROWS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_LIST = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


def suits(q: Array, value_dim: int, interpret: bool) -> bool:
    """Returns whether the kernels take the queries, on the chip that is traced for."""
    return (
        dispatch.capability() == capabilities.HOPPER
        and not triton_call.is_interpreted(interpret)
        and q.dtype == jnp.bfloat16
        and (value_dim, q.shape[-1] - value_dim) == (LATENT, ROPE)
        and q.shape[2] % HEADS == 0
    )


def forward(
    q: Float[Array, "B T N row"],
    kv: Float[Array, "B S row"],
    indices: Int[Array, "B T K"],
    count: Int[Array, "B T"],
    scale: float,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B T N"]]:
    """Returns the attention's output, and the logarithm of each softmax's sum."""
    shape = q.shape[:3]
    out, lse = triton_call.call(
        _forward_kernel,
        q,
        kv,
        indices,
        count,
        out_shape=[
            jax.ShapeDtypeStruct((*shape, LATENT), q.dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        SCALE=scale * LOG2_E,
        **_options(q, kv, indices),
    )
    return out, lse


def backward(
    inputs: tuple[Array, ...], count: Int[Array, "B T"], scale: float
) -> tuple[Float[Array, "B T N row"], Float[Array, "B S row"]]:
    """Returns the gradients of q and, in float32, of kv.

    Args:
      inputs: q, kv, indices, the softmax's logarithms [B, T, N], what is subtracted
        from the gradient of each probability [B, T, N], and the output's gradient.
      count: keys of each list.
      scale: factor on the scores.
    """
    q, kv, indices, *_ = inputs
    dq, dkv = triton_call.call(
        _backward_kernel,
        *inputs,
        count,
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(kv.shape, jnp.float32),
        ],
        zeroed_outputs=(1,),
        SCALE=scale,
        D=COLUMNS,
        **_options(q, kv, indices),
    )
    return dq, dkv


def _options(q: Array, kv: Array, indices: Array) -> dict:
    batch, num_queries, num_heads, _ = q.shape
    return {
        "grid": (batch * num_queries * (num_heads // HEADS),),
        "num_warps": WARPS,
        "T": num_queries,
        "S": kv.shape[1],
        "K": indices.shape[2],
        "N": num_heads,
        "C": LATENT,
        "R": ROPE,
        "HEADS": HEADS,
        "KEYS": KEYS,
    }


@gluon.jit
@typing.no_type_check
def _forward_kernel(
    q_ptr, kv_ptr, indices_ptr, count_ptr, out_ptr, lse_ptr,
    SCALE: gl.constexpr, T: gl.constexpr, S: gl.constexpr, K: gl.constexpr,
    N: gl.constexpr, C: gl.constexpr, R: gl.constexpr, HEADS: gl.constexpr,
    KEYS: gl.constexpr,
):  # fmt: skip
    # Softmax in base 2: SCALE holds log2(e). A step multiplies the weights of the step
    # before, while it waits for its rows; the first one has no step before.
    row = gl.program_id(0).to(gl.int64) // (N // HEADS)
    at = row * N + gl.program_id(0) % (N // HEADS) * HEADS
    kv_ptr += row // T * (S * (C + R))
    indices_ptr += row * K
    count = gl.load(count_ptr + row)
    q_c, q_r, kv_c, kv_r, lists = _shared(q_ptr, 2, C, R, HEADS, KEYS)
    weights_s = gl.allocate_shared_memory(q_c.dtype, [HEADS, KEYS], _ROWS)
    _copy_list(indices_ptr, 0, count, lists.index(0), KEYS)
    _copy_list(indices_ptr, KEYS, count, lists.index(1), KEYS)
    _arrived()
    _copy_heads(q_ptr + at * (C + R), q_c, q_r, C, R, HEADS)
    _copy_keys(kv_ptr, lists.index(0), kv_c.index(0), kv_r.index(0), C, R)
    _arrived()
    scores = _scores(q_c, q_r, kv_c.index(0), kv_r.index(0))
    _copy_keys(kv_ptr, lists.index(1), kv_c.index(1), kv_r.index(1), C, R)
    _copy_list(indices_ptr, 2 * KEYS, count, lists.index(0), KEYS)
    scores = hopper.warpgroup_mma_wait(0, deps=[scores])
    column = gl.arange(0, KEYS, gl.SliceLayout(0, _OF_64))[None]
    # Above the scores of hidden keys, so that their weights are zeros without any key.
    top = gl.full([HEADS], -1e29, gl.float32, gl.SliceLayout(1, _OF_64))
    sums = gl.zeros([HEADS, KEYS], gl.float32, _OF_64)  # summed at the end
    out = gl.zeros([HEADS, C], gl.float32, _OF_512)
    top, sums, _ = _softmax(scores * SCALE, column < count, top, sums, weights_s)
    for first in range(KEYS, count, KEYS):
        now = first // KEYS & 1
        out = hopper.warpgroup_mma(weights_s, kv_c.index(1 - now), out, is_async=True)
        _arrived()
        scores = _scores(q_c, q_r, kv_c.index(now), kv_r.index(now))
        out = hopper.warpgroup_mma_wait(2, deps=[out])
        gl.thread_barrier()  # all warps have read the rows that are replaced
        _copy_keys(
            kv_ptr, lists.index(1 - now), kv_c.index(1 - now), kv_r.index(1 - now), C, R
        )
        _copy_list(indices_ptr, first + 2 * KEYS, count, lists.index(now), KEYS)
        scores = hopper.warpgroup_mma_wait(0, deps=[scores])
        is_key = first + column < count
        top, sums, shrink = _softmax(scores * SCALE, is_key, top, sums, weights_s)
        out = out * gl.convert_layout(shrink, gl.SliceLayout(1, _OF_512))[:, None]
    last = gl.maximum(count - 1, 0) // KEYS & 1
    out = hopper.warpgroup_mma(weights_s, kv_c.index(last), out, is_async=True)
    out = hopper.warpgroup_mma_wait(0, deps=[out])
    _arrived()

    total = gl.sum(sums, 1)
    safe = gl.where(total > 0, total, 1.0)
    lse = gl.where(total > 0, (top + gl.log2(safe)) * _LN_2, 0.0)
    gl.store(lse_ptr + at + gl.arange(0, HEADS, gl.SliceLayout(1, _OF_64)), lse)
    safe = gl.convert_layout(safe, gl.SliceLayout(1, _OF_512))
    _store(out_ptr + at * C, out / safe[:, None], C, _OF_512)


@gluon.jit
@typing.no_type_check
def _backward_kernel(
    q_ptr, kv_ptr, indices_ptr, lse_ptr, shift_ptr, d_out_ptr, count_ptr, dq_ptr,
    dkv_ptr,
    SCALE: gl.constexpr, T: gl.constexpr, S: gl.constexpr, K: gl.constexpr,
    N: gl.constexpr, C: gl.constexpr, R: gl.constexpr, HEADS: gl.constexpr,
    KEYS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    # The next step's rows arrive while this one's gradients are multiplied and added.
    row = gl.program_id(0).to(gl.int64) // (N // HEADS)
    at = row * N + gl.program_id(0) % (N // HEADS) * HEADS
    kv_ptr += row // T * (S * (C + R))
    dkv_ptr += row // T * (S * (C + R))
    indices_ptr += row * K
    count = gl.load(count_ptr + row)
    q_c, q_r, kv_c, kv_r, lists = _shared(q_ptr, 1, C, R, HEADS, KEYS)
    kv_c, kv_r = kv_c.index(0), kv_r.index(0)
    d_out = gl.allocate_shared_memory(q_c.dtype, [HEADS, C], _ROWS)
    probs_s = gl.allocate_shared_memory(q_c.dtype, [HEADS, KEYS], _ROWS)
    d_scores_s = gl.allocate_shared_memory(q_c.dtype, [HEADS, KEYS], _ROWS)
    _copy_list(indices_ptr, 0, count, lists.index(0), KEYS)
    _arrived()
    _copy_heads(q_ptr + at * (C + R), q_c, q_r, C, R, HEADS)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, _WIDE))
    _copy(d_out_ptr + at * C, head * C, d_out, C, _WIDE)
    _copy_keys(kv_ptr, lists.index(0), kv_c, kv_r, C, R)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, _OF_64))
    lse = (gl.load(lse_ptr + at + head) * _LOG2_E)[:, None]
    shift = gl.load(shift_ptr + at + head)[:, None]
    dq_c = gl.zeros([HEADS, C], gl.float32, _OF_512)
    dq_r = gl.zeros([HEADS, R], gl.float32, _OF_64)
    column = gl.arange(0, KEYS, gl.SliceLayout(0, _OF_64))[None]
    four = gl.arange(0, D, gl.SliceLayout(0, _BY_FOUR))[None]
    for first in range(0, count, KEYS):
        now = first // KEYS & 1
        _arrived()
        _copy_list(indices_ptr, first + KEYS, count, lists.index(1 - now), KEYS)
        scores = _scores(q_c, q_r, kv_c, kv_r)
        d_probs = _product(d_out, kv_c.permute((1, 0)))
        scores, d_probs = hopper.warpgroup_mma_wait(0, deps=[scores, d_probs])
        probs = gl.exp2(scores * (SCALE * _LOG2_E) - lse)
        probs = gl.where(first + column < count, probs, 0.0)
        probs_s.store(probs.to(q_c.dtype))
        d_scores_s.store((probs * (d_probs - shift) * SCALE).to(q_c.dtype))
        _arrived()
        dq_c = hopper.warpgroup_mma(d_scores_s, kv_c, dq_c, is_async=True)
        dq_r = hopper.warpgroup_mma(d_scores_s, kv_r, dq_r, is_async=True)
        part = _d_keys(d_scores_s, q_c.slice(0, D, 1), probs_s, d_out.slice(0, D, 1))
        dq_c, dq_r = hopper.warpgroup_mma_wait(2, deps=[dq_c, dq_r])
        gl.thread_barrier()  # all warps have read the rows that are replaced
        _copy_keys(kv_ptr, lists.index(1 - now), kv_c, kv_r, C, R)
        # Padding repeats the last key, with gradients of zero.
        key = gl.maximum(lists.index(now).load(gl.SliceLayout(1, _BY_FOUR)), 0)
        place = dkv_ptr + (key * (C + R))[:, None] + four
        _add_rows(place, part, d_scores_s, probs_s, q_c, q_r, d_out, C, D)
    _arrived()
    _store(dq_ptr + at * (C + R), dq_c, C + R, _OF_512)
    _store(dq_ptr + at * (C + R) + C, dq_r, C + R, _OF_64)


@gluon.jit
@typing.no_type_check
def _shared(
    q_ptr, STEPS: gl.constexpr, C: gl.constexpr, R: gl.constexpr, HEADS: gl.constexpr,
    KEYS: gl.constexpr,
):  # fmt: skip
    # Memory for a query's heads, the rows of some steps and the lists of two.
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    return (
        gl.allocate_shared_memory(dtype, [HEADS, C], _ROWS),
        gl.allocate_shared_memory(dtype, [HEADS, R], _ROWS),
        gl.allocate_shared_memory(dtype, [STEPS, KEYS, C], _ROWS),
        gl.allocate_shared_memory(dtype, [STEPS, KEYS, R], _ROWS),
        gl.allocate_shared_memory(gl.int32, [2, KEYS], _LIST),
    )


@gluon.jit
@typing.no_type_check
def _copy(ptr, row, smem, COLUMNS: gl.constexpr, layout: gl.constexpr):
    # Begins to copy columns of rows, which start at `row`.
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    place = ptr + row[:, None] + column[None]
    hopper.async_copy.async_copy_global_to_shared(smem, place)


@gluon.jit
@typing.no_type_check
def _copy_heads(
    ptr, smem_c, smem_r, C: gl.constexpr, R: gl.constexpr, HEADS: gl.constexpr
):
    head = gl.arange(0, HEADS, gl.SliceLayout(1, _WIDE))
    _copy(ptr, head * (C + R), smem_c, C, _WIDE)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, _NARROW))
    _copy(ptr + C, head * (C + R), smem_r, R, _NARROW)


@gluon.jit
@typing.no_type_check
def _copy_keys(ptr, list_s, smem_c, smem_r, C: gl.constexpr, R: gl.constexpr):
    key = gl.maximum(list_s.load(gl.SliceLayout(1, _WIDE)), 0)
    _copy(ptr, key * (C + R), smem_c, C, _WIDE)
    key = gl.maximum(list_s.load(gl.SliceLayout(1, _NARROW)), 0)
    _copy(ptr + C, key * (C + R), smem_r, R, _NARROW)


@gluon.jit
@typing.no_type_check
def _copy_list(ptr, first, count, smem, KEYS: gl.constexpr):
    # Padding repeats the last key; its weight is zero.
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    k = gl.minimum(first + gl.arange(0, KEYS, flat), gl.maximum(count - 1, 0))
    hopper.async_copy.async_copy_global_to_shared(smem, ptr + k)


@gluon.jit
@typing.no_type_check
def _arrived():
    # Waits for all copies, and lets products read what all threads have written.
    hopper.async_copy.commit_group()
    hopper.async_copy.wait_group(0)
    hopper.fence_async_shared()
    gl.thread_barrier()


@gluon.jit
@typing.no_type_check
def _product(a, b):
    # Begins a product of 64 rows and columns.
    zeros = gl.zeros([64, 64], gl.float32, _OF_64)
    return hopper.warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)


@gluon.jit
@typing.no_type_check
def _scores(q_c, q_r, kv_c, kv_r):
    scores = _product(q_c, kv_c.permute((1, 0)))
    return hopper.warpgroup_mma(q_r, kv_r.permute((1, 0)), scores, is_async=True)


@gluon.jit
@typing.no_type_check
def _d_keys(d_scores, q, probs, d_out):
    # Some columns of the rows' gradients: by the scores, and by the weights.
    part = _product(d_scores.permute((1, 0)), q)
    return hopper.warpgroup_mma(probs.permute((1, 0)), d_out, part, is_async=True)


@gluon.jit
@typing.no_type_check
def _add_rows(
    place, part, d_scores_s, probs_s, q_c, q_r, d_out, C: gl.constexpr, D: gl.constexpr
):
    # Adds the gradients of rows, D columns while the next D are multiplied.
    for i in gl.static_range(D, C, D):
        done = part
        part = _d_keys(d_scores_s, q_c.slice(i, D, 1), probs_s, d_out.slice(i, D, 1))
        done = hopper.warpgroup_mma_wait(2, deps=[done])
        _add(place + i - D, done)
    rest = _product(d_scores_s.permute((1, 0)), q_r)
    part = hopper.warpgroup_mma_wait(1, deps=[part])
    _add(place + C - D, part)
    rest = hopper.warpgroup_mma_wait(0, deps=[rest])
    _add(place + C, rest)


@gluon.jit
@typing.no_type_check
def _add(place, part):
    gl.atomic_add(place, gl.convert_layout(part, _BY_FOUR), sem="relaxed")


@gluon.jit
@typing.no_type_check
def _softmax(scores, is_key, top, sums, weights_s):
    # Writes the weights by the greatest score so far, and returns that, the sums, and
    # the factor on what was summed before.
    scores = gl.where(is_key, scores, -1e30)
    new_top = gl.maximum(top, gl.max(scores, 1))
    shrink = gl.exp2(top - new_top)
    weights = gl.exp2(scores - new_top[:, None])
    weights_s.store(weights.to(weights_s.dtype))
    hopper.fence_async_shared()
    gl.thread_barrier()
    return new_top, sums * shrink[:, None] + weights, shrink


@gluon.jit
@typing.no_type_check
def _store(ptr, x, STRIDE: gl.constexpr, layout: gl.constexpr):
    row = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    gl.store(ptr + (row * STRIDE)[:, None] + column[None], x.to(ptr.dtype.element_ty))
