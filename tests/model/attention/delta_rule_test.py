"""The gated delta rule against a float64 loop, itself and transformers."""

import functools
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax.model import context as context_lib
from glm5_jax.model.attention import delta_rule
from glm5_jax.scale.compiled import flops as flops_lib
from tests import environment
from tests.model import tiny

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "delta_rule.npz"
TOL = 1e-5  # float32 against float64, values of about 1
B, T, N, H, O = 2, 75, 2, 8, 6
STARTS = ((0, 3, 40), (0, 64))  # where documents begin: also in the midst of chunks
recurrence = jax.jit(delta_rule.recurrence)
step = jax.jit(delta_rule.step)


@functools.partial(jax.jit, static_argnames="chunk_size")
def chunked(q, k, v, log_decay, beta, state=None, chunk_size=delta_rule.CHUNK_SIZE):
    return delta_rule.chunked(q, k, v, log_decay, beta, state, chunk_size=chunk_size)


@functools.partial(jax.jit, static_argnums=0)
def gradients(function, arrays, weights):
    """Of a weighted sum of outputs and last state."""

    def loss(*arrays):
        out = function(*arrays)
        return sum(jnp.vdot(x, w) for x, w in zip(out, weights, strict=True))

    return jax.grad(loss, argnums=range(6))(*arrays)


