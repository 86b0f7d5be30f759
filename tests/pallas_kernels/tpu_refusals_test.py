"""Each shape or dtype that a TPU kernel cannot take is refused with its reason.

Interpreted on a CPU the kernels would take some of them.
"""

import dataclasses
import functools
from unittest import mock

import jax
from absl.testing import parameterized

import pallas_kernels
from pallas_kernels import block_sizes, cases, dispatch
from pallas_kernels.dense_attention import tpu as dense_attention
from pallas_kernels.indexer_kl import tpu_dense as indexer_kl
from tests import environment
from tests.pallas_kernels import program

CASE = cases.SMALL["short"]
# Of each op: the names of its inputs, and its options.
OPS = {
    "indexer_bits": (("q_index", "k_index", "w", "lo", "hi"), {"topk": 4}),
    "indexer_topk": (("q_index", "k_index", "w", "lo", "hi"), {"topk": 4}),
    "dense_attention": (("q", "k", "v", "lo", "hi"), {"scale": 0.1}),
    "sparse_mla": (("q_latent", "kv", "indices"), {"scale": 0.1}),
    "decode_sparse_mla": (("q_latent", "kv", "indices"), {"scale": 0.1}),
    "decode_indexer_topk": (("q_index", "k_index", "w", "lo", "hi"), {"topk": 4}),
    "indexer_kl_loss": (("q", "k", "lo", "hi"), {"scale": 0.1}),
    "sparse_indexer_kl_loss": (("q_latent", "kv", "indices"), {"scale": 0.1}),
}
PAGES = {"keys": 64}  # the decode ops take whole pages
FLOAT16, FLOAT32 = {"kv": "float16"}, {"kv": "float32"}
BOTH_FLOAT16 = {"q_latent": "float16", "kv": "float16"}
REFUSED = (
    ("indexer_bits", {"index_heads": 12}, {}, r"8 x 128, got \(12, 128\)"),
    ("indexer_topk", {"index_dim": 64}, {}, r"8 x 128, got \(8, 64\)"),
    ("indexer_bits", {"keys": 2**19 + 1}, {}, "scores of 524289 keys do not fit"),
    ("dense_attention", {"head_dim": 64}, {}, r"multiples of 128, got \(64, 128\)"),
    ("dense_attention", {"value_dim": 64}, {}, r"multiples of 128, got \(128, 64\)"),
    ("dense_attention", {"batch": 2**18}, {}, "262144 pairs of blocks do not fit"),
    ("dense_attention", {"batch": 220 * 1024 + 1}, {}, "225281 pairs of blocks do not"),
    ("sparse_mla", {"latent": 64}, {}, "multiple of 128, got 64"),
    ("sparse_mla", {}, FLOAT16, "got bfloat16, float16"),
    ("sparse_mla", {}, BOTH_FLOAT16, "got float16, float16"),
    ("decode_sparse_mla", {"keys": 12}, {}, "multiples of 8 tokens, got 12"),
    ("decode_sparse_mla", PAGES | {"latent": 64}, {}, "multiple of 128, got 64"),
    ("decode_indexer_topk", {"queries": 9}, {}, "at most 8 queries .* got 9"),
    ("decode_indexer_topk", {"keys": 24}, {}, "multiples of 16 tokens, got 24"),
    ("decode_indexer_topk", {"keys": 2**20 + 16}, {}, "at most 1048576 keys"),
    ("indexer_kl_loss", {"head_dim": 64}, {}, r"multiples of 128, got \(64, 128\)"),
    ("indexer_kl_loss", {"index_dim": 64}, {}, r"multiples of 128, got \(128, 64\)"),
    ("indexer_kl_loss", {"heads": 12}, {}, r"multiples of 8 and 8, got \(12, 8\)"),
    ("indexer_kl_loss", {"index_heads": 4}, {}, r"of 8 and 8, got \(16, 4\)"),
    ("indexer_kl_loss", {"batch": 2**18}, {}, "pairs of blocks do not fit"),
    ("sparse_indexer_kl_loss", {}, FLOAT32, r"got \['bfloat16', 'float32'\]"),
    ("sparse_indexer_kl_loss", {"index_dim": 64}, {}, "at most .* got 64"),
    ("sparse_indexer_kl_loss", {"index_dim": 512}, {}, "at most .* got 512"),
)
# At the limits of what the kernels take.
TAKEN = (
    ("indexer_bits", {"keys": 2**19}),
    ("indexer_topk", {"index_heads": 16, "index_dim": 384}),
    ("dense_attention", {"batch": 220 * 1024, "head_dim": 384, "value_dim": 256}),
    ("sparse_mla", {"latent": 256}),
    ("decode_sparse_mla", {"keys": 8}),
    ("decode_indexer_topk", {"queries": 8, "keys": 16}),
    ("decode_indexer_topk", {"keys": 2**20}),
    ("indexer_kl_loss", {"batch": 110 * 1024, "heads": 8, "index_heads": 16}),
    ("sparse_indexer_kl_loss", {"index_dim": 256}),
)


