"""The text of modules: where computations end, how long loops run, sizes."""

from absl.testing import parameterized

from glm5_jax.scale.hlo import parser as hlo
from tests import environment

# Metadata of a Mosaic kernel has line breaks, and a line that begins with braces.
KERNEL = """HloModule jit_f, is_scheduled=true

%body.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0:T(128)}) parameter(0)
  %x = f32[8]{0:T(128)} get-tuple-element(%p), index=1
  %kernel = f32[8]{0:T(128)} custom-call(%x), custom_call_target="tpu_custom_call", \
metadata={op_name="jit(f)/attention/pallas_call" op_type="{{
 module @m {
}
}}, metadata={
}}, metadata={more}"}
  %gathered = f32[32]{0:T(128)} all-gather(%kernel), replica_groups={{0,1,2,3}}
  ROOT %out = (s32[], f32[8]{0:T(128)}) tuple(%i, %kernel)
}, execution_thread="main"

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
}
"""
LOOP = """HloModule jit_f

%condition (p: (f32[8], s32[])) -> pred[] {{
  %limit = s32[]{{:T(128)}} constant(8)
  %p = (f32[8]{{0}}, s32[]{{:T(128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=1
  ROOT %lt = pred[]{{:T(512)}} compare(%i, %limit), direction={direction}
}}

%body (p: (f32[8], s32[])) -> (f32[8], s32[]) {{
  ROOT %p = (f32[8]{{0}}, s32[]) parameter(0)
}}

ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = f32[8]{{0}} parameter(0)
  %start = s32[]{{:T(128)}} constant({start})
  %copied = s32[]{{:T(128)}} copy(%start)
  %init = (f32[8]{{0}}, s32[]{{:T(128)}}) tuple(%a, /*index=1*/%copied)
  %loop = (f32[8]{{0}}, s32[]{{:T(128)}}) while(%init), condition=%condition, \
body=%body{config}
}}
"""


def loop_module(direction="LT", start=0, config=""):
    return hlo.parse(LOOP.format(direction=direction, start=start, config=config))


class ParseTest(parameterized.TestCase):
    def test_a_kernels_metadata_ends_no_computation(self):
        module = hlo.parse(KERNEL)
        self.assertEqual(module.entry, "main")
        body = module.computations["body.1"]
        self.assertEqual(list(body), ["p", "x", "kernel", "gathered", "out"])
        self.assertEqual(body["kernel"].op_name, "jit(f)/attention/pallas_call")
        self.assertEqual(body["gathered"].opcode, "all-gather")

    def test_operands_and_called_computations(self):
        module = loop_module()
        loop = module.computations["main"]["loop"]
        self.assertEqual(loop.operands, ["init"])
        self.assertEqual(loop.called("body"), ["body"])
        self.assertEqual(loop.called(), ["condition", "body"])
        init = module.computations["main"]["init"]
        self.assertEqual(init.operands, ["a", "copied"])


class TripCountTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("below", {}, 8),
        ("up_to", {"direction": "LE"}, 9),
        ("peeled", {"start": 1}, 7),
        ("down", {"direction": "GT"}, None),
        (
            "of_overflow",
            {"config": ', metadata={op_name="jit(f)/jvp(overflow)/while"}'},
            0,
        ),
        (
            "known",
            {"config": ', backend_config={"known_trip_count":{"n":"5"}}'},
            5,
        ),
    )
    def test_of(self, changes, want):
        module = loop_module(**changes)
        loop = module.computations["main"]["loop"]
        self.assertEqual(module.trip_count(loop, "main"), want)


class ShapesTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("scalar", "f32[]", 4),
        ("matrix", "bf16[8,128]{1,0:T(8,128)(2,1)}", 2048),
        ("tuple", "(s32[]{:T(128)}, /*index=1*/pred[3]{0}, token[])", 7),
        ("small_types", "(s4[10]{0}, f8e4m3fn[6]{0}, u2[4])", 12),
        ("context", "(f32[2], f32[2], u32[]{:S(2)}, u32[]{:S(2)})", 24),
    )
    def test_bytes(self, text, want):
        self.assertEqual(hlo.num_bytes(text), want)

    def test_arrays_outside_hbm_are_told(self):
        text = "(bf16[4]{0:T(128)S(1)}, bf16[4]{0:T(128)})"
        self.assertEqual([is_hbm for *_, is_hbm in hlo.shapes(text)], [False, True])


if __name__ == "__main__":
    environment.main()
