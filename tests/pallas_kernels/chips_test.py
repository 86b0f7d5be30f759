"""The one table of what chips can do, and that no other file repeats its numbers."""

import ast
import pathlib

from absl.testing import parameterized

from glm5_jax.scale import slice_devices
from pallas_kernels import chips
from tests import environment

# As the vendors' pages write of a whole chip: devices that it is; TensorCores or
# multiprocessors; memory in GB and GB/s; GB/s of its links both ways, and their
# number; Gbit/s of the network beside them.
VENDORS = {
    "v5e": (1, 1, 16, 819, 400, 4, 25),
    "v5p": (1, 2, 95, 2765, 1200, 6, 50),
    "v6e": (1, 1, 32, 1638, 800, 4, 100),
    "tpu7x": (2, 2, 192, 7380, 1200, 6, 100),
    "a100": (1, 108, 80, 2039, 600, 12, 200),
    "l4": (1, 58, 24, 300, 64, 1, 25),
    "h100": (1, 132, 80, 3350, 900, 18, 400),
    "h200": (1, 132, 141, 4800, 900, 18, 400),
    "b200": (1, 148, 180, 8000, 1800, 18, 400),
}
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
        ("a100", 624, 1),
        ("l4", 242, 1),
        ("h100", 1978.9, 1),  # 3,958 with sparsity
        ("h200", 1978.9, 1),
        ("b200", 4500, 1),
    )
    def test_products_of_8_bits_are_twice_as_fast(self, name, tflops, num_devices):
        """As the vendors write of a whole chip, rounded to whole TFLOP/s."""
        bf16 = chips.CHIPS[name].bf16_tflops
        self.assertAlmostEqual(2 * num_devices * bf16, tflops, delta=1)

    @parameterized.parameters(*VENDORS.items())
    def test_memory_and_links_are_the_vendors(self, name, row):
        devices, cores, gigabytes, memory, links, num_links, network = row
        chip = chips.CHIPS[name]
        # Devices of a chip share its links: each has all of them at a part of the rate.
        self.assertEqual((chip.cores * devices, chip.num_links), (cores, num_links))
        self.assertAlmostEqual(chip.hbm_gib * devices, gigabytes)
        self.assertAlmostEqual(chip.hbm_tbps * 1e3 * devices, memory)
        self.assertAlmostEqual(chip.interconnect_gbps * devices, links)
        self.assertAlmostEqual(chip.network_gbps * 8 * devices, network)

    @parameterized.parameters(
        ("v5p", 459, 2.46, 90),  # one link of six: 1,200 / 6 / 2 GB/s, 90% reached
        ("h200", 790, 4.3, 22.5),
        ("v6e", 918, 1.638, 90),  # nobody timed it
    )
    def test_programs_reach_what_was_timed(self, name, tflops, tbps, gbps):
        chip = chips.CHIPS[name]
        self.assertAlmostEqual(chip.reachable_tflops, tflops)
        self.assertAlmostEqual(chip.reachable_tbps, tbps)
        self.assertAlmostEqual(chip.reachable_link_gbps, gbps)

    @parameterized.parameters(*slice_devices.DEVICES.values())
    def test_the_compiler_leaves_most_of_the_memory(self, device):
        least = 0.9 if device.is_gpu else 0.97  # jax allocates 0.92 of a GPU's
        self.assertBetween(device.hbm_limit_gib / device.chip.hbm_gib, least, 1.01)


if __name__ == "__main__":
    environment.main()
