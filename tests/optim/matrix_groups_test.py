"""The plan of Muon's matrices for GLM-5 on large meshes."""

import collections
import dataclasses
import math

import jax
from absl import logging
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.model import transformer
from glm5_jax.optim import dimension_numbers, matrix_groups, optimizer
from tests import environment

TERA, GIBI = 1e12, 2**30
V5P_512 = {"data": 1, "fsdp": 64, "expert": 8, "tensor": 1, "context": 1}
V5P_256 = {"data": 1, "fsdp": 32, "expert": 8, "tensor": 1, "context": 1}
TENSOR = {"data": 1, "fsdp": 16, "expert": 8, "tensor": 2, "context": 1}
REPLICAS = {"data": 2, "fsdp": 32, "expert": 8, "tensor": 1, "context": 1}


def plan(model, mesh_shape):
    config = config_lib.OptimConfig()
    dims, shapes = transformer.param_dims(model), transformer.abstract_params(model)
    leaves = optimizer.muon_leaves(config, model, dims, shapes)
    return leaves, matrix_groups.plan(leaves, mesh_shape)


def matrices(leaves):
    """Returns the number of matrices of each shape, and the FLOPs of all."""
    counts, flops = collections.Counter(), 0.0
    for shape, layout, _ in leaves:
        sizes = (layout.batch, layout.rows, layout.cols)
        n, *sides = (math.prod(shape[i] for i in axes) for axes in sizes)
        counts[tuple(sorted(sides))] += n
        flops += n * matrix_groups.newton_schulz_flops(*sides)
    return counts, flops


class PlanTest(parameterized.TestCase):
    @parameterized.product(
        model=[presets.GLM5, presets.GLM5_2],
        mesh_shape=[V5P_512, V5P_256, TENSOR, REPLICAS],
    )
    def test_every_matrix_is_some_devices(self, model, mesh_shape):
        leaves, groups = plan(model, mesh_shape)
        expected, flops = matrices(leaves)
        counts, once = collections.Counter(), 0.0
        num_devices = math.prod(mesh_shape.values())
        for group in groups:
            axes = group.stacks[0].batch_axes
            others = math.prod(mesh_shape[axis] for axis in axes)
            for stack in group.stacks:
                counts[tuple(sorted(stack.shape))] += stack.count * others
                self.assertLessEqual(*stack.block)  # accelerators want it wide
            copies = num_devices // (others * group.num_owners)
            once += group.work.useful_flops * num_devices / copies
            room = group.num_rounds * group.num_owners
            self.assertLessEqual(sum(s.count for s in group.stacks), room)
        self.assertEqual(counts, expected)
        self.assertAlmostEqual(once / flops, 1.0, places=9)

    @parameterized.named_parameters(
        ("512", presets.GLM5, V5P_512, 71.52, 83.4, 5.70),
        ("256", presets.GLM5, V5P_256, 143.03, 153.2, 10.90),
        ("512_index_share", presets.GLM5_2, V5P_512, 71.47, 83.4, 5.70),
    )
    def test_little_is_filled_up(self, model, mesh_shape, useful, flops, sent):
        _, groups = plan(model, mesh_shape)
        logging.info("%s", matrix_groups.markdown(groups))
        work = matrix_groups.total(groups)
        self.assertAlmostEqual(work.useful_flops / TERA, useful, delta=0.01)
        self.assertLess(work.flops / TERA, flops)
        self.assertLess(work.exchanged_bytes / GIBI, sent)

    def test_experts_divide_exactly(self):
        # 76 layers, 256 experts, 3 matrices: 114 on each of 512 devices.
        _, groups = plan(presets.GLM5, V5P_512)
        experts = [group for group in groups if "expert" in group.stacks[0].batch_axes]
        self.assertEqual(sum(group.num_rounds for group in experts), 114)
        for group in experts:
            self.assertEqual(group.work.flops, group.work.useful_flops)

    def test_replicas_share_matrices_that_cost_more_than_to_gather_them(self):
        _, groups = plan(presets.GLM5, REPLICAS)
        experts = [group for group in groups if "expert" in group.stacks[0].batch_axes]
        self.assertEqual({group.shared for group in experts}, {("data",)})

    def test_the_table_names_every_group_and_the_sum(self):
        _, groups = plan(presets.GLM5, V5P_512)
        lines = matrix_groups.markdown(groups).splitlines()
        self.assertLen(lines, len(groups) + 3)
        self.assertIn("71.52", lines[-1])


def alone(shape, spec):
    """A stack [L, rows, columns], as a leaf."""
    layout = dimension_numbers.Layout((0,), (1,), (2,))
    return shape, layout, jax.sharding.PartitionSpec(*spec)


def pieces(*leaves):
    """Returns leaf, start, count and pieces of each stack on four devices."""
    groups = matrix_groups.plan(leaves, {"fsdp": 4})
    return [
        [(s.leaf, s.start, s.count, group.num_pieces) for s in group.stacks]
        for group in groups
    ]


