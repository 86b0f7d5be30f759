"""Nodes of GPUs: seconds that can be counted by hand, memory, names."""

import dataclasses

from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax import presets
from glm5_jax.scale import roofline, slice_devices
from glm5_jax.scale.compiled import arrays
from glm5_jax.scale.estimate import torus
from glm5_jax.scale.hlo import communication
from glm5_jax.scale.plan import planner, table
from tests import environment

GB = 1e9
NVLINK = 0.9 * 450e9  # of an H200: 900 GB/s both ways, nine tenths reached
NETWORK = 50e9  # 400 Gbit/s a GPU
SMALL = config_lib.TrainConfig(
    model=dataclasses.replace(presets.GLM5_1M, remat_policy="full"),
    data=config_lib.DataConfig(sequence_length=128, batch_size=16),
)
LARGE = config_lib.TrainConfig(
    model=dataclasses.replace(presets.GLM5, remat_policy="full"),
    data=config_lib.DataConfig(sequence_length=4096, batch_size=8),
)


def mesh(topology, **axes):
    return torus.mesh(config_lib.MeshConfig(**axes), topology)


def seconds(mesh, kind, axes, whole, n):
    """NVLink's and the network's, of a collective on arrays of `whole` bytes."""
    wire = communication.KINDS[kind] * whole * (n - 1) / n
    found = communication.Collective(kind, axes, "forward", "", "", n, 1, wire)
    traffic = communication.Traffic((found,), ())
    roof = roofline.roofline(mesh, 0.0, 0.0, traffic)
    return roof.seconds["NVLink"], roof.seconds["network"]


class SecondsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        # In a node, 8 GB gathered: 7 GB come to each GPU over NVLink.
        ("gather_in_a_node", "all-gather", ("expert",), 8, 8, 7 * GB, 0),
        # On 16 GPUs of two nodes, 16 GB gathered. The 8 GB of the other node come in
        # over 8 adapters; from the 7 other GPUs of its node each gets 2 GB.
        ("gather", "all-gather", ("fsdp", "expert"), 16, 16, 14 * GB, 1 * GB),
        ("scatter", "reduce-scatter", ("fsdp", "expert"), 16, 16, 14 * GB, 1 * GB),
        ("sum", "all-reduce", ("fsdp", "expert"), 16, 16, 28 * GB, 2 * GB),
        # One GPU a node: an adapter brings half of the 8 GB.
        ("gather_between_nodes", "all-gather", ("fsdp",), 8, 2, 0, 4 * GB),
        # 1 GB for each of 7 GPUs of the node and of 8 of the other one.
        ("exchange", "all-to-all", ("fsdp", "expert"), 16, 16, 7 * GB, 8 * GB),
        ("exchange_in_a_node", "all-to-all", ("expert",), 8, 8, 7 * GB, 0),
    )
    def test_collectives_of_two_nodes(self, kind, axes, whole, n, nvlink, network):
        grid = mesh("h200:2x8", fsdp=2, expert=8)
        got = seconds(grid, kind, axes, whole * GB, n)
        self.assertAlmostEqual(got[0], nvlink / NVLINK)
        self.assertAlmostEqual(got[1], network / NETWORK)

    def test_a_permutation_waits_for_the_network_if_any_partner_is_far(self):
        grid = mesh("h200:2x8", context=16)
        found = communication.Collective(
            "collective-permute", ("context",), "forward", "", "", 16, 1, 5 * GB
        )
        traffic = communication.Traffic((found,), ())
        roof = roofline.roofline(grid, 0.0, 0.0, traffic)
        self.assertEqual(roof.seconds["NVLink"], 0)
        self.assertAlmostEqual(roof.seconds["network"], 5 * GB / NETWORK)

    def test_all_axes_share_the_links_of_a_node(self):
        """They are not the axes of a torus, which run side by side."""
        grid = mesh("h200:8", fsdp=4, expert=2)
        made = [
            communication.Collective("all-gather", axes, "forward", "", "", 4, 1, wire)
            for axes, wire in ((("fsdp",), 3 * GB), (("expert",), 4 * GB))
        ]
        roof = roofline.roofline(grid, 0.0, 0.0, communication.Traffic(tuple(made), ()))
        # One of two and three of four: what is sent comes from the others of a group.
        self.assertAlmostEqual(roof.seconds["NVLink"], 7 * GB / NVLINK)
        self.assertEqual(roof.binding, "NVLink")

    def test_the_last_axes_stay_in_a_node(self):
        grid = mesh("h200:4x8", fsdp=4, expert=8)
        self.assertEqual(
            slice_devices.span(grid, ("expert",)), slice_devices.Span(8, 1)
        )
        self.assertEqual(slice_devices.span(grid, ("fsdp",)), slice_devices.Span(4, 4))
        both = slice_devices.span(grid, ("fsdp", "expert"))
        self.assertEqual((both.num_devices, both.num_nodes, both.of_a_node), (32, 4, 8))

    def test_a_node_may_be_a_slice_that_data_alone_spans(self):
        config = config_lib.MeshConfig(slices=2, data=2, fsdp=8)
        grid = torus.mesh(config, "h200:8")
        nodes = [device.process_index for device in grid.devices[:, 0, 0, 0, 0]]
        self.assertEqual(nodes, [0, 1])
        self.assertEqual(slice_devices.span(grid, ("fsdp",), 2).num_nodes, 1)


