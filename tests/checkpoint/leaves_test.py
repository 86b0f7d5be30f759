"""Windows of parameters, and the checks of their values and shapes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import arrays, same_shapes
from glm5_jax.checkpoint import leaves as leaves_lib
from tests import environment

BF16 = ml_dtypes.bfloat16


def sharded(values):
    """Returns an array on two devices, whose windows need a program."""
    mesh = jax.make_mesh((2,), "x", axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    return jax.device_put(values, place)


class WindowTest(parameterized.TestCase):
    @parameterized.parameters(
        ((2**23,), (2**23,)),  # of 4 bytes: the limit, exactly
        ((2**23 + 1,), (2**23,)),
        ((3, 2**23), (1, 2**23)),
        ((3, 2**23 + 1), (1, 2**23)),
        ((), ()),
        ((1, 1), (1, 1)),
    )
    def test_a_window_has_32_mib_at_most(self, shape, want):
        self.assertEqual(leaves_lib.chunk_shape(shape, 4, range(len(shape))), want)

    def test_windows_tile_an_array_with_the_last_axis_fastest(self):
        got = [
            [(w.start, w.stop) for w in window]
            for window in leaves_lib.windows((3, 5), (2, 3))
        ]
        rows, columns = ((0, 2), (2, 3)), ((0, 3), (3, 5))
        self.assertEqual(got, [[row, column] for row in rows for column in columns])

    @parameterized.parameters(np.asarray, jnp.asarray, sharded)
    def test_windows_of_an_array_and_of_its_cast(self, place):
        values = np.arange(24, dtype=np.float32).reshape(4, 6)
        leaf = leaves_lib.DeviceLeaf(place(values))
        cast = leaves_lib.CastLeaf(leaf, np.dtype(BF16))
        self.assertEqual(cast.cuts, (0, 1))
        window = (slice(1, 3), slice(2, 5))
        np.testing.assert_array_equal(leaf.read(window), values[1:3, 2:5])
        np.testing.assert_array_equal(cast.read(window), values[1:3, 2:5].astype(BF16))

    def test_a_cast_to_the_same_type_copies_nothing(self):
        values = np.ones((4, 6), np.float32)
        leaf = leaves_lib.CastLeaf(leaves_lib.DeviceLeaf(values), values.dtype)
        window = (slice(0, 4), slice(1, 2))
        self.assertTrue(np.shares_memory(leaf.read(window), values))

    @parameterized.parameters(
        (("layers_dense", "mlp", "experts", "up_proj"), 2),
        (("layers_dense", "mlp", "gate"), 1),
        (("mtp", "experts", "up_proj"), 1),
        (("embed",), 0),
    )
    def test_axes_of_layers_and_experts(self, path, want):
        self.assertEqual(leaves_lib.stack_depth(path), want)


class FiniteTest(parameterized.TestCase):
    @parameterized.product(
        dtype=[BF16, np.float32, np.float16], value=[np.nan, np.inf, -np.inf]
    )
    def test_one_value_that_is_not_finite_is_found(self, dtype, value):
        values = np.zeros((3, 5), dtype)
        values[1, 2] = value
        with self.assertRaisesRegex(config_lib.InputError, "a.b holds a NaN or an inf"):
            leaves_lib.require_finite(values, "a.b")
        with self.assertRaisesRegex(config_lib.InputError, "a.b holds a NaN or an inf"):
            leaves_lib.require_finite_params({"a": {"b": jnp.asarray(values)}})

    @parameterized.parameters(BF16, np.float32, np.float16)
    def test_the_largest_and_the_smallest_numbers_are_finite(self, dtype):
        info = ml_dtypes.finfo(dtype)
        values = np.array([info.max, info.min, info.tiny, 0, -0.0], dtype)
        leaves_lib.require_finite(values, "a")
        leaves_lib.require_finite_params({"a": jnp.asarray(values)})

    def test_the_sum_of_a_state_is_that_of_its_floats(self):
        state = {
            "a": jnp.arange(6, dtype=jnp.float32).reshape(2, 3),
            "b": jnp.asarray([0.5, 1.0], jnp.bfloat16),
            "step": jnp.int32(100),
        }
        got = arrays.total(state)
        self.assertEqual((float(got), got.dtype), (16.5, jnp.float32))
        self.assertEqual(float(arrays.total({"step": jnp.int32(1)})), 0.0)


class SameShapesTest(parameterized.TestCase):
    @parameterized.parameters(4, 5, 6, 7)
    def test_a_message_names_five_leaves_and_counts_the_others(self, count):
        ours = {f"x{i}": (i,) for i in range(count)}
        with self.assertRaises(config_lib.InputError) as caught:
            same_shapes.require({}, ours, "it")
        lines = str(caught.exception).splitlines()[1:-1]
        named = [f"  x{i}: absent there, ({i},) here" for i in range(min(count, 5))]
        more = [f"  and {count - 5} more"] if count > 5 else []
        self.assertEqual(lines, named + more)

    def test_a_message_begins_with_the_parameters(self):
        theirs = {"opt_state.m": (1,), "params.b": "present", "same": (3,)}
        ours = {"opt_state.m": (2,), "params.a": (4,), "same": (3,)}
        with self.assertRaises(config_lib.InputError) as caught:
            same_shapes.require(theirs, ours, "it")
        want = [
            "  params.a: absent there, (4,) here",
            "  params.b: present there, absent here",
            "  opt_state.m: (1,) there, (2,) here",
        ]
        self.assertEqual(str(caught.exception).splitlines()[1:-1], want)


if __name__ == "__main__":
    environment.main()
