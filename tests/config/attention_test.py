"""The rules of the fields that give each layer its attention."""

import dataclasses

from absl.testing import parameterized

from glm5_jax import config as config_lib
from tests import environment, small_configs
from tests.model import tiny

GROUPED = ("latent", "grouped", "grouped_sliding")
SLIDING = ("latent", "latent_sliding", "latent")


class LayerTypesTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("length", {"layer_types": SLIDING[:2]}, "of the 3 layers .*, got 2 names"),
        (
            "unknown",
            {"layer_types": ("latent", "latent_slidng", "latent")},
            "got 'latent_slidng'. Did you mean latent_sliding?",
        ),
        (
            "letter_of_a_layer_without_an_indexer",
            {"layer_types": SLIDING, "index_topk_pattern": "FFF"},
            "asks for 'F-F' .F or S., got 'FFF'",
        ),
        (
            "no_letter_of_a_layer_with_one",
            {"index_topk_pattern": "F-F"},
            "asks for 'FFF' .F or S., got 'F-F'",
        ),
        (
            "first_index",
            {"layer_types": SLIDING[1:] + SLIDING[:1], "index_topk_pattern": "-SF"},
            "must begin with F",
        ),
        (
            "batch_invariant",
            {"layer_types": SLIDING, "batch_invariant": True},
            r"layers of type 'latent' only.* has \['latent_sliding'\]",
        ),
        (
            "window",
            {"variants": {"sliding_window": 0}},
            "sliding_window must be at least 1",
        ),
        (
            "groups",
            {"layer_types": GROUPED, "variants": {"num_key_value_heads": 3}},
            "num_attention_heads must be divisible by .*, got 4 and 3",
        ),
        (
            "head_dim",
            {
                "layer_types": GROUPED,
                "variants": {"num_key_value_heads": 2, "head_dim": 4},
            },
            "head_dim must be at least qk_rope_head_dim.* got 4 and 8",
        ),
    )
    def test_a_broken_rule_has_one_message(self, changes, message):
        with self.assertRaisesRegex(config_lib.InputError, message) as caught:
            sizes = config_lib.AttentionVariants(**changes.get("variants", {}))
            tiny.model(**changes | {"variants": sizes})
        self.assertLen(str(caught.exception).splitlines(), 1)

    def test_states_need_whole_rows(self):
        config = small_configs.step(16, tiny.model(layer_types=("gated_delta",) * 3))
        mesh = config_lib.MeshConfig(data=1, context=2)
        with self.assertRaisesRegex(config_lib.InputError, "mesh.context must be 1"):
            dataclasses.replace(config, mesh=mesh)

    def test_all_latent_is_the_same_config_as_none(self):
        self.assertEqual(tiny.model(layer_types=("latent",) * 3), tiny.model())

    def test_indexers_are_those_of_latent_layers(self):
        config = tiny.model(layer_types=SLIDING)
        self.assertEqual(config.is_full_index_layer, (True, False, True))
        self.assertFalse(config.shares_index)
        self.assertTrue(config.has_indexer)
        without = tiny.model(layer_types=("latent_sliding",) * 3)
        self.assertFalse(without.has_indexer)
        step = small_configs.step(16, without)
        self.assertFalse(step.has_indexer_loss)
        with self.assertRaisesRegex(config_lib.InputError, "must have a 'latent'"):
            small_configs.of_stage(step, "dsa_warmup")


if __name__ == "__main__":
    environment.main()
