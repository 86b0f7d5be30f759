"""Seconds on a torus that can be counted by hand."""

import dataclasses

from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.scale import roofline, slice_devices
from glm5_jax.scale.hlo import communication, schedule
from pallas_kernels import chips
from tests import environment, tpus

V5P = chips.CHIPS["v5p"]
LINK = 90e9  # of a v5p, one way
GB = 1e9


def mesh(size=4, num_slices=1, **axes):
    config = config_lib.MeshConfig(slices=num_slices, **axes)
    return mesh_lib.make_mesh(config, tpus.cube(size, num_slices))


def collective(axes, wire, kind="all-gather"):
    return communication.Collective(kind, axes, "forward", "", "f32[1]", 4, 1, wire)


def seconds(mesh, *found, num_slices=1):
    traffic = communication.Traffic(found, ())
    return roofline.roofline(mesh, 0.0, 0.0, traffic, num_slices).seconds


class RouteTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("one_ring", 4, ("expert",), 1, 2, (1 + 1 + 2) / 3),
        # To 15 others: 4 at distance 1, 6 at 2, 4 at 3, 1 at 4.
        ("two_rings", 4, ("fsdp",), 2, 4, (4 + 12 + 12 + 4) / 15),
        # As many have distance d as 6 - d.
        ("whole_torus", 4, ("fsdp", "expert"), 3, 6, 3 * 64 / 63),
        ("lines", 2, ("fsdp", "expert"), 3, 3, (3 * 1 + 3 * 2 + 3) / 7),
    )
    def test_links_of_axes(self, size, axes, num_torus, ways, hops):
        grid = mesh(size, fsdp=size**2, expert=size)
        route = slice_devices.route(grid, axes)
        self.assertLen(route.torus, num_torus)
        self.assertEqual(route.ways, ways)
        self.assertAlmostEqual(route.hops, hops)

    def test_part_of_an_axis_is_a_line(self):
        route = slice_devices.route(mesh(4, fsdp=32, expert=2), ("expert",))
        self.assertEqual((route.ways, route.hops), (1, 1))


class RooflineTest(parameterized.TestCase):
    def test_axes_of_their_own_run_side_by_side(self):
        grid = mesh(fsdp=16, expert=4)
        fsdp = collective(("fsdp",), 36 * GB)
        expert = collective(("expert",), 9 * GB)
        want = 36 * GB / (4 * LINK)
        self.assertAlmostEqual(seconds(grid, fsdp)["ICI"], want)
        self.assertAlmostEqual(seconds(grid, fsdp, expert)["ICI"], want)
        both = seconds(grid, fsdp, expert, expert, expert, expert)["ICI"]
        self.assertAlmostEqual(both, 4 * 9 * GB / (2 * LINK))

    def test_a_collective_over_all_waits_for_both(self):
        grid = mesh(fsdp=16, expert=4)
        found = [collective(("fsdp",), 36 * GB), collective(("fsdp", "expert"), 6 * GB)]
        want = 36 * GB / (4 * LINK) + 6 * GB / (6 * LINK)
        self.assertAlmostEqual(seconds(grid, *found)["ICI"], want)

    def test_a_permutation_has_one_link_and_an_exchange_travels_far(self):
        grid = mesh(8, fsdp=64, expert=8)
        permute = collective(("expert",), 9 * GB, "collective-permute")
        self.assertAlmostEqual(seconds(grid, permute)["ICI"], 9 * GB / LINK)
        exchange = collective(("expert",), 9 * GB, "all-to-all")
        hops = (2 * (1 + 2 + 3) + 4) / 7  # to the seven others
        want = 9 * GB * hops / (2 * LINK)
        self.assertAlmostEqual(seconds(grid, exchange)["ICI"], want)

    def test_between_slices(self):
        grid = mesh(4, 2, data=2, fsdp=16, expert=4)
        across = collective((communication.DCN,), 12.5 * GB, "all-reduce")
        got = seconds(grid, across, collective(("fsdp",), 36 * GB), num_slices=2)
        self.assertAlmostEqual(got["DCN"], 2.0)
        self.assertAlmostEqual(got["ICI"], 36 * GB / (4 * LINK))

    def test_the_slowest_binds(self):
        grid = mesh(fsdp=16, expert=4)
        traffic = communication.Traffic((collective(("expert",), 9 * GB),), ())
        roof = roofline.roofline(
            grid, V5P.bf16_tflops * 1e12, V5P.reachable_tbps * 1e12 / 2, traffic
        )
        self.assertEqual((roof.binding, roof.total), ("FLOPs", 1.0))
        self.assertAlmostEqual(roof.seconds["HBM"], 0.5)
        self.assertEqual(list(roof.by_axes), [("expert",)])

    def test_links_are_exposed_but_for_the_work_beside_them(self):
        grid = mesh(fsdp=16, expert=4)
        a_run = 9 * GB / (2 * LINK)  # 50 ms
        split = dataclasses.replace(collective(("expert",), 3 * 9 * GB), count=3)
        found = [
            dataclasses.replace(split, name=name) for name in ("half", "all", "alone")
        ]
        peak = V5P.reachable_tflops * 1e12
        beside = {
            "half": schedule.Work(peak * a_run / 2, 1.0),
            "all": schedule.Work(1.0, V5P.reachable_tbps * 1e12 * a_run * 2),
        }
        traffic = communication.Traffic(tuple(found), ())
        roof = roofline.roofline(grid, peak, 0.0, traffic, beside=beside)
        self.assertAlmostEqual(roof.exposed, 3 * a_run * 1.5)
        self.assertAlmostEqual(roof.scheduled, 1.0 + roof.exposed)


if __name__ == "__main__":
    environment.main()
