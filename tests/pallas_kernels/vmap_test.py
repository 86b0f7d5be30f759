"""Ops under `jax.vmap`, with gradients: an axis beside that of the sequences."""

import functools
import operator
import unittest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import pallas_kernels as pk
from tests import environment
from tests.pallas_kernels import sparse_mla_gpu_test

ENTRIES, B, T, N, C, R, I, J, K = 2, 1, 8, 8, 128, 64, 8, 128, 4
PAGES, SIZE = 3, 16  # of a cache, and their tokens


def arrays(*names):
    """Returns random arguments by name, for each entry of the mapped axis."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal((ENTRIES, *shape)).astype(np.float32)
    hi = np.tile(1 + np.arange(T, dtype=np.int32), (ENTRIES, B, 1))
    first = np.broadcast_to(np.arange(K, dtype=np.int32), (*hi.shape, K))
    made = {
        "index": (normal(B, T, I, J), normal(B, T, J), normal(B, T, I)),
        "bounds": (np.zeros_like(hi), hi),
        "main": (normal(B, T, N, C + R), normal(B, T, C + R)),
        "lists": np.where(first < hi[..., None], first, -1),
        "lse": 5 + normal(B, N, T),
        "experts": (normal(T, C), normal(3, C, J)),
        "sizes": np.array([[3, 1, 2], [0, 8, 0]], np.int32),
        "cache": normal(PAGES, SIZE, C + R),
        "keys": normal(PAGES, SIZE, J),
        "tables": np.array([[[2, 0]], [[1, 2]]], np.int32),
        "listed": rng.integers(0, 2 * SIZE, (ENTRIES, B, 1, K)).astype(np.int32),
    }
    return {name: jax.tree.map(jnp.asarray, made[name]) for name in names}


def select(x, how):
    return pk.indexer_topk(*x["index"], *x["bounds"], topk=K, **how)


def attend(x, how):
    return pk.sparse_mla(*x["main"], x["lists"], scale=0.1, value_dim=C, **how)


def learn(x, how):
    main, weight = (*x["main"], x["lse"]), jnp.ones((B, T))
    return pk.sparse_indexer_kl_loss(
        main, x["index"], x["lists"], weight, scale=0.1, **how
    )


def multiply(x, how):
    return pk.grouped_matmul(*x["experts"], x["sizes"], **how)


def decode(x, how):
    q, (k_index, w) = x["main"][0][:, :1], (x["index"][0][:, :1], x["index"][2][:, :1])
    out = pk.decode_sparse_mla(
        q, x["cache"], x["listed"], x["tables"], scale=0.1, value_dim=C, **how
    )
    lo, hi = jnp.zeros((B, 1), jnp.int32), jnp.full((B, 1), 2 * SIZE - 3)
    args = k_index, x["keys"], w, lo, hi, x["tables"]
    return out, pk.decode_indexer_topk(*args, topk=K, **how)


CASES = {
    "select": (select, ("index", "bounds"), ()),
    "attend": (attend, ("main", "lists"), ("main",)),
    "learn": (learn, ("main", "lse", "index", "lists"), ("index",)),
    "multiply": (multiply, ("experts", "sizes"), ("experts",)),
    "decode": (decode, ("main", "index", "cache", "keys", "tables", "listed"), ()),
}


def with_gradients(op, learnt, how, x):
    """Returns what the op returns, and gradients by the arguments of these names."""

    def loss(some):
        found = op(x | some, how)
        floats = [y for y in jax.tree.leaves(found) if y.dtype == jnp.float32]
        return sum(jnp.sum(jnp.sin(y)) for y in floats), found

    some = {name: x[name] for name in learnt}
    return jax.grad(loss, has_aux=True)(some) if some else loss(some)[1]


class Comparison(parameterized.TestCase):
    def check(self, name, implementation):
        """Compares with the entries one by one."""
        op, used, learnt = CASES[name]
        x, how = arrays(*used), {"implementation": implementation}
        run = jax.jit(functools.partial(with_gradients, op, learnt, how))
        alone = [run(jax.tree.map(operator.itemgetter(i), x)) for i in range(ENTRIES)]
        want = jax.tree.map(lambda *parts: np.stack(parts), *alone)
        got = jax.jit(jax.vmap(run))(x)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


class VmapTest(Comparison):
    @parameterized.parameters(*CASES)
    def test_plain_xla(self, name):
        self.check(name, None)

    def test_a_kernel_for_tpus(self):
        self.check("attend", "tpu_interpret")

    @parameterized.parameters("select", "learn", "decode")
    @pytest.mark.slow
    def test_other_kernels_for_tpus(self, name):
        """They go through the same wrapper; half a minute."""
        self.check(name, "tpu_interpret")


@unittest.skipUnless(
    sparse_mla_gpu_test.CAN_INTERPRET, "needs triton, torch and TRITON_INTERPRET=1"
)
class VmapGpuTest(Comparison):
    @parameterized.parameters(*CASES)
    def test_kernels_for_gpus(self, name):
        self.check(name, "gpu_interpret")


if __name__ == "__main__":
    environment.main()