class PlanTest(parameterized.TestCase):
    def test_memory_is_what_the_driver_shows_less_what_nccl_needs(self):
        for name, gib in (("h100", 73.28), ("h200", 129.17), ("b200", 164.74)):
            device = slice_devices.named(f"{name}:8")
            self.assertEqual(device.hbm_limit_gib, gib)
            self.assertTrue(device.is_gpu)

    def test_a_ranking_names_its_resources(self):
        ranking = planner.make(SMALL, "small", "h100:8", num_shown=3)
        self.assertEmpty(ranking.refusal)
        page = table.page(ranking, "python -m glm5_jax.plan")
        self.assertIn("| NVLink s | network s | waits s |", page)
        self.assertIn("limits: h100 73.28 GiB", page)
        self.assertNotIn("v5p", page)
        self.assertIn("no program for GPUs was compared", page)
        best = ranking.plans[0]
        self.assertEqual(
            tuple(best.roofline.seconds), ("FLOPs", "HBM", "NVLink", "network")
        )

    def test_memory_bounds_a_node(self):
        """Of 754B parameters 8 GPUs hold float32 masters and momentum: 8 bytes each."""
        mesh = config_lib.MeshConfig(expert=8)
        plan = planner.estimate(dataclasses.replace(LARGE, mesh=mesh), "h200:8")
        self.assertFalse(plan.fits)
        least = 8 * 753.9e9 / 8 / slice_devices.GIB
        self.assertBetween(plan.arguments_gib, least, 1.03 * least)
        self.assertRegex(
            planner._refusal("name", plan, "h200:8"),
            r"no mesh of h200:8: a device has 129\.17 GiB.*about 16 times as many",
        )

    def test_arrays_are_listed_without_a_compiler(self):
        mesh = config_lib.MeshConfig(fsdp=2, expert=8)
        config = dataclasses.replace(SMALL, mesh=mesh)
        sizes = [
            [(a.name, a.device_bytes) for a in arrays.make(config, "n", name).arrays]
            for name in ("h200:2x8", "v5p:2x2x4")
        ]
        self.assertEqual(*sizes)


class NamesTest(parameterized.TestCase):
    @parameterized.parameters(("h100:8", 8, 1), ("b200:64x8", 512, 64))
    def test_a_topology_is_its_nodes(self, name, devices, nodes):
        self.assertEqual(mesh_lib.num_devices(name), devices)
        self.assertEqual(mesh_lib.num_nodes(name), nodes)

    @parameterized.parameters(
        ("h200:4", 1, "nodes of 8 GPUs: h200:8 is one, h200:64x8 are 64"),
        ("h200:8x4", 1, "nodes of 8 GPUs"),
        ("h200:0x8", 1, "nodes of 8 GPUs"),
        ("h200", 1, "nodes of 8 GPUs"),
        ("a100:8", 1, "chip of v5e, v5p, v6e, tpu7x, h100, h200, b200"),
        ("h200:2x8", 3, "give h200:8 with a slice a node, .* e.g. h200:6x8"),
    )
    def test_a_name_that_is_none_says_what_is_one(self, name, slices, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            mesh_lib.num_devices(name, slices)

    def test_nothing_is_compiled_for_them(self):
        with self.assertRaisesRegex(config_lib.InputError, "aot --arrays"):
            mesh_lib.topology("h200:8")
        with self.assertRaisesRegex(config_lib.InputError, "for v5e, v5p, v6e, tpu7x"):
            planner.make(SMALL, "small", "h200:8", num_verified=1)


if __name__ == "__main__":
    environment.main()
