"""Triton kernels of gpu_dense.py: target, loss and gradients of a tile."""

import math
import typing

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
@typing.no_type_check
def target_kernel(
    q_ptr, k_ptr, lse_ptr, lo_ptr, hi_ptr, bits_ptr, start_ptr, target_ptr,
    SCALE: tl.constexpr, T: tl.constexpr, S: tl.constexpr, N: tl.constexpr,
    H: tl.constexpr, R: tl.constexpr, WORDS: tl.constexpr, STRIDE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Stores probabilities [QUERIES, KEYS], the mean of the heads; -1: not visible.

    A head has H - R dims, a power of two, and R more.
    """
    sequence = tl.load(start_ptr).to(tl.int64)
    i = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    s = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    t = tl.load(start_ptr + 1) + i
    lo = tl.load(lo_ptr + sequence * T + t, t < T, 0)
    hi = tl.load(hi_ptr + sequence * T + t, t < T, 0)
    first, end = _span(lo, hi)
    if (first < tl.program_id(1) * KEYS + KEYS) & (end > tl.program_id(1) * KEYS):
        h = tl.arange(0, H - R)[None]
        q_row = q_ptr + (sequence * T + t)[:, None] * (N * H) + h
        k_row = k_ptr + (sequence * S + s)[:, None] * (N * H) + h
        if R > 0:
            r = H - R + tl.arange(0, R)[None]
            q_rest = q_ptr + (sequence * T + t)[:, None] * (N * H) + r
            k_rest = k_ptr + (sequence * S + s)[:, None] * (N * H) + r
        total = tl.zeros([QUERIES, KEYS], tl.float32)
        for n in range(N):
            q = tl.load(q_row + n * H, (t < T)[:, None], 0.0)
            k = tl.load(k_row + n * H, (s < S)[:, None], 0.0)
            lse = tl.load(lse_ptr + (sequence * N + n) * T + t, t < T, 0.0)
            scores = tl.dot(q, k.T, input_precision="ieee")
            if R > 0:
                q = tl.load(q_rest + n * H, (t < T)[:, None], 0.0)
                k = tl.load(k_rest + n * H, (s < S)[:, None], 0.0)
                scores = tl.dot(q, k.T, scores, input_precision="ieee")
            total += tl.exp2(scores * (SCALE * LOG2_E) - lse[:, None] * LOG2_E)
        keep = (s[None] >= lo[:, None]) & (s[None] < hi[:, None])
        if WORDS > 0:
            # 128 words hold a run of keys; a tile lies in one run, at one bit position.
            word = s // 4096 * 128 + s % 128
            place = (sequence * T + t)[:, None] * WORDS + word[None]
            bits = tl.load(bits_ptr + place, keep, 0)
            keep = keep & (((bits >> (s % 4096 // 128)[None].to(tl.uint32)) & 1) == 1)
        mean = tl.where(keep, total * (1.0 / N), -1.0)
        tl.store(target_ptr + i[:, None] * STRIDE + s[None], mean)


@triton.jit
@typing.no_type_check
def loss_kernel(
    q_ptr, k_ptr, w_ptr, lo_ptr, hi_ptr, weight_ptr, start_ptr, target_ptr,
    loss_ptr, norm_ptr, total_ptr,
    T: tl.constexpr, S: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
    STRIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Sums p log p - p I + norm p in one pass, with norm = log sum exp I."""
    sequence = tl.load(start_ptr).to(tl.int64)
    i = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    t = tl.load(start_ptr + 1) + i
    lo = tl.load(lo_ptr + sequence * T + t, t < T, 0)
    hi = tl.load(hi_ptr + sequence * T + t, t < T, 0)
    first, end = _span(lo, hi)
    q, w = _load_rows(q_ptr, w_ptr, start_ptr, tl.program_id(0), T, I, J, QUERIES)
    k_ptr += sequence * (S * J)
    top = tl.full([QUERIES, KEYS], -1e30, tl.float32)
    weights = tl.zeros([QUERIES, KEYS], tl.float32)
    total = tl.zeros([QUERIES, KEYS], tl.float32)
    loss = tl.zeros([QUERIES, KEYS], tl.float32)
    for start in range(first // KEYS * KEYS, end, KEYS):
        s = start + tl.arange(0, KEYS)
        k = tl.load(
            k_ptr + s[:, None] * J + tl.arange(0, J)[None], (s < S)[:, None], 0.0
        )
        _, scores = _scores(q, k, w, I, QUERIES, KEYS)
        target = tl.load(target_ptr + i[:, None] * STRIDE + s[None])
        keep = target >= 0
        target = tl.where(keep, target, 0.0)
        scores = tl.where(keep, scores, -1e30)
        log_target = tl.log(tl.maximum(target, 1e-30))
        loss += tl.where(keep, target * (log_target - scores), 0.0)
        total += target
        new_top = tl.maximum(top, scores)  # per position in the tile
        weights *= tl.exp(top - new_top)
        weights += tl.where(keep, tl.exp(scores - new_top), 0.0)
        top = new_top
    highest = tl.max(top, 1)
    sum_weights = tl.sum(weights * tl.exp(top - highest[:, None]), 1)
    norm = highest + tl.log(tl.where(sum_weights > 0, sum_weights, 1.0))
    total = tl.sum(total, 1)
    # Without keys, norm is finite but unused, and total is zero.
    loss = tl.sum(loss, 1) + norm * total
    weight = tl.load(weight_ptr + sequence * T + t, t < T, 0.0)
    tl.store(loss_ptr + i, weight * loss)
    tl.store(norm_ptr + i, norm)
    tl.store(total_ptr + i, total)


@triton.jit
@typing.no_type_check
def gradient_kernel(
    q_ptr, k_ptr, w_ptr, lo_ptr, hi_ptr, weight_ptr, start_ptr, target_ptr,
    norm_ptr, total_ptr, dq_ptr, dw_ptr, d_scores_ptr,
    T: tl.constexpr, S: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
    STRIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Stores dI = (softmax(I) sum p - p) weight to HBM, and from it dq and dw."""
    sequence = tl.load(start_ptr).to(tl.int64)
    i = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    t = tl.load(start_ptr + 1) + i
    lo = tl.load(lo_ptr + sequence * T + t, t < T, 0)
    hi = tl.load(hi_ptr + sequence * T + t, t < T, 0)
    first, end = _span(lo, hi)
    q, w = _load_rows(q_ptr, w_ptr, start_ptr, tl.program_id(0), T, I, J, QUERIES)
    k_ptr += sequence * (S * J)
    j = tl.arange(0, J)[None]
    weight = tl.load(weight_ptr + sequence * T + t, t < T, 0.0)[:, None]
    norm, total = tl.load(norm_ptr + i)[:, None], tl.load(total_ptr + i)[:, None]
    dq = tl.zeros([QUERIES * I, J], tl.float32)
    dw = tl.zeros([QUERIES * I], tl.float32)
    for start in range(first // KEYS * KEYS, end, KEYS):
        s = start + tl.arange(0, KEYS)
        k = tl.load(k_ptr + s[:, None] * J + j, (s < S)[:, None], 0.0)
        dots, scores = _scores(q, k, w, I, QUERIES, KEYS)
        place = i[:, None] * STRIDE + s[None]
        target = tl.load(target_ptr + place)
        scores = tl.where(target >= 0, scores, -1e30)
        d_scores = (tl.exp(scores - norm) * total - target) * weight
        d_scores = tl.where(target >= 0, d_scores, 0.0)
        tl.store(d_scores_ptr + place, d_scores)
        d_rows = _repeat(d_scores, I, QUERIES, KEYS)
        dw += tl.sum(dots * d_rows, 1)
        d_dots = tl.where(dots > 0, d_rows * w[:, None], 0.0).to(k.dtype)
        dq = tl.dot(d_dots, k, dq, input_precision="ieee")
    row = tl.program_id(0) * (QUERIES * I) + tl.arange(0, QUERIES * I)
    tl.store(dw_ptr + row, dw)
    tl.store(dq_ptr + row[:, None] * J + j, dq.to(dq_ptr.dtype.element_ty))


@triton.jit
@typing.no_type_check
def dk_kernel(
    q_ptr, k_ptr, w_ptr, lo_ptr, hi_ptr, start_ptr, d_scores_ptr, first_ptr, end_ptr,
    dk_ptr,
    T: tl.constexpr, S: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
    STRIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds the queries of a chunk, in order, to the gradient of a tile of keys."""
    sequence = tl.load(start_ptr).to(tl.int64)
    s = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    place = s[:, None] * J + tl.arange(0, J)[None]
    k = tl.load(k_ptr + sequence * (S * J) + place, (s < S)[:, None], 0.0)
    first = tl.load(first_ptr + tl.program_id(0))
    end = tl.load(end_ptr + tl.program_id(0))
    dk = tl.zeros([KEYS, J], tl.float32)
    for group in range(first, end):
        i = group * QUERIES + tl.arange(0, QUERIES)
        t = tl.load(start_ptr + 1) + i
        lo = tl.load(lo_ptr + sequence * T + t, t < T, 0)[:, None]
        hi = tl.load(hi_ptr + sequence * T + t, t < T, 0)[:, None]
        q, w = _load_rows(q_ptr, w_ptr, start_ptr, group, T, I, J, QUERIES)
        keep = (s[None] >= lo) & (s[None] < hi)
        d_scores = tl.load(d_scores_ptr + i[:, None] * STRIDE + s[None], keep, 0.0)
        dots = tl.dot(q, k.T, input_precision="ieee")
        d_dots = _repeat(d_scores, I, QUERIES, KEYS) * w[:, None]
        d_dots = tl.where(dots > 0, d_dots, 0.0).to(k.dtype)
        dk = tl.dot(d_dots.T, q, dk, input_precision="ieee")
    tl.store(dk_ptr + place, dk, (s < S)[:, None])


@triton.jit
@typing.no_type_check
def _span(lo, hi):
    # Range of the keys that some query sees; its end is 0 if there are none.
    first = tl.min(tl.where(lo < hi, lo, 2147483647), 0)
    end = tl.max(tl.where(lo < hi, hi, 0), 0)
    return tl.minimum(first, end), end


@triton.jit
@typing.no_type_check
def _load_rows(
    q_ptr, w_ptr, start_ptr, group,
    T: tl.constexpr, I: tl.constexpr, J: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    # Returns q [queries times heads, J] and head weights of a tile.
    t = tl.load(start_ptr + 1) + group * QUERIES
    row = (tl.load(start_ptr).to(tl.int64) * T + t) * I
    local = tl.arange(0, QUERIES * I)
    is_row = local < (T - t) * I
    place = (row * J) + (local[:, None] * J + tl.arange(0, J)[None])
    q = tl.load(q_ptr + place, is_row[:, None], 0.0)
    w = tl.load(w_ptr + row + local, is_row, 0.0).to(tl.float32)
    return q, w


@triton.jit
@typing.no_type_check
def _scores(
    q, k, w, I: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # Returns ReLU(q . k), [queries times heads, KEYS], and weighted sums over heads.
    dots = tl.maximum(tl.dot(q, k.T, input_precision="ieee"), 0.0)
    return dots, tl.sum(tl.reshape(dots * w[:, None], [QUERIES, I, KEYS]), 1)


@triton.jit
@typing.no_type_check
def _repeat(x, I: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    # Repeats each query's row for its heads.
    x = tl.broadcast_to(x[:, None, :], [QUERIES, I, KEYS])
    return tl.reshape(x, [QUERIES * I, KEYS])
