"""A layer more: what the arrays, the planner and the compiler say that it takes."""

import functools
import math
import pathlib

import jax
import pytest
from absl.testing import parameterized

from glm5_jax import command_line
from glm5_jax import depth as depth_lib
from glm5_jax.model import block, layers
from glm5_jax.scale import programs, slice_devices
from glm5_jax.scale.compiled import arrays, report
from glm5_jax.scale.estimate import memory
from glm5_jax.scale.plan import planner
from glm5_jax.training.reporting import accounting
from tests import environment, tpus
from tests.scale import sharded_step_test

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
TOPOLOGY = "v5p:8x8x8"
DEVICES = 512
# kv_lora_rank's 512 are cut over fsdp alone, norms and biases are whole everywhere.
LESS_CUT = 0.02
# Fused differently, a program of another depth may hold a buffer more or less.
COMPILED = 0.1
KEPT = {  # more than the layers' inputs
    "model.remat_policy": "experts",
    "model.expert_transport": "rounds",
    "model.expert_chunks": "1",
}
DEPTHS = (4, 6)  # of the small model: one dense layer


@functools.cache
def pretrain(depth):
    arguments = command_line.Arguments(
        config=f"{CONFIGS}/glm5_pretrain.py:v5p_512", overrides=tuple(KEPT.items())
    )
    return programs.changed(arguments.train_config(), None, depth)


@functools.cache
def by_kind(config, topology):
    """Bytes of a device: parameters, moments, gradients, activations."""
    sums = {}
    mesh = slice_devices.abstract_mesh(config.mesh, topology)
    for array in arrays.of_program(config, mesh):
        kind = array.kind.partition(":")[0]
        sums[kind] = sums.get(kind, 0) + array.device_bytes
    return sums


def growth(config_of, depth, topology):
    """Returns the growth by a layer more than `depth`."""
    less, more = (by_kind(config_of(d), topology) for d in (depth, depth + 1))
    return {kind: more[kind] - less[kind] for kind in more}


class ShapesTest(parameterized.TestCase):
    @parameterized.parameters(4, 40, 77)
    def test_a_layer_takes_its_parameters_and_the_states_it_was_given(self, depth):
        found = growth(pretrain, depth, TOPOLOGY)
        model = pretrain(depth).model
        table = block.make(model, depth_lib.mtp_kind(model)).table()
        is_param = lambda x: isinstance(x, layers.Param)
        count = sum(
            math.prod(p.shape) for p in jax.tree.leaves(table, is_leaf=is_param)
        )
        less, more = (
            accounting.count_parameters(pretrain(d).model)["total"]
            for d in (depth, depth + 1)
        )
        self.assertEqual(more - less, count)
        params = 4 * count / DEVICES
        self.assertAlmostEqual(found["parameters"] / params, 1, delta=LESS_CUT)
        self.assertAlmostEqual(found["optimizer moments"] / params, 1, delta=LESS_CUT)
        self.assertAlmostEqual(found["gradients"] / (params / 2), 1, delta=LESS_CUT)
        self.assertEqual(found["activations"], 4096 * 6144 * 2)
        self.assertEqual(found["batch"], 0)

    @parameterized.parameters(4, 40, 77)
    def test_the_planner_adds_weights_gradients_and_states(self, depth):
        found = growth(pretrain, depth, TOPOLOGY)
        less, more = (
            planner.estimate(pretrain(d), TOPOLOGY).memory for d in (depth, depth + 1)
        )
        kept = sum(more.arguments.values()) - sum(less.arguments.values())
        self.assertEqual(kept, found["parameters"] + found["optimizer moments"])
        # Of a few layers other moments take most: MTP's, the update.
        made, before = (sum(m.moments["layer"].values()) for m in (more, less))
        want = 2 * found["gradients"] + found["activations"]  # and casts as large
        # Kept results: attention's output and sums, a bit for each key, the gradients
        # of the indexer's loss, the states after attention, gate and up of the rows.
        want += 4096 * (64 * (256 * 2 + 4) + 4096 / 8 + 6144 * 2)
        want += memory.INDEX_BYTES * 4096 * (32 * 129 + 128)
        want += 2 * 1.5 * 4096 * 8 * 2048 * 2
        self.assertEqual(made - before, want)


@pytest.mark.aot
# Small shapes are not those of the kernels: plain XLA stands in for them.
@pytest.mark.filterwarnings("ignore:.* runs as .* instead of tpu")
class CompiledTest(parameterized.TestCase):
    def test_a_layer_takes_its_state_and_its_kept_activations(self):
        if not tpus.has_libtpu():
            self.skipTest("no libtpu: pip install -e '.[aot]'")
        config, topology = sharded_step_test.SMALL, "v5p:2x2x2"
        with environment.optimized():
            lines = [
                report.make(config, "small", topology, depth=depth).line
                for depth in DEPTHS
            ]
        small = lambda depth: programs.changed(config, None, depth)
        found = growth(small, DEPTHS[0], topology)
        kept = found["parameters"] + found["optimizer moments"]
        casts = found["gradients"]  # of the same type
        least = casts + found["activations"]  # where MTP's pass is the worst moment
        most = least + found["gradients"]  # where a layer's is
        less, more = lines
        layers_more = DEPTHS[1] - DEPTHS[0]
        a_layer = lambda key: (more[key] - less[key]) * slice_devices.GIB / layers_more
        self.assertAlmostEqual(a_layer("hbm_args_gib") / kept, 1, delta=COMPILED)
        made = a_layer("hbm_temp_gib")
        self.assertBetween(made, (1 - COMPILED) * least, (1 + COMPILED) * most)


if __name__ == "__main__":
    environment.main()
