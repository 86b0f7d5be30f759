"""The arrays that live at once, against known peaks and against the compiler."""

import pathlib

from absl.testing import parameterized

from glm5_jax.scale.hlo import liveness
from glm5_jax.scale.hlo import parser as hlo
from tests import environment

TEXTS = pathlib.Path(__file__).parent / "texts"
MIB = 2**20
CHAIN = """HloModule chain

%cond (c: (s32[], f32[1024,256])) -> pred[] {
  %c = (s32[], f32[1024,256]{1,0}) parameter(0)
}

%body (p: (s32[], f32[1024,256])) -> (s32[], f32[1024,256]) {
  %p = (s32[], f32[1024,256]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %x = f32[1024,256]{1,0} get-tuple-element(%p), index=1
  %wide = f32[1024,1024]{1,0} dot(%x, %x), metadata={op_name="jit(f)/mlp/dot"}
  %fast = f32[1024,1024]{1,0:S(1)} copy(%wide)
  %new = f32[1024,256]{1,0} dot(%fast, %x)
  ROOT %out = (s32[], f32[1024,256]{1,0}) tuple(%n, %new)
}

ENTRY %main (a: f32[1024,256]) -> f32[1024,256] {
  %a = f32[1024,256]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %early = f32[1024,512]{1,0} dot(%a, %a)
  %carry = f32[1024,256]{1,0} slice(%early)
  %held = f32[1024,768]{1,0} dot(%a, %a)
  %view = f32[768,1024]{0,1} bitcast(%held)
  %init = (s32[], f32[1024,256]{1,0}) tuple(%zero, %carry)
  %loop = (s32[], f32[1024,256]{1,0}) while(%init), condition=%cond, body=%body
  %last = f32[1024,256]{1,0} get-tuple-element(%loop), index=1
  ROOT %result = f32[1024,256]{1,0} dot(%view, %last)
}
"""


class PeakTest(parameterized.TestCase):
    def test_a_loop_while_its_caller_holds_arrays(self):
        """Carry 1, what is read after the loop 3, inside 4; the early 2 are dead.

        Not counted: the argument, the result, the loop's own result (it becomes the
        carry), and what lies in the vector memory.
        """
        module = hlo.parse(CHAIN)
        found = liveness.peak(module)
        self.assertEqual(found.num_bytes, (1 + 3 + 4) * MIB)
        names = {name for _, name in found.live}
        self.assertEqual(names, {"carry", "held", "wide"})
        first = liveness.temporaries(module)[0]
        self.assertEqual(first.shape, "f32[1024,1024]")
        self.assertEqual((first.count, first.scope), (1, "mlp"))

    @parameterized.named_parameters(
        # GiB that libtpu 0.0.51 allocated for these programs.
        ("v5p", "v5p", 0.019623),
        ("tpu7x", "tpu7x", 0.019745),
        ("slices", "slices", 0.021576),
    )
    def test_near_the_compilers_own(self, name, want):
        got = liveness.peak(hlo.parse((TEXTS / f"{name}.hlo").read_text()))
        self.assertAlmostEqual(got.num_bytes / 2**30 / want, 1, delta=0.02)


if __name__ == "__main__":
    environment.main()
