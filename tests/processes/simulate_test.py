"""The division of the mesh's devices among simulated processes."""

from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.processes import simulate
from tests import environment

MeshConfig = config_lib.MeshConfig


class DevicesTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"data": 8}, 2, 4),
        ({"data": 2, "fsdp": 2, "expert": 2}, 4, 2),
        ({}, 2, 1),
        ({"fsdp": 4}, 2, 2),
        ({"fsdp": 2, "tensor": 3}, 4, 3),
    )
    def test_whole_shares(self, axes, count, each):
        self.assertEqual(simulate.devices_each(MeshConfig(**axes), count), each)

    @parameterized.parameters(({"data": 3}, 2), ({"data": 1, "context": 4}, 8))
    def test_no_whole_share(self, axes, count):
        with self.assertRaisesRegex(config_lib.InputError, "must divide the"):
            simulate.devices_each(MeshConfig(**axes), count)

    @parameterized.parameters(-1, 65, 99999)
    def test_no_process_or_too_many(self, count):
        with self.assertRaisesRegex(config_lib.InputError, "at least 1 and at most 64"):
            simulate.devices_each(MeshConfig(), count)


if __name__ == "__main__":
    environment.main()
