"""Bytes that go through HBM."""

import re

import jax
import jax.numpy as jnp
from absl.testing import parameterized
from jax import lax

from glm5_jax.scale.hlo import hbm
from glm5_jax.scale.hlo import parser as hlo
from tests import environment

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
# A product that cuts its matrix out of a stack, two fusions deep.
NESTED = """HloModule m, is_scheduled=true

%cut (s: f32[9,64,64], n: s32[]) -> f32[64,64] {
  %s = f32[9,64,64]{2,1,0} parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[] constant(0)
  %part = f32[1,64,64]{2,1,0} dynamic-slice(%s, %n, %zero, %zero), \
dynamic_slice_sizes={1,64,64}
  ROOT %matrix = f32[64,64]{1,0} bitcast(%part)
}

%product (x: f32[8,64], layer: s32[], stack: f32[9,64,64]) -> f32[8,64] {
  %x = f32[8,64]{1,0} parameter(0)
  %layer = s32[] parameter(1)
  %stack = f32[9,64,64]{2,1,0} parameter(2)
  %inner = f32[64,64]{1,0} fusion(%stack, %layer), kind=kLoop, calls=%cut
  ROOT %dot.1 = f32[8,64]{1,0} dot(%x, %inner), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}

ENTRY %main (x: f32[8,64], layer: s32[], stack: f32[9,64,64]) -> f32[8,64] {
  %x = f32[8,64]{1,0} parameter(0)
  %layer = s32[] parameter(1)
  %stack = f32[9,64,64]{2,1,0} parameter(2)
  ROOT %fusion.1 = f32[8,64]{1,0} fusion(%x, %layer, %stack), kind=kOutput, \
calls=%product
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


def module_of(function, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return hlo.parse(jax.jit(function).lower(*args).compile().as_text())


class TrafficTest(parameterized.TestCase):
    def test_operands_and_results(self):
        module = module_of(lambda x, y: jnp.dot(x, y), (256, 256), (256, 256))
        self.assertEqual(hbm.traffic(module), 3 * SIZE)

    def test_of_a_stack_in_a_loop_only_the_slice(self):
        """A scan over 6 matrices reads each once, however long the stack."""

        def f(x, stack):
            return lax.scan(lambda x, w: (jnp.dot(x, w), None), x, stack)[0]

        got = hbm.traffic(module_of(f, (256, 256), (6, 256, 256)))
        # A product is 3, the slice of the stack 2, a copy of the carry 2.
        self.assertBetween(got, 6 * 3 * SIZE, (6 * 7 + 3) * SIZE)

    def test_of_a_stack_in_an_inner_fusion_only_the_slice(self):
        rows, matrix = 4 * 8 * 64, 4 * 64 * 64
        got = hbm.traffic(hlo.parse(NESTED))
        self.assertEqual(got, 2 * rows + 4 + matrix)

    def test_of_what_is_gathered_only_the_rows(self):
        """Rows of one layer's cache, out of that of all layers, two fusions deep."""
        text = NESTED.replace(
            "ROOT %matrix = f32[64,64]{1,0} bitcast(%part)",
            """%matrix = f32[64,64]{1,0} bitcast(%part)
  %rows = s32[2]{0} constant({3, 5})
  ROOT %few = f32[2,64]{1,0} gather(%matrix, %rows)""",
        ).replace("%inner = f32[64,64]", "%inner = f32[2,64]")
        self.assertNotEqual(text, NESTED)
        got = hbm.traffic(hlo.parse(text))
        self.assertEqual(got, 2 * 4 * 8 * 64 + 4 + 4 * 2 * 64)
        plain = """HloModule g

ENTRY %main (a: f32[64,64], b: s32[2]) -> f32[2,64] {
  %a = f32[64,64]{1,0} parameter(0)
  %b = s32[2]{0} parameter(1)
  ROOT %few = f32[2,64]{1,0} gather(%a, %b)
}
"""
        self.assertEqual(hbm.traffic(hlo.parse(plain)), 4 * (2 * 64 + 2 + 2 * 64))

    def test_of_a_stack_in_other_tiles_only_the_slice(self):
        """Of int8 matrices libtpu renames the tiles before it slices, in place."""
        rows, matrix = 4 * 8 * 64, 4 * 64 * 64
        renamed = """  %r = f32[6,64,64]{2,1,0} fusion(%s), kind=kLoop, \
output_to_operand_aliasing={{}: (0, {})}, calls=%copies
  %part = f32[1,64,64]{2,1,0} dynamic-slice(%r, """
        text = re.sub(r"  %part = \S+ dynamic-slice\(%s, ", renamed, NESTED)
        self.assertNotEqual(text, NESTED)
        got = hbm.traffic(hlo.parse(text))
        self.assertEqual(got, 2 * rows + 4 + matrix)

    def test_of_a_stack_of_layers_the_matrices_of_one(self):
        """The name scope says how many layers there are."""
        text = GROUPED.replace("experts/ragged", "experts/layer_of_2/ragged")
        every, own = (hbm.traffic(hlo.parse(x)) for x in (GROUPED, text))
        self.assertEqual(every - own, 2 * 2 * 4 * 16 * 32 / 2)

    def test_of_what_is_started_the_operands_count_once(self):
        text = r"""HloModule f

ENTRY %main (a: f32[8,128], b: f32[4,128]) -> f32[4,128] {
  %a = f32[8,128]{1,0} parameter(0)
  %b = f32[4,128]{1,0} parameter(1)
  %copy = (f32[8,128]{1,0:S(1)}, f32[8,128]{1,0}, u32[]{:S(2)}) copy-start(%a)
  %there = ((f32[8,128]{1,0}, f32[4,128]{1,0}), f32[4,128]{1,0}, u32[]{:S(2)}) \
ragged-all-to-all-start(%a, %b), replica_groups={{0,1}}
  %inside = f32[8,128]{1,0:S(1)} copy-done(%copy)
  ROOT %got = f32[4,128]{1,0} ragged-all-to-all-done(%there)
}
""".replace("\\\n", "")
        rows = 4 * 128
        want = 8 * rows + (8 + 4 + 4) * rows
        self.assertEqual(hbm.traffic(hlo.parse(text)), want)

    @parameterized.named_parameters(
        ("gather", "gather", 16, "", 8 * 128 + 16 + 16 * 128),
        ("few_rows", "gather", 4, "", 4 * 128 + 16 + 4 * 128),
        ("scatter", "scatter", 8, ", f32[16,128]{1,0}", 16 + 2 * 16 * 128),  # in place
    )
    def test_of_what_a_sparse_core_does(self, opcode, rows, more, want):
        """Its start has no operands; the update has them, with the result."""
        text = rf"""HloModule f

%called (a: f32[8,128], b: s32[16]) -> f32[{rows},128] {{
  %a = f32[8,128]{{1,0}} parameter(0)
  %b = s32[16]{{0}} parameter(1)
  ROOT %inner = f32[{rows},128]{{1,0}} {opcode}(%a, %b)
}}, execution_thread="sparsecore"

ENTRY %main (a: f32[8,128], b: s32[16], c: f32[16,128]) -> f32[{rows},128] {{
  %a = f32[8,128]{{1,0}} parameter(0)
  %b = s32[16]{{0}} parameter(1)
  %c = f32[16,128]{{1,0}} parameter(2)
  %room = f32[512,128]{{1,0}} custom-call(), custom_call_target="AllocateBuffer"
  %there = ((), (), (s32[64]{{0:S(11)}})) custom-call-start(), \
async_execution_thread="sparsecore", called_computations={{%called}}
  %doing = ((f32[8,128]{{1,0}}, s32[16]{{0}}{more}), f32[{rows},128]{{1,0}}, \
(s32[64]{{0}})) custom-call-update(%there, %a, %b, %c)
  ROOT %done = f32[{rows},128]{{1,0}} custom-call-done(%doing)
}}
""".replace("\\\n", "")
        self.assertEqual(hbm.traffic(hlo.parse(text)), 4 * want)

    def test_a_write_in_place_and_a_kernel_that_states_its_bytes(self):
        rows = 4 * 8 * 128  # read once, written once
        want = 2 * rows + 4 * 8 + 777
        self.assertEqual(hbm.traffic(hlo.parse(WRITE_AND_KERNEL)), want)

    @parameterized.parameters(1, 4)
    def test_grouped_products_move_the_rows_of_an_even_load(self, num_sharing):
        narrow, wide, matrices = 2 * 64 * 16, 2 * 64 * 32, 2 * 4 * 16 * 32
        moved = 2 * narrow + 4 * 64 + narrow  # all rows, whoever they are for
        products = (narrow + wide) / num_sharing + matrices
        products += wide / num_sharing + matrices
        got = hbm.traffic(hlo.parse(GROUPED), num_sharing)
        self.assertEqual(got, moved + products)


if __name__ == "__main__":
    environment.main()
