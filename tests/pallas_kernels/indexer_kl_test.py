"""The indexer's loss against loops over queries and heads in float64."""

import jax
import numpy as np
from absl.testing import parameterized

from pallas_kernels import (
    cases,
    dense_attention,
    indexer_kl_loss,
    indexer_mask,
    selection,
    sparse_indexer_kl_loss,
    sparse_mla,
)
from tests import environment
from tests.pallas_kernels import program

CASE = cases.Case(
    "loop", 9, 14, batch=2, topk=5, documents=2, heads=3, latent=16, rope=8,
    head_dim=12, value_dim=12, index_heads=2, index_dim=8, dtype="float32",
)  # fmt: skip
LOSS_RTOL = 1e-4  # a logarithm of float32 probabilities
GRADIENT_RTOL = 1e-4  # relative L2: float32 against float64


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def by_hand(layers, index, keys_of, weight, scale):
    """Loss and gradients of q, k, w with the layers' averaged target.

    Args:
      layers: (q [B, T, N, row], k [B, S, N, row]) of the main attention of each.
      index: q, k and w of the indexer.
      keys_of: keys_of(b, t) lists the keys that count.
      weight: of each query.
      scale: of the main attention.
    """
    layers, index, weight = jax.tree.map(np.float64, (layers, index, weight))
    q, k, w = index
    loss, dq, dk, dw = 0.0, np.zeros(q.shape), np.zeros(k.shape), np.zeros(w.shape)
    for b, t in np.ndindex(q.shape[:2]):
        keys = keys_of(b, t)
        if not len(keys):
            continue
        rows = [
            softmax(scale * k_main[b, keys, n] @ main[b, t, n])
            for main, k_main in layers
            for n in range(main.shape[2])
        ]
        target = np.mean(rows, axis=0)
        np.testing.assert_allclose(target.sum(), 1)
        dots = np.maximum(k[b, keys] @ q[b, t].T, 0)  # [keys, heads]
        probs = softmax(dots @ w[b, t])
        loss += weight[b, t] * np.sum(target * np.log(target / probs))
        d_scores = weight[b, t] * (probs - target)
        np.testing.assert_allclose(d_scores.sum(), 0, atol=1e-12)
        d_dots = d_scores[:, None] * w[b, t] * (dots > 0)
        dq[b, t], dw[b, t] = d_dots.T @ k[b, keys], d_scores @ dots
        dk[b, keys] += d_dots @ q[b, t]
    return loss, (dq, dk, dw)


def inputs():
    q, k, w, lo, hi, weight = cases.make(
        CASE, "q_index", "k_index", "w", "lo", "hi", "weight"
    )
    return (q, k, w / 4), lo, hi, weight


class LoopTest(parameterized.TestCase):
    def assert_close(self, got, want):
        np.testing.assert_allclose(got[0], want[0], rtol=LOSS_RTOL)
        for g, w in zip(got[1], want[1], strict=True):
            error = np.linalg.norm(np.asarray(g, np.float64) - w)
            self.assertLess(error, GRADIENT_RTOL * np.linalg.norm(w))

    @parameterized.product(
        is_selected=(False, True), implementation=("reference", "tiled")
    )
    def test_with_a_key_a_head(self, is_selected, implementation):
        index, lo, hi, weight = inputs()
        q, k, v = cases.make(CASE, "q", "k", "v")
        keep = None
        if is_selected:
            keep = program.call(indexer_mask, *index, lo, hi, topk=CASE.topk)

        def loss(index, q, k, v, lo, hi, keep, weight):
            lse = dense_attention(q, k, v, lo, hi, keep, scale=CASE.scale)[1]
            options = {"scale": CASE.scale, "implementation": implementation}
            rest = (lo, hi, keep, weight)
            return indexer_kl_loss((q, k, lse), index, *rest, **options)

        run = jax.jit(jax.value_and_grad(loss))
        got = run(index, q, k, v, lo, hi, keep, weight)
        seen = np.asarray(selection.as_rows(lo, hi, keep, CASE.keys))
        keys_of = lambda b, t: np.flatnonzero(seen[b, t])
        self.assertEmpty(keys_of(0, -1))  # a query without keys is among them
        self.assert_close(got, by_hand([(q, k)], index, keys_of, weight, CASE.scale))

    @parameterized.product(num_layers=(1, 3), implementation=("reference", "tiled"))
    def test_over_lists_of_layers_that_share_them(self, num_layers, implementation):
        """The losses times 1 / layers have the gradient of the averaged target."""
        index, _, _, weight = inputs()
        (indices,) = cases.make(CASE, "indices")
        layers = [
            cases.make(CASE, "q_latent", "kv", seed=seed) for seed in range(num_layers)
        ]

        def loss(index, layers, indices, weight):
            total = 0.0
            for q, kv in layers:
                options = {"scale": CASE.scale, "implementation": implementation}
                lse = sparse_mla(q, kv, indices, value_dim=CASE.latent, **options)[1]
                total += sparse_indexer_kl_loss(
                    (q, kv, lse), index, indices, weight / num_layers, **options
                )
            return total

        got, gradients = jax.jit(jax.value_and_grad(loss))(
            index, layers, indices, weight
        )
        heads = lambda kv: np.repeat(np.asarray(kv)[:, :, None], CASE.heads, axis=2)
        main = [(q, heads(kv)) for q, kv in layers]
        lists = np.asarray(indices)
        keys_of = lambda b, t: lists[b, t][lists[b, t] >= 0]
        want, wanted = by_hand(main, index, keys_of, weight, CASE.scale)
        if num_layers == 1:
            np.testing.assert_allclose(got, want, rtol=LOSS_RTOL)
        else:  # the targets' own entropies differ, which has no gradient
            self.assertGreater(got, want)
        self.assert_close((0.0, gradients), (0.0, wanted))


if __name__ == "__main__":
    environment.main()
