"""What decoding reads of the cache: the kernels, and the rows of a window."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import pallas_kernels
from glm5_jax.model import cache as cache_lib
from glm5_jax.model import cached, transformer
from glm5_jax.model.attention import cache_rows, dsa_cached
from pallas_kernels import chips
from tests import environment
from tests.model import tiny
from tests.pallas_kernels import program
from tests.pallas_kernels.dispatch_test import meant_for

SLIDING = tiny.model(
    num_hidden_layers=2,
    first_k_dense_replace=2,  # compiles faster
    num_nextn_predict_layers=0,
    layer_types=("latent_sliding", "grouped_sliding"),
    variants=tiny.SIZES_OF_VARIANTS,
)
WINDOW = tiny.SIZES_OF_VARIANTS.sliding_window
OPS = ("indexer_topk", "sparse_mla", "decode_indexer_topk", "decode_sparse_mla")


def decode(config, num_new, capacity):
    """Traces a decoding step of two sequences."""
    params = transformer.abstract_params(config)
    tokens = jax.ShapeDtypeStruct((2, num_new), jnp.int32)

    def run(params, tokens):
        cache = cached.empty(config, 2, capacity)
        return cached.decode(params, config, cache, tokens)[0]

    jax.eval_shape(run, params, tokens)


class RowsTest(parameterized.TestCase):
    @parameterized.parameters((512, 640), (64, 128), (65, 256))
    def test_a_row_fills_tiles_of_128_on_a_tpu_alone(self, rank, width):
        config = tiny.model(kv_lora_rank=rank, qk_rope_head_dim=64, index_head_dim=64)
        self.assertEqual(cache_rows.of_latents(config).width, rank + 64)
        for chip, wanted in (("v5p", width), ("tpu7x", width), ("h200", rank + 64)):
            with meant_for(chips.CHIPS[chip]):
                self.assertEqual(cache_rows.of_latents(config).width, wanted)
                entries = dsa_cached.entries(config, True, 7)
            shapes = [entry.shape for entry in entries.values()]
            self.assertEqual(shapes, [(7, wanted), (7, 64)])

    def test_128_rounded_numbers_share_a_scale(self):
        """GLM-5's row takes 656 bytes instead of 1,152, an indexer's 129 of 256."""
        sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
        config = tiny.model(**sizes, dtype="bfloat16", kv_cache_dtype="fp8")
        self.assertEqual(cache_rows.of_latents(config).width, 656)
        codes, exponents = cache_rows.index_entries(config, 7).values()
        self.assertEqual((codes.shape, codes.dtype), ((7, 128), jnp.uint8))
        self.assertEqual((exponents.shape, exponents.dtype), ((7,), jnp.int8))
        config = tiny.model(kv_lora_rank=256, kv_cache_dtype="fp8")
        form = cache_rows.of_latents(config)
        x = np.repeat([1.0, 100, 1.0], [128, 128, 8])[None].astype(np.float32)
        x[0, :256:2] *= 0.0123  # in tile 0 too small for the scale of tile 1
        got = form.restore(form.store(jnp.asarray(x)))
        np.testing.assert_allclose(got, x, rtol=2**-4)

    @parameterized.parameters((1, True), (8, True), (9, False))
    def test_kernels_of_decoding_take_eight_tokens(self, num_new, is_few):
        """More tokens, as of a prompt's chunk, run as in training."""
        config = tiny.model(num_nextn_predict_layers=0)
        called = set()
        for name in OPS:
            op = getattr(pallas_kernels, name)

            def note(*args, _name=name, _op=op, **options):
                called.add(_name)
                return _op(*args, **options)

            self.enter_context(mock.patch.object(pallas_kernels, name, note))
        decode(config, num_new, capacity=32)
        self.assertEqual(called, {*(OPS[2:] if is_few else OPS[:2])})

    @parameterized.parameters(("fp8", "float8_e4m3fn", 132), ("auto", None, 256))
    def test_selected_rows_reach_the_op_as_they_are_cached(self, kind, codes, dims):
        """Beside codes, queries have no padding, which a TPU's rows of floats do."""
        sizes = {"kv_lora_rank": 128, "qk_rope_head_dim": 4, "index_topk": 8}
        config = tiny.model(num_nextn_predict_layers=0, kv_cache_dtype=kind, **sizes)
        op = pallas_kernels.decode_sparse_mla
        with (
            meant_for(chips.CHIPS["v5p"]),
            mock.patch.object(pallas_kernels, "decode_sparse_mla", wraps=op) as noted,
        ):
            decode(config, 2, capacity=32)
            entry = cache_rows.of_latents(config).entry(32)
        for call in noted.call_args_list:
            q, rows, *_ = call.args
            self.assertEqual((q.shape[-1], call.kwargs["kv_codes"]), (dims, codes))
            self.assertEqual((rows.shape[1:], rows.dtype), (entry.shape, entry.dtype))
        noted.assert_called()

    @parameterized.parameters((3, 32), (1, 32), (1, 4))
    def test_a_window_reads_the_rows_that_its_queries_see(self, num_new, capacity):
        read = []

        def latest(self, name, size, num_new):
            read.append((name, size))
            return latest.real(self, name, size, num_new)

        latest.real = cache_lib.Reader.latest
        with mock.patch.object(cache_lib.Reader, "latest", latest):
            decode(SLIDING, num_new, capacity)
        rows = min(capacity, WINDOW + num_new - 1)
        self.assertEqual(set(read), {(name, rows) for name in ("kv", "k", "v")})

    def test_a_window_moves_over_the_cache(self):
        """Of 16 rows the four last of 12 tokens read eight, from the fifth on."""
        params = tiny.params(SLIDING)
        tokens = np.random.default_rng(0).integers(0, 80, (2, 12))

        @jax.jit
        def run(params, tokens):
            whole = transformer.forward(params, SLIDING, tokens).hidden
            lengths = jnp.asarray([8, 8])
            _, cache, _ = cached.prefill(params, SLIDING, tokens[:, :8], lengths, 16)
            hidden, _, _ = cached.decode(params, SLIDING, cache, tokens[:, 8:])
            return whole[:, 8:], hidden

        np.testing.assert_allclose(*run(params, tokens), rtol=1e-4, atol=1e-5)


class VisibleTest(parameterized.TestCase):
    def test_attention_to_rows_is_a_loop_and_padding_adds_nothing(self):
        rng = np.random.default_rng(0)
        q, kv = rng.normal(size=(2, 3, 4, 6)), rng.normal(size=(2, 9, 6))
        lo = np.array([[0, 2, 3], [0, 1, 8]])
        hi = np.array([[1, 5, 9], [9, 2, 9]])
        want = np.empty((2, 3, 4, 5))
        for b, t, n in np.ndindex(2, 3, 4):
            rows = kv[b, lo[b, t] : hi[b, t]]
            weights = np.exp(0.3 * rows @ q[b, t, n])
            want[b, t, n] = weights @ rows[:, :5] / weights.sum()
        for width in (6, 8):
            rows = [
                cache_rows.padded(jnp.asarray(x, "float32"), width) for x in (q, kv)
            ]
            self.assertEqual(rows[0].shape, (2, 3, 4, width))
            np.testing.assert_array_equal(rows[1][..., 6:], 0)
            bounds = jnp.asarray(lo), jnp.asarray(hi)
            options = {"scale": 0.3, "value_dim": 5}
            attend = dsa_cached.attend_to_visible
            got = program.call(attend, *rows, *bounds, **options)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    environment.main()
