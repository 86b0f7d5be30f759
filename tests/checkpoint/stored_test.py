"""How training cuts its arrays: small chunks, a layer or an expert in each."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from glm5_jax.checkpoint import manager as manager_lib
from glm5_jax.checkpoint import step_windows, stored
from tests import environment
from tests.checkpoint import steps

LIMIT = 2**12  # bytes of a chunk here
SHAPES = {
    "experts": (3, 4, 16, 32),  # layers, experts, rows, columns: one has 2 KiB
    "heads": (3, 64, 4, 32),
    "small": (3, 4, 8, 2),
    "matrix": (64, 96),
    "stack": (40, 64),
    "vector": (2048,),
    "number": (),
}
# What lies in one chunk, by the number of devices.
CHUNKS = {
    1: {
        "experts": (1, 1, 16, 32),
        "heads": (1, 16, 4, 16),  # Orbax halves: a row for itself would be tiny
        "small": (3, 4, 8, 2),
    },
    2: {"experts": (1, 4, 16, 16), "small": (3, 4, 8, 1)},
}


class ChunksTest(steps.StepsTestCase):
    def setUp(self):
        super().setUp()
        for name, size in (("_CHUNK_BYTES", LIMIT), ("_LEAST_CHUNK_BYTES", 2**11)):
            self.enter_context(mock.patch.object(stored, name, size))

    def save(self, num_devices):
        """Columns on so many devices, as a mesh has them."""
        mesh = jax.make_mesh((num_devices,), ("x",), axis_types=(AxisType.Auto,))
        rng = np.random.default_rng(0)
        params = {}
        for name, shape in SHAPES.items():
            spec = [None] * (len(shape) - 1) + ["x"] if len(shape) > 1 else []
            values = jnp.asarray(rng.standard_normal(shape, np.float32))
            params[name] = jax.device_put(values, NamedSharding(mesh, P(*spec)))
        manager = self.open()
        manager.save(1, {"params": params, "step": jnp.int32(1)}, {})
        manager.close()
        return params

    @parameterized.parameters(1, 2)
    def test_chunks_are_small_and_follow_layers_and_experts(self, num_devices):
        params = self.save(num_devices)
        found = step_windows.open_params(self.step_folder(1), params)
        for name in SHAPES:
            self.assertLessEqual(found[name,].chunk_bytes, LIMIT, name)
        for name, shape in CHUNKS[num_devices].items():
            chunk = found[name,]._store.chunk_layout.read_chunk.shape
            self.assertEqual(chunk, shape, name)

    @parameterized.parameters(1, 2)
    def test_values_come_back_and_on_another_mesh(self, num_devices):
        params = self.save(num_devices)
        got = manager_lib.restore_params(self.folder, params)
        steps.assert_same(got, params)
        got = manager_lib.restore_params(self.folder, steps.abstract(params))
        steps.assert_same(got, params)


class Glm5Test(parameterized.TestCase):
    """Shapes of the released model on one device, and on 512."""

    @parameterized.named_parameters(
        ("experts", (75, 256, 6144, 2048), (0, 1)),  # 25 MB each
        ("experts_on_512", (75, 4, 768, 2048), (0,)),  # 13 MB a layer
        ("q_b_proj", (75, 2048, 64, 256), (0,)),  # 67 MB a layer, 64 MiB
        ("embed_tokens", (154880, 6144), ()),  # rows are cut, its largest dim
        ("norm", (75, 6144), ()),
    )
    def test_stacks(self, shape, axes):
        self.assertEqual(stored.stack_axes(shape, 2), axes)


if __name__ == "__main__":
    environment.main()
