"""Splits: every device is accounted for, and wrong ones are refused."""

from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.scale.rl import splits
from tests import environment


class SplitsTest(parameterized.TestCase):
    @parameterized.parameters(
        ("v5p:8x8x8", 1, "v5p:4x4x4"),
        ("v5p:8x8x8", 1, "v5p:4x4x8"),
        ("v5p:4x4x4", 3, "v5p:2x2x4"),
        ("v5p:8x8x16", 2, "v5p:8x8x8"),
        ("v6e:16x16", 2, "v6e:8x16"),
        ("tpu7x:4x4x8", 1, "tpu7x:2x4x4"),
    )
    def test_all_devices_are_accounted_for(self, topology, slices, engine):
        found = splits.of(topology, slices, engine)
        total = mesh_lib.num_devices(topology, slices)
        size = mesh_lib.num_devices(engine)
        for split in found:
            parts = split.sampling + split.training + split.unused
            self.assertEqual(parts, total)
            self.assertEqual(split.sampling, split.num_engines * size)
            self.assertBetween(split.unused, 0, size - 1)
            self.assertGreater(split.num_engines, 0)
            named = mesh_lib.num_devices(split.topology, split.num_slices)
            self.assertEqual(split.training, named)
        sizes = [(split.training, split.num_slices) for split in found]
        self.assertEqual(sizes, sorted(set(sizes)))

    def test_a_cube_of_512_chips_by_hand(self):
        found = splits.of("v5p:8x8x8", 1, "v5p:4x4x4")
        large = [s for s in found if s.training >= 64]
        self.assertEqual([s.training for s in large], [64, 128, 256])
        self.assertEqual([s.num_engines for s in large], [7, 6, 4])
        self.assertEqual([s.unused for s in large], [0, 0, 0])
        small = next(s for s in found if s.training == 16)
        self.assertEqual((small.num_engines, small.unused), (7, 48))

    def test_a_trainer_has_a_part_of_a_slice_or_whole_ones(self):
        found = splits.of("v5p:4x4x4", 3, "v5p:4x4x4")
        whole = [s for s in found if s.topology == "v5p:4x4x4"]
        self.assertEqual([s.num_slices for s in whole], [1, 2])
        self.assertEqual([s.num_engines for s in whole], [2, 1])
        layers = splits.of("v5p:4x4x16", 1, "v5p:4x4x4")
        self.assertIn("v5p:4x4x12", [s.topology for s in layers])

    def test_the_same_devices_take_turns(self):
        split = splits.alternating("v5p:8x8x8", 1, "v5p:4x4x4")
        self.assertEqual(
            (split.num_engines, split.training, split.total), (8, 512, 512)
        )
        small = splits.alternating("v5p:2x2x2", 1, "v5p:4x4x4")
        self.assertEqual((small.num_engines, small.engine, small.unused), (1, 8, 0))

    @parameterized.parameters(
        ("v5p:4x4x4", "v5p:4x4x4", "64 devices: there is no split into engines of 64"),
        ("v5p:4x4x4", "v6e:4x4", "must be a slice of v5p"),
        ("v5p:4x4x4", "v5p:3x3x3", "there is no slice 'v5p:3x3x3'"),
        ("h200:8", "h200:8", "8 devices: there is no split into engines of 8"),
        ("h200:8x8", "h100:8", "must be a slice of h200"),
    )
    def test_impossible_splits_are_refused(self, topology, engine, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            splits.of(topology, 1, engine)

    def test_an_engine_that_takes_turns_has_all_its_chips(self):
        with self.assertRaisesRegex(config_lib.InputError, "8 devices: there is no"):
            splits.of("v5p:2x2x2", 1, "v5p:4x4x4", takes_turns=True)

    def test_nodes_of_gpus_by_hand(self):
        for topology, slices in (("h200:8x8", 1), ("h200:8", 8)):
            found = splits.of(topology, slices, "h200:2x8")
            self.assertEqual([s.training for s in found], [8, 16, 24, 32, 48])
            self.assertEqual([s.num_engines for s in found], [3, 3, 2, 2, 1])
            self.assertEqual([s.unused for s in found], [8, 0, 8, 0, 0])
            for split in found:
                named = mesh_lib.num_devices(split.topology, split.num_slices)
                self.assertEqual(split.training, named)

    def test_the_smallest_slice(self):
        self.assertEqual(splits.smallest("h200", 8), "h200:8")
        self.assertEqual(splits.smallest("h200", 17), "h200:4x8")
        self.assertEqual(splits.smallest("v5p", 58.9), "v5p:4x4x4")
        self.assertEqual(splits.smallest("v6e", 1e9), "v6e:16x16")


if __name__ == "__main__":
    environment.main()
