"""How stacks are cut into scans."""

import dataclasses

from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import depth, presets
from tests import environment

DENSE = depth.Kind("dense", "own")
OWN = depth.Kind("experts", "own")
SHARED = depth.Kind("experts", "shared")
# Of the training-free search on GLM-5 in IndexCache, arXiv 2603.12201.
SEARCHED = (
    "FFSFSSSFSSFFFSSSFFFSFSSSSSSFFSFFSFFSSFFFFFFSFFFFFSFFSSSSSSFSFFFSFSSSFSFFSFFSSS"
)


class LayerGroupsTest(parameterized.TestCase):
    def test_glm5(self):
        groups = depth.layer_groups(presets.GLM5)
        dense, experts = depth.Group(0, (DENSE,), 3), depth.Group(3, (OWN,), 75)
        self.assertEqual(groups, (dense, experts))

    def test_glm5_2(self):
        """Full layers 0, 1, 2, 6, 10, ..., 74; the last three share layer 74's."""
        want = (
            depth.Group(0, (DENSE,), 3),
            depth.Group(3, (SHARED, SHARED, SHARED, OWN), 18),
            depth.Group(75, (SHARED,), 3),
        )
        self.assertEqual(depth.layer_groups(presets.GLM5_2), want)
        is_full = presets.GLM5_2.is_full_index_layer
        full = [i for i, owns_indexer in enumerate(is_full) if owns_indexer]
        self.assertEqual(full, [0, 1, *range(2, 75, 4)])

    def test_attention_variants(self):
        """A layer without an indexer has no index; MTP's is as the last layer."""
        config = config_lib.ModelConfig(
            num_hidden_layers=5,
            first_k_dense_replace=1,
            layer_types=("latent", *("latent_sliding", "latent") * 2),
            index_topk_pattern="F-S-S",
        )
        sliding = depth.Kind("experts", "none", "latent_sliding")
        want = depth.Group(0, (DENSE,), 1), depth.Group(1, (sliding, SHARED), 2)
        self.assertEqual(depth.layer_groups(config), want)
        self.assertEqual(depth.mtp_kind(config), OWN)
        types = ("latent",) * 4 + ("latent_sliding",)
        config = dataclasses.replace(
            config, layer_types=types, index_topk_pattern="FSSS-"
        )
        self.assertEqual(depth.mtp_kind(config), sliding)

    def test_irregular_pattern(self):
        """40 full and 38 shared layers: far fewer bodies to compile than layers."""
        config = config_lib.ModelConfig(index_topk_pattern=SEARCHED)
        self.assertEqual(sum(config.is_full_index_layer), 40)
        groups = self._assert_covers(config)
        self.assertLess(sum(len(group.unit) for group in groups), 78 / 2)

    @parameterized.parameters(
        (1, 0, "F"),
        (1, 1, "F"),
        (6, 6, "FSFSFS"),
        (7, 2, "FSSFSSF"),
        (9, 3, "FFFFFFFFF"),
        (10, 1, "FSSSSSSSSS"),
        (17, 1, "F" + "SSSSSSSF" * 2),
    )
    def test_groups_are_the_stack(self, num_layers, num_dense, pattern):
        self._assert_covers(
            config_lib.ModelConfig(
                num_hidden_layers=num_layers,
                first_k_dense_replace=num_dense,
                index_topk_pattern=pattern,
            )
        )

    def _assert_covers(self, config):
        groups = depth.layer_groups(config)
        places = [
            (group.layer(repeat, position), kind)
            for group in groups
            for repeat in range(group.repeats)
            for position, kind in enumerate(group.unit)
        ]
        self.assertEqual(places, list(enumerate(depth.layer_kinds(config))))
        return groups

    def test_unit_has_at_most_eight_layers(self):
        """The eighth repeats; a period of nine does not, and is cut in pieces."""
        for period in (8, 9):
            pattern = "F" + ("S" * (period - 1) + "F") * 3
            config = config_lib.ModelConfig(
                num_hidden_layers=len(pattern),
                first_k_dense_replace=1,
                index_topk_pattern=pattern,
            )
            longest = max(len(group.unit) for group in self._assert_covers(config))
            self.assertEqual(longest == depth.MAX_UNIT, period == 8)


if __name__ == "__main__":
    environment.main()
