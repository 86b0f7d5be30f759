"""The indexer's own numbers, which no golden model is fine enough to show."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import pallas_kernels
from glm5_jax import config as config_lib
from glm5_jax.model import cached, context, indexer, transformer
from glm5_jax.model import selection as selection_lib
from pallas_kernels import eight_bits
from tests import environment
from tests.model import tiny

EPS = 1e-6  # of the layer norm of keys in the released code
RTOL = 1e-4  # float32 products of small numbers


class KeyNormTest(absltest.TestCase):
    def test_small_keys_are_normalised_with_the_released_eps(self):
        config = tiny.model()
        rng = np.random.default_rng(0)
        hidden, dim = config.hidden_size, config.index_head_dim
        params = {
            "wq_b": jnp.zeros((config.q_lora_rank, config.index_n_heads, dim)),
            "wk": jnp.asarray(rng.normal(size=(hidden, dim)), jnp.float32),
            "k_norm_scale": jnp.ones(dim),
            "k_norm_bias": jnp.zeros(dim),
            "weights_proj": jnp.zeros((hidden, config.index_n_heads)),
        }
        x = 2e-4 * rng.normal(size=(1, 3, hidden))  # keys of a size like EPS ** 0.5
        made = context.make_context(
            config, jnp.ones((1, 3), int), jnp.arange(3, dtype=int)[None]
        )
        c_q = jnp.zeros((1, 3, config.q_lora_rank))
        x32 = jnp.asarray(x, jnp.float32)
        project = jax.jit(
            lambda *args: indexer.project(*args, made)[1], static_argnums=1
        )
        k = project(params, config, x32, c_q)
        variance = np.var(x @ np.asarray(params["wk"], np.float64), axis=-1)
        self.assertBetween(np.median(variance) / EPS, 0.2, 5)
        # Rotations keep the length, which shows the eps.
        got = np.mean(np.asarray(k, np.float64) ** 2, axis=-1)
        np.testing.assert_allclose(got, variance / (variance + EPS), rtol=RTOL)


CONFIG = tiny.model(num_hidden_layers=2, num_nextn_predict_layers=0)
EIGHT = dataclasses.replace(CONFIG, index_dtype="fp8")


def inputs(num_tokens=12):
    """An indexer's parameters, hidden states, query latents and their context."""
    params = tiny.params(CONFIG)["layers_0"]
    params = jax.tree.map(lambda x: x[0], next(iter(params.values()))["indexer"])
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(1, num_tokens, CONFIG.hidden_size)), jnp.float32)
    c_q = rng.normal(size=(1, num_tokens, CONFIG.q_lora_rank))
    made = context.make_context(
        CONFIG, jnp.ones((1, num_tokens), int), jnp.arange(num_tokens)[None]
    )
    return params, x, jnp.asarray(c_q, jnp.float32), made


class EightBitsTest(parameterized.TestCase):
    """index_dtype "fp8": in training, reading prompts and decoding."""

    def test_numbers_have_8_bits_and_gradients_are_those_of_all(self):
        params, x, c_q, made = inputs()

        def project(params, config):
            found = indexer.project(params, config, x, c_q, made)
            return sum(jnp.sum(jnp.sin(y)) for y in found), found

        def run(config):
            return jax.jit(jax.grad(project, has_aux=True), static_argnums=1)(
                params, config
            )

        (_, whole), (slope, eight) = run(CONFIG), run(EIGHT)
        for exact, few in zip(whole[:2], eight[:2], strict=True):
            want = eight_bits.restored(*eight_bits.rounded(exact), "float32")
            np.testing.assert_array_equal(few, want)
            self.assertGreater(np.mean(np.asarray(few != exact)), 0.5)
        np.testing.assert_array_equal(whole.w, eight.w)

        def given(params):  # the slope at the rounded numbers, handed to all numbers
            found = indexer.project(params, CONFIG, x, c_q, made)
            slopes = (jnp.cos(y) for y in eight)
            return sum(jnp.sum(y * c) for y, c in zip(found, slopes, strict=True))

        want = jax.jit(jax.grad(given))(params)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
            slope,
            want,
        )

    def test_a_model_without_indexers_refuses_it(self):
        changes = {"layer_types": ("latent_sliding",) * 2}
        message = "index_dtype='fp8' is of indexers, which no layer has with layer_ty"
        with self.assertRaisesRegex(config_lib.InputError, message):
            dataclasses.replace(EIGHT, variants=tiny.SIZES_OF_VARIANTS, **changes)

    def test_codes_of_rounded_numbers_are_exact(self):
        params, x, c_q, made = inputs()
        numbers = indexer.project(params, EIGHT, x, c_q, made)
        codes, exponents = indexer.as_scored(EIGHT, numbers)
        self.assertEqual({codes.q.dtype, codes.k.dtype}, {jnp.dtype("float8_e4m3fn")})
        np.testing.assert_array_equal(
            eight_bits.restored(codes.k, exponents, "float32"), numbers.k
        )
        factors = codes.w / numbers.w
        np.testing.assert_array_equal(
            codes.q.astype(jnp.float32) * factors[..., None], numbers.q
        )

    def test_training_selects_by_codes(self):
        params, x, c_q, made = inputs()
        called = []

        def choose(q, k, w, lo, hi, **options):
            called.append((q.dtype, k.dtype, options["k_exponents"].dtype))
            return pallas_kernels.indexer_mask(q, k, w, lo, hi, **options)

        forms = {"mask": (selection_lib.Mask, choose)}
        with mock.patch.dict(selection_lib._FORMS, forms):
            index = indexer.select(params, EIGHT, x, c_q, made)
        self.assertEqual(called, [(jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.int8)])
        q, k, w = (np.asarray(y[0], np.float64) for y in index.projections)
        for t in range(12):
            scores = w[t] @ np.maximum(q[t] @ k[: t + 1].T, 0)
            best = np.lexsort((np.arange(t + 1), -scores))[: CONFIG.index_topk]
            got = np.flatnonzero(index.selection.keep[0, :, t])
            np.testing.assert_array_equal(got, np.sort(best))

    @parameterized.parameters(2, 12)
    def test_reading_and_decoding_are_as_training(self, num_new):
        config, params, dtypes = EIGHT, tiny.params(EIGHT), []
        tokens = np.random.default_rng(0).integers(1, 80, (2, 12 + num_new))

        @jax.jit
        def run(params, tokens):
            whole = transformer.forward(params, config, tokens).hidden[:, 12:]
            _, cache, _ = cached.prefill(
                params, config, tokens[:, :12], jnp.full(2, 12), 12 + num_new
            )
            return whole, cached.decode(params, config, cache, tokens[:, 12:])[0]

        def note(q, k, *args, **options):
            dtypes.append((q.dtype.name, k.dtype.name))
            return pallas_kernels.decode.decode_indexer_topk(q, k, *args, **options)

        with mock.patch.object(pallas_kernels, "decode_indexer_topk", note):
            whole, read = run(params, tokens)
        eight = "float8_e4m3fn", "uint8"  # the cache has the codes' bytes
        self.assertEqual(set(dtypes), {eight} if num_new == 2 else set())
        np.testing.assert_allclose(whole, read, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    environment.main()
