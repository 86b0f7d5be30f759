"""Arguments by kind, replicas, and bytes that go through HBM."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax import lax

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax import presets
from glm5_jax.scale import hlo, memory, programs
from glm5_jax.training.reporting import accounting
from tests import environment, runs

CONFIG = config_lib.TrainConfig(
    model=presets.GLM5_1M,
    data=config_lib.DataConfig(sequence_length=128, batch_size=8),
    mesh=config_lib.MeshConfig(fsdp=4, expert=2),
)
# What TPUs' modules have: a write in place, and a kernel that says what it moves.
WRITE_AND_KERNEL = """HloModule m, is_scheduled=true

%fused (p0: f32[1024,128], p1: s32[8], p2: f32[8,128]) -> f32[1024,128] {
  %p0 = f32[1024,128]{1,0} parameter(0)
  %p1 = s32[8]{0} parameter(1)
  %p2 = f32[8,128]{1,0} parameter(2)
  ROOT %scatter.1 = f32[1024,128]{1,0} scatter(%p0, %p1, %p2), to_apply=%last
}

ENTRY %main (a: f32[1024,128], b: s32[8], c: f32[8,128]) -> f32[8,128] {
  %a = f32[1024,128]{1,0} parameter(0)
  %b = s32[8]{0} parameter(1)
  %c = f32[8,128]{1,0} parameter(2)
  %fusion.1 = f32[1024,128]{1,0} fusion(%a, %b, %c), kind=kCustom, calls=%fused
  ROOT %kernel.1 = f32[8,128]{1,0} custom-call(%fusion.1), \
custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"cost_estimate":{"bytes_accessed":"777"}}}
}
"""
# A grouped product as libtpu schedules it, the gather before it and its gradient. Of
# its rows some lie in on-chip memory, which is not counted.
GROUPED = """HloModule m, is_scheduled=true

ENTRY %main (a: bf16[64,16], b: s32[64], w: bf16[4,16,32]) -> bf16[4,16,32] {
  %a = bf16[64,16]{1,0} parameter(0)
  %b = s32[64]{0} parameter(1)
  %w = bf16[4,16,32]{2,1,0} parameter(2)
  %gather.1 = bf16[64,16]{1,0} gather(%a, %b)
  %ragged.1 = bf16[64,32]{1,0} custom-call(%gather.1, %w), \
custom_call_target="tpu_custom_call", \
metadata={op_name="jit(f)/moe/experts/ragged_dot_general/ragged-dot-none"}, \
backend_config={"custom_call_config":{"cost_estimate":{"bytes_accessed":"777"}}}
  %here = bf16[64,16]{1,0:S(1)} copy(%gather.1)
  ROOT %ragged.2 = bf16[4,16,32]{2,1,0} custom-call(%here, %ragged.1), \
custom_call_target="tpu_custom_call", \
metadata={op_name="jit(f)/moe/experts/ragged_dot_general/ragged-dot-none"}
}
"""
SIZE = 4 * 256 * 256  # bytes of a float32 matrix


@functools.cache
def arrays(config=CONFIG):
    job = programs.make(config, mesh_lib.make_mesh(config.mesh))
    return memory.arguments(job.arguments, job.names)


def module_of(function, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return hlo.parse(jax.jit(function).lower(*args).compile().as_text())


class ArgumentsTest(parameterized.TestCase):
    def test_on_one_device_they_are_the_state(self):
        config = dataclasses.replace(CONFIG, mesh=config_lib.MeshConfig())
        job = programs.make(config, runs.first_devices())
        kinds = memory.by_kind(memory.arguments(job.arguments, job.names))
        counts = accounting.count_parameters(config.model)
        experts = 4 * counts["routed experts"]
        mtp = 4 * 8 * 3 * 96 * 32  # the experts of MTP's block, counted under mtp
        self.assertEqual(kinds["parameters: experts"], experts + mtp)
        params = sum(v for k, v in kinds.items() if k.startswith("parameters"))
        self.assertEqual(params, accounting.state_bytes(config)["parameters"])
        self.assertEqual(
            kinds["optimizer moments"],
            accounting.state_bytes(config)["optimizer state"],
        )
        self.assertEqual(kinds["batch"], 5 * 4 * 8 * 128)

    def test_a_device_holds_its_part_and_copies_are_counted(self):
        found = {a.name: a for a in arrays()}
        for a in found.values():
            whole = np.prod(a.shape, dtype=int) * np.dtype(a.dtype).itemsize
            self.assertEqual(a.device_bytes * 8, whole * a.num_copies, a.name)
        self.assertEqual(found["batch.tokens"].num_copies, 1)
        self.assertEqual(found["opt_state.num_updates"].num_copies, 8)
        names = [a.name for a in memory.replicated(arrays())]
        self.assertIn("opt_state.num_updates", names)
        self.assertNotIn("batch.tokens", names)
        self.assertEmpty(memory.replicated(arrays(), least_bytes=2**30))


class TrafficTest(parameterized.TestCase):
    def test_operands_and_results(self):
        module = module_of(lambda x, y: jnp.dot(x, y), (256, 256), (256, 256))
        self.assertEqual(memory.traffic(module), 3 * SIZE)

    def test_of_a_stack_in_a_loop_only_the_slice(self):
        """A scan over 6 matrices reads each once, however long the stack."""

        def f(x, stack):
            return lax.scan(lambda x, w: (jnp.dot(x, w), None), x, stack)[0]

        got = memory.traffic(module_of(f, (256, 256), (6, 256, 256)))
        # A product is 3, the slice of the stack 2, a copy of the carry 2.
        self.assertBetween(got, 6 * 3 * SIZE, (6 * 7 + 3) * SIZE)

    def test_a_write_in_place_and_a_kernel_that_says_what_it_moves(self):
        rows = 4 * 8 * 128  # read once, written once
        want = 2 * rows + 4 * 8 + 777
        self.assertEqual(memory.traffic(hlo.parse(WRITE_AND_KERNEL)), want)

    @parameterized.parameters(1, 4)
    def test_grouped_products_move_the_rows_of_an_even_load(self, num_sharing):
        narrow, wide, matrices = 2 * 64 * 16, 2 * 64 * 32, 2 * 4 * 16 * 32
        moved = 2 * narrow + 4 * 64 + narrow  # all rows, whoever they are for
        products = (narrow + wide) / num_sharing + matrices
        products += wide / num_sharing + matrices
        got = memory.traffic(hlo.parse(GROUPED), num_sharing)
        self.assertEqual(got, moved + products)


if __name__ == "__main__":
    environment.main()
