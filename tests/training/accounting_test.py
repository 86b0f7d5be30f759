"""Counts against the published audit and against a real tree."""

import functools

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.model import transformer
from glm5_jax.training.reporting import accounting
from glm5_jax.training.reporting import dry_run as report
from tests import environment, small_configs


class CountTest(parameterized.TestCase):
    def test_glm5_is_the_checkpoints_audit(self):
        counts = accounting.count_parameters(presets.GLM5)
        self.assertEqual(counts["total"], 753_864_139_008)
        self.assertEqual(counts["mtp"], 9_952_920_576)
        self.assertEqual(counts["embedding"], 951_582_720)
        self.assertEqual(counts["head"], 951_582_720)
        self.assertEqual(counts["indexer"], 78 * 9_371_904)
        self.assertEqual(counts["dense feed-forward"], 3 * 226_492_416)
        self.assertEqual(round(counts["active"] / 1e7), 4083)  # 40.83 B with the head

    def test_glm5_2_lacks_57_indexers(self):
        counts = accounting.count_parameters(presets.GLM5_2)
        self.assertEqual(counts["total"], 753_329_940_480)
        self.assertEqual(counts["indexer"], 21 * 9_371_904)

    @parameterized.named_parameters(
        ("1m", "glm5_1m", 1e6), ("10m", "glm5_10m", 1e7), ("100m", "glm5_100m", 1e8)
    )
    def test_the_ladder_has_the_sizes_it_says(self, name, size):
        counts = accounting.count_parameters(presets.MODELS[name])
        self.assertBetween(counts["total"], 0.8 * size, 1.2 * size)

    def test_mla_192_and_256_cost_the_same_to_train(self):
        """The paper (2.1): equal FLOPs and parameters, a third fewer heads to decode.

        With DeepSeek's value dim of 128 they are equal to 0.3 % and 5 %.
        """
        wide, narrow = presets.GLM5, presets.GLM5_MLA192
        self.assertEqual((narrow.qk_head_dim, wide.qk_head_dim), (192, 256))
        self.assertEqual(wide.num_attention_heads * 3, narrow.num_attention_heads * 2)
        for count, tolerance in (
            (lambda model: accounting.count_parameters(model)["total"], 3e-3),
            (lambda model: accounting.flops_per_token(model, 4096), 5e-2),
        ):
            self.assertLess(abs(count(narrow) / count(wide) - 1), tolerance)
        cache = accounting.cache_bytes_per_token
        self.assertEqual(cache(wide), cache(narrow))

    def test_parts_sum_to_the_arrays(self):
        counts = accounting.count_parameters(presets.GLM5_1M)
        init = functools.partial(transformer.init_params, presets.GLM5_1M)
        params = jax.eval_shape(init, jax.random.key(0))
        sizes = sum(x.size for x in jax.tree.leaves(params))
        parts = {k: v for k, v in counts.items() if k not in ("total", "active")}
        self.assertEqual(sizes, counts["total"])
        self.assertEqual(sum(parts.values()), counts["total"])

    def test_cache_is_the_reports(self):
        latents, keys = 89_856, 19_968  # bytes a token, bfloat16 (spec 1.10)
        got = accounting.cache_bytes_per_token(presets.GLM5)
        self.assertEqual(got, latents + keys)


class FlopsTest(parameterized.TestCase):
    def test_six_per_active_weight_and_a_bit(self):
        flops = accounting.flops_per_token(presets.BENCH, 512)
        active = accounting.count_parameters(presets.BENCH)["active"]
        self.assertGreater(flops, 6 * active)

    def test_sparse_attention_costs_less_on_long_sequences(self):
        config = presets.GLM5
        longer = accounting.flops_per_token(config, 131072)
        shorter = accounting.flops_per_token(config, 4096)
        # What grows is the indexer alone: 3 x 2 x 64K keys more x 32 heads x 128 x 79.
        more = 3 * 2 * (131072 - 4096) / 2 * 32 * 128 * 79
        self.assertAlmostEqual((longer - shorter) / more, 1.0, delta=0.01)

    def test_documents_of_packed_rows(self):
        """By hand: those of a row as if each were alone, and nothing for padding."""
        config = presets.BENCH
        rows = np.zeros((2, 16), np.int32)
        rows[0, :5], rows[0, 5:12], rows[1, :] = 1, 2, 1
        one = functools.partial(accounting.flops_per_token, config)
        wanted = 5 * one(5) + 7 * one(7) + 16 * one(16)
        got = accounting.flops_of_documents(config, rows)
        np.testing.assert_allclose(got, wanted, rtol=1e-12)
        self.assertLess(got, 32 * one(16))
        whole = accounting.flops_of_documents(config, np.ones((2, 16), np.int32))
        np.testing.assert_allclose(whole, 32 * one(16), rtol=1e-12)
        self.assertEqual(accounting.flops_of_documents(config, 0 * rows), 0)


class StateTest(parameterized.TestCase):
    def test_frozen_parameters_have_no_optimizer_state(self):
        config = config_lib.TrainConfig(model=presets.GLM5_1M)
        whole, warmup = (
            accounting.state_bytes(small_configs.of_stage(config, stage))
            for stage in ("pretrain", "dsa_warmup")
        )
        self.assertEqual(warmup["parameters"], whole["parameters"])
        self.assertLess(warmup["optimizer state"], whole["optimizer state"] / 10)


class ReportTest(parameterized.TestCase):
    def test_names_every_part_and_allocates_nothing(self):
        text = report.dry_run(
            config_lib.TrainConfig(
                data=config_lib.DataConfig(sequence_length=4096),
                model=presets.GLM5,
            )
        )
        for wanted in ("753,864,139,008", "optimizer state", "hidden_size", "FLOPs"):
            self.assertIn(wanted, text)


if __name__ == "__main__":
    environment.main()