class PiecesTest(parameterized.TestCase):
    """Matrices of 2 MiB in bfloat16: a piece has room for 64 on each device."""

    @parameterized.named_parameters(
        ("as_many_as_fit", 256, [[(0, 0, 256, 1)]]),
        ("a_round_more", 260, [[(0, 0, 256, 1)], [(0, 256, 4, 1)]]),
        ("two_equal_pieces", 264, [[(0, 0, 264, 2)]]),
        ("three_equal_pieces", 4 * 129, [[(0, 0, 516, 3)]]),
        ("at_least_half_full", 4 * 93, [[(0, 0, 368, 2)], [(0, 368, 4, 1)]]),
        ("some_devices_have_one_more", 259, [[(0, 0, 259, 1)]]),
    )
    def test_large_stacks_are_cut(self, count, wanted):
        shape, spec = (count, 1024, 1024), (None, "fsdp")
        self.assertEqual(pieces(alone(shape, spec)), wanted)

    def test_a_matrix_larger_than_a_piece_is_a_piece(self):
        found = pieces(alone((8, 8192, 16384), (None, "fsdp")))  # 256 MiB each
        self.assertEqual(found, [[(0, 0, 8, 2)]])

    @parameterized.named_parameters(
        ("fills", (262, 2), [[(0, 0, 256, 1)], [(0, 256, 6, 1), (1, 0, 2, 1)]]),
        ("does_not_fit", (262, 3), [[(0, 0, 256, 1)], [(0, 256, 6, 1), (1, 0, 3, 1)]]),
        (
            "leaves_another_alone",
            (261, 4, 3),
            [[(0, 0, 256, 1)], [(0, 256, 5, 1), (2, 0, 3, 1)], [(1, 0, 4, 1)]],
        ),
        ("joins_a_full_piece", (256, 2), [[(0, 0, 256, 1), (1, 0, 2, 1)]]),
    )
    def test_small_stacks_join_what_is_left(self, counts, wanted):
        sides, spec = (1024, 1024), (None, "fsdp")
        found = pieces(*(alone((count, *sides), spec) for count in counts))
        self.assertEqual(found, wanted)

    @parameterized.named_parameters(
        ("small_ones_become_one_group", (4, 64, 64), (4, 64, 128), 1),
        ("one_round_serves_both", (1, 2048, 4096), (1, 2048, 4000), 1),
        ("padding_costs_more", (4, 4096, 4096), (4, 1024, 1024), 2),
    )
    def test_stacks_of_two_shapes_share_a_group_if_that_is_cheaper(
        self, one, other, num_groups
    ):
        leaves = [alone(shape, (None, "fsdp")) for shape in (one, other)]
        self.assertLen(pieces(*leaves), num_groups)

    def test_an_axis_of_one_device_makes_no_difference(self):
        axes = ("fsdp", ("fsdp", "tensor"))
        leaves = [alone((4, 64, 64), (None, axis)) for axis in axes]
        (group,) = matrix_groups.plan(leaves, {"fsdp": 4, "tensor": 1})
        self.assertEqual((group.exchanged, group.shared), (("fsdp",), ()))


class WorkTest(parameterized.TestCase):
    def test_work_in_closed_form(self):
        """Ten matrices 8 x 8 in two blocks each, on two devices with three replicas."""
        stack = matrix_groups.Stack(
            leaf=0,
            part=0,
            start=0,
            count=10,
            block=(4, 8),
            batch_axes=(),
            row_axes=("fsdp",),
            col_axes=(),
            shards=(2, 1),
            is_transposed=False,
        )
        group = matrix_groups.Group((stack,), ("fsdp",), ("data",), 2, 3)
        one = 5 * (4 * 8**3 + 2 * 8**3)  # FLOPs of five steps
        self.assertEqual((group.num_owners, group.num_rounds), (6, 2))
        work = group.work
        self.assertAlmostEqual(work.useful_flops, 10 * one / 6)
        self.assertEqual(work.flops, 2 * one)
        whole = 2 * 8 * 8 * 2  # bytes of a device's two matrices
        self.assertEqual(work.exchanged_bytes, 2 * whole / 2)  # half stay, both ways
        self.assertEqual(work.gathered_bytes, 2 * whole)  # of two other replicas
        self.assertEqual(work.cost, 2 * one + 4400 * 3 * whole)
        self.assertEqual(matrix_groups.newton_schulz_flops(16, 8), one + 5 * 4 * 8**3)
        doubled = matrix_groups.total([group, group])
        self.assertEqual((doubled.flops, doubled.cost), (4 * one, 2 * work.cost))
        self.assertEqual(set(dataclasses.asdict(matrix_groups.total([])).values()), {0})


if __name__ == "__main__":
    environment.main()
