"""The plan of Muon's matrices for GLM-5 on large meshes."""

import collections
import math

from absl import logging
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.model import transformer
from glm5_jax.optim import matrix_groups, optimizer
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


if __name__ == "__main__":
    environment.main()
