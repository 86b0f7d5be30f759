"""Products of compiled kernels, counted in written-out machine code."""

from absl.testing import parameterized

from pallas_kernels import aot_products
from tests import environment

# A dot of 64 rows, depth 576 and 32 columns, and one of 64, 32 and 512.
TTIR = """
  scf.for %first = %c0 to %count step %c32 {
    %s = tt.dot %q, %k, %z : tensor<64x576xbf16> * tensor<576x32xbf16> -> tensor<64x32x
    %o = tt.dot %p, %v, %o, input : tensor<64x32xbf16> * tensor<32x512xbf16> -> tensor<6
"""
SCORES, OUT = 2 * 64 * 576 * 32, 2 * 64 * 32 * 512


def listing(*lines):
    """SASS as nvdisasm prints it: labels, and an instruction a line."""
    return "\n".join(
        line
        if line.startswith(".L")
        else f"        /*0a10*/                   {line} ;"
        for line in lines
    )


class ProductsTest(parameterized.TestCase):
    def test_both_warp_groups_compute_the_scores(self):
        """An HGMMA of 32 columns for each 16 of depth, of which two groups do all."""
        sass = listing(
            "HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT",  # before the loop
            "@!P0 BRA `(.L_x_1)",
            ".L_x_0:",
            *["HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], R24"] * 36,
            *["HGMMA.64x256x16.F32.BF16 R24, R4, gdesc[UR4], R24, gsb0"] * 2,
            "@P1 BRA `(.L_x_0)",
            ".L_x_1:",
            "EXIT",
        )
        got = aot_products.count(sass, TTIR, warps=8)
        self.assertEqual(got.issued_flops, 2 * SCORES + OUT)
        self.assertEqual(got.asked_flops, SCORES + OUT)
        self.assertAlmostEqual(got.times, 1 + SCORES / (SCORES + OUT))
        names = "36 HGMMA 64x32x16", "2 HGMMA 64x256x16"
        self.assertEqual(got.instructions, names)

    def test_only_products_of_loops_are_asked_for(self):
        """Gluon's source has some before and after its loop, and names memory."""
        dot = (
            "%s = ttng.warp_group_dot %q, %k, %z {isAsync = true} : !ttg.memdesc<64x576"
            "xbf16, #shared, #smem, mutable> * !ttg.memdesc<576x32xbf16, #shared1, "
            "#smem, mutable, 2x64x512> -> tensor<64x32xf32, #mma>"
        )
        source = f"""
    {dot}
    %r = scf.for %i = %c0 to %count step %c64 : i32 {{
      {dot}
      %p = scf.if %b -> (i32) {{
        {dot}
      }}
    }} loc(#loc3)
    {dot}
"""
        sass = listing(".L_x_0:", "HMMA.16816.F32.BF16 R4, R8, R2, R4", "BRA `(.L_x_0)")
        got = aot_products.count(sass, source, warps=4)
        self.assertEqual(got.asked_flops, 2 * SCORES)

    def test_every_warp_issues_its_products(self):
        sass = listing(
            ".L_x_0:",
            *["HMMA.16816.F32.BF16 R4, R8, R2, R4"] * 3,
            "HMMA.1688.F32.TF32 R4, R8, R2, R4",
            "BRA.U UP0, `(.L_x_0)",
        )
        got = aot_products.count(sass, TTIR, warps=4)
        self.assertEqual(got.issued_flops, 4 * (3 * 2 * 16 * 8 * 16 + 2 * 16 * 8 * 8))

    def test_one_thread_issues_blackwells_products(self):
        """Rows and columns are bits of a constant; waits lie behind the loop."""
        sass = listing(
            "UMOV UR49, 0x4080490",  # 64 rows, 32 columns
            "UMOV UR51, 0x8400490",  # 128 rows, 256 columns
            "BRA `(.L_x_1)",
            ".L_x_0:",  # a part of the loop that lies before its head
            "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR50], idesc[UR51], UPT",
            "@!P0 BRA `(.L_x_4)",
            ".L_x_1:",
            "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR48], idesc[UR49], !UPT",
            "@!P1 BRA `(.L_x_3)",
            ".L_x_2:",
            "BRA `(.L_x_0)",
            ".L_x_4:",
            "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR48], idesc[UR49], !UPT",
            "EXIT",
            ".L_x_3:",  # waits, and jumps back into the loop
            "@!P2 BRA `(.L_x_3)",
            "BRA `(.L_x_2)",
        )
        got = aot_products.count(sass, TTIR, warps=8)
        self.assertEqual(got.issued_flops, 2 * 16 * (64 * 32 + 128 * 256))

    def test_two_loops_are_two_steps_and_nested_ones_one(self):
        product = "HMMA.16816.F32.BF16 R4, R8, R2, R4"
        one = (".L_x_{0}:", product, "@P0 BRA `(.L_x_{0})")
        name = lambda i: [line.format(i) for line in one]
        apart = aot_products.count(listing(*name(0), *name(1)), TTIR, warps=1)
        nested = listing(".L_x_9:", *name(0), "@P1 BRA `(.L_x_9)", "EXIT")
        for got in (apart, aot_products.count(nested, TTIR, warps=1)):
            self.assertEqual(got.issued_flops, 2 * 16 * 8 * 16)
        self.assertEqual(apart.asked_flops, (SCORES + OUT) // 2)

    def test_a_kernel_without_products_has_none(self):
        sass = listing(".L_x_0:", "FFMA R1, R2, R3, R1", "@P0 BRA `(.L_x_0)", "EXIT")
        for text in (sass, listing("HMMA.16816.F32.BF16 R4, R8, R2, R4", "EXIT")):
            self.assertIsNone(aot_products.count(text, TTIR, warps=4).times)


if __name__ == "__main__":
    environment.main()
