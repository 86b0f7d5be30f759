"""The Triton kernels of indexer_kl in the interpreter: TRITON_INTERPRET=1."""

import dataclasses
import importlib.util
import os
import unittest
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import (
    cases,
    dense_attention,
    indexer_kl_loss,
    selection,
    sparse_indexer_kl_loss,
    sparse_mla,
)
from tests import environment

CAN_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1" and all(
    map(importlib.util.find_spec, ("triton", "torch"))
)
LOSS_RTOL = 1e-4  # logarithms in float32, their sums in another order
FLOAT32_NORM = 1e-4  # of gradients, relative
BFLOAT16_NORM = 1e-2  # products' operands and dq, dk have 8 bits of mantissa

# The small cases with fewer queries: a program of the interpreter takes milliseconds.
CASES = tuple(
    dataclasses.replace(case, queries=queries, keys=keys)
    for case, (queries, keys) in zip(
        cases.SMALL.values(), ((5, 5), (30, 30), (7, 133), (9, 90)), strict=True
    )
)


def run(case, implementation):
    """The loss over lists, its gradients, and the loss alone."""
    names = ("q_latent", "kv", "indices")
    q, kv, indices = cases.make(case, *names)
    _, lse = sparse_mla(
        q,
        kv,
        indices,
        scale=case.scale,
        value_dim=case.latent,
        implementation="reference",
    )
    return differentiated(
        case,
        lambda index, weight: sparse_indexer_kl_loss(
            (q, kv, lse),
            index,
            indices,
            weight,
            scale=case.scale,
            implementation=implementation,
        ),
    )


def run_dense(case, implementation, is_selected):
    """The same over all keys, or those of bits."""
    q, k, lo, hi = cases.make(case, "q", "k", "lo", "hi")
    bits = None
    if is_selected:
        rng = np.random.default_rng(0)
        mask = jnp.asarray(rng.random((case.batch, case.keys, case.queries)) < 0.3)
        mask &= selection.visible(lo, hi, case.keys).swapaxes(1, 2)
        bits = selection.pack(mask)
    _, lse = dense_attention(
        q, k, k, lo, hi, bits, scale=case.scale, implementation="reference"
    )
    return differentiated(
        case,
        lambda index, weight: indexer_kl_loss(
            (q, k, lse),
            index,
            lo,
            hi,
            bits,
            weight,
            scale=case.scale,
            implementation=implementation,
        ),
    )


def differentiated(case, loss):
    *index, weight = cases.make(case, "q_index", "k_index", "w", "weight")
    weight = weight.at[:, -2].set(0)
    scaled = lambda index: 3 * loss(index, weight)
    value, grads = jax.value_and_grad(scaled)(tuple(index))
    grads = dict(zip(("dq", "dk", "dw"), grads, strict=True))
    return value, grads, loss(tuple(index), weight)


def assert_close(case, got, want):
    (value, grads, alone), (want_value, want_grads, _) = got, want
    np.testing.assert_allclose(value, want_value, LOSS_RTOL)
    np.testing.assert_allclose(value, 3 * alone, 1e-6)
    limit = FLOAT32_NORM if case.dtype == "float32" else BFLOAT16_NORM
    for name, want in want_grads.items():
        assert grads[name].dtype == want.dtype
        got, want = (np.asarray(x, np.float64) for x in (grads[name], want))
        error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-9)
        assert error < limit, f"{name}: {error}"


@unittest.skipUnless(CAN_INTERPRET, "needs triton, torch and TRITON_INTERPRET=1")
class SparseIndexerKlGpuTest(parameterized.TestCase):
    @parameterized.named_parameters((case.name, case) for case in CASES)
    def test_equals_definition_with_gradients(self, case):
        got = run(case, "gpu_interpret")
        assert_close(case, got, run(case, "reference"))

    @parameterized.parameters(80, 128)  # a padded and a whole second block of heads
    def test_more_heads_than_a_program_holds(self, heads):
        case = dataclasses.replace(CASES[0], heads=heads)
        got = run(case, "gpu_interpret")
        assert_close(case, got, run(case, "reference"))

    def test_queries_without_keys_or_weight_have_no_gradient(self):
        _, grads, _ = run(CASES[1], "gpu_interpret")
        for name in ("dq", "dw"):
            np.testing.assert_array_equal(grads[name][0, -2:], 0)
            np.testing.assert_array_equal(grads[name][1, -2], 0)

    def test_names_the_arguments_that_it_cannot_take(self):
        with self.assertRaisesRegex(NotImplementedError, "power of two"):
            run(dataclasses.replace(CASES[0], index_dim=48), "gpu_interpret")


@unittest.skipUnless(CAN_INTERPRET, "needs triton, torch and TRITON_INTERPRET=1")
class IndexerKlGpuTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("short", CASES[0], False),
        ("chunks_of_documents", cases.SMALL["documents"], True),
        ("continued", CASES[2], True),
        ("float32", CASES[3], False),
        (
            "dims_in_two_parts",
            dataclasses.replace(CASES[1], head_dim=192, value_dim=128),
            True,
        ),
        (
            "dims_in_two_parts_float32",
            dataclasses.replace(CASES[3], keys=70, head_dim=96),
            False,
        ),
    )
    def test_equals_definition_with_gradients(self, case, is_selected):
        from pallas_kernels.indexer_kl import gpu_dense

        with mock.patch.object(gpu_dense, "CHUNK", gpu_dense.QUERIES):
            got = run_dense(case, "gpu_interpret", is_selected)
        assert_close(case, got, run_dense(case, "reference", is_selected))
        for name in ("dq", "dw"):
            np.testing.assert_array_equal(got[1][name][:, -2], 0)

    def test_names_the_arguments_that_it_cannot_take(self):
        case = dataclasses.replace(cases.SMALL["short"], index_heads=12)
        with self.assertRaisesRegex(NotImplementedError, "power of two up to 128"):
            run_dense(case, "gpu_interpret", is_selected=False)
        for head_dim in (24, 224, 320):
            case = dataclasses.replace(cases.SMALL["short"], head_dim=head_dim)
            message = rf"the sum of two.* \({head_dim}, 128\)"
            with self.assertRaisesRegex(NotImplementedError, message):
                run_dense(case, "gpu_interpret", is_selected=False)
        wide = dataclasses.replace(CASES[3], head_dim=192)
        with self.assertRaisesRegex(NotImplementedError, "float32 fits .* got 192"):
            run_dense(wide, "gpu_interpret", is_selected=False)


if __name__ == "__main__":
    environment.main()