def inputs(channels, mean_decay=0.2, seed=0):
    """Unit keys, as callers make them; decays from none to strong."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, B, T, N, H))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(B, T, N, O))
    log_decay = -mean_decay * rng.exponential(size=(B, T, N, channels))
    beta = rng.uniform(size=(B, T, N))
    return q, k, v, log_decay, beta


def in_float32(arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


def loop(q, k, v, log_decay, beta, state, starts=((), ())):
    """The definition in float64, a head at a time."""
    out, last = np.zeros(v.shape), np.zeros(state.shape)
    for b, n in np.ndindex(len(q), q.shape[2]):
        s = np.array(state[b, n], np.float64)
        for t in range(q.shape[1]):
            if t in starts[b]:
                s = np.zeros_like(s)
            s = np.exp(log_decay[b, t, n])[:, None] * s
            wrong = v[b, t, n] - s.T @ k[b, t, n]
            s = s + beta[b, t, n] * np.outer(k[b, t, n], wrong)
            out[b, t, n] = s.T @ q[b, t, n]
        last[b, n] = s
    return out, last


def close(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=TOL)


def zeros():
    return np.zeros((B, N, H, O))


class DeltaRuleTest(parameterized.TestCase):
    @parameterized.product(channels=(1, H), chunk_size=(1, 16, 64))
    def test_chunks_are_the_loop(self, channels, chunk_size):
        """Of any size; 75 tokens are a multiple of none but 1."""
        arrays = inputs(channels)
        state = np.random.default_rng(1).normal(size=(B, N, H, O))
        got = chunked(*in_float32([*arrays, state]), chunk_size=chunk_size)
        close(got, loop(*arrays, state))

    def test_recurrence_is_the_loop(self):
        arrays = inputs(H)
        close(recurrence(*in_float32(arrays)), loop(*arrays, zeros()))

    @parameterized.product(channels=(1, H), mean_decay=(0.2, 100))
    def test_gradients_are_the_recurrences(self, channels, mean_decay):
        arrays = in_float32([*inputs(channels, mean_decay), zeros() + 1])
        rng = np.random.default_rng(2)
        weights = in_float32(rng.normal(size=s) for s in ((B, T, N, O), (B, N, H, O)))
        got, want = (
            gradients(f, arrays, weights)
            for f in (delta_rule.chunked, delta_rule.recurrence)
        )
        # In the norm: a gradient sums those of up to 75 tokens.
        for x, y in zip(got, want, strict=True):
            self.assertLess(np.linalg.norm(x - y), TOL * np.linalg.norm(y))

    @parameterized.parameters(1, H)
    def test_strong_decay(self, channels):
        """Sums of log-decays to -6,000, beside tokens without any decay."""
        q, k, v, log_decay, beta = inputs(channels, mean_decay=100)
        log_decay[:, 5:20] = 0
        log_decay[:, 33:] *= 1e-4
        arrays = q, k, v, log_decay, beta, zeros()
        close(chunked(*in_float32(arrays)), loop(*arrays))

    def test_equal_keys(self):
        """The hardest triangular system: powers of A would reach 1e17."""
        q, k, v, log_decay, beta = inputs(1, mean_decay=0)
        k[:] = k[:, :1]
        arrays = q, k, v, log_decay, np.ones_like(beta), zeros()
        close(chunked(*in_float32(arrays)), loop(*arrays))

    @parameterized.parameters(1, H)
    def test_documents_and_padding(self, channels):
        """Padding lies at the end of a row and between its documents."""
        q, k, v, log_decay, beta = inputs(channels)
        is_first, is_token = np.zeros((B, T), bool), np.ones((B, T), bool)
        for b, starts in enumerate(STARTS):
            is_first[b, list(starts)] = True
        is_token[:, 70:] = is_token[0, 30:40] = is_token[1, 0] = False
        gates = in_float32((log_decay, beta))
        g, strength = jax.jit(delta_rule.gated)(*gates, is_first, is_token)
        got = chunked(*in_float32((q, k, v)), g, strength, in_float32([zeros() + 1])[0])
        log_decay[~is_token] = beta[~is_token] = 0
        starts = STARTS[0], STARTS[1][1:]  # padding forgets nothing
        state = zeros()
        state[1] = 1
        close(got, loop(q, k, v, log_decay, beta, state, starts))

    def test_steps_continue_a_chunked_prefix(self):
        q, k, v, log_decay, beta = in_float32(inputs(1))
        want, last = chunked(q, k, v, log_decay, beta, jnp.zeros((B, N, H, O)))
        is_prefix = jnp.broadcast_to(jnp.arange(T)[None] < 70, (B, T))
        gates = log_decay, beta, jnp.zeros_like(is_prefix), is_prefix
        padded = jax.jit(delta_rule.gated)(*gates)
        _, state = chunked(q, k, v, *padded, jnp.zeros((B, N, H, O)))
        for t in range(70, T):
            token = (x[:, t] for x in (q, k, v, log_decay, beta))
            out, state = step(*token, state)
            close(out, want[:, t])
        close(state, last)

    def test_small_vectors_are_divided_with_the_released_eps(self):
        """transformers' l2norm adds 1e-6 to the square of the length."""
        x = jnp.asarray([[[3e-3, 4e-3], [0, 0]], [[6e-4, 8e-4], [3, 4]]])
        lengths = np.sqrt([[26e-6, 1e-6], [2e-6, 25]])[..., None]
        np.testing.assert_allclose(delta_rule.unit(x), x / lengths, rtol=1e-5)

    @parameterized.parameters((1, False), (2, True))
    def test_rows_of_several_tokens_run_in_chunks(self, num_tokens, in_chunks):
        arrays = (x[:, :num_tokens] for x in in_float32(inputs(1)))
        ids = jnp.ones((B, num_tokens), jnp.int32)
        context = context_lib.make_context(tiny.model(), ids, ids)
        wrapped = mock.patch.object(delta_rule, "chunked", wraps=delta_rule.chunked)
        with wrapped as run:
            jax.eval_shape(delta_rule.over_documents, *arrays, context)
        self.assertEqual(run.called, in_chunks)

    def test_flops_are_those_of_the_program(self):
        """Of one token."""
        arrays = (x[:, :1] for x in in_float32(inputs(1)))
        counted = flops_lib.count(jax.make_jaxpr(delta_rule.chunked)(*arrays), 1)
        self.assertEqual(counted.total, B * delta_rule.flops(N, H, O, length=1))

    def test_no_program_has_a_triangular_solve(self):
        """Two of them at a time block a CPU of two cores forever, with jaxlib 0.10."""
        program = jax.make_jaxpr(delta_rule.chunked)(*in_float32(inputs(1)))
        self.assertNotIn("triangular_solve", str(program))

    @parameterized.product(kind=("head", "channel"), start=("zeros", "state"))
    def test_is_that_of_transformers(self, kind, start):
        with np.load(GOLDEN) as golden:
            given = {name: jnp.asarray(x) for name, x in golden.items()}
        state = given["state"] * (start == "state")
        arrays = given["q"], given["k"], given["v"], given[f"{kind}/log_decay"]
        for form in ("chunked", "recurrent"):
            want = (given[f"{kind}/{start}/{form}/{n}"] for n in ("out", "last"))
            close(chunked(*arrays, given["beta"], state, chunk_size=4), tuple(want))


if __name__ == "__main__":
    environment.main()
