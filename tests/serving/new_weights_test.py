"""A process reads the windows of a store that lie on its own devices, in part."""

import types

from absl.testing import parameterized

from glm5_jax.rl.weight_store import manifest
from glm5_jax.serving import new_weights
from tests import environment

SHAPE = (8, 6)


def leaf(*indices):
    """A leaf of which this process's devices hold these blocks."""
    held = dict(enumerate(indices))
    place = types.SimpleNamespace(addressable_devices_indices_map=lambda shape: held)
    return types.SimpleNamespace(shape=SHAPE, sharding=place)


def window(start, shape):
    return manifest.Window(start, shape, "f", 0, 1, "raw", "")


class NeedsTest(parameterized.TestCase):
    @parameterized.parameters(
        ((0, 0), (4, 6), False),
        ((0, 0), (5, 6), True),
        ((4, 0), (3, 2), False),
        ((4, 0), (3, 3), True),
        ((6, 2), (2, 4), False),
        ((5, 3), (1, 1), True),
        ((6, 3), (1, 1), False),
        ((7, 0), (1, 1), True),
        ((7, 1), (1, 5), False),
    )
    def test_a_window_that_overlaps_a_block(self, start, shape, wanted):
        blocks = (slice(4, 6), slice(2, None)), (slice(7, 8), slice(None, 1))
        needs = new_weights.Needs({"a": {"w": leaf(*blocks)}})
        self.assertEqual(needs("a/w", window(start, shape)), wanted)

    def test_a_leaf_that_the_model_lacks_is_left_to_who_compares_names(self):
        self.assertTrue(new_weights.Needs({})("b", window((0, 0), SHAPE)))

    def test_a_scalar(self):
        scalar = leaf(())
        scalar.shape = ()
        self.assertTrue(new_weights.Needs({"s": scalar})("s", window((), ())))


if __name__ == "__main__":
    environment.main()
