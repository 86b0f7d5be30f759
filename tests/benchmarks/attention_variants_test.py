"""The table of docs/variants.md is the one that its command prints."""

import pathlib

from absl.testing import absltest

from benchmarks import attention_variants
from tests import environment

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "variants.md"
LONG = attention_variants.LONG


class TableTest(absltest.TestCase):
    def test_the_page_has_it(self):
        message = (
            "run benchmarks/attention_variants.py, and put its table into the page"
        )
        self.assertIn(attention_variants.table(), PAGE.read_text("utf-8"), message)

    def test_closed_forms(self):
        costs = {
            name.split("`")[1] + name.split("`")[2]: attention_variants.cost(model)
            for name, model in attention_variants.models()
        }
        sparse, dense = costs["latent, sparse: GLM-5"], costs["latent, dense"]
        rows = 78 * 2 * (512 + 64)  # bytes of a token
        self.assertEqual(dense.step_bytes, rows * LONG)
        keys = 78 * 2 * 128 * LONG
        self.assertEqual(sparse.step_bytes, rows * 2048 + keys)
        self.assertEqual(sparse.cache, rows * LONG + keys)
        self.assertEqual(dense.step_flops, 78 * 2 * 64 * (2 * 512 + 64) * LONG)
        self.assertEqual(costs["grouped"].cache, 78 * 2 * 2 * 8 * 128 * LONG)
        state = 78 * 64 * 256 * 256 * 4
        self.assertEqual(costs["simple_gated_delta"].cache, state)
        self.assertEqual(costs["simple_gated_delta"].step_bytes, 2 * state)
        window = costs["grouped_sliding"].step_bytes * LONG / 4096
        self.assertEqual(window, costs["grouped"].step_bytes)


if __name__ == "__main__":
    environment.main()
