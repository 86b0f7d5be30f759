"""FLOPs of every attention against loops over the pairs of query and key."""

import numpy as np
from absl.testing import absltest, parameterized

from glm5_jax import depth
from glm5_jax.model import attention
from glm5_jax.model.attention import delta_rule
from tests import environment
from tests.model import tiny

LENGTH = 150  # tokens of the document
CONFIG = tiny.variants()
HEADS, WINDOW = CONFIG.num_attention_heads, CONFIG.variants.sliding_window
QK, VALUE, GROUPED = CONFIG.qk_head_dim, CONFIG.v_head_dim, CONFIG.variants.head_dim


def make(config, name):
    """The attention of the first layer of this type that selects its own keys."""
    kinds = depth.layer_kinds(config)
    kind = next(k for k in kinds if k.attention == name)
    return attention.make(config, kind)


def mean_pairs(sees):
    """Keys that a query sees, the mean over a document."""
    pairs = sum(sees(query, key) for query in range(LENGTH) for key in range(LENGTH))
    return pairs / LENGTH


def causal(query, key):
    return key <= query


def in_window(query, key):
    return query - WINDOW < key <= query


class FlopsTest(parameterized.TestCase):
    @parameterized.parameters(
        ("latent_sliding", in_window, QK + VALUE),
        ("grouped", causal, 2 * GROUPED),
        ("grouped_sliding", in_window, 2 * GROUPED),
    )
    def test_scores_and_values_of_visible_pairs(self, name, sees, width):
        want = 2 * HEADS * width * mean_pairs(sees)
        self.assertAlmostEqual(make(CONFIG, name).flops(LENGTH), want)

    @parameterized.parameters(
        # Attention reads min(keys, index_topk); with a single one, every query does.
        ("dense", 6, mean_pairs(causal), 0),
        ("dense_with_indexer_loss", 6, mean_pairs(causal), mean_pairs(causal)),
        ("sparse", LENGTH, mean_pairs(causal), mean_pairs(causal)),
        ("sparse", 1, 1, mean_pairs(causal)),
    )
    def test_indexer_scores_what_attention_may_read(self, mode, topk, read, scored):
        config = tiny.model(attention=mode, index_topk=topk)
        want = 2 * HEADS * (QK + VALUE) * read
        want += 2 * config.index_n_heads * config.index_head_dim * scored
        self.assertAlmostEqual(make(config, "latent").flops(LENGTH), want)

    @parameterized.parameters("gated_delta", "simple_gated_delta")
    def test_delta_rule_counts_its_state_and_its_chunks(self, name):
        """Also for a last chunk that is not full: each counts as a full one."""
        state = 3 * QK * VALUE
        size = delta_rule.CHUNK_SIZE
        pairs = sum(causal(q, k) for q in range(size) for k in range(size)) / size
        want = 2 * HEADS * (state + pairs * (2 * QK + (QK + VALUE) + VALUE))
        self.assertAlmostEqual(make(CONFIG, name).flops(LENGTH), want)


class MemoriesTest(absltest.TestCase):
    def test_first_and_last_head_keep_a_share_of_1_over_e(self):
        """Of a state that is 16 and 4,096 tokens old; the others lie between."""
        (log_decays,) = make(CONFIG, "simple_gated_delta")._log_decays(HEADS)[0, ..., 0]
        self.assertAlmostEqual(float(16 * log_decays[0]), -1, places=6)
        self.assertAlmostEqual(float(4096 * log_decays[-1]), -1, places=6)
        self.assertSequenceAlmostEqual(log_decays, sorted(log_decays))

    def test_gated_heads_start_with_memories_of_2_to_2048_tokens(self):
        """At W_a x = 0, and with a convolution that keeps a token's own input."""
        table = make(CONFIG, "gated_delta").table()["self_attn"]
        decays = np.exp(table["A_log"].fill) * np.log1p(np.exp(table["dt_bias"].fill))
        self.assertAlmostEqual(2 * decays[0], 1)
        self.assertAlmostEqual(2048 * decays[-1], 1)
        ratios = decays[1:] / decays[:-1]
        np.testing.assert_allclose(ratios, ratios[0])
        self.assertEqual(table["conv1d"].fill, (0, 0, 0, 1))


if __name__ == "__main__":
    environment.main()
