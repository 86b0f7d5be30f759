"""The one table of what chips can do, and that no other file repeats its numbers."""

import ast
import pathlib

from absl.testing import parameterized

from glm5_jax.scale import slice_devices
from pallas_kernels import chips
from tests import environment

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("glm5_jax", "pallas_kernels", "benchmarks", "configs")


def digits(number):
    """The significant digits of a number, whatever its unit: 4.59e14 gives "459"."""
    return f"{abs(number):.6e}".partition("e")[0].replace(".", "").rstrip("0")


def numbers(path):
    """Numbers that a Python file spells out."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        is_number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
        if is_number and node.value:
            yield node.value, node.lineno


class TableTest(parameterized.TestCase):
    def test_no_other_file_has_its_peaks(self):
        rates = [(chip.bf16_tflops, chip.hbm_tbps) for chip in chips.CHIPS.values()]
        rates.append((790, 2.46, 920, 1155, 2307))  # measured, other tables', a chip's
        known = {digits(rate) for pair in rates for rate in pair}
        known = {text for text in known if len(text) >= 3}
        self.assertIn("459", known)
        paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
        repeated = [
            f"{path.relative_to(ROOT)}:{line}: {number}"
            for path in paths
            if path != ROOT / "pallas_kernels" / "chips.py"
            for number, line in numbers(path)
            if digits(number) in known
        ]
        self.assertEmpty(repeated, "read pallas_kernels.chips instead")

    @parameterized.parameters(*chips.CHIPS.values())
    def test_every_name_of_jax_finds_its_chip(self, chip):
        for kind in chip.device_kinds:
            self.assertIs(chips.find(kind), chip)

    @parameterized.parameters(*chips.CHIPS.values())
    def test_no_program_is_faster_than_the_vendor_says(self, chip):
        self.assertLessEqual(chip.reachable_tflops, chip.bf16_tflops)
        self.assertLessEqual(chip.reachable_tbps, chip.hbm_tbps)
        both_ways = 2 * chip.num_links * chip.reachable_link_gbps
        self.assertLess(both_ways, chip.interconnect_gbps)

    @parameterized.parameters(
        ("v5e", 393, 1),
        ("v5p", 918, 1),
        ("v6e", 1836, 1),
        ("tpu7x", 4614, 2),  # a chip is two devices
        ("h100", 1979, 1),  # 3,958 with sparsity
        ("h200", 1979, 1),
        ("b200", 4500, 1),
    )
    def test_products_of_8_bits_are_twice_as_fast(self, name, tflops, num_devices):
        """As the vendors write of a whole chip, in whole TFLOP/s."""
        bf16 = chips.CHIPS[name].bf16_tflops
        self.assertAlmostEqual(2 * num_devices * bf16, tflops, delta=1)

    @parameterized.parameters(*slice_devices.DEVICES.values())
    def test_the_compiler_leaves_most_of_the_memory(self, device):
        self.assertBetween(device.hbm_limit_gib / device.chip.hbm_gib, 0.97, 1.01)


if __name__ == "__main__":
    environment.main()