class TakenError(Exception):
    """Raised in place of a kernel that would run."""


class RefusalsTest(parameterized.TestCase):
    @parameterized.parameters(*REFUSED)
    def test_refused(self, name, sizes, dtypes, message):
        with self.assertRaisesRegex(NotImplementedError, message):
            self.trace(name, sizes, dtypes)

    @parameterized.parameters(*TAKEN)
    def test_taken(self, name, sizes):
        with (
            mock.patch.object(dispatch.Op, "load", side_effect=TakenError),
            self.assertRaises(TakenError),
        ):
            self.trace(name, sizes, {})

    def trace(self, name, sizes, dtypes):
        """Traces an op with the kernel of TPUs."""
        case = dataclasses.replace(CASE, **sizes)
        specs = cases.shapes(case)
        for of, dtype in dtypes.items():
            specs[of] = jax.ShapeDtypeStruct(specs[of].shape, dtype)
        names, options = OPS[name]
        args = [specs[of] for of in names]
        if name.endswith("kl_loss"):
            main = (args[0], args[1], specs["lse"])
            index = tuple(specs[of] for of in ("q_index", "k_index", "w"))
            none = [None] if name == "indexer_kl_loss" else []
            args = [main, index, *args[2:], *none, specs["weight"]]
        if name.endswith("sparse_mla"):
            options = options | {"value_dim": case.latent}

        def run(*args):
            op = getattr(pallas_kernels, name)
            return op(*args, **options, implementation="tpu_interpret")

        jax.eval_shape(run, *args)


class PairsTest(parameterized.TestCase):
    """Blocks of 1024 keys, in which the queries of a block see some key."""

    @parameterized.parameters((16091, None), (16092, "225288 pairs of blocks do not"))
    def test_attention_has_a_limit(self, batch, message):
        """3 x 5 blocks; queries 0 to 1023 do not see the last keys."""
        heads = ((batch, 2500, 2, 128), "bfloat16"), ((batch, 5000, 2, 128), "bfloat16")
        unsupported = functools.partial(
            dense_attention.unsupported_dense_attention, selected=None, scale=0.1
        )
        bounds = [((batch, 2500), "int32")] * 2
        with block_sizes.tried(block_sizes.Tpu()):
            found = program.traced(unsupported, *heads, heads[1], *bounds)
        self.assertIn(message or "None", str(found))

    @parameterized.parameters((8664, None), (8665, "225290 pairs of blocks do not"))
    def test_the_loss_has_a_list_for_each_core(self, batch, message):
        """3 x 5 blocks; queries 0 to 1023 do not see the last keys."""
        shapes = (batch, 1300, 8, 128), (batch, 4300, 8, 128), (batch, 8, 1300)
        main = [(shape, "bfloat16") for shape in shapes]
        index = [
            main[0],
            ((batch, 4300, 128), "bfloat16"),
            ((batch, 1300, 8), "float32"),
        ]

        def unsupported(*args):
            main, index, (lo, hi, weight) = args[:3], args[3:6], args[6:]
            return indexer_kl.unsupported_indexer_kl_loss(
                main, index, lo, hi, None, weight, 0.1
            )

        rows = [((batch, 1300), kind) for kind in ("int32", "int32", "float32")]
        with block_sizes.tried(block_sizes.Tpu(cores=2)):
            found = program.traced(unsupported, *main, *index, *rows)
        self.assertIn(message or "None", str(found))


if __name__ == "__main__":
    environment.main()
