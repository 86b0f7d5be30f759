"""The gated delta rule: linear attention whose state is one matrix for each head.

A head keeps a matrix S [H, O] that maps keys to values. A token with query q, key k,
value v, log-decay g <= 0 and writing strength beta in [0, 1] does three things:

    S   <-  diag(e^g) S                      forget
    S   <-  S + k (beta (v - S^T k))^T       replace what S answers to k by v
    out  =  S^T q                            read

g is one number for a head (Gated DeltaNet, arXiv 2412.06464), or one for each of the H
channels of its key (Kimi Delta Attention, arXiv 2510.26692). `recurrence` is this
definition, token by token; `step` is one token of it, for decoding.

`chunked` computes the same with matrix products, for training. Let L_i be the sum of g
from the start of a chunk through token i, S the state before the chunk, and

    D_ij = e^(L_i - L_j)                     decay between two tokens, j <= i
    A_ij = beta_i sum_h k_ih D_ijh k_jh      for j < i, else 0
    U = (I + A)^-1 (beta v)                  the UT transform of arXiv 2406.06484, 3.2
    W = (I + A)^-1 (beta e^L k)

Then the corrections beta (v - S^T k) of all its tokens are X = U - W S, and

    out_i = (e^(L_i) q_i)^T S + sum_(j <= i) (sum_h q_ih D_ijh k_jh) X_j
    S    <-  diag(e^(L_C)) S + sum_j (D_Cj k_j) X_j^T

Every exponent is a sum of the log-decays of the very tokens between, all of them <= 0:
nothing overflows, and no small number is the difference of two large sums.

Everything is float32: a state sums thousands of small updates, which bfloat16 (8 bits)
would drop, and (I + A)^-1 amplifies rounding errors. Callers normalise q and
k and apply the gates' nonlinearities; here, beta and g are used as they are.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from glm5_jax.model import context as context_lib

CHUNK_SIZE = 64  # tokens of a chunk, as in the papers' implementations
_SUBCHUNK_SIZE = 16  # tokens between which decays of channels are kept pair by pair
_RESET = -1e4  # e^-10000 is 0 in float32 and in float64

# Chips would round the factors of float32 products to bfloat16 or TF32.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def gated(
    log_decay: Float[Array, "B T N channels"],
    beta: Float[Array, "B T N"],
    is_first: Bool[Array, "B T"],
    is_token: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T N channels"], Float[Array, "B T N"]]:
    """Returns decays and strengths that keep the documents of a row apart.

    The first token of a document forgets the whole state; padding changes nothing.

    Args:
      log_decay: g of each token.
      beta: of each token.
      is_first: whether a document begins with the token.
      is_token: whether it is no padding.
    """
    is_first, is_token = is_first[..., None], is_token[..., None]
    log_decay = jnp.where(is_first[..., None], _RESET, log_decay.astype(jnp.float32))
    log_decay = jnp.where(is_token[..., None], log_decay, 0.0)
    return log_decay, jnp.where(is_token, beta.astype(jnp.float32), 0.0)


def over_documents(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N O"],
    log_decay: Float[Array, "B T N channels"],
    beta: Float[Array, "B T N"],
    context: context_lib.Context,
    state: Float[Array, "B N H O"] | None = None,
) -> tuple[Float[Array, "B T N O"], Float[Array, "B N H O"]]:
    """Runs packed rows, or the next tokens of cached sequences.

    Args:
      q: as in `recurrence`, and so the next four.
      k: keys.
      v: values.
      log_decay: g.
      beta: strengths.
      context: where documents begin, and which tokens are padding.
      state: before the first token, of the document that it continues.
    """
    is_first = context.is_token & (context.hi == context.lo + 1)
    log_decay, beta = gated(log_decay, beta, is_first, context.is_token)
    run = recurrence if q.shape[1] == 1 else chunked
    return run(q, k, v, log_decay, beta, state)


def unit(x: Float[Array, "*n H"]) -> Float[Array, "*n H"]:
    """Divides vectors by their lengths, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def flops(num_heads: int, key_dim: int, value_dim: int, length: int) -> float:
    """Returns the FLOPs of `chunked` for a token of a document of this length.

    Three products of a vector with the state, and for each earlier token of the chunk:
    two scores, a row of (I + A)^-1 times U and W, a weighted value.
    """
    earlier = (min(CHUNK_SIZE, length) + 1) / 2
    state = 3 * key_dim * value_dim
    pairs = earlier * (2 * key_dim + (key_dim + value_dim) + value_dim)
    return 2.0 * num_heads * (state + pairs)


