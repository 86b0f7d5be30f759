"""A cache of 8 bits against rows that numpy rounds, and its size."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.config import stages
from glm5_jax.inference import engine, limits
from glm5_jax.model import cached
from glm5_jax.model.attention import cache_rows
from tests import environment
from tests.inference import engine_test, fewer_programs
from tests.model import tiny

TILE = 128  # of vLLM's fp8_ds_mla
LOGPROB_ATOL = 1e-5  # float32 sums in another order
# Sizes that no other test compiles, and two tiles a row, the second one shorter.
MODEL = dataclasses.replace(
    engine_test.TINY,
    vocab_size=104,
    kv_lora_rank=136,
    num_hidden_layers=1,
    first_k_dense_replace=1,
)
DRAFTING = dataclasses.replace(MODEL, num_nextn_predict_layers=1)
WINDOWS = dataclasses.replace(
    MODEL,
    num_hidden_layers=2,
    layer_types=("latent_sliding", "latent"),
    variants=tiny.SIZES_OF_VARIANTS,
)


def rounded(x, num_rounded, kind):
    """Returns the numbers that a row has after rounding, by a loop over its tiles."""
    flat = np.array(x, np.float32).reshape(-1, x.shape[-1])
    for row in flat:
        for first in range(0, num_rounded, TILE):
            tile = row[first : min(first + TILE, num_rounded)]
            largest = np.abs(tile).max()
            if not largest:
                continue
            if kind == "int8":
                scale = np.float32(largest * np.float32(1 / 127))
                codes = np.rint(tile * np.float32(1 / scale))
            else:
                scale = np.float32(largest * np.float32(1 / 448))
                ratios = np.clip(tile * np.float32(1 / scale), -448, 448)
                codes = ratios.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            tile[:] = codes * scale
    return flat.reshape(x.shape).astype(x.dtype)


def rounded_keys(k):
    """Returns the indexer's keys after rounding, by a loop over them."""
    flat = np.array(k, np.float32).reshape(-1, k.shape[-1])
    for row in flat:
        factor = 2.0 ** max(np.ceil(np.log2(np.abs(row).max() / 448)), -100)
        row[:] = (row / factor).astype(ml_dtypes.float8_e4m3fn).astype(float) * factor
    return flat.reshape(k.shape).astype(k.dtype)


class RowsTest(parameterized.TestCase):
    @parameterized.product(kind=("int8", "fp8"), dtype=("float32", "bfloat16"))
    def test_numbers_are_those_of_the_loop(self, kind, dtype):
        model = dataclasses.replace(MODEL, kv_cache_dtype=kind, dtype=dtype)
        form = cache_rows.of_latents(model)
        size = model.kv_lora_rank + model.qk_rope_head_dim
        x = (
            np.random.default_rng(0).normal(size=(3, 2, size))
            * 10.0 ** np.arange(3)[:, None, None]
        )
        x[0, 0] = 0
        x = jnp.asarray(x, dtype)
        rows = form.store(x)
        self.assertEqual((rows.dtype, rows.shape), (jnp.uint8, (3, 2, form.width)))
        np.testing.assert_array_equal(
            form.restore(rows), rounded(x, model.kv_lora_rank, kind)
        )

    def test_bytes_are_those_of_vllm(self):
        plain, fp8, int8 = (
            dataclasses.replace(presets.GLM5, kv_cache_dtype=kind)
            for kind in ("auto", "fp8", "int8")
        )
        self.assertEqual(cache_rows.of_latents(fp8).width, 656)
        sizes = [*map(cached.bytes_per_token, (plain, fp8, int8))]
        self.assertEqual(sizes, [78 * n for n in (1152 + 256, 656 + 129, 656 + 256)])

    def test_it_is_refused_where_selections_must_be_those_of_training(self):
        with self.assertRaisesRegex(config_lib.InputError, "kv_cache_dtype='int8'"):
            dataclasses.replace(
                MODEL, dtype="bfloat16", kv_cache_dtype="int8", batch_invariant=True
            )
        model = dataclasses.replace(MODEL, dtype="bfloat16")
        invariant = stages.BY_NAME["rl"].model_defaults(model)
        self.assertTrue(invariant.batch_invariant)
        model = dataclasses.replace(model, kv_cache_dtype="fp8")
        self.assertIsNone(stages.BY_NAME["rl"].model_defaults(model).batch_invariant)


class EngineTest(parameterized.TestCase):
    def test_in_pages(self):
        self.check(MODEL, "fp8", num_pages=24, page_size=8)

    @pytest.mark.slow  # 8 s
    def test_in_slots(self):
        self.check(MODEL, "int8")

    @pytest.mark.slow  # 15 s
    def test_in_windows(self):
        self.check(WINDOWS, "int8")

    @pytest.mark.slow  # 20 s
    def test_with_drafts(self):
        self.check(DRAFTING, "fp8", num_drafts=2, adapts_drafts=False)

    def check(self, model, kind, **bounds):
        """Compares tokens and log-probs with those of rows that numpy has rounded."""
        params = tiny.params(model)

        def run(model, num_slots):
            sizes = {"num_slots": num_slots, "capacity": 64, "chunk": 16}
            bound = limits.Limits(**bounds)
            with fewer_programs.of_all_rows():
                machine = engine.Engine(
                    params, model, **sizes, num_steps=5, limits=bound
                )
            requests = engine_test.make_requests(5, 40, 19, n=12)
            done = engine_test.run_all(machine, requests)
            return [done[request.id] for request in requests]

        def store(form, x):
            form = dataclasses.replace(form, kind=kind)
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            arguments = form.num_rounded, kind
            return jax.pure_callback(lambda x: rounded(x, *arguments), shape, x)

        def index_keys(config, k):
            shape = jax.ShapeDtypeStruct(k.shape, k.dtype)
            found = jax.pure_callback(rounded_keys, shape, k) if kind == "fp8" else k
            return {"k_index": found}

        model_8bit = dataclasses.replace(model, kv_cache_dtype=kind)
        dtype = cached.empty(model_8bit, 1, 8).entries["kv"].dtype
        self.assertEqual(dtype, np.uint8)
        found = run(model_8bit, num_slots=4)
        with (
            mock.patch.object(cache_rows.Rows, "store", store),
            mock.patch.object(cache_rows, "of_index_keys", index_keys),
        ):
            other = dataclasses.replace(model, rms_norm_eps=1.0001e-5)
            wanted = run(other, num_slots=1)  # fewer programs
        for one, other in zip(found, wanted, strict=True):
            self.assertEqual(one.tokens, other.tokens)
            np.testing.assert_allclose(
                one.logprobs, other.logprobs, rtol=0, atol=LOGPROB_ATOL
            )


if __name__ == "__main__":
    environment.main()
