"""Checks the chunks of training's arrays: a layer or an expert in each."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from absl import logging
from absl.testing import parameterized
from etils import epath
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import leaves as leaves_lib
from glm5_jax.checkpoint import manager as manager_lib
from glm5_jax.checkpoint import step_folder, step_windows, stored
from tests import environment
from tests.checkpoint import steps

LIMIT = 2**12  # bytes of a chunk here
KEY = "total_bytes_limit"
LAYER = ("layers_1", "block_0")
SHAPES = {
    (*LAYER, "mlp", "experts", "up_proj"): (3, 4, 16, 32),  # an expert has 2 KiB
    (*LAYER, "self_attn", "q_b_proj"): (3, 64, 4, 32),
    (*LAYER, "mlp", "gate"): (3, 16, 4),
    ("mtp", "block", "mlp", "experts", "up_proj"): (4, 16, 32),
    ("mtp", "block", "self_attn", "q_b_proj"): (64, 4, 32),
    ("embed_tokens",): (96, 64),
    ("norm",): (64,),
    ("number",): (),
}
# Chunk shapes of the arrays of SHAPES, by the number of devices.
CHUNKS = {
    1: ((1, 1, 16, 32), (1, 16, 4, 16), (3, 16, 4), (1, 16, 32), (16, 4, 16)),
    2: ((1, 1, 16, 16), (1, 64, 4, 4), (3, 16, 2), (1, 16, 16), (64, 4, 4)),
}


class ChunksTest(steps.StepsTestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.object(stored, "_CHUNK_BYTES", LIMIT))

    def save(self, num_devices):
        """Saves arrays whose columns are sharded over so many devices."""
        mesh = jax.make_mesh((num_devices,), ("x",), axis_types=(AxisType.Auto,))
        rng = np.random.default_rng(0)
        params = {}
        for path, shape in SHAPES.items():
            spec = [None] * (len(shape) - 1) + ["x"] if len(shape) > 1 else []
            values = jnp.asarray(rng.standard_normal(shape, np.float32))
            params[path] = jax.device_put(values, NamedSharding(mesh, P(*spec)))
        params = leaves_lib.unflatten(params)
        manager = self.open()
        manager.save(1, {"params": params, "step": jnp.int32(1)}, {})
        manager.close()
        return params

    @parameterized.parameters(1, 2)
    def test_chunks_are_small_and_follow_layers_and_experts(self, num_devices):
        params = self.save(num_devices)
        found = step_windows.open_params(self.step_folder(1), params)
        for path in SHAPES:
            self.assertLessEqual(found[path].chunk_bytes, LIMIT, path)
            self.assertFalse(found[path]._store.writable)
        for path, shape in zip(SHAPES, CHUNKS[num_devices], strict=False):
            chunk = found[path]._store.chunk_layout.read_chunk.shape
            self.assertEqual(chunk, shape, path)

    @parameterized.parameters(1, 2)
    def test_values_come_back_and_on_another_mesh(self, num_devices):
        params = self.save(num_devices)
        got = manager_lib.restore_params(self.folder, params)
        steps.assert_same(got, params)
        got = manager_lib.restore_params(self.folder, steps.abstract(params))
        steps.assert_same(got, params)


class WindowsTest(steps.StepsTestCase):
    """Steps that `save_params` writes, without the arrays of a training state."""

    def setUp(self):
        super().setUp()
        params = {"a": {"w": np.ones((3, 4), np.float32)}, "zeros": np.zeros(5)}
        self.params = jax.tree.map(np.float32, params)
        leaves = jax.tree.map(leaves_lib.DeviceLeaf, self.params)
        logger = logging.get_absl_logger()
        with self.assertNoLogs(logger, "WARNING"):
            before = logger.level
            step_windows.save_params(self.step_folder(1), leaves, {"step": 1})
            self.levels = before, logger.level

    def test_the_level_of_the_log_is_what_it_was(self):
        self.assertEqual(*self.levels)

    def test_orbax_reads_them_with_a_parameter_of_zeros(self):
        abstract = {"params": steps.abstract(self.params)}
        got = manager_lib.read_state(self.step_folder(1), abstract)
        steps.assert_same(got, {"params": self.params})

    def test_other_arrays_are_absent(self):
        abstract = {"params": self.params, "step": jnp.int32(1)}
        message = r"step: absent there, \(\) here"
        with self.assertRaisesRegex(config_lib.InputError, message):
            self.open().restore(steps.abstract(abstract))
        manager_lib.require_shapes(self.folder, self.params)


class GoneTest(steps.StepsTestCase):
    """Steps that their run deletes or sets aside while another program reads them."""

    @parameterized.product(is_of_training=[True, False], is_renamed=[True, False])
    def test_what_is_gone_is_an_error_and_not_zeros(self, is_of_training, is_renamed):
        folder = epath.Path(self.step_folder(1))
        params = {"w": np.ones((3, 4), np.float32)}
        if is_of_training:
            manager = self.open()
            manager.save(1, {"params": jax.tree.map(jnp.asarray, params)}, {})
            manager.close()
        else:
            leaves = jax.tree.map(leaves_lib.DeviceLeaf, params)
            step_windows.save_params(folder, leaves, {"step": 1})
        leaf = step_windows.open_params(folder, params)[("w",)]
        if is_renamed:
            step_folder.set_aside(folder, step_folder.ABANDONED)
        else:
            step_folder.remove(folder)
        message = "/1 lacks files of 'w': perhaps its run deleted.*checkpoints_to_keep"
        with self.assertRaisesRegex(config_lib.DamagedError, message):
            leaf.read((slice(0, 3), slice(0, 4)))

    def test_a_parameter_that_is_gone_before_it_is_opened(self):
        leaves = {"w": leaves_lib.DeviceLeaf(np.ones((3, 4), np.float32))}
        folder = epath.Path(self.step_folder(1))
        step_windows.save_params(folder, leaves, {"step": 1})
        step_folder.remove(folder / step_folder.PARAMS / "params.w")
        with self.assertRaisesRegex(config_lib.DamagedError, "its run deleted"):
            step_windows.open_params(folder, leaves)


class ChunkShapeTest(parameterized.TestCase):
    @parameterized.parameters(
        ((1000, 7), (0,), 280, (10, 7)),  # 28 bytes a row
        ((6, 10, 4), (0, 1), 80, (1, 5, 4)),  # one row of 160 bytes is too large
        ((3, 2), (0,), 24, (3, 2)),
        ((0, 5), (0,), 8, (1, 5)),  # an axis that is not to be cut stays whole
    )
    def test_a_window_is_as_large_as_the_limit_lets_it(self, shape, cuts, limit, want):
        self.assertEqual(leaves_lib.chunk_shape(shape, 4, cuts, limit), want)


class CacheTest(steps.StepsTestCase):
    def test_decoded_chunks_take_a_quarter_of_a_gibibyte_at_most(self):
        """Unless one chunk is larger, so that a stream of a large model stays small."""
        path = (*LAYER, "mlp", "gate")
        params = leaves_lib.unflatten({path: jnp.zeros((2, 3))})
        manager = self.open()
        manager.save(1, {"params": params, "step": jnp.int32(1)}, {})
        manager.close()
        context = tensorstore.Context
        with mock.patch.object(tensorstore, "Context", wraps=context) as made:
            step_windows.open_params(self.step_folder(1), params)
            manager_lib.restore_params(self.folder, params)
        limits = [call.args[0]["cache_pool"] for call in made.call_args_list]
        # Devices' parts, which are read one after another, need less.
        self.assertEqual([limits[1], limits[-1]], [{KEY: 2**28}, {KEY: 2**26}])

    @parameterized.parameters(
        (("layers_0", "mlp"), (1, 2, 6), 48, 192),  # one tensor of 8 x 6
        (("layers_0", "mlp"), (3, 2, 6), 144, 288),  # two chunks, which are more
        (("mtp", "mlp"), (1, 2, 6), 48, 576),
        (("mtp", "mlp"), (9, 9, 9), 576, 1152),  # a chunk has no more than the array
        (("layers_0", "experts", "mlp"), (1, 1, 6), 24, 48),
    )
    def test_the_cache_holds_a_tensor_and_two_chunks(self, path, chunks, size, want):
        store = tensorstore.open(
            {
                "driver": "zarr",
                "kvstore": {"driver": "memory"},
                "metadata": {"shape": [3, 8, 6], "chunks": chunks, "dtype": "<f4"},
            },
            create=True,
        ).result()
        leaf = step_windows.StepLeaf(store, "")
        self.assertEqual(leaf.chunk_bytes, size)
        self.assertEqual(step_windows._needed_cache(path, leaf), want)

    def test_windows_of_one_chunk_decode_it_once(self):
        """Its three layers are read one by one."""
        path = (*LAYER, "mlp", "gate")
        values = np.random.default_rng(0).random((3, 256, 256), np.float32)
        params = leaves_lib.unflatten({path: jnp.asarray(values)})
        manager = self.open()
        manager.save(1, {"params": params, "step": jnp.int32(1)}, {})
        manager.close()
        with mock.patch.object(step_windows, "_CACHE_BYTES", 0):
            leaf = step_windows.open_params(self.step_folder(1), params)[path]
        self.assertEqual(leaf.chunk_bytes, values.nbytes)

        def bytes_read():
            name = "/tensorstore/kvstore/file/bytes_read"
            (metric,) = tensorstore.experimental_collect_matching_metrics(name)
            return metric["values"][0]["value"]

        before = bytes_read()
        for layer in range(3):
            window = (slice(layer, layer + 1), slice(0, 256), slice(0, 256))
            np.testing.assert_array_equal(leaf.read(window), values[window])
        self.assertLess(bytes_read() - before, 2 * values.nbytes)


class Glm5Test(parameterized.TestCase):
    """Shapes of the released model."""

    @parameterized.named_parameters(
        ("experts", "mlp.experts.up_proj", (75, 256, 6144, 2048), [0, 1]),  # 25 MB
        ("q_b_proj", "self_attn.q_b_proj", (75, 2048, 64, 256), [0]),  # 67 MB
        ("norm", "input_layernorm", (75, 6144), []),  # small as it is
        ("a_chunk", "mlp.experts.up_proj", (75, 2, 8192, 2048), [0]),  # 67 MB, exactly
        ("four_experts", "mlp.experts.up_proj", (75, 4, 6144, 2048), [0, 1]),  # 101 MB
    )
    def test_stacks(self, name, shape, axes):
        path = (*LAYER, *name.split("."))
        self.assertEqual(stored.stack_axes(path, shape, 2), axes)


if __name__ == "__main__":
    environment.main()