def empty_state(
    q: Float[Array, "B T N H"], v: Float[Array, "B T N O"]
) -> Float[Array, "B N H O"]:
    """Returns the state before the first token."""
    return jnp.zeros((q.shape[0], *q.shape[2:], v.shape[-1]), jnp.float32)


def step(
    q: Float[Array, "B N H"],
    k: Float[Array, "B N H"],
    v: Float[Array, "B N O"],
    log_decay: Float[Array, "B N channels"],
    beta: Float[Array, "B N"],
    state: Float[Array, "B N H O"],
) -> tuple[Float[Array, "B N O"], Float[Array, "B N H O"]]:
    """Runs one token of every sequence; see `recurrence`."""
    q, k, v, log_decay, beta, state = _float32(q, k, v, log_decay, beta, state)
    state = jnp.exp(log_decay)[..., None] * state
    correction = beta[..., None] * (v - _einsum("bnho,bnh->bno", state, k))
    state = state + k[..., None] * correction[:, :, None]
    return _einsum("bnho,bnh->bno", state, q), state


def recurrence(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N O"],
    log_decay: Float[Array, "B T N channels"],
    beta: Float[Array, "B T N"],
    state: Float[Array, "B N H O"] | None = None,
) -> tuple[Float[Array, "B T N O"], Float[Array, "B N H O"]]:
    """Runs the definition, token by token.

    Args:
      q: queries.
      k: keys, of length 1 or less: longer ones can make the state grow without bound.
      v: values.
      log_decay: g <= 0; one channel decays the whole head, H channels each their own.
      beta: in [0, 1], after the sigmoid.
      state: before the first token. Default: zeros.

    Returns:
      The outputs, float32, and the state after the last token.
    """

    def body(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, log_decay, beta = token
        out, state = step(q, k, v, log_decay, beta, state)
        return state, out

    tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, beta)]
    first = empty_state(q, v) if state is None else state.astype(jnp.float32)
    last, out = lax.scan(body, first, tuple(tokens))
    return jnp.moveaxis(out, 0, 1), last


