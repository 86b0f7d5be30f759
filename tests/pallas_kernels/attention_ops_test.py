"""The tiled ops against their definitions, and the definitions against numpy loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import dense_attention, indexer_kl_loss, indexer_mask, indexer_topk
from pallas_kernels.dense_attention import tiled as attention_tiled
from pallas_kernels.indexer_topk import reference as indexer_reference
from pallas_kernels.indexer_topk import tiled as indexer_tiled
from tests import environment
from tests.pallas_kernels import program

B, N, H, O, I, J = 2, 3, 12, 8, 2, 16
FLOAT32_RTOL = 2e-5  # two orders of summation in float32

# Odd lengths, one tile and many, packed rows, fewer queries than keys.
SHAPES = (
    ("short", 5, 5),
    ("tiers", 150, 150),  # two tiles in a loop, and one
    ("continued", 70, 201),
)


def make_inputs(num_queries, num_keys, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    t = np.arange(num_keys)
    border = num_keys // 3  # row 1 is two documents
    lo = np.stack([np.zeros(num_keys), np.where(t < border, 0, border)])
    hi = np.stack([t + 1, t + 1])
    hi[0, -1] = 0  # a row that sees nothing
    return {
        "q": normal(B, num_queries, N, H),
        "k": normal(B, num_keys, N, H),
        "v": normal(B, num_keys, N, O),
        "index": (
            normal(B, num_queries, I, J),
            normal(B, num_keys, J),
            normal(B, num_queries, I),
        ),
        "lo": jnp.asarray(lo[:, -num_queries:], jnp.int32),
        "hi": jnp.asarray(hi[:, -num_queries:], jnp.int32),
    }


def selected(x, topk):
    return program.call(indexer_mask, *x["index"], x["lo"], x["hi"], topk=topk)


class ScaleTest(parameterized.TestCase):
    @parameterized.parameters(
        ("bfloat16", 0.25, 0.25, 1.0),
        ("bfloat16", 0.3, 1.0, 0.3),  # rounded, every score would be wrong alike
        ("float32", 0.3, 0.3, 1.0),
    )
    def test_queries_are_scaled_where_that_is_exact(self, dtype, scale, factor, rest):
        q = jnp.asarray([1.0, -3.0], dtype)
        got, left = attention_tiled.scaled(q, scale)
        np.testing.assert_array_equal(got, factor * q)
        self.assertEqual((got.dtype, left), (dtype, rest))


class SelectionTest(parameterized.TestCase):
    @parameterized.named_parameters(*SHAPES)
    def test_tiled_selects_as_the_definition_does(self, num_queries, num_keys):
        x = make_inputs(num_queries, num_keys)
        args = (*x["index"], x["lo"], x["hi"])
        for topk in (1, 17, num_keys + 3):
            got, want = (
                program.call(indexer_mask, *args, topk=topk, implementation=name)
                for name in ("tiled", "reference")
            )
            np.testing.assert_array_equal(got, want)

    def test_definition_is_lexsort(self):
        x = make_inputs(40, 40)
        scores = np.asarray(indexer_reference.indexer_scores(*x["index"]))
        args = (*x["index"], x["lo"], x["hi"])
        mask = program.call(indexer_mask, *args, topk=7)
        lists = program.call(indexer_topk, *args, topk=7)
        mask, lists = np.asarray(mask), np.asarray(lists)
        for b in range(B):
            for t in range(40):
                s = np.arange(x["lo"][b, t], x["hi"][b, t])
                order = s[np.lexsort((s, -scores[b, t, s]))][:7]
                np.testing.assert_array_equal(
                    np.flatnonzero(mask[b, :, t]), sorted(order)
                )
                padded = sorted(order) + [-1] * (7 - len(order))
                np.testing.assert_array_equal(lists[b, t], padded)

    def test_ties_go_to_the_lower_index(self):
        scores = jnp.asarray(
            [[0.0, 1.0, -1.0], [-0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]
        )
        got = indexer_tiled.topk_mask(scores, jnp.ones((4, 3), bool), 2)
        want = [[1, 1, 0], [1, 1, 1], [0, 0, 1], [0, 0, 0]]
        np.testing.assert_array_equal(got, np.asarray(want, bool))

    def test_scores_of_any_sign_and_size_are_ordered(self):
        rng = np.random.default_rng(1)
        x = rng.normal(size=(200, 5)) * 10.0 ** rng.integers(-38, 38, (200, 5))
        x = x.astype(np.float32)
        got = indexer_tiled.topk_mask(jnp.asarray(x), jnp.ones(x.shape, bool), 9)
        for column in range(5):
            best = np.sort(np.argsort(-x[:, column], kind="stable")[:9])
            np.testing.assert_array_equal(np.flatnonzero(got[:, column]), best)


class AttentionTest(parameterized.TestCase):
    @parameterized.named_parameters(*SHAPES)
    def test_tiled_equals_definition_with_gradients(self, num_queries, num_keys):
        x = make_inputs(num_queries, num_keys)
        mask = selected(x, topk=9)

        def loss(q, k, v, lo, hi, mask, name):
            out, lse = dense_attention(
                q, k, v, lo, hi, mask, scale=0.3, implementation=name
            )
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse)), (out, lse)

        gradients = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True), static_argnums=6)
        args = [x[name] for name in ("q", "k", "v", "lo", "hi")]
        for keep in (mask, None):
            results = [gradients(*args, keep, name) for name in ("tiled", "reference")]
            for got, want in zip(*map(jax.tree.leaves, results), strict=True):
                np.testing.assert_allclose(got, want, rtol=FLOAT32_RTOL, atol=2e-5)

    def test_definition_is_a_loop(self):
        x = make_inputs(20, 20)
        mask = selected(x, topk=4)
        args = x["q"], x["k"], x["v"], x["lo"], x["hi"], mask
        out, lse = map(np.asarray, program.call(dense_attention, *args, scale=0.3))
        mask = np.asarray(mask)
        q, k, v = (np.asarray(x[name], np.float64) for name in "qkv")
        for b, t, n in np.ndindex(B, 20, N):
            keys = np.flatnonzero(mask[b, :, t])
            if not keys.size:
                np.testing.assert_array_equal(out[b, t, n], 0)
                continue
            scores = 0.3 * k[b, keys, n] @ q[b, t, n]
            weights = np.exp(scores)
            want = weights @ v[b, keys, n] / weights.sum()
            np.testing.assert_allclose(out[b, t, n], want, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(lse[b, n, t], np.log(weights.sum()), rtol=1e-5)

    def test_bfloat16_does_not_round_the_scale(self):
        """0.1 is 0.1 % too large in bfloat16, and all scores of a query with it."""
        x = make_inputs(5, 20)
        q, k, v = (x[name].astype(jnp.bfloat16) for name in "qkv")
        args = (q * 4, k * 4, v, x["lo"], x["hi"])
        lse, want = (
            program.call(dense_attention, *args, scale=0.1, implementation=name)[1]
            for name in ("tiled", "reference")
        )
        np.testing.assert_allclose(lse, want, atol=1e-5)

    def test_bfloat16_is_close_to_float32(self):
        x = make_inputs(70, 70)
        args = (x["q"], x["k"], x["v"])
        run = jax.jit(
            functools.partial(dense_attention, lo=x["lo"], hi=x["hi"], scale=0.3)
        )
        want, _ = run(*args)
        got, _ = run(*(a.astype(jnp.bfloat16) for a in args))
        error = np.linalg.norm(got.astype(jnp.float32) - want) / np.linalg.norm(want)
        self.assertEqual(got.dtype, jnp.bfloat16)
        self.assertLess(error, 1e-2)


class IndexerLossTest(parameterized.TestCase):
    @parameterized.named_parameters(*SHAPES)
    def test_tiled_equals_definition_with_gradients(self, num_queries, num_keys):
        x = make_inputs(num_queries, num_keys)
        mask = selected(x, topk=9)
        weight = jnp.asarray(np.random.default_rng(3).random((B, num_queries)))

        # Constants of a program would be folded, which takes XLA much longer.
        @functools.partial(jax.jit, static_argnums=7)
        def loss(index, q, k, lse, lo, hi, keep, implementation):
            options = {"scale": 0.3, "implementation": implementation}
            return 2 * indexer_kl_loss(
                (q, k, lse), index, lo, hi, keep, weight, **options
            )

        gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)), static_argnums=7)
        index, q, k, v, lo, hi = (
            x[name] for name in ("index", "q", "k", "v", "lo", "hi")
        )
        for keep in (mask, None):
            _, lse = program.call(dense_attention, q, k, v, lo, hi, keep, scale=0.3)
            args = index, q, k, lse, lo, hi
            (got, (grads, *others)), (want, (wanted, *_)) = (
                gradients(*args, keep, name) for name in ("tiled", "reference")
            )
            np.testing.assert_allclose(got, want, rtol=1e-4)
            if num_queries < num_keys:  # the value alone comes without a gradient
                alone = loss(*args, keep, "tiled")
                np.testing.assert_allclose(alone, got)
            for g, w in zip(grads, wanted, strict=True):
                np.testing.assert_allclose(g, w, rtol=1e-3, atol=2e-5)
            for other in others:  # the main attention is a constant
                np.testing.assert_array_equal(other, 0)


if __name__ == "__main__":
    environment.main()
