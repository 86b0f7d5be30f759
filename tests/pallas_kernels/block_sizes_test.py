"""The table of block sizes: a row a chip, read by what is traced for the chip."""

import dataclasses

import jax
from absl.testing import parameterized

from pallas_kernels import block_sizes, capabilities, chips, selection
from pallas_kernels.indexer_topk import tpu_dense
from tests import environment
from tests.pallas_kernels.dispatch_test import meant_for


class BlockSizesTest(parameterized.TestCase):
    @parameterized.parameters(*map(chips.CHIPS.get, block_sizes.names()))
    def test_a_program_takes_the_row_of_its_chip(self, chip):
        read = block_sizes.tpu if chip.platform == "tpu" else block_sizes.gpu
        seen = []
        with meant_for(chip):
            jax.jit(lambda x: seen.append(read()) or x)(1.0)
        self.assertIs(seen[0], block_sizes.of(chip.name))

    def test_an_unknown_chip_takes_blocks_that_fit_all(self):
        """The least VMEM, and the parts of most cores."""
        safe, rows = block_sizes.tpu(), block_sizes.TPUS.values()
        self.assertEqual(safe.vmem_bytes, min(row.vmem_bytes for row in rows))
        self.assertEqual(safe.cores, max(row.cores for row in rows))
        self.assertIs(block_sizes.gpu(), capabilities.GPUS[90])

    @parameterized.parameters(*block_sizes.TPUS)
    def test_blocks_divide_their_dims(self, chip):
        row = block_sizes.TPUS[chip]
        for size in (*row.dense_attention, *row.indexer_kl):
            self.assertEqual(size & (size - 1), 0)  # a power of two
        for keys in (row.dense_attention[1], row.indexer_kl[1], row.indexer_keys):
            self.assertEqual(selection.RUN % keys, 0)
        self.assertEqual(row.indexer_keys % tpu_dense.PRODUCT_KEYS, 0)

    @parameterized.product(capability=tuple(capabilities.GPUS), rest=(0, 64))
    def test_tiles_of_queries_divide_their_padding(self, capability, rest):
        """Bits and statistics are padded to 128 queries."""
        row = capabilities.GPUS[capability].for_heads(rest)
        for kernel in ("", "_dq", "_dk", "_dv"):
            tile = getattr(row, f"dense_attention{kernel}")
            self.assertEqual(128 % tile.sizes[0], 0)
            self.assertEqual(tile.sizes[1] % 32, 0)  # keys of a word
        for kernel in ("target", "loss", "gradient", "dk"):
            queries_or_rows, keys = getattr(row, f"kl_{kernel}").sizes
            self.assertEqual(128 % queries_or_rows, 0)
            # What a kernel reads of the probabilities was written.
            self.assertLessEqual(keys, row.kl_target.sizes[1])
        # A tile of codes has one scale.
        for size in row.grouped_matmul_quantized.sizes[1:]:
            self.assertEqual(128 % size, 0)

    @parameterized.parameters(
        ("v5e", 1, 128), ("v5p", 2, 64), ("v6e", 1, 128), ("tpu7x", 1, 64)
    )
    def test_kernels_leave_an_eighth_of_the_vmem(self, name, cores, megabytes):
        row = block_sizes.TPUS[name]
        self.assertEqual(row.cores, cores)
        self.assertEqual(8 * row.vmem_bytes, 7 * (megabytes << 20))
        for size in (row.indexer_keys, row.sparse_rows, row.decode_groups):
            self.assertEqual(size & (size - 1), 0)  # a power of two

    @parameterized.product(capability=tuple(capabilities.GPUS), rest=(0, 64))
    def test_triton_takes_powers_of_two(self, capability, rest):
        row = capabilities.GPUS[capability].for_heads(rest)
        tiles = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
        tiles = {k: x for k, x in tiles.items() if isinstance(x, capabilities.Tile)}
        for kernel, tile in tiles.items():
            for size in (*tile.sizes, tile.warps):
                self.assertEqual(size & (size - 1), 0, kernel)
            self.assertBetween(tile.warps, 4, 8)  # warp groups of 128 threads
            self.assertGreater(tile.stages, 0)
        rows, columns, depth = row.grouped_matmul.sizes
        operands = 2 * depth * (rows + columns) * row.grouped_matmul.stages
        self.assertLessEqual(operands, row.shared_kib << 10)

    def test_one_entry_is_tried_for_a_while(self):
        row = block_sizes.changed(block_sizes.of("h200"), "sparse_mla=64,32,4,3")
        tile = capabilities.Tile((64, 32), warps=4, stages=3)
        self.assertEqual(row, dataclasses.replace(row, sparse_mla=tile))
        before = block_sizes.gpu()
        with block_sizes.tried(row):
            self.assertIs(block_sizes.gpu(), row)
            self.assertIs(block_sizes.tpu(), block_sizes.TPUS["v5p"])
        self.assertIs(block_sizes.gpu(), before)
        row = block_sizes.changed(block_sizes.of("v6e"), "dense_attention=512,2048")
        self.assertEqual(row.dense_attention, (512, 2048))
        row = block_sizes.changed(row, "sparse_rows=256")
        self.assertEqual((row.dense_attention, row.sparse_rows), ((512, 2048), 256))


if __name__ == "__main__":
    environment.main()