def chunked(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N O"],
    log_decay: Float[Array, "B T N channels"],
    beta: Float[Array, "B T N"],
    state: Float[Array, "B N H O"] | None = None,
    *,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Float[Array, "B T N O"], Float[Array, "B N H O"]]:
    """Computes `recurrence` with matrix products over chunks of tokens.

    Args:
      q: as in `recurrence`, and so the next five.
      k: keys.
      v: values.
      log_decay: g.
      beta: strengths.
      state: before the first token.
      chunk_size: tokens of a chunk. Any size gives the same result; T need not be a
        multiple of it.
    """
    num_tokens = q.shape[1]
    first = empty_state(q, v) if state is None else state.astype(jnp.float32)
    size = min(chunk_size, num_tokens)
    q, k, v, g, beta = (
        _in_chunks(x, size) for x in _float32(q, k, v, log_decay, beta[..., None])
    )
    since = jnp.exp(jnp.cumsum(g, axis=-2))  # e^L
    with jax.named_scope("ut_transform"):
        mixed = jnp.tril(beta * _scores(k, k, g), -1)
        right = beta * jnp.concatenate([v, since * k], axis=-1)
        solved = _einsum("...ts,...sh->...th", _inverse(mixed), right)
        u, w = jnp.split(solved, [v.shape[-1]], axis=-1)
    chunks = (u, w, since * q, _scores(q, k, g), _to_end(g) * k, since[..., -1, :])

    def body(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        u, w, q, scores, k, decay = chunk
        x = u - _einsum("bnth,bnho->bnto", w, state)
        out = _einsum("bnth,bnho->bnto", q, state)
        out += _einsum("bnts,bnso->bnto", scores, x)
        state = decay[..., None] * state + _einsum("bnth,bnto->bnho", k, x)
        return state, out

    last, out = lax.scan(body, first, chunks)
    out = jnp.moveaxis(out, (0, 3), (1, 2))  # B, chunks, tokens, N, O
    return out.reshape(len(out), -1, *out.shape[3:])[:, :num_tokens], last


@jax.custom_vjp
def _inverse(x: Float[Array, "*n s s"]) -> Float[Array, "*n s s"]:
    """Returns (I + x)^-1 of matrices x that are zero on and above the diagonal.

    The inverse of [[a, 0], [b, c]] is [[a^-1, 0], [-c^-1 b a^-1, c^-1]], so that the
    inverses of two neighbouring blocks give that of both: 1 row, 2, 4, ... Unlike a
    power series it adds no large terms that cancel. lax.linalg.triangular_solve can
    wait forever on a CPU: with jaxlib 0.10 a solve holds a thread of XLA's pool while
    it waits for another, so that two solves at a time block a pool of two threads.
    """
    size = x.shape[-1]
    length = 1 << (size - 1).bit_length()
    pad = [(0, 0)] * (x.ndim - 2) + [(0, length - size)] * 2
    x = jnp.pad(x, pad)
    blocks = jnp.ones((*x.shape[:-1], 1, 1), x.dtype)
    rows = 1
    while rows < length:
        tiles = x.reshape(*x.shape[:-2], *(length // (2 * rows), 2 * rows) * 2)
        pairs = jnp.moveaxis(jnp.diagonal(tiles, axis1=-4, axis2=-2), -1, -3)
        b = pairs[..., rows:, :rows]
        a, c = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        low = -_einsum("...ij,...jk,...kl->...il", c, b, a)
        top = jnp.concatenate([a, jnp.zeros_like(a)], axis=-1)
        blocks = jnp.concatenate([top, jnp.concatenate([low, c], axis=-1)], axis=-2)
        rows *= 2
    return blocks.reshape(x.shape)[..., :size, :size]


def _inverse_and_itself(x: Float[Array, "*n s s"]) -> tuple[Array, Array]:
    out = _inverse(x)
    return out, out


def _inverse_gradient(
    out: Float[Array, "*n s s"], grad: Float[Array, "*n s s"]
) -> tuple[Float[Array, "*n s s"]]:
    return (-jnp.tril(_einsum("...ji,...jk,...lk->...il", out, grad, out), -1),)


_inverse.defvjp(_inverse_and_itself, _inverse_gradient)


def _float32(*arrays: Array) -> list[Array]:
    return [x.astype(jnp.float32) for x in arrays]


def _in_chunks(
    x: Float[Array, "B T N n"], size: int
) -> Float[Array, "chunks B N tokens n"]:
    """Cuts the rows into chunks; zeros at the end change no state."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size), (0, 0), (0, 0)])
    x = x.reshape(len(x), -1, size, *x.shape[2:])
    return jnp.moveaxis(x, (1, 2), (0, 3))


def _to_end(
    g: Float[Array, "*n tokens channels"],
) -> Float[Array, "*n tokens channels"]:
    """Returns the decay from after each token through the last one."""
    later = jnp.roll(g, -1, axis=-2).at[..., -1, :].set(0.0)
    return jnp.exp(lax.cumsum(later, axis=g.ndim - 2, reverse=True))


def _scores(
    rows: Float[Array, "*n tokens H"],
    k: Float[Array, "*n tokens H"],
    g: Float[Array, "*n tokens channels"],
) -> Float[Array, "*n tokens tokens"]:
    """Returns sum_h rows_ih D_ijh k_jh for j <= i, else 0."""
    if g.shape[-1] == 1:
        dots = _einsum("...th,...sh->...ts", rows, k)
        return dots * _decays(g)[..., 0]
    return _scores_by_channel(rows, k, g)


def _scores_by_channel(
    rows: Float[Array, "*n tokens H"],
    k: Float[Array, "*n tokens H"],
    g: Float[Array, "*n tokens H"],
) -> Float[Array, "*n tokens tokens"]:
    """Computes `_scores` for decays of channels, a few rows at a time.

    Between tokens of one subchunk the decays are kept pair by pair. From an earlier
    subchunk, D_ij is the decay from j to the start of i's subchunk times that from
    there to i, so that the scores are a matrix product.
    """
    num_tokens = g.shape[-2]
    size = math.gcd(num_tokens, _SUBCHUNK_SIZE)
    parts = []
    for start in range(0, num_tokens, size):
        own = slice(start, start + size)
        q, near, decays = rows[..., own, :], k[..., own, :], g[..., own, :]
        pairs = _einsum("...th,...sh,...tsh->...ts", q, near, _decays(decays))
        earlier = k[..., :start, :]
        if start:
            earlier = earlier * _to_end(g[..., :start, :])
        far = _einsum(
            "...th,...sh->...ts", q * jnp.exp(jnp.cumsum(decays, axis=-2)), earlier
        )
        later = jnp.zeros((*pairs.shape[:-1], num_tokens - start - size))
        parts.append(jnp.concatenate([far, pairs, later], axis=-1))
    return jnp.concatenate(parts, axis=-2)


def _decays(
    g: Float[Array, "*n tokens channels"],
) -> Float[Array, "*n tokens tokens channels"]:
    """Returns D_ij for j <= i, else 0."""
    size, lead = g.shape[-2], (1,) * (g.ndim - 2)
    is_later, is_visible = (
        np.tri(size, k=k, dtype=bool).reshape(*lead, size, size, 1) for k in (-1, 0)
    )
    between = jnp.where(is_later, g[..., :, None, :], 0.0)
    return jnp.where(is_visible, jnp.exp(jnp.cumsum(between, axis=-3)), 0.0)
