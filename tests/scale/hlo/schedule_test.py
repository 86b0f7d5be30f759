"""What runs beside collectives: counted by hand, and in a program of libtpu."""

import pathlib

from absl.testing import parameterized

from glm5_jax.scale.hlo import communication, schedule
from glm5_jax.scale.hlo import parser as hlo
from tests import environment

TEXTS = pathlib.Path(__file__).parent / "texts"
MIB = 2**20
# An exchange of 4 MiB of rows to buffers of 6 MiB, beside a fusion with a product, a
# kernel, a loop and another collective; the way back beside a grouped product.
EXCHANGES = r"""HloModule f

%product (p0: bf16[512,1024], p1: bf16[1024,256]) -> bf16[512,256] {
  %p0 = bf16[512,1024]{1,0} parameter(0)
  %p1 = bf16[1024,256]{1,0} parameter(1)
  ROOT %convolution.1 = bf16[512,256]{1,0} convolution(%p0, %p1), dim_labels=bf_io->bf
}

%body (state: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {
  %state = (s32[], f32[64,64]{1,0}) parameter(0)
  %x = f32[64,64]{1,0} get-tuple-element(%state), index=1
  %dot.1 = f32[64,64]{1,0} dot(%x, %x), lhs_contracting_dims={1}
  ROOT %next = (s32[], f32[64,64]{1,0}) tuple(%x, %dot.1)
}

%condition (state: (s32[], f32[64,64])) -> pred[] {
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a: bf16[512,1024], b: bf16[1024,256]) -> bf16[1024,2048] {
  %a = bf16[512,1024]{1,0} parameter(0)
  %b = bf16[1024,256]{1,0} parameter(1)
  %rows = bf16[1024,2048]{1,0} parameter(2)
  %empty = bf16[1536,2048]{1,0} parameter(3)
  %counts = s32[4]{0} parameter(4)
  %first = (s32[], f32[64,64]{1,0}) parameter(5)
  %w = bf16[4,2048,512]{2,1,0} parameter(6)
  %there = ((bf16[1024,2048]{1,0}, bf16[1536,2048]{1,0}), bf16[1536,2048]{1,0}, \
u32[]) ragged-all-to-all-start(%rows, %empty, %counts), replica_groups={{0,1,2,3}}
  %fusion.1 = bf16[512,256]{1,0} fusion(%a, %b), kind=kOutput, calls=%product
  %kernel = bf16[8,8]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", \
backend_config={"cost_estimate":{"flops":"1000","bytes_accessed":"77"}}
  %loop = (s32[], f32[64,64]{1,0}) while(%first), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %gather.1 = bf16[2048,256]{1,0} all-gather(%b), replica_groups={{0,1}}
  %got = bf16[1536,2048]{1,0} ragged-all-to-all-done(%there)
  %after = bf16[512,256]{1,0} fusion(%a, %b), kind=kOutput, calls=%product
  %back = ((bf16[1536,2048]{1,0}, bf16[1024,2048]{1,0}), bf16[1024,2048]{1,0}, \
u32[]) ragged-all-to-all-start(%got, %rows, %counts), replica_groups={{0,1,2,3}}
  %grouped = bf16[1536,512]{1,0} custom-call(%got, %w), \
custom_call_target="tpu_custom_call", metadata={op_name="ragged_dot_general"}, \
backend_config={"cost_estimate":{"flops":"3000","bytes_accessed":"88"}}
  %end = bf16[1024,2048]{1,0} ragged-all-to-all-done(%back)
  ROOT %lone = bf16[1536,2048]{1,0} ragged-all-to-all(%end, %empty, %counts), \
replica_groups={{0,1,2,3}}
}
""".replace("\\\n", "")


class ScheduleTest(parameterized.TestCase):
    def test_work_between_start_and_end(self):
        found = schedule.beside(hlo.parse(EXCHANGES), spare=1.5)
        self.assertEqual([*found], ["there", "back"])  # no other one is split
        product = 2 * 512 * 1024 * 256
        loop = 3 * 2 * 64**3
        self.assertEqual(found["there"].flops, product + 1000 + loop)
        moved = 2 * (512 * 1024 + 1024 * 256 + 512 * 256) + 77 + 3 * 3 * 4 * 64**2
        self.assertEqual(found["there"].hbm_bytes, moved)
        self.assertEqual(found["back"].flops, 2000)  # rows of an even load
        rows = 2 * (1536 * 2048 + 1536 * 512) / 1.5
        self.assertEqual(found["back"].hbm_bytes, rows + 2 * 4 * 2048 * 512)

    def test_a_ragged_exchange_sends_what_both_arrays_hold(self):
        traffic = communication.find(hlo.parse(EXCHANGES), {"a": 4})
        exchanges = [c for c in traffic.collectives if c.kind == "ragged-all-to-all"]
        self.assertEqual([c.name for c in exchanges], ["there", "back", "lone"])
        for c in exchanges:
            self.assertEqual(c.wire_bytes, 4 * MIB * 3 / 4)

    def test_products_of_a_program_of_libtpu(self):
        """6 times x W and h W^T, of 512 rows."""
        module = hlo.parse((TEXTS / "v5p.hlo").read_text())
        counter = schedule.Counter(module, 1)
        got = counter.computation(module.entry)
        self.assertEqual(got, 6 * 2 * 2 * 512 * 2048 * 4096)

    @parameterized.named_parameters(
        ("rows", "[8,32]", "[32,16]", "[8,16]", "bf_io->bf", 32),
        ("transposed", "[32,8]", "[16,32]", "[8,16]", "fb_oi->bf", 32),
        ("heads", "[8,32,1]", "[4,32,16]", "[4,8,16]", "bf0_0io->0bf", 32),
        ("batch", "[4,8,32]", "[4,32,16]", "[4,8,16]", "0bf_0io->0bf", 32),
        ("sum_of_heads", "[4,8,32]", "[4,32,16]", "[1,8,16]", "0bf_0io->0bf", 4 * 32),
    )
    def test_products_that_are_written_as_convolutions(
        self, left, right, out, labels, terms
    ):
        i = hlo.Instruction(
            "x", f"f32{out}", "convolution", f"(%a, %b), dim_labels={labels}", False
        )
        got = schedule.product_flops(i, [f"f32{left}", f"f32{right}"])
        self.assertEqual(got, 2 * 8 * 16 * (4 if out[1] == "4" else 1) * terms)


if __name__ == "__main__":
    environment.main()
