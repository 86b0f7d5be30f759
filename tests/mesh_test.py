"""Meshes of this machine's 8 CPUs and of absent TPU slices."""

import math
import pathlib

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.config import files
from tests import environment, tpus

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


def mesh_config(**axes):
    return config_lib.MeshConfig(**axes)


class MachineTest(parameterized.TestCase):
    def test_data_takes_the_remaining_devices(self):
        mesh = mesh_lib.make_mesh(mesh_config(fsdp=2, tensor=2))
        self.assertEqual(dict(mesh.shape)["data"], jax.device_count() // 4)

    @parameterized.named_parameters(
        ("fsdp", {"fsdp": 3}, r"product is 8.*mesh\.fsdp=2 or 4"),
        ("data", {"data": 3, "fsdp": 4}, r"mesh\.data=2, or -1"),
        ("two", {"fsdp": 3, "expert": 4}, r"mesh\.fsdp=2\."),
        ("slices", {"slices": 2}, "set mesh.slices=1"),
        ("three", {"slices": 3}, "must divide the devices, got 3 on 8; .* 2 or 4"),
        ("across", {"slices": 2, "fsdp": 8}, "set the other axes to 4 devices"),
    )
    def test_a_mesh_that_does_not_fit_names_one_that_does(self, axes, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            mesh_lib.make_mesh(mesh_config(**axes))


class SlicesTest(parameterized.TestCase):
    def test_data_alone_goes_across(self):
        config = mesh_config(slices=2, data=2, fsdp=16, expert=4)
        mesh = mesh_lib.make_mesh(config, tpus.cube(4, 2))
        slices = np.vectorize(lambda d: d.slice_index)(mesh.devices)
        np.testing.assert_array_equal(slices[0], 0)
        np.testing.assert_array_equal(slices[1], 1)

    def test_data_within_and_across(self):
        config = mesh_config(slices=2, data=8, fsdp=4, expert=4)
        mesh = mesh_lib.make_mesh(config, tpus.cube(4, 2))
        slices = np.vectorize(lambda d: d.slice_index)(mesh.devices)
        np.testing.assert_array_equal(slices[:4], 0)
        np.testing.assert_array_equal(slices[4:], 1)

    def test_expert_lies_on_one_axis_of_the_torus(self):
        mesh = mesh_lib.make_mesh(mesh_config(fsdp=16, expert=4), tpus.cube(4, 1))
        for row in mesh.devices.reshape(16, 4):
            coords = np.array([device.coords for device in row])
            moving = np.ptp(coords, axis=0)
            self.assertEqual(sorted(moving), [0, 0, 3])


class NodesTest(parameterized.TestCase):
    """GPUs of several hosts, which jax numbers as slices."""

    def test_fsdp_goes_across_nodes_and_experts_stay_within(self):
        path = f"{CONFIGS}/glm5_pretrain.py:h200_512"
        config = command_line.resolve(files.load(path)).mesh
        mesh = mesh_lib.make_mesh(config, tpus.gpu_nodes(64))
        self.assertEqual(dict(mesh.shape) | {"fsdp": 64, "expert": 8}, mesh.shape)
        nodes = np.vectorize(lambda d: d.process_index)(mesh.devices)
        for row in nodes.reshape(64, 8):
            self.assertLen(set(row), 1)

    def test_nodes_may_be_counted_as_slices(self):
        config = mesh_config(slices=4, data=8, fsdp=4)
        mesh = mesh_lib.make_mesh(config, tpus.gpu_nodes(4))
        nodes = np.vectorize(lambda d: d.process_index)(mesh.devices).reshape(4, 8)
        np.testing.assert_array_equal(nodes, np.arange(4)[:, None] + np.zeros(8))

    def test_another_number_is_refused(self):
        with self.assertRaisesRegex(config_lib.InputError, "set mesh.slices=1 or 4"):
            mesh_lib.make_mesh(mesh_config(slices=2), tpus.gpu_nodes(4))


class TopologyTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("chip", "v9:2x2", "chip of v5e, v5p, v6e, tpu7x"),
        ("no_shape", "v5p", "each of 3 axes"),
        ("dims", "v5p:16x16", "v5p:4x8x8, v5p:8x8x8"),
    )
    def test_a_name_that_is_none_names_near_ones(self, name, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            mesh_lib.topology(name)

    @parameterized.parameters(
        ("v5p:8x8x0", "v5p:4x4x4"),
        ("v5p:0x0x0", "v5p:2x2x1"),
        ("v5p:3x3x1", "v5p:2x2x2"),
        ("v5p:512x1x1", "v5p:8x8x8"),
        ("v5p:8x8x2", "v5p:4x4x8"),
        ("v6e:6x4", "v6e:4x8"),
        ("tpu7x:4x4x10", "tpu7x:4x4x8"),
    )
    def test_a_shape_that_no_slice_has_names_near_ones(self, name, near):
        """Checked before libtpu is asked: a side of 0 would crash it."""
        for ask in (mesh_lib.topology, mesh_lib.num_devices):
            with self.assertRaisesRegex(config_lib.InputError, f"no slice.* {near}"):
                ask(name)

    def test_slices_in_any_order_of_their_axes(self):
        for kind, shapes in mesh_lib.TOPOLOGIES.items():
            for shape in shapes:
                turned = "x".join(reversed(shape.split("x")))
                want = math.prod(map(int, shape.split("x")))
                got = mesh_lib.num_devices(f"{kind}:{turned}")
                self.assertEqual(got, want * (1 + (kind == "tpu7x")))
        self.assertEqual(mesh_lib.num_devices("v6e:32x32", 2), 2048)

    def test_a_chip_of_two_devices_is_on_the_expert_axis(self):
        if not tpus.has_libtpu():
            self.skipTest("no libtpu: pip install -e '.[aot]'")
        devices = mesh_lib.topology("tpu7x:4x4x4")
        mesh = mesh_lib.make_mesh(mesh_config(fsdp=16, expert=8), devices)
        row = mesh.devices[0, 0, :, 0, 0]
        self.assertLen({tuple(device.coords) for device in row}, 4)


if __name__ == "__main__":
    environment.main()
